"""What the runtime tells telemetry: who ran what from when to when, who started, who waits for whom."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import podium
from podium import Cluster, telemetry
from podium.errors import EndpointError
from podium.runtime import Worker
from podium.telemetry import progress
from podium.telemetry.progress import Counting
from podium_testing.workers import Probe, Sleeper


@pytest.fixture
def events() -> Iterator[list[telemetry.Event]]:
    heard: list[telemetry.Event] = []
    unsubscribe = telemetry.subscribe(heard.append)
    yield heard
    unsubscribe()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with podium.connect("inline", threads=True) as cluster:
        yield cluster


def calls(events: list[telemetry.Event], method: str) -> list[telemetry.CallFinished]:
    found = [event for event in events if isinstance(event, telemetry.CallFinished) and event.method == method]
    return sorted(found, key=lambda event: event.rank)


def test_each_rank_of_a_call_is_an_event_with_its_times(cluster: Cluster, events: list[telemetry.Event]) -> None:
    sleeper = cluster.start(Sleeper.bind(), cluster.pool([2]), name="role")
    before = time.monotonic_ns()
    sleeper.sleep(0.05)
    first, second = calls(events, "sleep")
    for event in (first, second):
        assert (event.role, event.node, event.ok) == ("role", "localhost", True)
        assert before <= event.submitted_ns <= event.started_ns
        assert event.ended_ns - event.started_ns >= 50_000_000
    assert (first.rank, second.rank) == (0, 1)
    assert first.call_id == second.call_id
    started = [event for event in events if isinstance(event, telemetry.WorkerStarted)]
    assert [(event.role, event.rank) for event in started] == [("role", 0), ("role", 1)]


def test_a_call_that_fails_says_so(cluster: Cluster, events: list[telemetry.Event]) -> None:
    probe = cluster.start(Probe.bind(), cluster.pool([2]))
    with pytest.raises(EndpointError):
        probe.fail([1], ValueError("no"))
    probe.rank()
    assert [event.ok for event in calls(events, "fail")] == [True, False]


def test_a_listener_that_raises_does_not_harm_the_call(cluster: Cluster) -> None:
    probe = cluster.start(Probe.bind(), cluster.pool([2]))
    unsubscribe = telemetry.subscribe(lambda event: 1 // 0)  # pyright: ignore[reportArgumentType]
    try:
        assert probe.rank() == [0, 1]
    finally:
        unsubscribe()


def test_a_stall_names_who_waits_for_whom(
    cluster: Cluster, events: list[telemetry.Event], caplog: pytest.LogCaptureFixture
) -> None:
    sleeper = cluster.start(Sleeper.bind(), cluster.pool([2]), name="slow")
    progress._OPEN.clear()  # what tests before this one have left open
    with caplog.at_level(logging.WARNING, "podium"):
        call = sleeper.sleep.submit(0.8)
        calls = sleeper.group.processes.calls
        for flight in calls._in_flight.values():  # pyright: ignore[reportPrivateUsage] - not a whole minute
            flight.next_stall = 0.1
        call.result()
    (stalled, *_) = [event for event in events if isinstance(event, telemetry.Stalled)]
    assert (stalled.role, stalled.method, stalled.waiting_for) == ("slow", "sleep", (0, 1))
    assert "slow.sleep has waited" in caplog.text


class Reader(Worker):
    """Has read three tensors of seven until there is a file."""

    def __init__(self, goes_on: str) -> None:
        with Counting("tensors", 7, role="any", rank=self.ctx.rank) as count:
            count.done = 3
            while not Path(goes_on).exists():
                time.sleep(0.01)


def test_workers_of_other_processes_tell_how_far_they_are_with_loading(tmp_path: Path) -> None:
    goes_on = tmp_path / "go"
    heard: set[tuple[str, int, int, int]] = set()

    def let_go_on(event: telemetry.Event) -> None:
        if isinstance(event, telemetry.Progressing):
            heard.update((count.role, count.rank, count.done, count.total) for count in event.counts)
            if heard >= {("any", rank, 3, 7) for rank in range(2)}:
                goes_on.touch()

    unsubscribe = telemetry.subscribe(let_go_on)
    try:
        with podium.connect("local", preload=()) as cluster:
            cluster.start(Reader.bind(str(goes_on)), cluster.pool([2]), start_timeout_s=60)
    finally:
        unsubscribe()
