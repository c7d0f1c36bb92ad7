"""A call as its caller holds it."""

from __future__ import annotations

import asyncio
import copy
import itertools
import operator
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, TypeVar, cast
from weakref import WeakSet

from podium.errors import CallCancelled, ConfigError, DeadlineExceeded, PodiumError
from podium.exceptions import format_error
from podium.runtime.codec import copy_value
from podium.runtime.dispatch import PerRank

if TYPE_CHECKING:
    from podium.runtime.backend import Backend

T = TypeVar("T")

LONGEST_WAIT_S = 1e6  # one wait of the operating system; a longer wait is several
FIRST_NAP_S, LAST_NAP_S = 0.0005, 0.1  # between two offers to deliver replies for the backend


class CurrentProcess:
    """This process. A fork notes its own number once, because every call asks for it."""

    pid: ClassVar[int] = os.getpid()

    @classmethod
    def note(cls) -> None:
        """Note the number of this process."""
        cls.pid = os.getpid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=CurrentProcess.note)


def refuse_in_a_fork(process: int, what: str) -> None:
    """Raise a ConfigError if this process is a fork of ``process``, whose connections it shares. 0 allows forks."""
    if process not in (CurrentProcess.pid, 0):
        raise ConfigError(
            f"{what}: process {process} connected this cluster, and this process is a fork of it, which cannot use its "
            "connections; call podium.connect() in the fork"
        )


def end_fork(process: int, what: str, error: BaseException | None = None) -> None:
    """End this process if it is a fork of ``process`` that has come back from ``what``, perhaps by ``error``. It would
    answer and take calls in the place of ``process``, whose connections it has. 0 allows forks."""
    if process in (CurrentProcess.pid, 0):
        return
    if error is not None:
        sys.stderr.write(format_error(error))
    why = f"is a fork of {process} and came back from {what}; it ends here, where a fork has to call os._exit()"
    sys.stderr.write(f"podium: process {CurrentProcess.pid} {why}\n")
    sys.stderr.flush()
    os._exit(1)


