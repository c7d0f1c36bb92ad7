"""The thread of a cluster that watches deadlines and runs delayed actions."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol
from weakref import WeakSet

__all__ = ["Watch"]

TICK_S = 0.1


class Ticking(Protocol):
    """An object that looks at the time now and then. ``now`` is in seconds of ``time.monotonic()``."""

    def tick(self, now: float) -> None: ...


class Watch:
    """Calls ``tick(now)`` of every registered object ten times a second, and runs delayed actions when they are due.

    Ticks and actions run in the watch's thread, so they must return quickly.
    """

    def __init__(self) -> None:
        self._ticking: WeakSet[Ticking] = WeakSet()
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self._wake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="podium-watch", daemon=True)
        self._thread.start()

    def register(self, ticking: Ticking) -> None:
        """Call ``ticking.tick`` for as long as the object exists."""
        with self._wake:
            self._ticking.add(ticking)

    def later(self, delay_s: float, action: Callable[[], object]) -> None:
        """Run ``action`` after ``delay_s`` seconds."""
        with self._wake:
            heapq.heappush(self._due, (time.monotonic() + delay_s, next(self._order), action))
            self._wake.notify()

    def close(self) -> None:
        """Stop. Nothing runs after this returns."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        next_tick = time.monotonic() + TICK_S
        while True:
            with self._wake:
                until = min(next_tick, self._due[0][0]) if self._due else next_tick
                self._wake.wait(max(0.0, until - time.monotonic()))
                if self._closed:
                    return
                now = time.monotonic()
                actions: list[Callable[[], object]] = []
                while self._due and self._due[0][0] <= now:
                    actions.append(heapq.heappop(self._due)[2])
                if now >= next_tick:
                    next_tick = now + TICK_S
                    actions += [partial(ticking.tick, now) for ticking in self._ticking]
            while actions:  # no name keeps an action or its object until the next tick
                try:
                    actions.pop(0)()
                except Exception:
                    logging.getLogger("podium").exception("the watch of a cluster met an error; it goes on")
