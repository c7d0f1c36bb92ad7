"""A call in flight: the controller's view of one endpoint running on several ranks."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, cast

from podium.errors import CallCancelled, DeadlineExceeded, PodiumError
from podium.runtime.markers import CallArgument

if TYPE_CHECKING:
    from podium.runtime.backend import Backend, Reply

__all__ = ["Call"]

T = TypeVar("T")

FIRST_NAP_S, LAST_NAP_S = 0.0005, 0.1  # between two offers to deliver replies for the backend


def _nothing() -> None:
    return None


class Call(Generic[T]):
    """The result of an endpoint that may still be running.

    It ends once: with the joined results of all ranks, or with the first cause of failure. :meth:`result` raises

    - EndpointError: a rank raised (the first that did; siblings that fail because of it are secondary);
    - WorkerDied: a rank's process ended;
    - DeadlineExceeded: the deadline given at submission passed (who still runs what is in the message);
    - CallCancelled: after :meth:`cancel`.
    """

    def __init__(self, label: str, timeout_s: float) -> None:
        self.label = label
        self.timeout_s = timeout_s
        self.deadline = time.monotonic() + timeout_s
        self._join: Callable[[list[Any]], T] | None = None
        self._backend: Backend | None = None
        self._replies: list[Reply | None] = []
        self._left = -1
        self._lock = threading.Lock()
        self._gate = threading.Lock()  # held until the call has ended; a lock wakes its waiter faster than an Event
        self._gate.acquire()
        self._ended = False
        self._error: BaseException | None = None
        self._value: T | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._on_cancel: Callable[[], None] = _nothing

    # -- for the caller ------------------------------------------------------------------------------------------

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for the result. Waiting less long than the deadline does not cancel the call.

        Raises:
            TimeoutError: ``timeout_s`` passed; the call goes on.
        """
        if not self.wait(timeout_s):
            raise TimeoutError(
                f"{self.label} has no result after {timeout_s} s of waiting; it goes on: ask again, or cancel()"
            )
        return self._outcome()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end, in whatever way; True if it came within ``timeout_s``."""
        return self._ended or self._wait(timeout_s)

    def done(self) -> bool:
        """Whether the call has ended, in whatever way."""
        return self._ended

    def cancel(self) -> bool:
        """Give the call up; False if it had ended. A queued call is dropped, an async endpoint gets CancelledError,
        a running sync endpoint goes on unheard."""
        tell = self._on_cancel
        if not self.fail(CallCancelled(f"{self.label} was cancelled")):
            return False
        tell()
        return True

    def arg(self) -> T:
        """This call as an argument of another call, typed as its result. The other call starts when this one is done
        and fails with this one's error."""
        return cast(T, CallArgument(self))

    def __await__(self) -> Generator[Any, None, T]:
        if not self._ended:
            loop = asyncio.get_running_loop()
            future: asyncio.Future[None] = loop.create_future()

            def wake() -> None:
                if not future.done():
                    future.set_result(None)

            def ended() -> None:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(wake)

            self.when_done(ended)
            yield from future.__await__()
        return self._outcome()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Call stays in the controller; another call takes its result by call.arg()")

    def __repr__(self) -> str:
        state = "running" if not self._ended else "failed" if self._error else "done"
        return f"<Call {self.label} {state}>"

    # -- for the runtime -----------------------------------------------------------------------------------------

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once the call has ended (at once if it has); from whichever thread ends it."""
        with self._lock:
            if not self._ended:
                self._callbacks.append(callback)
                return
        callback()

    def begin(self, ranks: int, join: Callable[[list[Any]], T], backend: Backend) -> None:
        """The call goes out to ``ranks`` ranks; ``join`` makes the result of their replies, in its reader's thread."""
        self._backend = backend
        self._replies = [None] * ranks
        self._left = ranks
        self._join = join

    def record(self, place: int, reply: Reply) -> None:
        """Note one rank's good reply; the last one ends the call."""
        with self._lock:
            if self._ended:
                return
            self._replies[place] = reply
            self._left -= 1
            if self._left:
                return
            if time.monotonic() > self.deadline:
                self._error = DeadlineExceeded(
                    f"{self.label} took longer than its deadline of {self.timeout_s:g} s; its results are discarded",
                    method=self.label,
                )
            self._end()
        self._run_callbacks()

    def fail(self, error: BaseException) -> bool:
        """End the call with ``error``; False if it had ended."""
        with self._lock:
            if self._ended:
                return False
            self._error = error
            self._end()
        if self._backend is not None:
            self._backend.wake()
        self._run_callbacks()
        return True

    def on_cancel(self, action: Callable[[], None]) -> None:
        self._on_cancel = action

    def _end(self) -> None:
        self._ended = True
        self._on_cancel = _nothing  # it holds what holds this call: a cycle would keep large results until a collection
        self._gate.release()

    def _run_callbacks(self) -> None:
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def _wait(self, timeout_s: float | None) -> bool:
        """Wait for the end; True if it came."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        nap = FIRST_NAP_S
        while not self._ended:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                break
            driven = None if self._backend is None else self._backend.wait(self.done, left)
            if driven:
                continue
            sleep = LAST_NAP_S if driven is None else nap
            if self._gate.acquire(timeout=sleep if left is None else min(sleep, left)):
                self._gate.release()
            nap = min(2 * nap, LAST_NAP_S)
        return self._ended

    def _outcome(self) -> T:
        with self._lock:
            if self._error is None and self._join is not None:
                try:
                    self._value = self._join(self._replies)
                except PodiumError as error:
                    self._error = error
            self._join, self._replies = None, []  # they hold the arguments
        if self._error is not None:
            raise _copy_of(self._error)
        return cast(T, self._value)


def _copy_of(error: BaseException) -> BaseException:
    """What to raise: the traceback of what is raised leads to the caller's frame, which holds the call. If the call
    held that same error, all that the frame holds, large arguments too, would live until a collection."""
    if not isinstance(error, PodiumError):
        return error
    again = copy.copy(error)
    again.__cause__ = error.__cause__
    return again
