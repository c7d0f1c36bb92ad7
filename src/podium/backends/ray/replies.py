# pyright: basic
"""Who hears the replies: the thread that waits for a call, or else Ray's own.

A future for each reply makes a broadcast to eight actors 1.17 times as long as `ray.get` on all of them, so a reply is
first left to whoever waits, who gets all of a short call with one `ray.get`. What nobody has waited for after a few
milliseconds gets a future.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import ray

from podium.backends.interrupts import Interrupts

__all__ = ["Replies"]

TOGETHER_S = 0.005  # the replies of a short call are taken in all at once, if they come within this
LOOK_S = 0.05  # a waiting thread looks this often whether its call was ended by somebody else
TICK_S = 0.004
LINGER = 50  # ticks without a call after which the listener sleeps; to wake it costs a call 2 % of its time

Heard = Callable[[Any, BaseException | None], None]
"""Called once with the answer, or None and the error."""


class Replies:
    """References of answers that are due, and what to call with each."""

    def __init__(self) -> None:
        self._due: dict[Any, Heard] = {}
        self._awaited: frozenset[Any] = frozenset()  # those that the thread which drives waits for
        self._turn = threading.Lock()
        self._some = threading.Event()
        self._closed = False
        self._interrupts = Interrupts()
        threading.Thread(target=self._listen, name="podium-ray", daemon=True).start()

    def expect(self, reference: Any, heard: Heard) -> None:
        """Call ``heard`` when the answer is there, from whichever thread."""
        self._due[reference] = heard
        if not self._some.is_set():
            self._some.set()

    def drive(self, ended: Callable[[], bool], timeout_s: float | None) -> bool | None:
        """``Backend.wait``: hear answers in this thread."""
        if not self._turn.acquire(blocking=False):
            return False
        try:
            until = float("inf") if timeout_s is None else time.monotonic() + timeout_s
            if not ended():
                self._await_all(min(TOGETHER_S, until - time.monotonic()))
            while not ended() and (left := until - time.monotonic()) > 0:
                if not self._due:
                    return None
                due = self._await()
                ray.wait(due, timeout=min(LOOK_S, left))
                ready, _ = ray.wait(due, num_returns=len(due), timeout=0)
                self._interrupts.hold(self._hear, ready)
        finally:
            self._awaited = frozenset()
            self._turn.release()
        return True

    def close(self) -> None:
        """Hear no more."""
        self._closed = True
        self._some.set()
        self._interrupts.restore()

    def _await(self) -> list[Any]:
        due = list(self._due)
        self._awaited = frozenset(due)
        return due

    def _await_all(self, timeout_s: float) -> None:
        """Hear all that is due, if all of it comes in time and none is an error."""
        due = self._await()
        try:
            answers = ray.get(due, timeout=max(0.0, timeout_s))
        except Exception:  # noqa: BLE001 - too late, or one is an error: each is heard by itself then
            return
        self._interrupts.hold(self._hear_all, zip(due, answers, strict=True))

    def _hear_all(self, answers: Iterable[tuple[Any, Any]]) -> None:
        for reference, answer in answers:
            if (heard := self._due.pop(reference, None)) is not None:
                heard(answer, None)

    def _hear(self, ready: list[Any]) -> None:
        try:
            answers = ray.get(ready)
        except Exception:  # noqa: BLE001 - one of them is an error: each by itself then
            for reference in ready:
                self._hear_one(reference)
        else:
            self._hear_all(zip(ready, answers, strict=True))

    def _hear_one(self, reference: Any) -> None:
        heard = self._due.pop(reference, None)
        if heard is None:
            return
        try:
            answer, error = ray.get(reference), None
        except Exception as found:  # noqa: BLE001 - whatever Ray raises is what came of the call
            answer, error = None, found.with_traceback(None)  # it leads to this frame, and so to the arguments
        heard(answer, error)

    def _listen(self) -> None:
        while not self._closed:
            self._some.wait()
            idle = 0
            while idle < LINGER and not self._closed:
                self._pass_on()
                idle = 0 if self._due else idle + 1
            self._some.clear()
            if self._due:
                self._some.set()

    def _pass_on(self) -> None:
        """Give what nobody waits for a future. No reference outlives this: it would keep a result in Ray's store."""
        before = list(self._due)
        time.sleep(TICK_S)
        for reference in before:
            if reference not in self._awaited and (heard := self._due.pop(reference, None)) is not None:
                _by_future(reference, heard)


def _by_future(reference: Any, heard: Heard) -> None:
    def done(future: Any) -> None:
        error = future.exception()
        heard(future.result() if error is None else None, error)

    reference.future().add_done_callback(done)