class Call(Generic[T]):
    """The result of an endpoint that may still be running.

    A call ends once: with the joined results of all ranks, or with the first cause of failure. :meth:`result` raises

    - EndpointError: a rank raised. Ranks that fail because of that rank are not reported.
    - WorkerDied: a rank's process ended.
    - DeadlineExceeded: the deadline given at submission passed. The message says which ranks still run what.
    - CallCancelled: :meth:`cancel` was called, or the group was closed or restarted.
    """

    def __init__(self, label: str, timeout_s: float, backend: Backend) -> None:
        self.label = label
        self.timeout_s = timeout_s
        self.deadline = time.monotonic() + timeout_s
        self.backend = backend
        self._process = CurrentProcess.pid
        self._lock = threading.Lock()
        self._gate = threading.Lock()  # held until the call has ended: a lock wakes its waiter faster than an Event
        self._gate.acquire()
        self._ended = False
        self._error: BaseException | None = None
        self._read: Callable[[], T] | None = None
        self._value: T | None = None
        self._takers = 0  # calls that wait for this one's result
        self._theirs: tuple[T] | None = None  # which has a copy where the caller may have changed its own
        self._callbacks: list[Callable[[], None]] = []
        self.on_cancel: Callable[[], None] | None = None  # set by the runtime, and called when the caller cancels

    # -- for the caller ------------------------------------------------------------------------------------------

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for the result. A wait that is shorter than the deadline does not cancel the call.

        Raises:
            TimeoutError: ``timeout_s`` passed. The call continues.
        """
        if not self.wait(timeout_s):
            raise TimeoutError(
                f"{self.label} has no result after {timeout_s} s of waiting. The call still runs: wait again, or "
                "cancel()"
            )
        return self._outcome()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the call has a result or has failed. Returns False if neither happens within ``timeout_s``."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        nap = FIRST_NAP_S
        while not self._ended:
            if self._process != CurrentProcess.pid:
                refuse_in_a_fork(self._process, self.label)
            left = None if until is None else min(until - time.monotonic(), LONGEST_WAIT_S)
            if left is not None and not left > 0:
                break
            delivered = self.backend.wait(self.done, left)
            if delivered:
                continue
            sleep = LAST_NAP_S if delivered is None else nap
            if self._gate.acquire(timeout=sleep if left is None else min(sleep, left)):
                self._gate.release()
            nap = min(2 * nap, LAST_NAP_S)
        return self._ended

    def done(self) -> bool:
        """Whether the call has a result or has failed."""
        return self._ended

    def cancel(self) -> bool:
        """Give up the call. Returns False if the call had already ended.

        A queued call is dropped. An async endpoint that runs gets CancelledError. A sync endpoint that runs continues,
        and its result is dropped.
        """
        tell = self.on_cancel
        if not self.fail(CallCancelled(f"{self.label} was cancelled")):
            return False
        if tell is not None:
            tell()
        return True

    def arg(self) -> T:
        """This call as an argument of another call, or in a list, tuple or dict of one, typed as its result.

        The other call starts when this call has its result. If this call fails, the other one fails with the same
        error.
        """
        return cast(T, CallArgument(self))

    def __await__(self) -> Generator[Any, None, T]:
        if not self._ended:
            ended: Future[None] = Future()
            ended.set_running_or_notify_cancel()
            self.when_done(lambda: ended.set_result(None))
            try:
                yield from asyncio.wrap_future(ended).__await__()
            except asyncio.CancelledError:  # as asyncio.wait_for does at its time-out; asyncio.shield() prevents it
                self.cancel()
                raise
        return self._outcome()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Call cannot leave the controller; pass its result to another call by call.arg()")

    def __repr__(self) -> str:
        state = "running" if not self._ended else "failed" if self._error else "done"
        return f"<Call {self.label} {state}>"

    # -- for the runtime -----------------------------------------------------------------------------------------

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` from the thread that ends the call, or at once if it has ended."""
        with self._lock:
            if not self._ended:
                self._callbacks.append(callback)
                return
        callback()

    def succeed(self, read: Callable[[], T]) -> None:
        """End the call. ``read`` makes its result, in the thread that first asks for it."""
        if time.monotonic() <= self.deadline:
            self._end(None, read)
        else:
            late = f"{self.label} took longer than its deadline of {self.timeout_s:g} s; its results are discarded"
            self._end(DeadlineExceeded(late, method=self.label), None)

    def fail(self, error: BaseException, first: Callable[[], object] | None = None) -> bool:
        """Call ``first``, and end the call with ``error``. Returns False, and does neither, if it had ended."""
        return self._end(error, None, first)

    def lend(self, takers: int) -> None:
        """Add ``takers`` calls that wait for this one's result, which must be as it was when they are sent."""
        with self._lock:
            self._takers += takers
            if not self._takers:
                self._theirs = None

    def take(self) -> T:
        """Return the result for a call that waits for it."""
        return self._outcome(takes=True)

    def failed(self) -> bool:
        """Whether the call has ended with an error."""
        return self._error is not None

    def _end(
        self, error: BaseException | None, read: Callable[[], T] | None, first: Callable[[], object] | None = None
    ) -> bool:
        with self._lock:
            if self._ended:
                return False
            if first is not None:
                first()
            self._error, self._read, self._ended = error, read, True
            self.on_cancel = None  # it refers to this call: a cycle would keep large results until a collection
            callbacks, self._callbacks = self._callbacks, []
            self._gate.release()
        if error is not None:
            self.backend.wake()
        for callback in callbacks:
            callback()
        return True

    def _outcome(self, takes: bool = False) -> T:
        with self._lock:
            if self._read is not None:
                try:
                    self._value = self._read()
                except PodiumError as error:
                    self._error = error
                self._read = None  # it holds the arguments
            if not takes and self._takers and self._theirs is None:
                self._theirs = (cast(T, self._value),)
                self._value = copy_value(self._value)
            value = self._theirs[0] if takes and self._theirs is not None else cast(T, self._value)
        if self._error is not None:
            raise _copy_of(self._error)
        return value


