"""A worker process without a backend: requests, failures, cancelling, status, shutdown."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from podium.errors import RefLostError, SerializationError
from podium.runtime import Worker, WorkerContext, endpoint
from podium.runtime.messages import Failure
from podium.runtime.worker_process import Outcome, WorkerProcess, pack_outcome
from tests.waits import LONG_S, wait_until
from tests.warm_python import run_python

go_on = threading.Event()


class Subject(Worker):
    def __init__(self) -> None:
        self.closed = False

    @endpoint
    def add(self, x: int, y: int = 1) -> int:
        return x + y

    @endpoint
    async def wait(self, seconds: float) -> str:
        await self._inner(seconds)
        return "waited"

    async def _inner(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    @endpoint
    async def wait_for_the_test(self) -> str:
        while not go_on.is_set():  # noqa: ASYNC110 - the test sets it in another thread
            await asyncio.sleep(0.01)
        return "waited"

    @endpoint
    async def block_the_loop(self) -> None:
        while not go_on.is_set():
            time.sleep(0.01)  # noqa: ASYNC251 - what a user does by mistake

    @endpoint
    async def in_the_loop(self, what: str) -> str:
        loop = asyncio.get_running_loop()
        if what == "stop":
            loop.stop()
        else:
            for _ in range(2):
                loop.call_soon(sys.exit, 3)
        await asyncio.sleep(0.01)
        return what

    @endpoint
    def missing(self) -> None:
        raise AttributeError("of the method's own")

    @endpoint
    async def fail(self, kind: type[BaseException]) -> None:
        await asyncio.sleep(0)
        error = kind("its text")
        error.add_note("a note")
        raise error

    @endpoint
    def fail_later(self) -> Future[int]:
        return ThreadPoolExecutor(1).submit(next, iter([]))

    def close(self) -> None:
        self.closed = True


class Closing(Worker):
    async def close(self) -> None:
        raise TimeoutError("it took too long to close")


@pytest.fixture
def process() -> Iterator[WorkerProcess]:
    process = WorkerProcess()
    process.do_construct("subject", Subject.bind(), WorkerContext(role="subject"), False)
    yield process
    process.do_shutdown()


def run(process: WorkerProcess, method: str, number: int = 1, **values: Any) -> Outcome:
    return process.execute(number, "subject", method, values)


def in_background(
    process: WorkerProcess, method: str, number: int, **values: Any
) -> tuple[threading.Thread, list[Outcome]]:
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(run(process, method, number, **values)))
    thread.start()
    assert wait_until(lambda: any(line in process.do_status() for line in ("sleep(", "go_on.is_set()")))
    return thread, outcomes


def test_outcomes_carry_values_and_times(process: WorkerProcess) -> None:
    outcome = run(process, "add", x=2)
    assert (outcome.status, outcome.value) == ("ok", 3)
    assert 0 < outcome.started_ns <= outcome.ended_ns
    assert run(process, "wait", seconds=0.0).value == "waited"


def test_first_calls_that_come_side_by_side_share_an_event_loop(
    process: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, made = threading.Barrier(2), list[asyncio.Runner]()

    def make_slowly(**options: Any) -> asyncio.Runner:
        with suppress(threading.BrokenBarrierError):
            both.wait(0.5)  # until the other call makes a loop, too
        made.append(make(**options))
        return made[-1]

    make = asyncio.Runner
    monkeypatch.setattr(asyncio, "Runner", make_slowly)
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(lambda number: run(process, "wait", number, seconds=0.0), (1, 2)))
    assert [outcome.value for outcome in outcomes] == ["waited", "waited"]
    assert len(made) == 1


def test_failures_tell_type_message_and_the_workers_own_frames(process: WorkerProcess) -> None:
    outcome = run(process, "missing")
    assert outcome.status == "error"
    failure = outcome.value
    assert isinstance(failure, Failure)
    assert (failure.type_name, failure.message, failure.secondary) == ("AttributeError", "of the method's own", False)
    assert "in missing" in failure.traceback
    assert "in execute" not in failure.traceback
    assert isinstance(failure.original(), AttributeError)
    assert "no worker 'nobody'" in process.execute(1, "nobody", "add", {}).value.message


@pytest.mark.parametrize(
    ("error", "secondary"),
    [
        (RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"), True),
        (RuntimeError("NCCL communicator was aborted"), True),
        (RuntimeError("a shape mismatch"), False),
        (ValueError("gloo is mentioned"), False),
    ],
)
def test_a_broken_collective_counts_as_the_consequence_of_something_else(
    process: WorkerProcess, error: Exception, secondary: bool
) -> None:
    def fail(worker: Subject) -> None:
        raise error

    outcome = process.execute(1, "", "run", {"worker": "subject", "function": fail, "values": {}})
    assert outcome.value.secondary is secondary


def test_a_cancelled_request_that_has_not_begun_never_runs(process: WorkerProcess) -> None:
    process.do_cancel(7)
    assert run(process, "add", 7, x=1).status == "cancelled"
    assert run(process, "add", 7, x=1).status == "ok", "once"


def test_a_running_async_request_is_cancelled(process: WorkerProcess) -> None:
    thread, outcomes = in_background(process, "wait", 9, seconds=600.0)
    process.do_cancel(9)
    thread.join(LONG_S)
    assert outcomes[0].status == "cancelled"


@pytest.mark.parametrize("kind", [asyncio.CancelledError, TimeoutError, SystemExit, GeneratorExit, ValueError])
def test_an_async_endpoints_error_keeps_text_notes_and_traceback(
    process: WorkerProcess, kind: type[BaseException]
) -> None:
    """A future in between would have another exception in the place of the first two."""
    failure = run(process, "fail", kind=kind).value
    assert (failure.type_name, failure.message) == (kind.__name__, "its text")
    assert all(part in failure.traceback for part in ("in fail", "raise error", "a note"))
    assert "concurrent/futures" not in failure.traceback
    assert failure.original().__notes__ == ["a note"]


def test_a_future_that_fails_with_a_stop_iteration_ends_its_call(process: WorkerProcess) -> None:
    """``asyncio.wrap_future`` would wait for ever."""
    outcomes = list[Outcome]()
    thread = threading.Thread(target=lambda: outcomes.append(run(process, "fail_later")), daemon=True)
    thread.start()
    thread.join(LONG_S)
    assert (outcomes[0].status, outcomes[0].value.message) == ("error", "coroutine raised StopIteration")


def test_a_close_that_raises_is_told_with_its_traceback(
    process: WorkerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    process.do_construct("closing", Closing.bind(), WorkerContext(role="closing"), False)
    process.do_shutdown()
    assert "in close" in caplog.text
    assert "it took too long to close" in caplog.text


@pytest.mark.parametrize("what", ["stop", "exit"])
def test_what_stops_the_event_loop_ends_no_request(process: WorkerProcess, what: str) -> None:
    go_on.clear()
    thread, outcomes = in_background(process, "wait_for_the_test", 1)
    assert run(process, "in_the_loop", 2, what=what).value == what
    go_on.set()
    thread.join(LONG_S)
    assert outcomes[0].value == run(process, "wait", 3, seconds=0.0).value == "waited"


def test_status_shows_the_line_where_each_request_waits(process: WorkerProcess) -> None:
    first, _ = in_background(process, "wait", 1, seconds=600.0)
    status = process.do_status()
    assert re.match(r"runs subject\.wait since \d+\.\d s, at\n      ", status)
    assert "await self._inner(seconds)" in status
    assert "await asyncio.sleep(seconds)" in status
    assert "await coroutine" not in status
    process.do_cancel(1)
    first.join()
    go_on.clear()
    second, _ = in_background(process, "block_the_loop", 2)
    assert "while not go_on.is_set()" in (status := process.do_status()) or "time.sleep(0.01)" in status
    go_on.set()
    second.join()
    assert process.do_status() == "idle: the request is queued or lost"


def test_shutdown_closes_workers_loops_and_threads(process: WorkerProcess) -> None:
    worker, others = process.workers["subject"], {*threading.enumerate()}
    assert isinstance(worker, Subject)
    run(process, "wait", seconds=0.0)
    loops = [thread for thread in threading.enumerate() if thread.name == "podium-loop" and thread not in others]
    assert len(loops) == 1
    process.do_shutdown()
    assert worker.closed
    assert not loops[0].is_alive()


def test_a_worker_made_by_hand_is_an_ordinary_object_of_one_rank() -> None:
    subject = Subject()
    assert subject.add(1, y=5) == 6
    assert (subject.ctx.rank, subject.ctx.world_size) == (0, 1)
    with pytest.raises(AttributeError, match=r"Subject\.group exists on the controller's handle"):
        _ = subject.group  # pyright: ignore[reportAttributeAccessIssue] - the point


def test_arguments_that_cannot_be_read_are_an_error_of_the_request(process: WorkerProcess) -> None:
    def read() -> dict[str, int]:
        raise SerializationError("an argument of subject.add does not unpickle")

    outcome = process.execute(1, "subject", "add", read)
    assert (outcome.status, outcome.value.type_name) == ("error", "SerializationError")
    assert "an argument of subject.add" in outcome.value.message
    assert process.execute(2, "subject", "add", lambda: {"x": 1, "y": 2}).value == 3


def test_a_result_that_cannot_be_packed_becomes_an_error_that_can() -> None:
    def pack(value: Any) -> list[Any]:
        if isinstance(value, set):
            raise SerializationError("the result does not pickle")
        return [value]

    good = Outcome("ok", 5, 1, 2)
    assert pack_outcome(good, True, pack) == (good, [5])
    assert pack_outcome(good, False, pack) == (good, [None]), "nobody wants it"
    outcome, (failure,) = pack_outcome(Outcome("ok", {5}, 1, 2), True, pack)
    assert (outcome.status, outcome.started_ns, outcome.ended_ns) == ("error", 1, 2)
    assert (failure.type_name, failure.message) == ("SerializationError", "the result does not pickle")


@pytest.mark.parametrize("error", [OSError(27, "File too large"), RefLostError("gone"), MemoryError()])
def test_a_result_that_cannot_be_sent_for_any_reason_is_an_error_of_its_call(error: Exception) -> None:
    def pack(value: Any) -> list[Any]:
        if value == 5:
            raise error
        return [value]

    outcome, (failure,) = pack_outcome(Outcome("ok", 5, 1, 2), True, pack)
    assert outcome.status == "error"
    assert "cannot be sent" in failure.message


def test_a_concurrent_request_whose_answer_cannot_be_sent_is_answered_by_an_error(process: WorkerProcess) -> None:
    answers, asked = SimpleQueue[Outcome](), list[Outcome]()

    def done(outcome: Outcome) -> None:
        asked.append(outcome)
        if outcome.status == "ok":
            raise OSError(27, "File too large")
        answers.put(outcome)

    process.execute_concurrently(1, "subject", "add", lambda: {"x": 1, "y": 2}, done)
    outcome = answers.get(timeout=60)
    assert len(asked) == 2
    assert (outcome.status, outcome.value.type_name) == ("error", "OSError")
    assert "the answer of add cannot be sent" in outcome.value.message
    assert "File too large" in outcome.value.message


def test_a_scripts_own_traceback_is_pythons(tmp_path: Path) -> None:
    """torch.distributed replaces sys.excepthook, in a script too whose worker is in its process."""
    script = tmp_path / "script.py"
    script.write_text(
        "import podium, torch\n"
        "class Two(podium.Worker):\n"
        "    @podium.endpoint(collect=podium.first())\n"
        "    def two(self): return 2\n"
        "with podium.connect('inline') as cluster:\n"
        "    assert cluster.start(Two.bind(), cluster.pool([1])).two() == 2\n"
        "    import torch.distributed; print(torch.distributed.is_initialized())\n"
        "raise ValueError('mine')\n"
    )
    done = run_python(script)
    assert done.stdout == "True\n"
    assert done.stderr.startswith(f'Traceback (most recent call last):\n  File "{script}", line 8'), done.stderr
    assert done.stderr.endswith("\nValueError: mine\n")
