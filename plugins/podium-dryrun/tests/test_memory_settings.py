"""The estimate of memory follows every setting that takes memory. A new one has to be entered here."""

from __future__ import annotations

import re
from dataclasses import fields as settings_of, replace
from inspect import getsource
from pathlib import Path
from typing import Any

import pytest

import podium.algorithms.declarations
from podium.config import keys_of
from podium.data import fields
from podium.runs.config import GRPOConfig, PPOConfig, SFTConfig
from podium_dryrun import describe_memory
from podium_dryrun.memory import Amounts, ModelSize, memory_gib
from tests.integration.training import tiny

WIDE = {fields.ROLLOUT_TOP, fields.TEACHER_TOP, fields.EXPERTS}
"""Token columns with several numbers a token that the line `columns of several numbers` counts."""

COUNTED: dict[str, Any] = {
    "model.dtype": "bfloat16",
    "model.gradient_checkpointing": True,
    "model.lora.rank": 4,
    "sampling.max_new_tokens": 200,
    "sampling.n": 32,
    "sampling.top_k": 9,
    "engine.cache_gib": 0.001,
    "engine.max_sequences": 1,
    "batch.prompts": 64,
    "parallel.micro_batch_tokens": 32,
    "algorithm.kl_in": "loss",
    "algorithm.minibatches": 16,
}
COUNTED_OPTIONS = {"score_centering": 9}
COUNTED_ELSEWHERE = {  # by tests of test_plan.py, test_value_head.py, test_reward_model.py and below
    *("model.path", "model.config", "model.lora.targets", "placement.ranks", "placement.generator_ranks"),
    *("placement.layout", "placement.pools", "parallel.strategy", "parallel.batching", "parallel.precision"),
    *("optim.master_weights", "engine.dtype", "engine.name", "engine.options", "reward.path", "eval.items"),
    *(
        "algorithm.advantage",
        "algorithm.loss",
        "algorithm.options",
        "algorithm.correction",
        "algorithm.entropy_coef",
        "critic.path",
    ),
    *("batch.examples", "data.max_prompt_tokens", "run.schedule", "model.lora.dropout", "data.train"),
}
NOT_COUNTED = {  # docs/training.md says so
    "parallel.offload",
    "environment.options",
    "reward.processes",
    "sampling.top_p",
    "algorithm.epochs",
}
WITHOUT_MEMORY = {
    *("run", "save", "eval", "optim", "environment", "reward", "data", "critic"),
    *("model.allow_tensors", "model.tokenizer", "model.attention", "model.dropout", "model.seed", "model.lora.alpha"),
    *("sampling.temperature", "sampling.stop_token_ids", "placement.delta_sync", "placement.cpus", "placement.wait_s"),
    *("algorithm.gamma", "algorithm.lam", "algorithm.normalize_advantage", "algorithm.kl_coef"),
    *("algorithm.kl_estimator", "algorithm.kl_target", "algorithm.clip_low", "algorithm.clip_high"),
    *(
        "algorithm.value_clip",
        "algorithm.aggregation",
        "algorithm.cut_off",
        "algorithm.max_mismatch",
        "algorithm.entropy_coef",
    ),
}
OPTIONS_ELSEWHERE = {"teacher", "teacher_top_k", "critic_trunk", "router_replay", "router_balance"}
OPTIONS_WITHOUT_MEMORY = {
    *("reference_refresh", "reference_mix", "critic_warmup", "value_coef", "teacher_divergence"),
    *("dual_clip", "weight_cap"),
}


def nest(key: str, value: Any) -> dict[str, Any]:
    first, _, rest = key.partition(".")
    return {first: nest(rest, value) if rest else value}


def estimate(folder: Path, key: str = "", value: Any = None) -> str:
    """The estimate of a run whose parts are large enough to show."""
    sections: dict[str, Any] = {"sampling": {"max_new_tokens": 300}, "batch": {"prompts": 16}}
    if key:
        first, _, rest = key.partition(".")
        sections[first] = {**sections.get(first, {}), **nest(rest, value)}
    return describe_memory(tiny(GRPOConfig, folder, **sections), "local", {}, [20] * 64)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    return estimate(tmp_path_factory.mktemp("plain"))


def test_each_setting_is_counted_or_said_to_take_no_memory() -> None:
    keys = {key.path for cls in (GRPOConfig, PPOConfig, SFTConfig) for key in keys_of(cls)}
    entered = {*COUNTED, *COUNTED_ELSEWHERE, *NOT_COUNTED, *WITHOUT_MEMORY}
    unknown = {key for key in keys if not {key, key.partition(".")[0]} & entered}
    assert not unknown, "count what these take in podium_dryrun/memory.py, or enter them here"
    assert {key for key in entered - keys if "." in key} == set()


def test_each_option_of_podiums_own_is_counted_or_said_to_take_no_memory() -> None:
    sections = [
        value for value in vars(podium.algorithms.declarations).values() if hasattr(value, "__pydantic_fields__")
    ]
    options = {field.name for section in sections for field in settings_of(section)}
    assert options == {*COUNTED_OPTIONS, *OPTIONS_ELSEWHERE, *OPTIONS_WITHOUT_MEMORY}


def test_each_column_with_several_numbers_a_token_is_counted() -> None:
    lines = re.findall(r'(?m)^\w+: Final = "(\w+)"  # token column, \w+ \[N, ', getsource(fields))
    assert {*lines} == WIDE, "count the column in column_widths of podium_dryrun.memory, or beside it"


@pytest.mark.everyday("model.dtype-bfloat16", "sampling.n-32", "parallel.micro_batch_tokens-32", "model.lora.rank-4")
@pytest.mark.parametrize(("key", "value"), COUNTED.items())
def test_the_estimate_follows_a_setting(tmp_path: Path, key: str, value: Any, plain: str) -> None:
    assert estimate(tmp_path, key, value) != plain


def test_the_estimate_follows_an_option(tmp_path: Path, plain: str) -> None:
    assert "columns of several numbers" in estimate(tmp_path, "algorithm.options", COUNTED_OPTIONS)
    assert "columns of several numbers" not in plain


def test_columns_of_a_teacher_and_of_experts_are_counted(tmp_path: Path) -> None:
    size = ModelSize(1, 1, 2, 1, 1, 100, experts=8, choices=4)
    for options, nbytes in (({"router_replay": "old"}, 2 * 4), ({"teacher": "m", "teacher_top_k": 6}, 4 * 12)):
        loss = {"loss": "teacher_kl"} if "teacher" in options else {}
        config = tiny(GRPOConfig, tmp_path, algorithm={"options": options, **loss})
        amounts = Amounts.of(config, [4] * 16)
        for roles in (("policy",), ("generator",)):
            gib = memory_gib(config, size, roles, amounts=amounts)["columns of several numbers"]
            assert gib == 3 * nbytes * amounts.step / 2**30
    config = tiny(GRPOConfig, tmp_path, algorithm={"options": {"router_balance": 0.1}})
    big = replace(Amounts.of(config, [4] * 16), tokens=2**20)
    assert memory_gib(config, size, ("policy",), amounts=big)["routers' logits"] == 3 * 2 * 8 * 4 / 2**10
