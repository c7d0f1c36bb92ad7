"""Requests to end a run: signals, or a call of ``StopRequest.request``.

    kernel ──▶ Python's C handler ──a byte──▶ pipe ──▶ listener thread, which decides what the signal means

    before the first step          ends the run now: there is nothing to save; so it is while a run recovers from a loss
    the first after that           the run finishes what it does, which the note names, and saves
    SIGHUP, however often          the same: the terminal is gone, and both its shell and the kernel say so
    a second SIGINT or SIGTERM     ends the run now

    the run ends now:  listener ──signal──▶ main thread raises KeyboardInterrupt, and workers are killed on the way out;
                       │                    the script gets RunInterrupted in its place
                       └─ main thread still in the run after END_S: end what this process has started, os._exit

Python runs a signal's handler only between two instructions of the main thread, which may compute in C for minutes. The
listener hears of the signal meanwhile.
"""

import gc
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Final, NoReturn

from podium.errors import RunInterrupted
from podium.processes import end_launched
from podium.telemetry import Note, emit
from podium.telemetry.sinks.console import restore_terminal

ECHO_S: Final = 1.0
"""A second signal so soon is a copy of the first, where this process's parent passes signals on."""
END_S: Final = 1.0
"""How long the main thread has to leave the run once its workers are killed."""
_NO_SIGNAL: Final = 0  # in the pipe: it wakes the listener
_ASKED: Final = "{}: {}; a second signal ends it now"
_ENDS: Final = "{}: the run ends now; {}"


class StopRequest:
    """Whether the run was asked to end.

    Attributes:
        requested: The run ends after the step that is running, with a checkpoint.
        forced: The number of the signal that ends the run now, or 0.
        begun: Whether the first step has begun. A signal before that ends the run now.
        describe_latest: Says from which checkpoint the run can be resumed.
        describe_rest: Says what the run still does when it is asked to end. It may be called at any moment.
        tidy: Removes the files that only a running run needs.
    """

    def __init__(self) -> None:
        self.requested = False
        self.requested_at = -math.inf
        self.forced = 0
        self.begun = False
        self.describe_latest: Callable[[], str] = lambda: "nothing was saved"
        self.describe_rest: Callable[[], str] = lambda: "the run finishes this step and saves"
        self.tidy: Callable[[], None] = lambda: None

    def request(self, reason: str = "asked to stop") -> None:
        """End the run after the step that is running, with a checkpoint."""
        self.mark()
        emit(Note(_ASKED.format(reason, self.describe_rest())))

    def mark(self) -> None:
        """Do what :meth:`request` does, without a note."""
        self.requested = True
        self.requested_at = time.monotonic()


@contextmanager
def listen_for_stop() -> Iterator[StopRequest]:
    """Listen for SIGINT (Ctrl-C), SIGTERM and SIGHUP during the block, then put the former handlers back.

    SIGHUP stays ignored where it was, as ``nohup`` has it. Python runs handlers in the main thread only. A block in any
    other thread hears no signal, and ``request()`` is the way to stop.

    Raises:
        RunInterrupted: A signal ended the run. Other exceptions that this caused are replaced.
    """
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    try:
        listener = _Listener(stop)
        try:
            yield stop
        finally:
            listener.close()
    except BaseException as error:
        if not stop.forced:
            raise
        gc.freeze()  # or Python looks for cycles in all of torch before it ends, which takes seconds
        in_notebook = hasattr(sys, "ps1")  # which shows KeyboardInterrupt as it should
        interruption = KeyboardInterrupt() if in_notebook else RunInterrupted(128 + stop.forced)
        raise interruption.with_traceback(error.__traceback__) from None


