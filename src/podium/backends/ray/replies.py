# pyright: basic
"""Who hears the replies: the thread that waits for a call, or else Ray's own.

A future for each reply makes a broadcast to eight actors 1.17 times as long as `ray.get` on all of them; one `ray.wait`
in the thread that waits anyway makes it 1.05 times as long. So a reply is first left to whoever waits. What nobody has
waited for after a few milliseconds gets a future.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import ray

from podium.backends.interrupts import Interrupts

__all__ = ["Replies"]

TOGETHER_S = 0.005  # the replies of a short call are taken in all at once, if they come within this
LOOK_S = 0.05  # a waiting thread looks this often whether its call was ended by somebody else
TICK_S = 0.004

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
            together = True
            while not ended() and (left := until - time.monotonic()) > 0:
                due = list(self._due)
                if not due:
                    return None
                self._awaited = frozenset(due)
                if together:
                    ready, _ = ray.wait(due, num_returns=len(due), timeout=min(TOGETHER_S, left))
                else:
                    ray.wait(due, timeout=min(LOOK_S, left))
                    ready, _ = ray.wait(due, num_returns=len(due), timeout=0)
                together = False
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

    def _hear(self, ready: list[Any]) -> None:
        try:
            answers = ray.get(ready)
        except Exception:  # noqa: BLE001 - one of them is an error: each by itself then
            for reference in ready:
                self._hear_one(reference)
            return
        for reference, answer in zip(ready, answers, strict=True):
            if (heard := self._due.pop(reference, None)) is not None:
                heard(answer, None)

    def _hear_one(self, reference: Any) -> None:
        heard = self._due.pop(reference, None)
        if heard is None:
            return
        try:
            answer, error = ray.get(reference), None
        except Exception as found:  # noqa: BLE001 - whatever Ray raises is what came of the call
            answer, error = None, found
        heard(answer, error)

    def _listen(self) -> None:
        while not self._closed:
            self._some.wait()
            self._pass_on()
            if not self._due and not self._closed:
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
