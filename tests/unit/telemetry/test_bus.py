"""The bus: cheap when nobody listens, safe under threads and forks, and unharmed by a sink that raises."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from podium import telemetry
from podium.telemetry import Bus, Event, Note, StepFinished, emit
from podium.telemetry.sinks import JsonlSink, TraceSink


def test_events_reach_every_listener_in_order_until_it_unsubscribes() -> None:
    bus = Bus()
    heard: list[tuple[str, Event]] = []
    leave = bus.subscribe(lambda event: heard.append(("first", event)))
    bus.subscribe(lambda event: heard.append(("second", event)))
    bus.emit(Note("a"))
    leave()
    leave()  # twice is harmless
    bus.emit(Note("b"))
    assert heard == [("first", Note("a")), ("second", Note("a")), ("second", Note("b"))]


def test_active_says_whether_anybody_listens() -> None:
    bus = Bus()
    assert not bus.active()
    leave = bus.subscribe(lambda event: None)
    assert bus.active()
    leave()
    assert not bus.active()


def test_one_callback_subscribed_twice_is_two_subscriptions() -> None:
    bus = Bus()
    heard: list[Event] = []
    leave = bus.subscribe(heard.append)
    bus.subscribe(heard.append)
    leave()
    bus.emit(Note("once"))
    assert heard == [Note("once")]


def test_a_listener_that_raises_is_named_once_and_gets_no_more(caplog: pytest.LogCaptureFixture) -> None:
    bus = Bus()
    calls: list[Event] = []
    heard: list[Event] = []

    def full_disk(event: Event) -> None:
        calls.append(event)
        raise OSError("No space left on device")

    bus.subscribe(full_disk)
    bus.subscribe(heard.append)
    with caplog.at_level(logging.ERROR, "podium.telemetry"):
        bus.emit(Note("a"))
        bus.emit(Note("b"))
    assert len(calls) == 1
    assert heard == [Note("a"), Note("b")]
    (record,) = caplog.records
    assert "full_disk failed on Note" in record.getMessage()
    assert "No space left on device" in record.getMessage()
    assert record.exc_info is None, "a full disk is told without a traceback"


def test_ctrl_c_inside_a_listener_is_not_swallowed() -> None:
    bus = Bus()

    def interrupted(event: Event) -> None:
        raise KeyboardInterrupt

    bus.subscribe(interrupted)
    with pytest.raises(KeyboardInterrupt):
        bus.emit(Note("a"))
    assert bus.active()


def test_subscriptions_from_many_threads_are_all_kept() -> None:
    bus = Bus()
    counts = [0] * 8
    start = threading.Barrier(9)

    def work(index: int) -> None:
        def count(event: Event) -> None:
            counts[index] += 1

        start.wait()
        for _ in range(200):
            bus.subscribe(lambda event: None)()
        bus.subscribe(count)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    start.wait()
    for _ in range(200):
        bus.emit(Note("during"))
    for thread in threads:
        thread.join()
    before = list(counts)
    bus.emit(Note("after"))
    assert [after - b for after, b in zip(counts, before, strict=True)] == [1] * 8


def test_a_forked_child_does_not_write_into_its_parents_sinks() -> None:
    heard: list[Event] = []
    leave = telemetry.subscribe(heard.append)
    try:
        pid = os.fork()
        if pid == 0:
            os._exit(7 if telemetry.active() else 0)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert telemetry.active()
    finally:
        leave()


def test_importing_telemetry_and_its_sinks_package_needs_the_standard_library_only() -> None:
    script = (
        "import sys; before = set(sys.modules); import podium.telemetry, podium.telemetry.sinks;"
        "roots = {name.partition('.')[0] for name in set(sys.modules) - before};"
        "sys.stdout.write(','.join(sorted(roots - set(sys.stdlib_module_names))))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "podium"


def test_every_public_name_exists() -> None:
    from podium.telemetry import events, sinks

    for module in (telemetry, events, sinks):
        for name in module.__all__:
            assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="NoSuchSink"):
        _ = sinks.NoSuchSink  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("sink", [JsonlSink, TraceSink])
def test_a_full_disk_is_told_in_a_line_each_time_and_ends_nothing(
    sink: type[JsonlSink] | type[TraceSink], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file"
    with sink(path) as opened:
        os.dup2(os.open("/dev/full", os.O_WRONLY), opened._file.fileno())
        for step in range(3):
            emit(StepFinished(step, {"loss": 1.0}))
            time.sleep(0.01)
    assert caplog.records
    assert all(
        record.exc_info is None and "No space left on device" in record.getMessage() for record in caplog.records
    )
    assert len(caplog.records) <= 2
