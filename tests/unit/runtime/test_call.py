"""A call ends once, whoever ends it, and everybody who waits learns of it."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref

import pytest

from podium.backends.inline import InlineBackend
from podium.errors import CallCancelled, ConfigError, DeadlineExceeded, EndpointError
from podium.runtime import Call
from podium.runtime.backend import Backend
from podium.runtime.calls.deadlines import DeadlineWatch
from tests.waits import LONG_S, wait_until


@pytest.fixture
def backend() -> Backend:
    return InlineBackend()


def begun(backend: Backend, timeout_s: float = 60.0) -> Call[str]:
    return Call("w.m", timeout_s, backend)


def test_the_result_is_read_once_when_it_is_asked_for(backend: Backend) -> None:
    call, read = begun(backend), list[int]()

    def reading() -> str:
        read.append(1)
        return "result"

    call.succeed(reading)
    assert call.done()
    assert not read
    assert [call.result(), call.result()] == ["result"] * 2
    assert len(read) == 1


def test_the_first_cause_stays(backend: Backend) -> None:
    call = begun(backend)
    assert call.fail(EndpointError("first", method="m", rank=1))
    assert not call.fail(EndpointError("second", method="m", rank=0))
    call.succeed(lambda: "late")
    assert not call.cancel()
    for _ in range(2):
        with pytest.raises(EndpointError, match="first"):
            call.result()


def test_a_result_that_came_after_the_deadline_is_discarded(backend: Backend) -> None:
    call = begun(backend, timeout_s=0.01)
    time.sleep(0.05)
    call.succeed(lambda: "late")
    with pytest.raises(DeadlineExceeded, match=r"w\.m took longer than its deadline of 0\.01 s"):
        call.result()


def test_an_error_of_joining_is_raised_again_each_time(backend: Backend) -> None:
    def join() -> str:
        raise ConfigError("does not join")

    call = begun(backend)
    call.succeed(join)
    for _ in range(2):
        with pytest.raises(ConfigError, match="does not join"):
            call.result()


def test_callbacks_run_once_also_when_it_had_ended(backend: Backend) -> None:
    call, heard = begun(backend), list[str]()
    call.when_done(lambda: heard.append("before"))
    call.succeed(lambda: "x")
    call.when_done(lambda: heard.append("after"))
    assert heard == ["before", "after"]


def test_all_who_wait_wake(backend: Backend) -> None:
    call = begun(backend)
    results: list[str] = []
    waiters = [threading.Thread(target=lambda: results.append(call.result())) for _ in range(5)]
    for waiter in waiters:
        waiter.start()
    time.sleep(0.05)
    call.succeed(lambda: "x")
    for waiter in waiters:
        waiter.join(LONG_S)
    assert results == ["x"] * 5


def test_awaiting_ends_with_the_call_whichever_thread_ends_it(backend: Backend) -> None:
    async def main() -> str:
        call = begun(backend)
        threading.Timer(0.05, call.succeed, (lambda: "x",)).start()
        return await call

    assert asyncio.run(main()) == "x"


def test_giving_up_an_await_cancels_the_call_unless_it_is_shielded(backend: Backend) -> None:
    call = begun(backend)

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(_await(call))), 0.05)
        assert not call.done()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(call, 0.05)

    asyncio.run(main())
    with pytest.raises(CallCancelled):
        call.result()


def test_a_call_may_end_when_the_loop_that_awaited_it_is_closed(backend: Backend) -> None:
    call = begun(backend)
    waiting = call.__await__()

    async def main() -> None:
        next(waiting)

    asyncio.run(main())
    call.succeed(lambda: "x")
    assert call.result() == "x"


async def _await(call: Call[str]) -> str:
    return await call


def test_cancelling_tells_the_workers_once(backend: Backend) -> None:
    call, told = begun(backend), list[int]()
    call.on_cancel = lambda: told.append(1)
    assert call.cancel()
    assert not call.cancel()
    assert told == [1]
    with pytest.raises(CallCancelled, match=r"w\.m was cancelled"):
        call.result()


class Ticked:
    def __init__(self, heard: list[float], error: Exception | None = None) -> None:
        self.heard = heard
        self.error = error

    def tick(self, now: float) -> None:
        self.heard.append(now)
        if self.error is not None:
            raise self.error


def test_the_watch_ticks_until_it_is_closed_and_survives_what_a_tick_raises() -> None:
    watch, heard = DeadlineWatch(), list[float]()
    watched = Ticked(heard, ValueError("no harm to the watch"))
    watch.register(watched)
    assert wait_until(lambda: len(heard) >= 3)
    watch.close()
    assert heard == sorted(heard)
    times = len(heard)
    time.sleep(0.25)
    assert len(heard) == times


def test_the_watch_does_not_keep_what_it_ticks() -> None:
    watch, heard = DeadlineWatch(), list[float]()
    watched = Ticked(heard)
    watch.register(watched)
    assert wait_until(lambda: bool(heard))
    gone = weakref.ref(watched)
    del watched
    assert wait_until(lambda: gone() is None)
    watch.close()
