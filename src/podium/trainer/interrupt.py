"""Ctrl-C and SIGTERM: the first finishes the step and saves, the second stops now."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from podium.telemetry import Note, emit

__all__ = ["StopRequest", "listen_for_stop"]


class StopRequest:
    """Whether somebody asked the run to end. ``request()`` does what a first signal does."""

    def __init__(self) -> None:
        self.requested = False

    def request(self, reason: str = "asked to stop") -> None:
        """End after the step that is running, with a checkpoint."""
        self.requested = True
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
        if stop.requested:
            raise KeyboardInterrupt
        stop.request(signal.Signals(number).name)

    former = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
