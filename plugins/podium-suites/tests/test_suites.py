"""Harnesses: which is found, how it is called, and how its results are read."""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

import podium_suites as suites
from podium.errors import ConfigError, PodiumError
from podium.models import char_tokenizer
from podium.models.config import ModelConfig
from podium.runs.config import InferenceConfig
from podium_inference.suites import find_suite, write_table


def make_command(folder: Path, name: str) -> str:
    path = folder / name
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


def test_a_harness_is_found_on_the_path_or_where_its_user_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = make_command(tmp_path, "lm_eval")
    assert suites.LM_EVAL("a,b", program, ["--limit", "3"]).program == program
    monkeypatch.setenv("PATH", str(tmp_path))
    suite: Any = find_suite("lm-eval:a:b", None, ())
    assert (suite.program, suite.task) == (program, "a:b")


@pytest.mark.parametrize(
    ("spec", "program", "error"),
    [
        ("lighteval:x", None, "pip install 'lighteval.*--harness"),
        ("inspect:x", "/nowhere/inspect", "there is no command /nowhere/inspect"),
    ],
)
def test_a_harness_that_is_absent_is_refused_with_the_remedy(
    spec: str, program: str | None, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=error):
        find_suite(spec, program, ())


def test_results_of_lm_eval_are_numbers_with_their_errors(tmp_path: Path) -> None:
    results = {
        "copy": {"name": "copy", "alias": "copy", "sample_len": 15, "exact_match,none": 0.25,
                 "exact_match_stderr,none": 0.1, "acc,strict": 0.5, "acc_stderr,strict": "N/A"},
        "group": {"alias": "group"},
    }  # fmt: skip
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "results_2026-01-01T00-00-00.json").write_text(json.dumps({"results": results}))
    read: Any = suites._read_tasks(tmp_path)
    assert read == {"copy": {"exact_match": 0.25, "exact_match_stderr": 0.1, "acc,strict": 0.5}}
    assert [*write_table(read)] == ["copy  exact_match  0.2500  ± 0.1000", "copy  acc,strict   0.5000"]


def test_results_of_inspect_are_those_of_its_scorers(tmp_path: Path) -> None:
    metrics = {"accuracy": {"name": "accuracy", "value": 0.5}, "stderr": {"name": "stderr", "value": 0.1}}
    log: dict[str, Any] = {"status": "success", "eval": {"task": "sums"}}
    log["results"] = {"scores": [{"name": "match", "metrics": metrics}]}
    (tmp_path / "log.json").write_text(json.dumps(log))
    assert suites._read_inspect(tmp_path) == {"sums": {"match/accuracy": 0.5, "match/accuracy_stderr": 0.1}}
    (tmp_path / "log.json").write_text(json.dumps({**log, "status": "error"}))
    with pytest.raises(PodiumError, match="the task sums ended as error; the output of inspect"):
        suites._read_inspect(tmp_path)


def test_two_ways_to_reduce_the_epochs_of_a_scorer_are_two_figures(tmp_path: Path) -> None:
    """inspect gives both the scorer's name."""
    scores = [
        {"name": "match", "reducer": reducer, "metrics": {"accuracy": {"value": value}, "stderr": {"value": 0.1}}}
        for reducer, value in (("mean", 0.25), ("pass_at_2", 0.5))
    ]
    log = {"status": "success", "eval": {"task": "sums"}, "results": {"scores": scores}}
    (tmp_path / "log.json").write_text(json.dumps(log))
    row = suites._read_inspect(tmp_path)["sums"]
    assert (row["match/mean/accuracy"], row["match/pass_at_2/accuracy"]) == (0.25, 0.5)
    assert row["match/pass_at_2/accuracy_stderr"] == 0.1


