"""What a command says when SIGTERM or Ctrl-C ends it, and its exit status."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from podium.errors import RunInterrupted
from podium.telemetry.formatting import visible


class CommandInterrupted(KeyboardInterrupt):
    """SIGTERM ended a command, which has not said so yet. A training run listens for signals itself."""

    code = 128 + signal.SIGTERM


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """During the block, SIGTERM raises :class:`CommandInterrupted` in the main thread, unless something else handles
    or ignores it already."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    process = os.getpid()

    def end(number: int, frame: FrameType | None) -> NoReturn:
        del frame
        if os.getpid() != process:  # a fork, whose end is nobody's but its own
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        raise CommandInterrupted

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) == end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def explained(describe: Callable[[], str]) -> Iterator[None]:
    """Where a signal ends the block, have :func:`end_interrupted` add what ``describe`` says of the work."""
    try:
        yield
    except KeyboardInterrupt as interruption:
        interruption.add_note(describe())
        raise


def end_interrupted(command: str, interruption: KeyboardInterrupt) -> int:
    """Say that the command was ended, and what it had done, unless a run has said so. Returns the exit status."""
    if not isinstance(interruption, RunInterrupted):
        what = "ended by SIGTERM" if isinstance(interruption, CommandInterrupted) else "interrupted"
        parts = [f"podium {command}: {what}", *getattr(interruption, "__notes__", ())]
        sys.stderr.write(visible("; ".join(parts)) + "\n")
    if not isinstance(interruption, RunInterrupted | CommandInterrupted):
        return 130
    for number in (signal.SIGINT, signal.SIGTERM):  # all is said, and Python's end is not to be disturbed
        signal.signal(number, signal.SIG_IGN)
    return int(interruption.code or 0)
