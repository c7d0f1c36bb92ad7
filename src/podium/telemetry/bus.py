"""The bus hands an event to every listener, in the thread that emits it.

    emit(event) ──▶ snapshot of the listeners (a tuple, replaced and never changed) ──▶ each callback in turn

``emit`` and ``active`` take no lock. ``subscribe`` and its undo take one and replace the tuple. So a callback may be
called by several threads at once, and once more just after it was unsubscribed. A callback that raises is unsubscribed
and reported once through ``logging``, and the run goes on. Sinks are callbacks that only put the event into a queue
(podium.telemetry.sinks.base). ``flush`` waits until they have written what is there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from podium.telemetry.events import Event

AS_EVENT: Final = "podium_event"
"""The attribute of a log record that says what an event says as well, so that a terminal shows one of the two."""


class Bus:
    """A list of listeners. The functions of this module use one bus for the whole program; tests make their own."""

    __slots__ = ("_listeners", "_lock")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drop every listener, and make a new lock. A forked child does so first, since the sinks are its parent's."""
        self._lock = threading.Lock()
        self._listeners: tuple[partial[None], ...] = ()

    def active(self) -> bool:
        """Whether anybody listens. Ask before building an event on a hot path."""
        return self._listeners != ()

    def emit(self, event: Event) -> None:
        """Pass ``event`` to every listener, in the order in which they subscribed. Never raises an Exception."""
        for listener in self._listeners:
            try:
                listener(event)
            except (Exception, SystemExit, GeneratorExit) as error:  # noqa: BLE001 - not Ctrl-C: the run must go on
                if self._remove(listener):
                    report_failure(listener.func, event, error)

    def flush(self) -> None:
        """Wait until each listener that has a ``flush`` of its own has written all events so far."""
        for listener in self._listeners:
            write: Callable[[], None] | None = getattr(listener.func, "flush", None)
            if write is not None:
                write()

    def subscribe(self, callback: Callable[[Event], None]) -> Callable[[], None]:
        """Call ``callback`` with every event from now on. Returns a function that unsubscribes, which may be called
        twice.
        """
        listener = partial(callback)  # an object of its own, although the same callback may subscribe twice

        def unsubscribe() -> None:
            self._remove(listener)

        with self._lock:
            self._listeners = (*self._listeners, listener)
        return unsubscribe

    def _remove(self, listener: partial[None]) -> bool:
        with self._lock:
            left = tuple(other for other in self._listeners if other is not listener)
            removed = len(left) < len(self._listeners)
            self._listeners = left
        return removed


def report_failure(callback: object, event: Event, error: BaseException) -> None:
    """Log that ``callback`` raised ``error`` on ``event`` and gets no more events."""
    import logging  # imported here: it would be a third of this package's import time

    from podium.exceptions import describe_error, format_error

    logging.getLogger("podium.telemetry").error(
        "%s failed on %s and gets no more events; the run goes on: %s%s",
        getattr(callback, "__qualname__", type(callback).__name__),
        type(event).__name__,
        describe_error(error),
        "" if isinstance(error, OSError) else f"\n{format_error(error)}",  # a full disk is no matter of the code
    )


_BUS: Final = Bus()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_BUS.forget)

active = _BUS.active
emit = _BUS.emit
flush = _BUS.flush
subscribe = _BUS.subscribe
