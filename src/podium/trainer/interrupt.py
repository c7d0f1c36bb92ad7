"""Ctrl-C and SIGTERM: the first finishes the step and saves, the second stops now."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from podium.telemetry import Note, emit

ECHO_S = 1.0
"""A signal so soon after the first is the same one: `make` and `timeout` pass it on to who had it already."""

__all__ = ["StopRequest", "listen_for_stop"]


class StopRequest:
    """Whether somebody asked the run to end. ``request()`` does what a first signal does."""

    def __init__(self) -> None:
        self.requested = False
        self.requested_at = 0.0

    def request(self, reason: str = "asked to stop") -> None:
        """End after the step that is running, with a checkpoint."""
        self.requested = True
        self.requested_at = time.monotonic()
        emit(Note(f"{reason}: finishing this step, then saving; once more stops now"))


@contextmanager
def listen_for_stop() -> Iterator[StopRequest]:
    """Listen while the body runs, then put the former handlers back.

    A second signal raises KeyboardInterrupt in the main thread. Python delivers signals to the main thread only, so
    anywhere else this listens to nothing and ``request()`` is the way to stop.
    """
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def on_signal(number: int, frame: FrameType | None) -> None:
        del frame
        if not stop.requested:
            stop.request(signal.Signals(number).name)
        elif time.monotonic() - stop.requested_at > ECHO_S:
            raise KeyboardInterrupt

    former = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
