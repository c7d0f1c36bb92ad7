"""Requests to end a run: Ctrl-C, SIGTERM, or a call of ``StopRequest.request``."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

from podium.telemetry import Note, emit

__all__ = ["ECHO_S", "StopRequest", "listen_for_stop"]

ECHO_S: Final = 1.0
"""A signal within this time after the first counts as the same one, because ``make`` and ``timeout`` send it again."""


class StopRequest:
    """Whether the run was asked to end. ``request()`` has the effect of a first signal."""

    def __init__(self) -> None:
        self.requested = False
        self.requested_at = 0.0

    def request(self, reason: str = "asked to stop") -> None:
        """End the run after the step that is running, with a checkpoint."""
        self.requested = True
        self.requested_at = time.monotonic()
        emit(Note(f"{reason}: the run finishes this step and saves; a second signal ends it now"))


@contextmanager
def listen_for_stop() -> Iterator[StopRequest]:
    """Listen for Ctrl-C and SIGTERM during the block, then put the former handlers back.

    The first signal requests a stop, the second raises KeyboardInterrupt in the main thread. Python delivers signals to
    the main thread only. A block in any other thread hears no signal, and ``request()`` is the way to stop.
    """
    stop = StopRequest()

    def on_signal(number: int, frame: FrameType | None) -> None:
        del frame
        if not stop.requested:
            stop.request(signal.Signals(number).name)
        elif time.monotonic() - stop.requested_at > ECHO_S:
            raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    former = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
