"""Ctrl-C between the replies, never inside one."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

T = TypeVar("T")


class Interrupts:
    """Keeps Ctrl-C from tearing a message that is half taken in: a notebook goes on after an interrupt.

    Until :meth:`restore`, Python's own SIGINT handler is replaced by one that, inside a step of the main thread, only
    notes the interrupt. The interrupt is raised right after the step. A handler of the user's is left alone.
    """

    def __init__(self) -> None:
        self._main = threading.main_thread().ident
        self._inside = False
        self._noted = False
        self._installed = self._replaces(signal.default_int_handler)
        if self._installed:
            signal.signal(signal.SIGINT, self._note)

    def hold(self, step: Callable[[T], None], ready: T) -> None:
        """Run ``step(ready)``, then raise KeyboardInterrupt if one came to this thread meanwhile."""
        if threading.get_ident() != self._main:
            step(ready)
            return
        self._inside = True
        try:
            step(ready)
        finally:
            self._inside = False
        if self._noted:
            self._noted = False
            raise KeyboardInterrupt

    def restore(self) -> None:
        """Give Python its own handler back."""
        if self._installed and self._replaces(self._note):
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _replaces(self, handler: Callable[[int, FrameType | None], object]) -> bool:
        """Whether ``handler`` is there now, and this thread may put another in its place."""
        return threading.get_ident() == self._main and signal.getsignal(signal.SIGINT) == handler

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._inside:
            raise KeyboardInterrupt
        self._noted = True