def test_a_harness_without_an_answer_has_no_figures(capsys: pytest.CaptureFixture[str]) -> None:
    """lighteval ends well where each of its requests has failed, and says 0.0."""
    suites._check_answers("lighteval", Counter({"200": 3}))
    assert not capsys.readouterr().err
    suites._check_answers("lighteval", Counter({"200": 3, "400": 2}))
    assert "3 were answered and others were not (2 with status 400)" in capsys.readouterr().err
    with pytest.raises(PodiumError, match=r"answered none of its requests \(2 with status 400\)"):
        suites._check_answers("lighteval", Counter({"400": 2}))
    with pytest.raises(PodiumError, match=r"\(there were none\)"):
        suites._check_answers("lighteval", Counter())


def test_the_arguments_name_the_served_model() -> None:
    model = suites.Served("m", "http://127.0.0.1:1/v1", "/tokenizer", 64)
    words = " ".join(suites._ask_lm_eval(model, "copy", "/out"))
    assert "model=m,base_url=http://127.0.0.1:1/v1/completions" in words and "max_length=64" in words
    assert "openai/m" in " ".join(suites._ask_inspect(model, "x.py", "/out"))
    words = " ".join(suites._ask_lighteval(model, "x", "/out"))
    assert "base_url=http://127.0.0.1:1/v1,cache_dir=/out/cache,max_model_length=64" in words


ECHO = """#!{python}
import json, sys
from pathlib import Path
words = dict(zip(sys.argv[1:], sys.argv[2:]))
Path({folder!r}, "arguments.json").write_text(json.dumps(sys.argv[1:]))
Path(words["--output_path"], "results_1.json").write_text(json.dumps({{"results": {{}}}}))
"""


class SilentService:
    """A service that serves nothing, and counts no requests."""

    @contextlib.contextmanager
    def served(self, *_: Any, **options: Any) -> Iterator[Any]:
        yield SimpleNamespace(url="http://127.0.0.1:1")


def read_settings(
    folder: Path, monkeypatch: pytest.MonkeyPatch, form: str, *arguments: str, bos: str | None = "<bos>"
) -> dict[str, str]:
    """The model_args that lm-eval gets for a model whose tokenizer writes texts in this form."""
    tokenizer: Any = char_tokenizer("0123456789+=")
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<bos>", "<eos>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=form, special_tokens=special)
    tokenizer.bos_token = bos
    tokenizer.save_pretrained(folder / "tokenizer")
    program = folder / "lm_eval"
    program.write_text(ECHO.format(python=sys.executable, folder=str(folder)))
    program.chmod(0o755)
    monkeypatch.setattr("podium_agents.services.load_service", lambda _: SilentService())
    monkeypatch.setattr("podium.models.loading.position_limit", lambda _: 64)
    monkeypatch.setattr(suites, "_count_requests", lambda *_: None)
    config = InferenceConfig(model=ModelConfig(path=str(folder / "tokenizer")))
    suites.LM_EVAL("copy", str(program), arguments).run(config, None, "m")
    words = json.loads((folder / "arguments.json").read_text())
    return dict(part.split("=", 1) for part in words[words.index("--model_args") + 1].split(","))


@pytest.mark.parametrize(
    ("form", "bos", "expected"),
    [
        ("<bos> $A", "<bos>", "True"),
        ("$A", "<bos>", None),  # lm-eval would begin with the token that the tokenizer itself leaves out
        ("<bos> $A <eos>", "<bos>", None),  # or end the text before the model goes on
        ("$A <eos>", "<bos>", None),
        ("<bos> $A", None, None),
    ],
)
def test_lm_eval_begins_texts_as_the_tokenizer_does(
    form: str, bos: str | None, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default it asks for log-probabilities of texts that begin without the token with which all others did."""
    assert read_settings(tmp_path, monkeypatch, form, bos=bos).get("add_bos_token") == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--apply_chat_template"], None),
        (["--limit", "3", "--apply_chat_template=default"], None),
        (["--apply_chat"], None),  # as argparse takes it
        (["--limit", "3"], "True"),
        (["--"], "True"),
    ],
)
def test_a_conversation_begins_as_its_template_writes_it(
    arguments: list[str], expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lm-eval writes it as a text, whose first token of a beginning would be the second one."""
    assert read_settings(tmp_path, monkeypatch, "<bos> $A", *arguments).get("add_bos_token") == expected
