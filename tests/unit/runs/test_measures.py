"""Which settings decide how a run measures its held-out figures."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from podium.rollout.tasks.config import DataConfig
from podium.runs.measures import OF_BOTH_SIDES, OF_TRAINING, TOKENIZER, list_differing, select_measures
from podium.runs.run_reader import flatten
from podium.telemetry.held_out import ACCURACY, LENGTH, LOSS, PERPLEXITY, REWARD, TOKEN_ACCURACY, Metric

MEASURING = {
    *("eval", "prompt_column", "answer_column", "system_prompt", "chat_template", "chat_template_kwargs"),
    *("max_prompt_tokens", "overlong", "bad_rows", "split_turns", "eval_split", "options"),
}
"""Keys of the section data that decide what a held-out figure means, whatever the training data are."""
USUAL = {"data": {"train": "t.jsonl", "eval": "e.jsonl"}, "model": {"path": "m"}, "batch": {"examples": 4}}


def compare(first: dict[str, Any], second: dict[str, Any], figure: str = LOSS) -> list[str]:
    """What two runs differ in whose settings are the usual ones, and those of ``first`` and of ``second``."""
    runs = [{name: {**USUAL.get(name, {}), **run.get(name, {})} for name in USUAL | run} for run in (first, second)]
    return list_differing([select_measures(dict(flatten(run)), Metric(figure)) for run in runs])


def test_every_key_of_the_data_is_classified() -> None:
    """A new key goes into one of the three sets: it measures, it measures where there is no data.eval, or neither."""
    names = [field.name for field in fields(cast("Any", DataConfig))]
    assert sorted(names) == sorted([*MEASURING, *OF_BOTH_SIDES, *OF_TRAINING])


@pytest.mark.parametrize("name", sorted(MEASURING))
def test_a_key_of_the_data_that_measures_is_compared(name: str) -> None:
    assert compare({"data": {name: "a"}}, {"data": {name: "b"}}) == [f"data.{name}"]


@pytest.mark.parametrize("name", sorted(OF_BOTH_SIDES))
def test_the_training_data_count_where_held_out_examples_are_taken_from_them(name: str) -> None:
    first, second = {"data": {name: 0.1, "eval": ""}}, {"data": {name: 0.2, "eval": ""}}
    if name == "train":
        first, second = {"data": {name: "a", "eval": ""}}, {"data": {name: ["a", "b"], "eval": ""}}
    assert compare(first, second) == [f"data.{name}"]
    del first["data"]["eval"], second["data"]["eval"]
    assert compare(first, second) == []


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"data": {"train_items": 10}}, {"data": {"train_items": 20}}),
        ({"optim": {"lr": 1e-5}, "run": {"seed": 1}}, {"optim": {"lr": 1e-4}, "run": {"seed": 2}}),
        ({"data": {"eval": "", "train": {"a": 1, "b": 3}}}, {"data": {"eval": "", "train": {"b": 1, "a": 1}}}),
        ({}, {"data": {"split_turns": False, "options": {}, "bad_rows": "refuse"}}),  # what an earlier version lacked
        (
            {"data": {"options": {"t.jsonl": {"a": 1}, "e.jsonl": {"b": 1}}}},
            {"data": {"options": {"e.jsonl": {"b": 1}}}},
        ),
        ({"sampling": {"max_new_tokens": 10}}, {"sampling": {"max_new_tokens": 20}}),  # a loss draws nothing
    ],
)
def test_runs_that_compare_are_not_said_to_differ(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert compare(first, second) == []


@pytest.mark.parametrize(
    ("key", "figure", "data", "counts"),
    [
        ("reward.name", REWARD, {}, True),
        ("reward.path", ACCURACY, {}, True),
        ("reward.name", LOSS, {}, False),
        ("data.eval.hard", LOSS, {}, True),
        ("data.chat_template", LOSS, {}, True),
        ("data.train", LOSS, {}, False),
        ("data.train", LOSS, {"eval": ""}, True),
        ("model.path", REWARD, {}, False),
    ],
)
def test_the_contents_of_files_that_measure_are_compared(
    key: str, figure: str, data: dict[str, str], counts: bool
) -> None:
    settings = dict(flatten({**USUAL, "data": {**USUAL["data"], **data}, "algorithm": {"loss": "dpo"}}))
    runs = [select_measures(settings, Metric(figure), {(key, "file"): content}) for content in "ab"]
    assert list_differing(runs) == [f"the content of file ({key})"] * counts
    assert list_differing([runs[0], select_measures(settings, Metric(figure))]) == [], "it is not known"


def test_null_is_another_value_than_the_default() -> None:
    assert compare({"data": {"prompt_column": None}}, {}) == ["data.prompt_column"]


def test_what_completions_are_drawn_with_measures_them() -> None:
    first, second = {"sampling": {"max_new_tokens": 10}}, {"sampling": {"max_new_tokens": 20}}
    assert compare(first, second, REWARD) == ["sampling.max_new_tokens"]


def test_a_loss_of_preferences_is_that_of_its_objective() -> None:
    first: dict[str, Any] = {"algorithm": {"loss": "dpo", "options": {"beta": 0.1}}}
    second: dict[str, Any] = {"algorithm": {"loss": "dpo", "options": {"beta": 0.5}}}
    assert compare(first, second) == ["algorithm.options"]
    assert compare(first, second, ACCURACY) == []
    assert compare(first, {"algorithm": {"loss": "simpo"}}, ACCURACY) == ["algorithm.loss"]


@pytest.mark.parametrize("figure", [LOSS, PERPLEXITY, TOKEN_ACCURACY, LENGTH, f"sources/math/{LOSS}"])
def test_a_figure_per_token_has_the_tokenizer_for_its_unit(figure: str) -> None:
    models = [{"model": {"path": "org/one"}}, {"model": {"path": "org/other"}}]
    assert compare(models[0], models[1], figure) == [TOKENIZER]
    assert compare(models[0], models[1], ACCURACY) == []
    tokenizers = [{"model": {**model["model"], "tokenizer": "chars:abc"}} for model in models]
    assert compare(tokenizers[0], tokenizers[1], figure) == []


def write_tokenizer(folder: Path, tokens: str) -> str:
    folder.mkdir(parents=True)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    content = {"model": {"vocab": vocabulary}, "added_tokens": [], "padding": folder.name}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return str(folder)


def test_models_with_the_same_tokens_compare(tmp_path: Path) -> None:
    """Models of one family have equal tokenizers in different directories."""
    small, large = (write_tokenizer(tmp_path / name, "abc") for name in ("small", "large"))
    other = write_tokenizer(tmp_path / "other", "abd")
    assert compare({"model": {"path": small}}, {"model": {"path": large}}) == []
    assert compare({"model": {"path": small}}, {"model": {"path": other}}) == [TOKENIZER]


def test_a_model_of_a_run_has_the_tokenizer_of_the_model_before(tmp_path: Path) -> None:
    for name, path in (("a", "org/model"), ("b", str(tmp_path / "a/model"))):
        (run := tmp_path / name).mkdir()
        (run / "config.yaml").write_text(yaml.safe_dump({"model": {"path": path}}))
        (run / "metrics.jsonl").touch()
        (run / "model").mkdir()
        (run / "checkpoints/step-000002/policy").mkdir(parents=True)
    base: dict[str, Any] = {"model": {"path": "org/model"}}
    for path in ("a/model", "b/model", "b/checkpoints/step-000002/policy"):
        assert compare(base, {"model": {"path": str(tmp_path / path)}}) == []
    assert compare({"model": {"path": "org/other"}}, {"model": {"path": str(tmp_path / "b/model")}}) == [TOKENIZER]
