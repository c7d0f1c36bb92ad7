"""A resume says which settings it changes, and which of these have no effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from podium.config import build_config
from podium.runs.config import SFTConfig
from podium.runs.named_files import record
from podium.trainer import GRPOConfig, PPOConfig
from podium.trainer.checks.resumed import describe_changes

LISTED = "settings that differ from those before the resume: "


def describe(
    tmp_path: Path,
    before: dict[str, Any],
    after: dict[str, Any],
    cls: type[PPOConfig | SFTConfig] = GRPOConfig,
    checkpoint: Path | None = Path("step-000004"),
) -> list[str]:
    """The sentences on a run of the settings ``before`` that is resumed with ``after`` besides."""
    (tmp_path / "config.yaml").write_text(record(build_config(cls, before), tmp_path)[0])
    resumed = {name: {**before.get(name, {}), **after.get(name, {})} for name in (before | after | {"run": {}})}
    resumed["run"] |= {"resume": str(tmp_path)}
    return list(describe_changes(build_config(cls, resumed), tmp_path, checkpoint))


def test_a_resume_with_the_same_settings_says_nothing(tmp_path: Path) -> None:
    assert describe(tmp_path, {"run": {"steps": 5}, "optim": {"lr": 1e-3}}, {}) == []


def test_every_setting_that_differs_is_listed_with_both_values(tmp_path: Path) -> None:
    after = {"run": {"steps": 9}, "optim": {"lr": 0.5}, "parallel": {"strategy": "fsdp2"}}
    assert describe(tmp_path, {"run": {"steps": 5}}, after) == [
        f"{LISTED}optim.lr = 0.5 (was 1e-05), parallel.strategy = 'fsdp2' (was 'replicate'), run.steps = 9 (was 5)"
    ]


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ({}, {"run": {"seed": 7}}, "run.seed: no effect on the order of the data"),
        ({}, {"run": {"name": "b"}}, "run.name: no effect, because a resumed run stays in its directory"),
        ({}, {"model": {"path": "b"}}, "model.path: no effect on the policy, because the checkpoint holds its weights"),
        (
            {"algorithm": {"kl_in": "loss", "kl_coef": 0.1}},
            {"model": {"path": "b"}},
            "model.path: no effect on the policy, because the checkpoint holds its weights; the reference has that",
        ),
        ({"model": {"path": "a", "lora": {"rank": 4}}}, {"model": {"seed": 3}}, "model.seed: no effect on the policy"),
        (
            {"algorithm": {"kl_in": "reward", "kl_coef": 0.1, "kl_target": 0.1}},
            {"algorithm": {"kl_coef": 0.5}},
            "algorithm.kl_coef: no effect, because the coefficient follows its target",
        ),
        (
            {"algorithm": {"entropy_coef": {"start": 0.001}}},
            {"algorithm": {"entropy_coef": {"start": 0.002}}},
            "algorithm.entropy_coef.start: no effect, because the coefficient follows its target",
        ),
        (
            {},
            {"eval": {"temperature": {"temperature": 0.6, "n": 4}}},
            "eval.temperature: held-out figures do not compare",
        ),
        ({}, {"reward": {"correct_at": 0.5}}, "reward: held-out figures do not compare"),
        (
            {"batch": {"prompts": {"skip_solved": 1.0}}},
            {"batch": {"prompts": {"skip_solved": 1.0}}, "reward": {"correct_at": 0.5}},
            "reward.correct_at: no effect on the running pass rates",
        ),
    ],
)
def test_settings_without_the_expected_effect_are_named(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any], told: str
) -> None:
    listed, *others = describe(tmp_path, before, after)
    assert listed.startswith(LISTED)
    assert [sentence for sentence in others if sentence.startswith(told)]


def test_another_model_of_the_critic_has_no_effect(tmp_path: Path) -> None:
    _, told = describe(tmp_path, {}, {"critic": {"path": "b"}}, PPOConfig)
    assert told == "critic.path: no effect, because the checkpoint holds the critic's weights"


def test_the_base_of_adapters_is_no_setting_without_effect(tmp_path: Path) -> None:
    """A resume with another base is refused when the adapters are loaded."""
    assert len(describe(tmp_path, {"model": {"path": "a", "lora": {"rank": 4}}}, {"model": {"path": "b"}})) == 1


def test_a_run_without_a_checkpoint_begins_with_its_new_settings(tmp_path: Path) -> None:
    after = {"run": {"seed": 7}, "model": {"path": "b"}}
    assert len(describe(tmp_path, {}, after, checkpoint=None)) == 1


def test_a_secret_is_not_shown(tmp_path: Path) -> None:
    told = describe(tmp_path, {}, {"environment": {"name": "service", "options": {"api_key": "abcdef12345"}}})
    assert "abcdef12345" not in " ".join(told) and "environment.options.api_key" in told[0]


SENTENCE = ": held-out figures do not compare with those before the resume"


@pytest.mark.parametrize(
    ("before", "after", "names"),
    [
        ({}, {"data": {"prompt_column": "{context} {question}"}}, "data.prompt_column"),
        ({"data": {"answer_column": None}}, {"data": {"answer_column": "answer"}}, "data.answer_column"),
        ({"data": {"options": {"name": "main"}}}, {"data": {"options": {"name": "socratic"}}}, "data.options"),
        ({}, {"data": {"max_prompt_tokens": 99, "overlong": "cut"}}, "data.max_prompt_tokens, data.overlong"),
        ({"data": {"train": "a.jsonl"}}, {"data": {"train": "b.jsonl"}}, "data.train"),
        ({"data": {"eval": "a.jsonl"}}, {"data": {"eval": "b.jsonl"}}, "data.eval"),
    ],
)
def test_a_resume_that_measures_otherwise_is_named(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any], names: str
) -> None:
    sentences = describe(tmp_path, before, after)
    assert [line for line in sentences if line.startswith(f"{names}{SENTENCE}")]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"data": {"train_items": 50}, "optim": {"lr": 0.5}}),
        ({"data": {"eval": "e.jsonl"}}, {"data": {"train": "b.jsonl", "train_split": "all", "holdout": 0.5}}),
        ({"data": {"train": {"a.jsonl": 1, "b.jsonl": 3}}}, {"data": {"train": {"a.jsonl": 2, "b.jsonl": 3}}}),
        ({}, {"model": {"path": "b"}}),
    ],
)
def test_a_resume_that_measures_the_same_is_not_named(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    assert not [line for line in describe(tmp_path, before, after) if SENTENCE in line]


def test_another_tokenizer_counts_another_loss(tmp_path: Path) -> None:
    """The reward of a completion does not depend on the tokens that its text is made of, and a loss does."""
    before, after = {"model": {"path": "a", "tokenizer": "chars:ab"}}, {"model": {"tokenizer": "chars:abc"}}
    assert f"the tokenizer{SENTENCE}" in describe(tmp_path, before, after, SFTConfig)[-1]
    assert len(describe(tmp_path, before, after)) == 1
