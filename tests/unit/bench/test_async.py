"""The simulation of schedules: figures that can be worked out by hand, and the bound on staleness."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

simulation: Any = importlib.import_module("bench.async")


@pytest.fixture
def even(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two generators of 16 lanes; each completion has 100 tokens and takes a second; an update takes two."""
    monkeypatch.setattr(simulation, "LANES", 16)
    monkeypatch.setattr(simulation, "TOKEN_S", 0.01)
    monkeypatch.setattr(simulation, "PROMPTS_A_GENERATOR", 2)
    monkeypatch.setattr(simulation, "lengths_of", lambda step, generators: np.full((2 * generators, 16), 100))
    monkeypatch.setattr(simulation, "update_s", lambda: 2.0)


@pytest.mark.usefixtures("even")
def test_times_are_those_that_can_be_worked_out() -> None:
    steps, samples = 10, 10 * 4 * 16
    sync = simulation.simulate("sync", 2, steps)
    assert samples / sync["samples_per_s"] == pytest.approx(steps * (2 + 2))  # two waves of completions, then an update
    assert sync["staleness"] == {"0": 1.0}
    ahead = simulation.simulate("one_step_off", 2, steps)
    assert samples / ahead["samples_per_s"] == pytest.approx(2 + steps * 2)
    assert ahead["most_stale"] == 1
    beside = simulation.simulate("asynchronous", 2, steps, 3)
    assert samples / beside["samples_per_s"] == pytest.approx(2 + steps * 2)
    assert beside["of_ideal"] == pytest.approx(20 / 22)


@pytest.mark.parametrize("most", [1, 2, 4])
def test_no_completion_is_staler_than_the_schedule_allows(most: int) -> None:
    found = simulation.simulate("asynchronous", 4, 12, most)
    assert found["most_stale"] <= most
    assert sum(found["staleness"].values()) == pytest.approx(1)
    assert found["samples"] == 12 * 4 * 16 * 16


def test_a_schedule_that_runs_too_far_ahead_is_found_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    from podium.trainer.schedules.asynchronous import asynchronous

    def reckless(steps: Any) -> None:
        steps.max_staleness += 3
        asynchronous(steps)

    monkeypatch.setattr(simulation, "load_schedule", lambda name: reckless)
    assert simulation.simulate("asynchronous", 4, 12, 1)["most_stale"] > 1


def test_the_controller_sends_every_prompt_once_on_inline() -> None:
    found = simulation.controller("inline", 2, 8, "idle")
    assert found["samples"] == 128
    assert found["controller_us_a_sample"] > 0
