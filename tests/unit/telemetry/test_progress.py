"""How far the long parts of a run are: counted, read, asked of workers, described, and shown without a flood."""

from __future__ import annotations

import io
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import podium
import podium.telemetry.progress as telemetry_progress
from podium import Cluster, telemetry
from podium.errors import DeadlineExceeded
from podium.runtime import Worker, endpoint
from podium.runtime.calls import progress
from podium.runtime.calls.in_flight import HearReply
from podium.runtime.calls.progress import ProgressWatch, RankCounts
from podium.runtime.messages import Capabilities, Reply
from podium.telemetry import PhaseStarted, Progressing, Stalled, StepFinished, emit, metrics, subscribe
from podium.telemetry.bus import AS_EVENT
from podium.telemetry.events import Count
from podium.telemetry.progress import TOKENS, Counting, describe_counts, read_counts
from podium.telemetry.sinks import ConsoleSink
from podium_testing.workers import Sleeper
from tests.unit.telemetry.test_console import drawn, on_file, on_terminal
from tests.waits import wait_until


def stage(name: str, seconds: float) -> Count:
    return Count("", 0, 0, seconds, stage=name)


@pytest.fixture
def local() -> Iterator[Cluster]:
    with podium.connect("local", preload=()) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def none_of_others() -> None:
    """What tests before this one have left open does not count here."""
    telemetry_progress._OPEN.clear()


def states() -> list[tuple[int, int]]:
    return [(count.done, count.total) for count in read_counts()]


# -- counting


def test_a_thing_is_counted_once_the_next_one_is_asked_for() -> None:
    with Counting("rows", 2) as count:
        assert [states() for _ in count.over("ab")] == [[(0, 2)], [(1, 2)]]
        assert states() == [(2, 2)]
    assert states() == []


def test_nothing_is_counted_any_more_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), Counting("rows", 2) as count:
        for _ in count.over("ab"):
            raise ZeroDivisionError
    assert states() == []


def test_what_has_just_begun_is_not_told() -> None:
    with Counting("rows", 2):
        assert read_counts(after_s=3600.0) == ()


# -- one line of text


@pytest.mark.parametrize(
    ("counts", "line"),
    [
        ([], ""),
        ([stage("publish", 3.2)], "publish 3s"),
        ([stage("update", 75), Count("micro-batches", 3, 16, 9)], "update 1m15s · 3 of 16 micro-batches"),
        ([Count("micro-batches", 1, 2, 9, rank=0), Count("micro-batches", 1, 3, 9, rank=1)], "2 of 5 micro-batches"),
        ([Count("optimizer steps", 0, 1, 9)], ""),  # of one thing there is nothing to tell
        ([Count("completions", 4, 64, 9, whole=True), Count("completions", 3, 8, 2)], "7 of 64 completions"),
        ([Count("completions", 64, 64, 9, whole=True), Count("completions", 3, 8, 2)], "64 of 64 completions"),
        (
            [stage("generate", 9), Count(TOKENS, 900, 0, 3.0), Count(TOKENS, 200, 0, 2.0), Count("rows", 0, 2_000, 1)],
            "generate 9s · 0 of 2,000 rows · 400 tok/s",
        ),
        ([stage("generate", 9), stage("update", 4)], "generate 9s · update 4s"),
    ],
)
def test_stages_come_first_then_numbers_by_unit_then_the_speed(counts: list[Count], line: str) -> None:
    assert describe_counts(counts) == line


# -- asking workers


class Counter(Worker):
    """Counts, and goes on once a file is there."""

    @endpoint()
    def count(self, go_on: str) -> None:
        with Counting("rows", 10) as count:
            count.done = 3 + self.ctx.rank
            while not Path(go_on).exists():
                time.sleep(0.01)


