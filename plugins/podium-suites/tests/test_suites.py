"""Harnesses: which is found, how it is called, and how its results are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import podium_suites as suites
from podium.cli.suites import find_suite, write_table
from podium.errors import ConfigError


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
    with pytest.raises(ValueError, match="ended as error"):
        suites._read_inspect(tmp_path)


def test_the_arguments_name_the_served_model() -> None:
    model = suites.Served("m", "http://127.0.0.1:1/v1", "/tokenizer", 64)
    words = " ".join(suites._ask_lm_eval(model, "copy", "/out"))
    assert "model=m,base_url=http://127.0.0.1:1/v1/completions" in words and "max_length=64" in words
    assert "openai/m" in " ".join(suites._ask_inspect(model, "x.py", "/out"))
    assert "base_url=http://127.0.0.1:1/v1" in " ".join(suites._ask_lighteval(model, "x", "/out"))
