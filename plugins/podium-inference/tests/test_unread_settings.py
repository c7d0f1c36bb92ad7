"""Typed settings that a command does not read are refused; those of a run or of a file are not."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from podium.cli import main
from podium.config import build_config, load_config
from podium.runs.config import InferenceConfig
from podium_inference.command import inference_config
from podium_inference.unread_settings import (
    list_unread_by_best,
    list_unread_by_eval,
    list_unread_by_sample,
    list_unread_by_service,
    refuse_unread,
)

EVAL, SAMPLE, SERVE = ["eval", "m", "--backend", "inline"], ["sample", "m", "--prompt", "1="], ["serve", "m"]
BEST = ["sample", "m", "--best", "best.jsonl"]


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        (EVAL, "--sampling.n 4 --sampling.top_k=3", "write --eval.temperature '{temperature: 1.0, n: 4, top_k: 3}'"),
        (EVAL, "--sampling '{top_p: 0.5}'", "--sampling.top_p has no effect: .*'{temperature: 1.0, top_p: 0.5}'"),
        (EVAL, "--eval.temperature '{n: 2, temperature: 1}' --sampling.n 4", "temperature '{temperature: 1.0, n: 4}'"),
        (
            EVAL,
            "--eval.temperature '{max_new_tokens: 2}' --sampling.max_new_tokens 9",
            "'{temperature: 1.0, max_new_tokens: 9}'",
        ),
        (EVAL, "--eval.every 5", "--eval.every has no effect: podium eval evaluates once"),
        (EVAL, "--eval.metric loss --reward.name math", "--reward.name has no effect: eval.metric = 'loss' scores"),
        (
            EVAL,
            "--eval.metric loss --sampling.max_new_tokens 9",
            "--sampling.max_new_tokens has no effect: eval.metric",
        ),
        (SAMPLE, "--reward.name math", "--reward.name has no effect: completions are only printed"),
        (
            SAMPLE,
            "--environment.options '{a: 1}'",
            "--environment.options.a has no effect: completions are only printed",
        ),
        (SAMPLE, "--eval.temperature 0.5", "--eval.temperature has no effect: completions are only printed"),
        (SAMPLE, "--data.train a.jsonl", "--data.train has no effect: prompts are those of --prompt"),
        (BEST, "--eval.temperature 0.5", "--eval.temperature has no effect: nothing is evaluated"),
        (SERVE, "--sampling.temperature 0", "--sampling.temperature has no effect: each request has its own n, temp"),
        (SERVE, "--sampling.max_new_tokens 5", "--sampling.max_new_tokens has no effect: each request has its own"),
        (SERVE, "--data.max_prompt_tokens 5", "--data.max_prompt_tokens has no effect: prompts are those of the requ"),
        (SERVE, "--reward.name math", "--reward.name has no effect: requests are answered"),
    ],
)
def test_a_typed_setting_that_a_command_does_not_read_is_refused_before_the_model_is_loaded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    words: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PODIUM_TOKEN", "secret")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    assert main([*command, *shlex.split(words)]) == 2
    error = " ".join(capsys.readouterr().err.split())
    for fragment in message.split(".*"):
        assert fragment in error
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("words", ["--sampling.n 1 --sampling.temperature 0", "--sampling.max_new_tokens 9"])
def test_what_evaluations_do_anyway_is_not_refused(words: str) -> None:
    refuse_unread(words.split(), list_unread_by_eval(load_config(InferenceConfig, None, words.split())))


def test_settings_that_a_command_reads_are_not_refused() -> None:
    config = build_config(InferenceConfig, {})
    model = "--model.dtype bfloat16 --engine.name native --placement.ranks 2 --run.seed 3 --data.system_prompt a"
    for list_unread, words in {
        list_unread_by_eval: "--sampling.stop_token_ids [7] --reward.name math --eval.items 2 --data.eval a.jsonl",
        list_unread_by_sample: "--sampling.n 4 --sampling.temperature 0 --data.max_prompt_tokens 9",
        list_unread_by_best: "--sampling.n 4 --data.train a.jsonl --reward.name math --environment.name a",
        list_unread_by_service: "--sampling.stop_token_ids [7] --data.chat_template a.jinja",
    }.items():
        refuse_unread([*model.split(), *words.split()], list_unread(config))


def test_settings_of_a_file_are_not_refused(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    (tmp_path / "run.yaml").write_text("{sampling: {n: 8}, reward: {name: math}, eval: {every: 5}}")
    config = inference_config(str(tmp_path / "m"), str(tmp_path / "run.yaml"), [])
    for list_unread in (list_unread_by_eval, list_unread_by_sample, list_unread_by_service):
        refuse_unread([], list_unread(config))