def test_each_rank_tells_what_it_counts_while_a_call_runs(local: Cluster, tmp_path: Path) -> None:
    counter = local.start(Counter.bind(), local.pool([2]), name="counter")
    heard: list[tuple[Count, ...]] = []
    unsubscribe = subscribe(lambda event: heard.append(event.counts) if isinstance(event, Progressing) else None)
    try:
        call = counter.count.submit(str(tmp_path / "go"))
        assert wait_until(lambda: any(len(counts) == 2 for counts in heard))
        (tmp_path / "go").touch()
        call.result()
        assert wait_until(lambda: heard[-1] == ()), "after the last there is none"
    finally:
        unsubscribe()
    first, second = next(counts for counts in heard if len(counts) == 2)
    assert [(c.role, c.rank, c.unit, c.done, c.total) for c in (first, second)] == [
        ("counter", 0, "rows", 3, 10), ("counter", 1, "rows", 4, 10),
    ]  # fmt: skip


def test_nobody_is_asked_while_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []
    monkeypatch.setattr(progress, "LOOK_S", 0.01)
    watch = ProgressWatch(lambda after_s: looks.append(after_s) or [])
    try:
        time.sleep(0.5)  # dozens of looks, if it looked
        assert looks == []
        unsubscribe = subscribe(lambda event: None)
        assert wait_until(lambda: looks)
        unsubscribe()
    finally:
        watch.close()


class _Backend:
    capabilities = Capabilities(processes=True, collectives=True, concurrent=True)

    def unpack(self, payload: Any) -> Any:
        return payload


def test_a_process_that_does_not_answer_is_not_asked_again() -> None:
    ranks = RankCounts(_Backend())  # type: ignore[arg-type] - as much of a backend as is used
    heard: list[HearReply] = []

    def ask(asked: Sequence[int], method: str, values: Mapping[str, Any], hear: HearReply) -> None:
        heard.extend(hear for _ in asked)

    for _ in range(3):
        assert ranks.read("role", ask, {0}, lambda ended, timeout_s: None) == []
    (answer,) = heard
    answer(0, Reply("ok", [Count("rows", 1, 2, 3.0)], 0, 0))
    ranks.read("role", ask, {0}, lambda ended, timeout_s: heard[-1](0, Reply("ok", [], 0, 0)))
    assert len(heard) == 2


@pytest.mark.parametrize("how", [pytest.param("raises", marks=pytest.mark.exhaustive), "never returns"])
def test_deadlines_hold_whatever_a_listener_of_progress_does(local: Cluster, how: str) -> None:
    hears, over = threading.Event(), threading.Event()

    def listen(event: telemetry.Event) -> None:
        if isinstance(event, Progressing):
            hears.set()
            if how == "raises":
                raise ValueError("no harm")
            over.wait()

    sleeper = local.start(Sleeper.bind(), local.pool())
    unsubscribe = subscribe(listen)
    try:
        with Counting("rows", 2):
            call = sleeper.sleep.within(timeout_s=3.0).submit(300.0)
            assert hears.wait(60)
            with pytest.raises(DeadlineExceeded):
                call.result()
            local.close()
    finally:
        over.set()
        unsubscribe()


def test_progress_that_cannot_be_read_ends_alone(caplog: pytest.LogCaptureFixture) -> None:
    def read(after_s: float) -> list[Count]:
        raise OSError("no descriptor is left")

    unsubscribe = subscribe(lambda event: None)
    watch = ProgressWatch(read)
    try:
        assert wait_until(lambda: "progress is not shown any more; the run goes on" in caplog.text)
    finally:
        watch.close()
        unsubscribe()


def test_the_end_of_a_cluster_is_no_failure_of_progress(caplog: pytest.LogCaptureFixture) -> None:
    read, over = threading.Event(), threading.Event()

    def fail(after_s: float) -> list[Count]:
        read.set()
        over.wait()
        raise OSError("the processes are gone")

    unsubscribe = subscribe(lambda event: None)
    watch = ProgressWatch(fail)
    try:
        assert read.wait(60)
        watch.close()
        over.set()
        assert wait_until(lambda: not watch._thread.is_alive())  # pyright: ignore[reportPrivateUsage]
    finally:
        unsubscribe()
    assert "progress" not in caplog.text


