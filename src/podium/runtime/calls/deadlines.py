"""The thread that watches the deadlines of all calls."""

from __future__ import annotations

import logging
import threading
import time
from typing import Protocol
from weakref import WeakSet

from podium.exceptions import format_error
from podium.runtime.calls.call import CurrentProcess

TICK_S = 0.1


class Ticking(Protocol):
    """An object that looks at the time now and then."""

    def tick(self, now: float) -> None:
        """Return quickly. ``now`` is in seconds of ``time.monotonic()``."""
        ...


class DeadlineWatch:
    """Calls ``tick(now)`` of every registered object ten times a second, for as long as the object exists."""

    def __init__(self) -> None:
        self.process = CurrentProcess.pid
        self._ticking: WeakSet[Ticking] = WeakSet()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="podium-watch", daemon=True)
        self._thread.start()

    def register(self, ticking: Ticking) -> None:
        with self._lock:
            self._ticking.add(ticking)

    def registered(self) -> list[Ticking]:
        """The objects that were registered and still exist."""
        with self._lock:
            return [*self._ticking]

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
                except Exception as error:  # noqa: BLE001 - the checks go on whatever one of them raises
                    what = "checking the deadlines of calls failed; the checks go on"
                    logging.getLogger("podium").error("%s: %s", what, format_error(error))
