"""Each preset of ``podium train grpo --recipe`` and each other recipe learns, with five seeds of five.

A preset or a recipe that is added is trained by itself: the listing of Podium says what there is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bench.presets.page import find_missed
from bench.presets.training import SEEDS, Course, list_arms
from podium.algorithms import AdvantageInputs, AdvantageOutputs, AlgorithmConfig
from podium.algorithms.advantages import grpo

pytestmark = pytest.mark.exhaustive
ARMS = list_arms()
ENDS: dict[str, Any] = {"eval": {"every": 0}}  # scored before the first step and after the last one


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Course:
    """A model with a wrong habit, and the teacher."""
    course = Course(tmp_path_factory.mktemp("presets"))
    course.warm_up()
    return course


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ARMS)
def test_each_preset_learns(course: Course, name: str, seed: int) -> None:
    assert not find_missed([course.train(ARMS[name], seed, **ENDS)], [name], seeds=[seed])


def turned(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutputs:
    """The advantages of GRPO with the wrong sign."""
    outputs = grpo(inputs, config)
    return replace(outputs, advantages_N=-outputs.advantages_N)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("grpo", {"optim": {"lr": 0.0}}),
        ("grpo", {"algorithm": {"advantage": f"{__name__}:turned"}}),
        ("rm", {"optim": {"lr": 0.0}}),
    ],
    ids=["no learning rate", "advantages turned", "reward model without learning rate"],
)
def test_a_broken_preset_does_not_pass(course: Course, name: str, changes: dict[str, Any]) -> None:
    run = course.train(ARMS[name], 0, **ENDS, **changes)
    (sentence,) = find_missed([run], [name], seeds=[0])
    assert f"{name}, seed 0, goes from" in sentence
