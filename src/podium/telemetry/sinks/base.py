"""The base class of all sinks: events wait in a queue, and a thread of each sink's own handles them.

    emit(event) ──▶ queue ──▶ the sink's thread, every WRITE_S ──▶ handle(event), under the sink's lock
                      └─────▶ flush(), close(), or whoever finds the queue full

So whoever emits does not wait until an event is shown and stored. Nothing in the queue is lost when the sink is closed
or the program exits in good order. A program that is killed loses the events of the last WRITE_S.
"""

import atexit
import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final, Self

from podium.telemetry.bus import report_failure, subscribe
from podium.telemetry.events import Event

WRITE_S: Final = 0.1
"""How long an event waits at most while its sink has nothing else to do."""
QUEUE_LENGTH: Final = 8192


class Sink(ABC):
    """Receives events. ``with SomeSink(...):`` listens until the block ends.

    A subclass implements ``handle`` and, if it holds something open, ``finish``. Both run under the sink's lock. An
    event that arrives after ``close`` is dropped.

    Attributes:
        emitted_ns: The time, by ``time.monotonic_ns``, at which the event in ``handle`` was emitted.
    """

    def __init__(self) -> None:
        # Re-entrant: what a sink does may itself log, warn or emit.
        self._lock = threading.RLock()
        self._closed = False
        self._unsubscribe: Callable[[], None] | None = None
        self.emitted_ns = time.monotonic_ns()
        self._queue: deque[tuple[Event, int]] = deque()
        self._handling = False
        # It wakes the thread. A signal handler emits, too, maybe in the middle of another emit: a lock that is not
        # re-entrant, such as that of an Event, would block the program for ever.
        self._some = SimpleQueue[None]()
        self._called = False
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    @abstractmethod
    def handle(self, event: Event) -> None:
        """Handle one event. An exception unsubscribes the sink, and the run continues."""

    def finish(self) -> None:  # noqa: B027 - not abstract: a sink that holds nothing needs none
        """Write everything that is not yet written, and close everything that is open. Called once."""

    def attach(self) -> Self:
        """Listen to the program's events until ``close``, or until the program exits."""
        with self._lock:
            if self._unsubscribe is None and not self._closed:
                self._unsubscribe = subscribe(self)
                atexit.register(self._close_at_exit, os.getpid())
                name = f"podium-{type(self).__name__}"
                self._thread = threading.Thread(target=self._handle_queue, name=name, daemon=True)
                self._thread.start()
        return self

    def flush(self) -> None:
        """Handle all events that were emitted before this call."""
        with self._lock:
            if self._handling:  # a sink's own handle() called this
                return
            self._handling = True
            try:
                while self._queue:
                    self._handle(*self._queue.popleft())
            finally:
                self._handling = False

    def close(self) -> None:
        """Stop listening, handle all earlier events, and finish. A full disk is logged. A second call does nothing."""
        with self._lock:
            if self._unsubscribe is not None:
                self._unsubscribe()
                self._unsubscribe = None
            if not self._closed:
                self.flush()
                self._closed = True
                atexit.unregister(self._close_at_exit)
                self.emitted_ns = time.monotonic_ns()
                try:
                    self.finish()
                except OSError as error:
                    logging.getLogger("podium.telemetry").error(
                        "%s is not complete: %s: %s", type(self).__qualname__, type(error).__name__, error
                    )
        self._over.set()
        self._some.put(None)

    def _handle(self, event: Event, emitted_ns: int) -> None:
        self.emitted_ns = emitted_ns
        try:
            self.handle(event)
        except (Exception, SystemExit, GeneratorExit) as error:  # noqa: BLE001 - not Ctrl-C: the run must go on
            if self._unsubscribe is not None:
                self._unsubscribe()
                self._unsubscribe = None
            self._queue.clear()
            report_failure(self, event, error)

    def _handle_queue(self) -> None:
        """Handle the events of WRITE_S together, so that the steps of a run are seldom interrupted."""
        while not self._over.is_set():
            self._some.get()
            self._over.wait(WRITE_S)
            self._called = False
            self.flush()

    def _close_at_exit(self, attached_in: int) -> None:
        if os.getpid() == attached_in:  # a forked child holds a copy of what its parent will write
            self.close()

    def __call__(self, event: Event) -> None:
        if self._closed:
            return
        self._queue.append((event, time.monotonic_ns()))
        if len(self._queue) >= QUEUE_LENGTH:
            self.flush()
        elif not self._called:
            self._called = True
            self._some.put(None)

    def __enter__(self) -> Self:
        return self.attach()

    def __exit__(self, *error: object) -> None:
        self.close()