def test_a_call_that_goes_on_is_not_said_to_wait(local: Cluster, tmp_path: Path) -> None:
    counter = local.start(Counter.bind(), local.pool(), name="counter")
    stalls: list[Stalled] = []
    unsubscribe = subscribe(lambda event: stalls.append(event) if isinstance(event, Stalled) else None)
    try:
        call = counter.count.submit(str(tmp_path / "go"))
        calls = counter.group.processes.calls
        (flight,) = calls._in_flight.values()  # pyright: ignore[reportPrivateUsage] - not a whole minute
        assert wait_until(lambda: calls._counts.of({0}))  # pyright: ignore[reportPrivateUsage]
        flight.next_stall = 0.0
        assert wait_until(lambda: flight.counted)
        assert not stalls
        flight.next_stall = 0.0  # and now it has counted nothing since
        assert wait_until(lambda: stalls)
        (tmp_path / "go").touch()
        call.result()
    finally:
        unsubscribe()


# -- what is shown


def test_the_bar_says_how_far_a_stage_is_until_the_step_ends() -> None:
    console, out = on_terminal()
    with ConsoleSink(console=console):
        emit(PhaseStarted("grpo", 3))
        emit(Progressing((stage("generate", 9), Count("completions", 3, 64, 9), Count(TOKENS, 90, 0, 9))))
        assert "0/3 · generate 9s · 3 of 64 completions · 10 tok/s" in drawn(out, "of 64")[-1]
        emit(Progressing(()))
        emit(StepFinished(1, {metrics.STEP_S: 1800.0}))
        last = drawn(out, "left")[-1]
    assert "completions" not in last
    assert "1/3 · 1h00m left, until " in last, "after the first step it says when the run ends"


def test_a_file_gets_a_line_of_a_long_stage_ever_more_rarely() -> None:
    console, out = on_file()
    with ConsoleSink(console=console):
        emit(PhaseStarted("grpo", 3))
        for second in range(600):
            emit(Progressing((stage("generate", second), Count("completions", second // 60, 64, second))))
        for second in range(40):
            emit(Progressing((stage("update", second), Count("micro-batches", second // 4, 16, second))))
        emit(StepFinished(1, {metrics.STEP_S: 640.0}))
        emit(StepFinished(2, {metrics.STEP_S: 640.0}))
    lines = [line.strip() for line in out.getvalue().splitlines()]
    assert [line for line in lines if "generate" in line or "update" in line] == [
        "generate 30s · 0 of 64 completions", "generate 1m00s · 1 of 64 completions",
        "generate 2m00s · 2 of 64 completions", "generate 4m00s · 4 of 64 completions",
        "generate 8m00s · 8 of 64 completions", "update 30s · 7 of 16 micro-batches",
    ]  # fmt: skip
    (left,) = [line for line in lines if "left" in line]
    assert left.startswith("1  about 21m20s left, until ")


def test_a_short_run_does_not_say_when_it_ends() -> None:
    console, out = on_file()
    with ConsoleSink(console=console):
        emit(PhaseStarted("grpo", 3))
        emit(StepFinished(1, {metrics.STEP_S: 0.5}))
    assert "left" not in out.getvalue()


@pytest.mark.parametrize("console", [on_terminal, on_file], ids=["terminal", "file"])
def test_what_waits_is_one_line(
    console: Callable[[], tuple[Console, io.StringIO]], capfd: pytest.CaptureFixture[str]
) -> None:
    shown, out = console()
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []  # pytest's own
    try:
        with podium.connect("inline", threads=True) as cluster, ConsoleSink(console=shown):
            sleeper = cluster.start(Sleeper.bind(), cluster.pool(), name="slow")
            call = sleeper.sleep.submit(1.0)
            for flight in sleeper.group.processes.calls._in_flight.values():  # pyright: ignore[reportPrivateUsage]
                flight.next_stall = 0.7  # not a whole minute, and not twice
            call.result()
    finally:
        root.handlers = handlers
    text = out.getvalue() + "".join(capfd.readouterr())
    assert text.count("slow.sleep") == 1


def test_a_log_file_of_the_user_gets_what_a_terminal_shows_as_an_event() -> None:
    written: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: written.append(record.getMessage())  # type: ignore[method-assign] - it stands for a file
    log = logging.getLogger("podium")
    log.addHandler(handler)
    try:
        with ConsoleSink(console=on_file()[0]):
            log.warning("slow.sleep has waited", extra={AS_EVENT: True})
    finally:
        log.removeHandler(handler)
    assert written == ["slow.sleep has waited"]
