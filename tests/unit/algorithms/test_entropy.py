"""The coefficient of the entropy bonus that follows a target."""

from __future__ import annotations

from typing import Any

import pytest

from podium.algorithms import AlgorithmConfig
from podium.algorithms.entropy import EntropyController, EntropyTarget
from podium.config import load_config
from podium.errors import ConfigError
from podium.trainer import GRPOConfig


def test_the_coefficient_is_that_of_the_paper() -> None:
    """He et al. 2025, section 3.2.5: c grows below the target and falls above it; alpha = c 1[e < target]."""
    controller = EntropyController.of({"target": 0.3, "delta": 0.01, "max": 0.025, "start": 0.005})
    value, coefs = 0.005, [0.005]
    entropies = [0.5, 0.2, 0.1, 0.1, 0.29, 0.3, 0.31, 0.4, 0.2]
    for entropy in entropies:
        value = min(max(value + (0.01 if entropy < 0.3 else -0.01), 0.0), 0.025)
        coefs.append(value if entropy < 0.3 else 0.0)
    found = [controller.coef]
    for entropy in entropies:
        controller = controller.next(entropy)
        found.append(controller.coef)
    assert found == pytest.approx(coefs)
    assert max(found) == 0.025


def test_a_step_without_a_measured_entropy_changes_nothing() -> None:
    controller = EntropyController(value=0.001, target=EntropyTarget())
    assert controller.next(None) is controller
    assert EntropyController(value=0.1).next(0.0).coef == 0.1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"entropy_coef": {"taget": 0.2}}, r"unknown key algorithm\.entropy_coef\.taget"),
        ({"entropy_coef": {"start": 0.1}}, r"entropy_coef\.start = 0\.1 with min = 0\.0 and max = 0\.005"),
        ({"epochs": {"counts": 2}}, r"unknown key algorithm\.epochs\.counts"),
        ({"epochs": {"count": 0}}, r"algorithm\.epochs\.count = 0"),
        ({"epochs": 0}, r"epochs"),
    ],
)
def test_mistakes_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AlgorithmConfig(**settings)


def test_forms_of_the_keys() -> None:
    words = [
        "--algorithm.entropy_coef.target",
        "0.4",
        "--algorithm.epochs.count",
        "3",
        "--algorithm.epochs.max_kl",
        "0.1",
    ]
    algorithm = load_config(GRPOConfig, None, words).algorithm
    assert (algorithm.epoch_choice.count, algorithm.epoch_choice.max_kl, algorithm.updates) == (3, 0.1, 3)
    assert algorithm.resolve().entropy_coef == 0.0
    assert EntropyController.of(algorithm.entropy_coef).target == EntropyTarget(target=0.4)
