"""The settings of the algorithm: defaults that stand, and errors that name key, value and expectation."""

from __future__ import annotations

import dataclasses
from typing import Any

import pydantic
import pytest

from podium.algorithms import AlgorithmConfig
from podium.errors import ConfigError


def test_defaults() -> None:
    config = AlgorithmConfig()
    assert (config.clip_low, config.clip_high, config.kl_in, config.updates) == (0.2, 0.28, "none", 1)
    assert not config.needs_reference
    assert AlgorithmConfig(kl_in="loss").needs_reference
    assert AlgorithmConfig(epochs=2, minibatches=4).updates == 8


def test_it_is_frozen_and_takes_keywords_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        AlgorithmConfig().gamma = 0.5  # pyright: ignore[reportAttributeAccessIssue] - the point of the test
    with pytest.raises(TypeError):
        AlgorithmConfig("grpo")  # pyright: ignore[reportCallIssue] - the point of the test


@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [
        ("advantage", "grop", "expected one of grpo, .*did you mean 'grpo'"),
        ("gamma", 1.5, "from 0 to 1"),
        ("gamma", float("nan"), "from 0 to 1"),
        ("lam", -0.1, "from 0 to 1"),
        ("kl_coef", -1.0, "at least 0"),
        ("kl_in", "rewards", "expected one of none, loss, reward; did you mean 'reward'"),
        ("kl_estimator", "k4", "expected one of k1, k2, k3"),
        ("clip_low", 1.2, "at most 1"),
        ("clip_low", 0.0, "above 0"),
        ("clip_high", 0.0, "a positive number"),
        ("dual_clip", 1.0, "above 1, or null"),
        ("value_clip", 0.0, "positive number, or null"),
        ("aggregation", "token_mean", "expected one of token-mean.*did you mean 'token-mean'"),
        ("entropy_coef", float("inf"), "a finite number"),
        ("importance_cap", 0.5, "above 1, or null"),
        ("epochs", 0, "at least 1"),
        ("minibatches", 0, "at least 1"),
    ],
)
def test_a_value_out_of_range_is_told_with_key_and_value(setting: str, value: object, expected: str) -> None:
    settings: dict[str, Any] = {setting: value}
    with pytest.raises(ConfigError, match=expected) as caught:
        AlgorithmConfig(**settings)
    assert str(caught.value).startswith(f"algorithm.{setting} = {value!r}")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kl_coef": 0.1}, "kl_coef = 0.1 with algorithm.kl_in = 'none': expected kl_coef 0, or kl_in set"),
        ({"kl_in": "loss", "kl_coef": 0.1, "kl_estimator": "k1"}, "kl_estimator = 'k1' with .*expected 'k2' or 'k3'"),
        ({"kl_in": "loss", "kl_coef": 0.1, "kl_target": 0.1}, "kl_target = 0.1 with kl_in = 'loss'"),
        ({"kl_in": "reward", "kl_target": 0.1}, "kl_target = 0.1 .*a positive kl_coef to start from"),
    ],
)
def test_settings_that_contradict_each_other(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AlgorithmConfig(**settings)


def test_pydantic_reads_it() -> None:
    """The trainer builds it from YAML through a TypeAdapter."""
    adapter = pydantic.TypeAdapter(AlgorithmConfig)
    settings = {"advantage": "gae", "dual_clip": 3, "normalise_advantage": False, "value_clip": None}
    expected = AlgorithmConfig(advantage="gae", dual_clip=3.0, normalise_advantage=False, value_clip=None)
    assert adapter.validate_python(settings) == expected
    with pytest.raises(pydantic.ValidationError, match=r"algorithm\.gamma = 2\.0"):
        adapter.validate_python({"gamma": 2})
