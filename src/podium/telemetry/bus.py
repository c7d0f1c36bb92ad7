"""From whoever emits an event to whoever listens, in the emitting thread.

    emit(event) ──▶ snapshot of the listeners (a tuple, replaced and never changed) ──▶ each callback in turn

``emit`` and ``active`` take no lock; ``subscribe`` and its undo take one and replace the tuple. So a callback may
be called by several threads at once, and once more just after it was unsubscribed: sinks hold a lock of their own.
A callback that raises is unsubscribed and reported once through ``logging``; the run goes on.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from podium.telemetry.events import Event

__all__ = ["Bus", "active", "emit", "subscribe"]


class Bus:
    """A list of listeners. A program has one, behind the functions of this module; tests may make their own."""

    __slots__ = ("_callbacks", "_lock")

    def __init__(self) -> None:
        self._callbacks: tuple[Callable[[Event], None], ...] = ()
        self._lock = threading.Lock()

    def active(self) -> bool:
        """Whether anybody listens: ask before building an event on a hot path."""
        return self._callbacks != ()

    def emit(self, event: Event) -> None:
        """Hand ``event`` to every listener, in the order in which they subscribed. Never raises an Exception."""
        for callback in self._callbacks:
            try:
                callback(event)
            except Exception as error:  # noqa: BLE001 - whatever a listener raises, the run must go on
                if self._remove(callback):
                    _report(callback, event, error)

    def subscribe(self, callback: Callable[[Event], None]) -> Callable[[], None]:
        """Call ``callback`` with every event from now on; the function returned ends that and may be called twice."""

        def listener(event: Event) -> None:
            callback(event)

        # A wrapper of its own makes each subscription distinct, although the same callback may subscribe twice.
        listener.__wrapped__ = callback  # pyright: ignore[reportFunctionMemberAccess]
        with self._lock:
            self._callbacks = (*self._callbacks, listener)

        def unsubscribe() -> None:
            self._remove(listener)

        return unsubscribe

    def _remove(self, callback: Callable[[Event], None]) -> bool:
        with self._lock:
            left = tuple(one for one in self._callbacks if one is not callback)
            removed = len(left) < len(self._callbacks)
            self._callbacks = left
        return removed

    def forget(self) -> None:
        """Drop every listener, with a fresh lock: what a forked child does first, since the sinks are its parent's."""
        self._lock = threading.Lock()
        self._callbacks = ()


def _report(callback: Callable[[Event], None], event: Event, error: Exception) -> None:
    import logging  # imported here: it would be a third of this package's import time

    target: object = getattr(callback, "__wrapped__", callback)
    owner: object = getattr(target, "__self__", None)
    name = type(owner).__name__ if owner is not None else getattr(target, "__qualname__", repr(target))
    logging.getLogger("podium.telemetry").error(
        "%s failed on %s and gets no more events; the run goes on: %s: %s",
        name,
        type(event).__name__,
        type(error).__name__,
        error,
        exc_info=error,
    )


_BUS: Final = Bus()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_BUS.forget)

active = _BUS.active
emit = _BUS.emit
subscribe = _BUS.subscribe
