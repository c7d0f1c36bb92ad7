"""The clock of stages: several steps at once, times that add up."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from podium.telemetry import StageFinished, subscribe
from podium.trainer.schedules import steps
from podium.trainer.schedules.steps import StageClock
from tests.waits import LONG_S


def test_the_clock_adds_stages_up_and_tells_their_speed() -> None:
    clock = StageClock()
    events: list[object] = []
    unsubscribe = subscribe(events.append)
    try:
        for step in (1, 2):
            for _ in range(2):
                with clock.stage("update", step, "learn"):
                    pass
            found = clock.finish(step, {"update": 100.0, "step": 100.0, "absent": 5.0})
    finally:
        unsubscribe()
    stages = [(e.name, e.step, e.half) for e in events if isinstance(e, StageFinished)]
    assert stages == [("update", 1, "learn")] * 2 + [("update", 2, "learn")] * 2
    assert found["tokens_per_s/update"] == pytest.approx(100 / found["time/update"])
    assert found["time/step"] >= found["time/update"]
    assert "tokens_per_s/absent" not in found
    assert clock.totals_tokens["update"] == 200
    assert clock.tokens_per_s()["update"] == pytest.approx(200 / clock.totals_s["update"])


def test_stages_of_two_steps_at_once_are_counted_for_their_own_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0
    monkeypatch.setattr(steps, "time", SimpleNamespace(monotonic_ns=lambda: now_s * 10**9))
    clock = StageClock()
    collecting, learned = threading.Event(), threading.Event()

    def collect() -> None:
        with clock.stage("generate", 2, "collect"):
            collecting.set()
            learned.wait(LONG_S)

    thread = threading.Thread(target=collect)
    thread.start()
    collecting.wait(LONG_S)
    with clock.stage("update", 1, "learn"):
        now_s = 3
    assert clock.finish(1, {}) == {"time/update": 3.0, "time/step": 3.0}
    now_s = 5
    learned.set()
    thread.join()
    assert clock.finish(2, {}) == {
        "time/generate": 5.0,
        "time/step": 2.0,
    }  # a step begins where the one before it ended


def test_what_lies_between_two_steps_belongs_to_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0
    monkeypatch.setattr(steps, "time", SimpleNamespace(monotonic_ns=lambda: now_s * 10**9))
    clock = StageClock()
    for step in (1, 2):
        with clock.stage("update", step, "learn"):
            now_s += 2
        assert clock.finish(step, {})["time/step"] == 2.0
        now_s += 3  # an evaluation
