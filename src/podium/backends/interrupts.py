"""Ctrl-C between the replies, never inside one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

__all__ = ["Interrupts"]

T = TypeVar("T")


class Interrupts:
    """In the main thread, Ctrl-C must not tear a message half taken in: a notebook goes on after it.

    While the sockets are open, Python's own SIGINT handler is replaced by one that, inside a step, only notes the
    interrupt; it is raised right after the step. A handler of the user's is left alone.
    """

    def __init__(self) -> None:
        self._inside = False
        self._noted = False
        main = threading.current_thread() is threading.main_thread()
        self._installed = main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._installed:
            signal.signal(signal.SIGINT, self._note)

    def hold(self, step: Callable[[T], None], ready: T) -> None:
        """Run ``step(ready)``, then raise KeyboardInterrupt if one came meanwhile."""
        self._inside = True
        try:
            step(ready)
        finally:
            self._inside = False
        if self._noted:
            self._noted = False
            raise KeyboardInterrupt

    def restore(self) -> None:
        main = threading.current_thread() is threading.main_thread()
        if self._installed and main and signal.getsignal(signal.SIGINT) == self._note:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._inside:
            raise KeyboardInterrupt
        self._noted = True
