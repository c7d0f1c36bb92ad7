"""What all sinks have in common: a queue, a thread, and nothing lost."""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from podium.telemetry import Event, Note, emit, flush
from podium.telemetry.sinks import Sink, base
from tests.waits import LONG_S

WAIT_S = LONG_S


class Heard(Sink):
    """Keeps what it hears, as soon as ``gate`` is open."""

    def __init__(self, *, open_gate: bool = True) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.threads: set[int] = set()
        self.times_ns: list[int] = []
        self.some = threading.Event()
        self.gate = threading.Event()
        if open_gate:
            self.gate.set()

    def handle(self, event: Event) -> None:
        assert isinstance(event, Note)
        assert self.gate.wait(WAIT_S)
        if event.text == "raise":
            raise ValueError("cannot")
        self.texts.append(event.text)
        self.threads.add(threading.get_ident())
        self.times_ns.append(self.emitted_ns)
        self.some.set()


def test_an_emit_may_come_in_the_middle_of_another_as_from_a_signal_handler() -> None:
    def interrupted(at: int) -> None:
        left = itertools.count(at, -1)

        def look(frame: object, kind: str, called: object) -> None:
            if next(left) == 0:
                sys.setprofile(None)
                emit(Note("inner"))

        sys.setprofile(look)
        try:
            emit(Note("outer"))
        finally:
            sys.setprofile(None)

    for at in range(40):  # more than the calls and returns of an emit
        with Heard() as sink:
            emitting = threading.Thread(target=interrupted, args=(at,), daemon=True)
            emitting.start()
            emitting.join(WAIT_S)
            assert not emitting.is_alive(), f"it waits for itself, interrupted at {at}"
        assert "outer" in sink.texts


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads of sinks write nothing by themselves."""
    monkeypatch.setattr(base, "WRITE_S", 1e6)


def test_an_event_is_handled_in_another_thread_and_emit_does_not_wait_for_it() -> None:
    with Heard(open_gate=False) as sink:
        emit(Note("a"))
        time.sleep(2 * base.WRITE_S)
        emit(Note("b"))  # while the first is being handled, maybe
        assert not sink.texts
        sink.gate.set()
        assert sink.some.wait(WAIT_S)
        assert sink.threads.isdisjoint({threading.get_ident()})
    assert sink.texts == ["a", "b"]


def test_the_time_of_an_event_is_that_of_its_emission(patient: None) -> None:
    with Heard() as sink:
        before = time.monotonic_ns()
        emit(Note("a"))
        after = time.monotonic_ns()
        time.sleep(0.01)
    assert before <= sink.times_ns[0] <= after


def test_flush_writes_what_was_emitted_before(patient: None) -> None:
    with Heard() as sink, Heard() as other:
        emit(Note("a"))
        assert not sink.texts
        flush()
        assert sink.texts == other.texts == ["a"]


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_what_waits_is_handled_when_the_block_ends_in_any_way(patient: None, error: type[BaseException] | None) -> None:
    sink = Heard()
    try:
        with sink:
            emit(Note("a"))
            emit(Note("b"))
            if error is not None:
                raise error
    except (ValueError, KeyboardInterrupt):
        pass
    assert sink.texts == ["a", "b"]


def test_a_full_queue_makes_whoever_emits_write(patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "QUEUE_LENGTH", 4)
    with Heard() as sink:
        threads = [threading.Thread(target=lambda: [emit(Note(str(n))) for n in range(100)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(sink.texts) > 400 - 4
    assert sorted(sink.texts) == sorted(4 * [str(n) for n in range(100)])


def test_a_sink_that_raises_in_its_thread_is_told_once_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR, "podium.telemetry"), Heard() as sink, Heard() as other:
        other.handle = lambda event: other.texts.append("x")  # type: ignore[method-assign] # takes what this refuses
        for text in ("a", "raise", "b", "c"):
            emit(Note(text))
        flush()
        emit(Note("d"))
    assert sink.texts == ["a"]
    assert len(other.texts) == 5
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "Heard failed on Note and gets no more events"
    ]


def test_a_sink_may_emit_and_flush_while_it_handles(patient: None) -> None:
    class Echo(Heard):
        def handle(self, event: Event) -> None:
            super().handle(event)
            if event == Note("a"):
                emit(Note("b"))
                flush()

    with Echo() as sink:
        emit(Note("a"))
        flush()
    assert sink.texts == ["a", "b"]


def test_the_thread_of_a_closed_sink_ends() -> None:
    with Heard() as sink:
        thread = sink._thread
        assert thread is not None
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_a_program_that_is_killed_has_lost_no_more_than_the_last_moment(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    script = f"""
import os, signal, time
from podium.telemetry import StepFinished, emit
from podium.telemetry.sinks import JsonlSink
JsonlSink({str(path)!r}).attach()
for step in range(3):
    emit(StepFinished(step, {{"loss": 0.5}}))
until = time.monotonic() + {WAIT_S}
while open({str(path)!r}).read().count("\\n") < 3 and time.monotonic() < until:
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", script], check=False, env=os.environ)
    assert path.read_text().count("\n") == 3
