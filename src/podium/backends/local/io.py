"""Waiting for all sockets at once, in the thread that waits for a result or, when none does, in a thread of its own.

Handing a reply from an I/O thread to the thread that waits for it takes longer than the whole exchange, because both
threads want the interpreter's lock. So the thread that waits *drives*: it polls and takes in every message, its own and
others'. The I/O thread polls only when nobody has driven for HOT_S.

    result() ──drive──▶ has the turn? poll, take in, until its call has ended     (another's call ended: its gate opens)
             ├─ the I/O thread has it: wake it, it gives the turn away
             ├─ another caller has it: sleep on the call's own gate, and try again now and then
             └─ this thread has it: a handler of a signal runs inside its poll, and polls in its place
    I/O thread ── every TICK_S: nobody drives, and nobody drove or sent for HOT_S? take the turn and poll
                  one caller drives for longer than a tick: sleep until it gives the turn away
"""

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

from podium.backends.interrupts import Interrupts
from podium.errors import ConfigError

TICK_S = 0.004
HOT_S = 0.004
TAKE_OVER_S = 0.05
INTERRUPTED = (
    "a handler of a signal, or a callback of a call, came inside a message from or to a worker, where no call can be "
    "made: set a flag there, and call where the script looks at it"
)
LONGEST_HOT_S = 0.1  # for which sending alone keeps the I/O thread from polling


def _nothing_to_send() -> bool:
    return True


class IoLoop:
    """The sockets of one backend and who waits for them.

    Attributes:
        sent_at: When the last call was sent: its sender mostly waits for it next, or sends to further processes.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, tuple[Callable[[], bool], Callable[[], bool]]] = {}
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.watch(self._wake_fd, self._on_wake)
        self._turn = threading.RLock()
        self._polling = 0  # how often the turn is taken: more than once where a handler of a signal waits
        self._taking_in = False
        self._in_thread = False
        self._wanted = False
        self._driven_at = self.sent_at = 0.0
        self._soon: deque[Callable[[], None]] = deque()
        self._drives = 0
        self._asleep = False  # the I/O thread sleeps until somebody who drives sets the event
        self._given_away = threading.Event()
        self._stopping = threading.Event()
        self._interrupts = Interrupts()
        self._thread = threading.Thread(target=self._run, name="podium-io", daemon=True)
        self._thread.start()

    def watch(self, fd: int, on_readable: Callable[[], bool], flush: Callable[[], bool] = _nothing_to_send) -> None:
        """Call ``on_readable`` when ``fd`` has something to read, until it returns False. ``flush`` sends what waits
        for ``fd``, and returns whether that was all."""
        self._watched[fd] = on_readable, flush
        self._epoll.register(fd, select.EPOLLIN)

    def unwatch(self, *fds: int) -> None:
        """Forget ``fds``. Call this before they are closed."""
        for fd in fds:
            if self._watched.pop(fd, None) is not None:
                with contextlib.suppress(OSError, ValueError):
                    self._epoll.unregister(fd)

    def flush_later(self, fd: int) -> None:
        """Flush ``fd`` when it can be written."""
        with contextlib.suppress(OSError, ValueError):
            self._epoll.modify(fd, select.EPOLLIN | select.EPOLLOUT)

    def soon(self, run: Callable[[], None]) -> None:
        """Call ``run`` before the next poll, within milliseconds. Any thread's garbage collection may call this."""
        self._soon.append(run)
        if self._polling:
            self.wake()

    def _run_soon(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._soon.popleft()()

    def wake(self) -> None:
        """Have the thread that polls call its ``ended()`` again."""
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake_fd, 1)

    def drive(self, ended: Callable[[], bool], timeout_s: float | None) -> bool:
        """Poll in this thread until ``ended()`` or ``timeout_s``; False at once if another thread polls.

        Raises:
            ConfigError: This thread is taking in a message, and a handler of a signal or a callback waits here.
        """
        if not self._turn.acquire(blocking=False) and not self._take_over():
            return False
        self._polling += 1
        self._drives += 1
        try:
            if self._taking_in:
                raise ConfigError(INTERRUPTED)
            if self._soon:
                self._run_soon()
            until = None if timeout_s is None else time.monotonic() + timeout_s
            while not ended() and not self._stopping.is_set():
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._interrupts.hold(self._take_in, self._poll(left))
        finally:
            self._driven_at = time.monotonic()
            self._polling -= 1
            self._turn.release()
            if self._polling:  # a handler of a signal has driven, and may have taken in what the poll below waits for
                self.wake()
            if self._asleep:
                self._given_away.set()
        return True

    def _poll(self, timeout_s: float | None) -> list[tuple[int, int]]:
        try:
            return self._epoll.poll(timeout_s)
        except (OSError, ValueError):
            if self._stopping.is_set():  # by a handler of a signal that ran meanwhile
                return []
            raise

    def _take_over(self) -> bool:
        """Ask the I/O thread for the turn. False if another caller has it: its own wait may be long."""
        if not self._in_thread:
            return False
        self._wanted = True
        self.wake()
        return self._turn.acquire(timeout=TAKE_OVER_S)

    def stop(self) -> None:
        """End the thread and free everything."""
        self._interrupts.restore()
        self._stopping.set()
        self._given_away.set()
        self.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()
            with self._turn:
                self._epoll.close()
                os.close(self._wake_fd)

    def _run(self) -> None:
        while not self._stopping.is_set():
            if self._is_hot() or not self._turn.acquire(blocking=False):
                self._rest()
                continue
            try:
                self._polling += 1
                self._wanted = False
                self._in_thread = True
                self._run_soon()
                while not self._wanted and not self._stopping.is_set():
                    self._take_in(self._epoll.poll())
                self._driven_at = time.monotonic()  # somebody wants the turn: leave it to them
            finally:
                self._in_thread = False
                self._polling -= 1
                self._turn.release()

    def _is_hot(self) -> bool:
        now = time.monotonic()
        since = now - self._driven_at
        return since < HOT_S or (since < LONGEST_HOT_S and now - self.sent_at < HOT_S)

    def _rest(self) -> None:
        """Sleep for a tick, and on while the same caller drives: a wait for a long call would cost a wake-up a tick."""
        drive = self._drives
        self._stopping.wait(TICK_S)
        if not self._polling or self._drives != drive:
            return
        self._asleep = True
        self._given_away.clear()
        # Looked at after _asleep is set, as whoever drives looks at _asleep after giving the turn away.
        if self._polling and not self._stopping.is_set():
            self._given_away.wait()
        self._asleep = False

    def _on_wake(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        self._run_soon()
        return True

    def _take_in(self, ready: list[tuple[int, int]]) -> None:
        self._taking_in = True
        try:
            self._serve(ready)
        finally:
            self._taking_in = False

    def _serve(self, ready: list[tuple[int, int]]) -> None:
        for fd, events in ready:
            watched = self._watched.get(fd)
            if watched is None:
                continue
            on_readable, flush = watched
            if events & select.EPOLLOUT:
                with contextlib.suppress(OSError, ValueError):  # first: a sender may call flush_later after the flush
                    self._epoll.modify(fd, select.EPOLLIN)
                if not flush():
                    self.flush_later(fd)
            if events & ~select.EPOLLOUT and not on_readable():
                self.unwatch(fd)
