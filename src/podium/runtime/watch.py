"""The thread of a cluster that watches deadlines."""

from __future__ import annotations

import logging
import threading
import time
from typing import Protocol
from weakref import WeakSet

__all__ = ["Watch"]

TICK_S = 0.1


class Ticking(Protocol):
    """An object that looks at the time now and then."""

    def tick(self, now: float) -> None:
        """Return quickly. ``now`` is in seconds of ``time.monotonic()``."""
        ...


class Watch:
    """Calls ``tick(now)`` of every registered object ten times a second, for as long as the object exists."""

    def __init__(self) -> None:
        self._ticking: WeakSet[Ticking] = WeakSet()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="podium-watch", daemon=True)
        self._thread.start()

    def register(self, ticking: Ticking) -> None:
        with self._lock:
            self._ticking.add(ticking)

    def close(self) -> None:
        """Stop. No tick runs after this returns."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(TICK_S):
            with self._lock:
                ticks = [ticking.tick for ticking in self._ticking]
            while ticks:  # no name here keeps an object until the next round
                try:
                    ticks.pop()(time.monotonic())
                except Exception:
                    logging.getLogger("podium").exception("the watch of a cluster met an error; it goes on")