def wait(
    calls: Sequence[Call[Any]], *, first: int | None = None, timeout_s: float | None = None
) -> tuple[list[Call[Any]], list[Call[Any]]]:
    """Wait until ``first`` of the calls, or all, have a result or have failed, or until ``timeout_s`` has passed.

    Returns the calls that have ended and those that have not, each in the order given. Nothing is cancelled.

    >>> done, running = podium.wait(calls, first=3)  # doctest: +SKIP

    Raises:
        ConfigError: ``first`` is no whole number from 0 to the number of calls, or ``calls`` holds something else.
    """
    calls = list(calls)
    if odd := [type(call).__name__ for call in calls if not isinstance(call, Call)]:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"wait(calls): {odd[0]} is no call; endpoint.submit(...) returns one")
    try:
        wanted = len(calls) if first is None else operator.index(first)
    except TypeError:
        wanted = -1
    if not 0 <= wanted <= len(calls):
        raise ConfigError(f"wait(first={first!r}): a whole number from 0 to the {len(calls)} calls given")
    if wanted:
        backend = calls[0].backend
        enough: Call[None] = Call("wait", float("inf"), backend)
        left = itertools.count(wanted - 1, -1)

        def note_end() -> None:
            if next(left) == 0:
                enough.succeed(lambda: None)
                backend.wake()  # the call may be another backend's

        for call in calls:
            call.when_done(note_end)
        enough.wait(timeout_s)
    over = [call.done() for call in calls]
    return list(itertools.compress(calls, over)), [call for call, done in zip(calls, over, strict=True) if not done]


class CallArgument:
    """The result of a call that may not be done yet, as an argument of another call or in a list, tuple or dict."""

    __slots__ = ("__weakref__", "call")
    alive: ClassVar[WeakSet[CallArgument]] = WeakSet()
    """All that there are. Without any, no container is searched for them."""

    def __init__(self, call: Call[Any]) -> None:
        self.call = call
        self.alive.add(self)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "call.arg() is passed as an argument, or in a list, tuple or dict of an argument, and not inside another "
            "object: pass call.result()"
        )


def find_calls(value: Any, above: tuple[int, ...] = ()) -> Iterator[Call[Any]]:
    """Yield the calls of each ``call.arg()`` in ``value``, a list, tuple or dict of any depth."""
    if type(value) is CallArgument:
        yield value.call
    elif (parts := _parts_of(value)) and id(value) not in above and CallArgument.alive:
        for part in parts:
            yield from find_calls(part, (*above, id(value)))


def fill_in(value: T, above: tuple[int, ...] = ()) -> T:
    """Return ``value`` with the result of its call for each ``call.arg()``. What holds none is returned as it is.

    Raises:
        Exception: What one of these calls failed with.
    """
    if type(value) is CallArgument:
        return value.call.take()
    parts = _parts_of(value)
    if not parts or id(value) in above or not CallArgument.alive:
        return value
    results = [fill_in(part, (*above, id(value))) for part in parts]
    if all(map(operator.is_, results, parts)):
        return value
    container: Any = value
    return cast(T, dict(zip(container, results, strict=True)) if type(value) is dict else type(container)(results))


def _parts_of(value: Any) -> Sequence[Any]:
    if type(value) is dict:
        return list(cast("dict[Any, Any]", value).values())
    if type(value) is PerRank:
        return value.values
    return cast("Sequence[Any]", value) if type(value) in (list, tuple) else ()


def _copy_of(error: BaseException) -> BaseException:
    """The error to raise. Its traceback leads to the caller's frame, which holds the call. If the call held that same
    error, whatever the frame holds, large arguments too, would live until a garbage collection."""
    if not isinstance(error, PodiumError):
        return error
    again = copy.copy(error)
    again.__cause__ = error.__cause__
    return again


def run_later(delay_s: float, action: Callable[..., object], *args: Any) -> None:
    """Run ``action(*args)`` after ``delay_s`` in a thread of its own."""
    timer = threading.Timer(delay_s, action, args)
    timer.daemon = True
    timer.start()
