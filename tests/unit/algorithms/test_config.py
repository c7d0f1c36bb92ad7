"""The settings of the algorithm: defaults that stand, and errors that name key, value and expectation."""

from __future__ import annotations

import dataclasses
from typing import Any

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
    ("settings", "message"),
    [
        ({"advantage": "grop"}, "expected one of grpo, .*did you mean 'grpo'"),
        ({"kl_coef": 0.1}, "kl_coef = 0.1 with algorithm.kl_in = 'none': expected kl_coef 0, or kl_in set"),
        ({"kl_in": "loss", "kl_coef": 0.1, "kl_estimator": "k1"}, "kl_estimator = 'k1' with .*expected 'k2' or 'k3'"),
        ({"kl_in": "loss", "kl_coef": 0.1, "kl_target": 0.1}, "kl_target = 0.1 with kl_in = 'loss'"),
        ({"kl_in": "reward", "kl_target": 0.1}, "kl_target = 0.1 .*a positive kl_coef to start from"),
    ],
)
def test_settings_that_contradict_each_other(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AlgorithmConfig(**settings)
