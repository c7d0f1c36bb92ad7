"""The whole configuration: how large it is, what it defaults to, and which settings contradict each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from podium.errors import ConfigError
from podium.trainer import (
    GRPOConfig,
    InferenceConfig,
    PPOConfig,
    SFTConfig,
    build_config,
    config_class,
    config_to_yaml,
    keys_of,
    load_config,
)

ROOTS = [GRPOConfig, PPOConfig, SFTConfig, InferenceConfig]


def test_there_are_fewer_than_a_hundred_keys() -> None:
    assert len({key.path for root in ROOTS for key in keys_of(root)}) < 100


@pytest.mark.parametrize("root", ROOTS)
def test_every_key_says_in_a_line_what_it_is(root: type) -> None:
    undocumented = [key.path for key in keys_of(root) if not key.doc]
    assert undocumented == []


@pytest.mark.parametrize("root", ROOTS)
def test_the_defaults_make_a_configuration_that_reads_back_equal(root: type, tmp_path: Path) -> None:
    config = build_config(root, {})
    assert config == root()
    path = tmp_path / "config.yaml"
    path.write_text(config_to_yaml(config))
    assert load_config(root, path) == config


def test_recipes_differ_where_they_should() -> None:
    grpo, ppo = build_config(GRPOConfig, {}), build_config(PPOConfig, {})
    assert (grpo.has_critic, grpo.sampling.n, grpo.algorithm.advantage) == (False, 8, "grpo")
    assert (ppo.has_critic, ppo.sampling.n, ppo.algorithm.advantage) == (True, 1, "gae")
    partly = build_config(PPOConfig, {"algorithm": {"gamma": 0.9}, "sampling": {"n": 2}})
    assert (partly.algorithm.advantage, partly.sampling.max_new_tokens) == ("gae", 256)


@pytest.mark.parametrize(
    ("root", "values", "message"),
    [
        (GRPOConfig, {"sampling": {"n": 1}}, r"sampling\.n = 1 with algorithm\.advantage = 'grpo'.*at least 2"),
        (
            GRPOConfig,
            {"batch": {"prompts": 5}, "algorithm": {"minibatches": 3}},
            r"5 x 8 = 40 completions do not divide into algorithm\.minibatches = 3.*such as [24]",
        ),
        (
            GRPOConfig,
            {"batch": {"prompts": 1}, "sampling": {"n": 2}, "placement": {"ranks": 4}},
            r"a minibatch has 2 completions .* placement\.ranks = 4: each rank needs at least one",
        ),
        (GRPOConfig, {"sampling": {"temperature": 0}}, r"sampling\.temperature = 0\.0: expected above 0"),
        (SFTConfig, {"batch": {"examples": 1}, "placement": {"ranks": 2}}, r"batch\.examples = 1 for placement\.ranks"),
        (GRPOConfig, {"placement": {"generator_ranks": 2}}, "the generator then shares the policy's ranks"),
        (GRPOConfig, {"run": {"schedule": "async"}}, r"run\.schedule = 'async': expected one of sync"),
        (GRPOConfig, {"run": {"steps": -1}}, r"run\.steps = -1: expected at least 0"),
        (GRPOConfig, {"eval": {"stop_at": 2}}, r"eval\.stop_at = 2\.0: expected a share"),
        (GRPOConfig, {"model": {"path": "a", "config": {"model_type": "qwen3"}}}, r"give either model\.path .* or"),
        (GRPOConfig, {"algorithm": {"advantage": "grppo"}}, "did you mean 'grpo'"),
        (GRPOConfig, {"algorithm": {"clip_lo": 0.1}}, r"unknown key algorithm\.clip_lo.*algorithm\.clip_low\?"),
        (SFTConfig, {"algorithm": {}}, r"unknown key algorithm \(value \{\}\)"),
        (SFTConfig, {"batch": {"prompts": 4}}, r"unknown key batch\.prompts"),
    ],
)
def test_contradictions_are_refused_with_a_remedy(root: type, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_config(root, values)


def test_a_schedule_ends_with_the_run() -> None:
    values = {"run": {"steps": 10}, "algorithm": {"minibatches": 2}, "optim": {"schedule": "cosine"}}
    assert build_config(GRPOConfig, values).ending_optim.total_steps == 20
    assert (
        build_config(GRPOConfig, {**values, "optim": {"schedule": "linear", "total_steps": 7}}).ending_optim.total_steps
        == 7
    )
    with pytest.raises(ConfigError, match="must exceed warmup_steps=20"):
        build_config(GRPOConfig, {**values, "optim": {"schedule": "cosine", "warmup_steps": 20}})


def test_placement_counts_hosts() -> None:
    split = build_config(GRPOConfig, {"placement": {"layout": "split", "ranks": 3}}).placement
    assert (split.generators, split.slots) == (1, 4)
    together = build_config(GRPOConfig, {"placement": {"ranks": 3}}).placement
    assert (together.generators, together.slots) == (3, 3)


def test_an_unknown_recipe_is_named() -> None:
    with pytest.raises(ConfigError, match="no recipe 'dpo': expected one of grpo, ppo, sft"):
        config_class("dpo")
