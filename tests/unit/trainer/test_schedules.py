"""What a schedule drives, in which order, and how a stop is asked for."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping

import pytest

from podium.trainer.interrupt import ECHO_S, StopRequest, listen_for_stop
from podium.trainer.schedules import Plan, sync


class Recorder:
    """A loop that writes down what was asked of it."""

    def __init__(self, stop: StopRequest | None = None, stop_at: int = 0, good_at: int = 0) -> None:
        self.calls: list[str] = []
        self._stop, self._stop_at, self._good_at = stop, stop_at, good_at

    def step(self, step: int) -> Mapping[str, float]:
        self.calls.append(f"step {step}")
        if self._stop is not None and step == self._stop_at:
            self._stop.request()
        return {"loss": 0.0}

    def evaluate(self, step: int) -> bool:
        self.calls.append(f"evaluate {step}")
        return step == self._good_at > 0

    def save(self, step: int) -> None:
        self.calls.append(f"save {step}")


def plan(first: int = 1, last: int = 4, eval_every: int = 0, save_every: int = 0, eval_at_start: bool = True) -> Plan:
    return Plan(first=first, last=last, eval_at_start=eval_at_start, eval_every=eval_every, save_every=save_every)


def test_evaluation_and_saving_come_when_they_are_due() -> None:
    loop = Recorder()
    assert sync(loop, plan(eval_every=2, save_every=3), StopRequest()) == 4
    assert loop.calls == [
        *("evaluate 0", "step 1", "step 2", "evaluate 2", "step 3", "save 3", "step 4", "evaluate 4", "save 4"),
    ]


def test_without_a_rhythm_both_come_at_the_end_only() -> None:
    loop = Recorder()
    sync(loop, plan(last=2, eval_at_start=False), StopRequest())
    assert loop.calls == ["step 1", "step 2", "evaluate 2", "save 2"]


def test_a_resumed_run_is_not_evaluated_at_its_start_again() -> None:
    loop = Recorder()
    assert sync(loop, plan(first=4), StopRequest()) == 4
    assert loop.calls == ["step 4", "evaluate 4", "save 4"]


def test_a_finished_run_that_is_resumed_has_no_step_left() -> None:
    loop = Recorder()
    assert sync(loop, plan(first=5), StopRequest()) == 4
    assert loop.calls == []


def test_a_stop_ends_after_the_step_with_a_checkpoint() -> None:
    stop = StopRequest()
    loop = Recorder(stop, stop_at=2)
    assert sync(loop, plan(eval_every=1, eval_at_start=False), stop) == 2
    assert loop.calls == ["step 1", "evaluate 1", "step 2", "save 2"]


def test_a_run_that_is_good_enough_ends_with_a_checkpoint() -> None:
    loop = Recorder(good_at=2)
    assert sync(loop, plan(eval_every=2), StopRequest()) == 2
    assert loop.calls[-2:] == ["evaluate 2", "save 2"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_interrupts(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with listen_for_stop() as stop:
        os.kill(os.getpid(), number)
        assert stop.requested
        os.kill(os.getpid(), number)  # an echo of the first, as make and timeout send it: not a second wish
        stop.requested_at = time.monotonic() - 2 * ECHO_S
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before


def test_outside_the_main_thread_there_is_no_signal_to_hear() -> None:
    heard: list[bool] = []

    def run() -> None:
        with listen_for_stop() as stop:
            stop.request("somebody asked")
            heard.append(stop.requested)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert heard == [True]