class _Listener:
    """The handlers, and the thread that hears of signals while the main thread cannot.

    Whichever of the two is first takes a signal's byte from the pipe. The main thread makes and closes this object.
    """

    def __init__(self, stop: StopRequest) -> None:
        self._stop = stop
        self._hung_up = False  # SIGHUP alone has asked so far
        self._told = self._raised = False
        self._deciding = threading.RLock()  # another handler may interrupt one
        self._over = threading.Event()
        self._before = {*threading.enumerate()}
        self._passes_on = _parent_passes_signals_on()
        self._reads, self._writes = os.pipe()
        for fd in (self._reads, self._writes):
            os.set_blocking(fd, False)
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        self._former = {number: signal.signal(number, self._on_signal) for number in numbers}
        self._former_fd = signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)
        _LISTENERS.append(self)
        threading.Thread(target=self._listen, name="podium-signals", daemon=True).start()

    def close(self) -> None:
        """Put the former handlers back, and end the thread."""
        _LISTENERS.remove(self)
        self.forget()
        self._over.set()
        os.close(self._writes)

    def forget(self) -> None:
        """Put the former handlers back. A fork does so at once, since its signals are not the run's."""
        signal.set_wakeup_fd(self._former_fd)
        for number, handler in self._former.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Python's handler, in the main thread."""
        del frame
        if (other := signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)) != self._writes:
            signal.set_wakeup_fd(other)  # a loop of asyncio has put its own there, so there is no byte
            os.write(self._writes, bytes([number]))
        self._take_in()
        if self._told and not self._raised:  # the way out closes what shows the note
            self._raised = True
            os.write(self._writes, bytes([_NO_SIGNAL]))
            raise KeyboardInterrupt

    def _listen(self) -> None:
        incoming = select.poll()  # select() cannot take a descriptor above 1023
        incoming.register(self._reads, select.POLLIN)
        while not self._stop.forced:
            incoming.poll()
            if not self._take_in():
                break
        else:
            self._end()
        os.close(self._reads)

    def _take_in(self) -> bool:
        """Decide what the signals mean that have come. Returns False once the pipe is closed."""
        decisions: list[tuple[int, str]] = []
        with self._deciding:  # nothing is told here, which takes locks that the main thread may hold
            try:
                numbers = os.read(self._reads, 64)
            except BlockingIOError:  # the other thread was first
                return True
            for number in numbers:
                if number != _NO_SIGNAL and signal.getsignal(number) == self._on_signal:  # else a debugger's, say
                    decisions.append((number, self._decide(number)))
        for number, note in decisions:
            if note:
                rest = self._stop.describe_latest() if note is _ENDS else self._stop.describe_rest()
                emit(Note(note.format(signal.Signals(number).name, rest)))
                self._told = self._told or note is _ENDS
        return bool(numbers)

    def _decide(self, number: int) -> str:
        """Decide what a signal means. Returns the note about it; "" if it changes nothing."""
        stop = self._stop
        if stop.begun and not stop.requested:
            self._hung_up = number == signal.SIGHUP
            stop.mark()
            return _ASKED
        if stop.begun and number == signal.SIGHUP:
            return ""
        if stop.begun and self._hung_up:
            self._hung_up = False
            stop.mark()
            return _ASKED
        if stop.forced or (self._passes_on and time.monotonic() - stop.requested_at <= ECHO_S):
            return ""
        stop.forced = number
        return _ENDS

    def _end(self) -> None:
        """Have the main thread leave the run, or end the process where it cannot."""
        main = threading.main_thread()
        if not self._raised:
            signal.pthread_kill(main.ident or 0, self._stop.forced)
        if hasattr(sys, "ps1"):  # the process of a notebook is more than the run
            self._over.wait()  # the handler writes to the pipe, which this thread closes
            return
        threads = [thread for thread in {*threading.enumerate()} - self._before if not thread.daemon]
        if self._over.wait(END_S):
            main.join()  # the script may do more
            time.sleep(END_S)
            if not any(thread.is_alive() for thread in threads):  # Python waits for these before it ends
                return
        _exit(self._stop)


_LISTENERS: Final[list[_Listener]] = []


def _forget_listeners() -> None:
    for listener in _LISTENERS:
        listener.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_listeners)


def _exit(stop: StopRequest) -> NoReturn:
    """End the process, whatever its threads do. Nothing is left of what it has started."""
    for clean_up in (end_launched, stop.tidy, restore_terminal):
        with suppress(Exception):
            clean_up()
    os._exit(128 + stop.forced)


def _parent_passes_signals_on() -> bool:
    """Whether this process may get a signal twice: from its sender, and from its parent.

    ``timeout`` and ``make`` send a signal that they get to their child. A terminal or ``kill -TERM -GROUP`` has sent it
    to the child as well, since all of them are one process group. What an interactive shell starts is a group of its
    own, and hears each signal once. Nothing tells the second signal's sender: Python's handlers do not have it, and to
    wait for signals (``signal.sigwaitinfo``) all threads and children would have to block them. So a clock decides
    there, and only there, that the second signal is a copy.
    """
    parent = os.getppid()  # 0 is the parent outside of a container
    with suppress(OSError):
        return parent != 0 and os.getpgid(parent) == os.getpgrp()
    return False
