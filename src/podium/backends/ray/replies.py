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

from podium.backends.interrupts import Interrupts
from podium.backends.ray.untyped import ray

__all__ = ["Replies"]

TOGETHER_S = 0.005  # the replies of a short call are taken in all at once, if they come within this
LOOK_S = 0.05  # a waiting thread looks this often whether its call was ended by somebody else
TICK_S = 0.004
LINGER = 50  # ticks without a call after which the listener sleeps; to wake it costs a call 2 % of its time

Heard = Callable[[Any, BaseException | None], None]
"""Called once with the answer, or None and the error."""
Answer = tuple[Any, BaseException | None]


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
                self._hear(self._await(), min(TOGETHER_S, max(0.0, until - time.monotonic())))
            while not ended() and (left := until - time.monotonic()) > 0:
                if not self._due:
                    return None
                due = self._await()
                ray.wait(due, timeout=min(LOOK_S, left))
                self._hear(ray.wait(due, num_returns=len(due), timeout=0)[0])
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

    def _hear(self, references: list[Any], timeout_s: float | None = None) -> None:
        """Pass on the answers; with ``timeout_s`` only if all come in time and none is an error."""
        try:
            answers = [(answer, None) for answer in ray.get(references, timeout=timeout_s)]
        except Exception:  # noqa: BLE001 - one of them is an error: each by itself then
            if timeout_s is not None:
                return
            answers = [_answer(reference) for reference in references]
        self._interrupts.hold(self._tell, zip(references, answers, strict=True))

    def _tell(self, answers: Iterable[tuple[Any, Answer]]) -> None:
        for reference, answer in answers:
            if (heard := self._due.pop(reference, None)) is not None:
                heard(*answer)

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


def _answer(reference: Any) -> Answer:
    try:
        return ray.get(reference), None
    except Exception as error:  # noqa: BLE001 - whatever Ray raises is what came of the call
        return None, error.with_traceback(None)  # which leads to frames that hold the arguments


def _by_future(reference: Any, heard: Heard) -> None:
    def done(future: Any) -> None:
        error = future.exception()
        heard(future.result() if error is None else None, error)

    reference.future().add_done_callback(done)
