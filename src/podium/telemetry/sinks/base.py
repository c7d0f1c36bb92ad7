"""The base class of all sinks, with a lock around every event."""

import atexit
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self

from podium.telemetry.bus import subscribe
from podium.telemetry.events import Event

__all__ = ["Sink"]


class Sink(ABC):
    """Receives events. ``with SomeSink(...):`` listens until the block ends.

    A subclass implements ``handle`` and, if it holds something open, ``finish``. Both run under the sink's lock. An
    event that arrives after ``close`` is dropped.
    """

    def __init__(self) -> None:
        # Re-entrant: what a sink does may itself log, warn or emit.
        self._lock = threading.RLock()
        self._closed = False
        self._unsubscribe: Callable[[], None] | None = None

    @abstractmethod
    def handle(self, event: Event) -> None:
        """Take one event. An exception unsubscribes the sink, and the run goes on."""

    def finish(self) -> None:  # noqa: B027 - not abstract: a sink that holds nothing needs none
        """Write what is not yet written, and release what is open. Called once."""

    def attach(self) -> Self:
        """Listen to the program's events until ``close``, or until the program exits."""
        with self._lock:
            if self._unsubscribe is None and not self._closed:
                self._unsubscribe = subscribe(self)
                atexit.register(self._close_at_exit, os.getpid())
        return self

    def close(self) -> None:
        """Stop listening and finish. A full disk is logged. Calling it again does nothing."""
        with self._lock:
            if self._unsubscribe is not None:
                self._unsubscribe()
                self._unsubscribe = None
            if not self._closed:
                self._closed = True
                atexit.unregister(self._close_at_exit)
                try:
                    self.finish()
                except OSError as error:
                    logging.getLogger("podium.telemetry").error(
                        "%s is not complete: %s: %s", type(self).__qualname__, type(error).__name__, error
                    )

    def _close_at_exit(self, attached_in: int) -> None:
        if os.getpid() == attached_in:  # a forked child holds a copy of what its parent will write
            self.close()

    def __call__(self, event: Event) -> None:
        with self._lock:
            if not self._closed:
                self.handle(event)

    def __enter__(self) -> Self:
        return self.attach()

    def __exit__(self, *error: object) -> None:
        self.close()
