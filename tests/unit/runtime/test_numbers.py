"""Numbers of calls in flight: they are used again, but not while a process may still hear of a call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import podium
from podium.errors import CallCancelled
from podium.runtime.endpoints import Window
from podium.runtime.messages import Reply, Request
from podium_testing.workers import Sleeper
from tests.waits import LONG_S


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, list[int]]]:
    """A worker in a thread of this process, and the numbers of the requests that go to it."""
    numbers: list[int] = []
    with podium.connect("inline", threads=True) as cluster:
        sleeper = cluster.start(Sleeper.bind(), distributed=False)
        (handle,) = sleeper.group.processes.calls.handles
        invoke: Callable[..., None] = handle.invoke

        def note(request: Request, done: Callable[[Reply], None]) -> None:
            if request.target:
                numbers.append(request.number)
            invoke(request, done)

        monkeypatch.setattr(handle, "invoke", note)
        yield sleeper, numbers


def test_a_thousand_calls_one_after_the_other_share_a_number(sent: tuple[Any, list[int]]) -> None:
    """A backend may keep something for each that it ever saw: Ray keeps 4 kB for every name of a task."""
    sleeper, numbers = sent
    for _ in range(1000):
        sleeper.history()
    assert len(numbers) == 1000
    assert len(set(numbers)) <= 2


def test_calls_in_flight_have_numbers_of_their_own(sent: tuple[Any, list[int]]) -> None:
    sleeper, numbers = sent
    calls: list[Any] = [sleeper.history.submit() for _ in range(50)]
    for call in calls:
        call.result()
    assert 1 <= len(set(numbers)) <= 50
    busy = sleeper.nap.submit(0.3, "busy")
    first = numbers[-1]
    sleeper.history()
    assert numbers[-1] != first
    busy.result()


def test_the_number_of_a_cancelled_call_is_not_used_again(sent: tuple[Any, list[int]]) -> None:
    sleeper, numbers = sent
    call = sleeper.nap.submit(60.0, "nap")
    cancelled = numbers[-1]
    call.cancel()
    with pytest.raises(CallCancelled):
        call.result()
    for _ in range(100):
        sleeper.history()
    assert cancelled not in numbers[1:]


def test_a_reply_that_is_counted_late_does_not_lose_the_next_call_of_its_number(sent: tuple[Any, list[int]]) -> None:
    """Where all ranks raise, the caller goes on at the first error, while the other ranks' replies come in."""
    sleeper, numbers = sent
    calls = sleeper.group.processes.calls
    first = sleeper.nap.submit(0.1, "first")
    (flight,) = calls._in_flight.values()
    first.result()
    second = sleeper.nap.submit(0.1, "second")
    assert numbers[-1] == numbers[-2]
    calls._all_answered(flight)
    assert second.result(timeout_s=LONG_S) == ["second"]


def test_a_call_that_is_interrupted_while_it_is_sent_is_dropped_by_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """By Ctrl-C in a notebook, which goes on. Ranks that ran it would meet the others in collectives of later calls."""
    with podium.connect("inline", threads=True) as cluster:
        sleeper = cluster.start(Sleeper.bind(), cluster.pool(2), distributed=False)
        calls = sleeper.group.processes.calls
        first = sleeper.nap.submit(1.0, "first")

        def interrupt(request: Request, done: Callable[[Reply], None]) -> None:
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(calls.handles[1], "invoke", interrupt)
        with pytest.raises(KeyboardInterrupt):
            sleeper.nap.submit(0.0, "half sent")
        first.result()
        assert sleeper.history() == [["first"]] * 2


def test_a_handler_may_use_the_window_that_its_thread_waits_in() -> None:
    with podium.connect("inline") as cluster:
        sleeper = cluster.start(Sleeper.bind(), distributed=False)
        window, ended = Window(1), threading.Event()

        def use_inside() -> None:
            window.submit(lambda: window.submit(sleeper.history.submit))
            ended.set()

        threading.Thread(target=use_inside, daemon=True).start()
        assert ended.wait(LONG_S)
