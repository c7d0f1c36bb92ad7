"""A process that forks children, and ends whatever they started.

    controller ──orders──▶ supervisor ──fork──▶ child ──▶ whatever the child starts, in whatever session
               ◀─reports──            ◀─SIGCHLD─

The supervisor imports once and never computes: a forked child of a process that ran a multi-threaded operation may hang
for ever. It forks in its main thread, because a child's parent-death signal fires when the forking thread ends.

The kernel says which process started which. The supervisor and each of its children are subreapers: a process that
loses its parent becomes a child of the nearest of them. A daemon of a living child is therefore a child of that child.
A process that becomes a child of the supervisor was started by a child that has ended, so the supervisor kills it. When
the socket to the controller closes, or the supervisor's parent is no longer the controller, the supervisor kills all
its descendants and ends.
"""

import contextlib
import fcntl
import gc
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final, NoReturn

from podium.exceptions import format_error
from podium.processes.channel import Channel
from podium.processes.table import become_subreaper, children_of, descendants_of, kill, kill_with_parent

_PARENT_CHECK_S: Final = 0.5  # a copy of the socket in a fork of the controller would hide the controller's end


class Supervisor:
    """Forks children, reaps them, and kills what they started.

    Args:
        connection: The supervisor's end of the socket to its controller, which is its parent.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._controller = os.getppid()
        self._wake, wake = os.pipe()
        for fd in (self._wake, wake):
            os.set_blocking(fd, False)
        become_subreaper()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the controller
        signal.signal(signal.SIGCHLD, _look_up)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._private = [self._wake, wake, connection.fileno()]
        self._children: set[int] = set()
        self._spared: set[int] = set()
        self.poller = select.poll()  # select() cannot take a descriptor above 1023
        self.poller.register(connection, select.POLLIN)
        self.poller.register(self._wake, select.POLLIN)

    def hear(self, end: Callable[[], NoReturn]) -> None:
        """Call ``end`` as soon as the controller is gone, although the main thread imports: the kernel sends a signal
        when the other end of the socket is closed, and when the parent ends. This holds until :meth:`settle`."""
        connection = self._private[-1]

        def look(number: int = 0, frame: FrameType | None = None) -> None:
            if self.is_left():  # other signals tell of messages
                end()

        signal.signal(signal.SIGIO, look)
        signal.siginterrupt(signal.SIGIO, False)
        fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(connection, fcntl.F_SETFL, fcntl.fcntl(connection, fcntl.F_GETFL) | os.O_ASYNC)
        kill_with_parent(signal.SIGIO)
        look()  # it may have gone before

    def is_left(self) -> bool:
        """Return whether the controller has closed its end of the socket, or has ended."""
        closed = select.poll()
        closed.register(self._private[-1], getattr(select, "POLLRDHUP", 0))  # which macOS lacks
        return bool(closed.poll(0)) or os.getppid() != self._controller

    def settle(self) -> None:
        """Call this once, after the imports. It spares the processes that they started, and keeps the memory of what
        they loaded shared with forks."""
        connection = self._private[-1]
        fcntl.fcntl(connection, fcntl.F_SETFL, fcntl.fcntl(connection, fcntl.F_GETFL) & ~os.O_ASYNC)
        kill_with_parent(0)
        signal.signal(signal.SIGIO, signal.SIG_DFL)
        self._spared = set(children_of(os.getpid()))
        gc.freeze()

    def fork(self, run: Callable[[], int]) -> int:
        """Start a child that ends with the exit code that ``run`` returns. Returns its process id."""
        supervisor = os.getpid()
        pid = os.fork()
        if pid != 0:
            self._children.add(pid)
            return pid
        code = 70
        try:
            os.setsid()
            kill_with_parent()
            if os.getppid() != supervisor:  # it had ended before
                kill(os.getpid())
            become_subreaper()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGIO):
                signal.signal(number, signal.SIG_DFL)
            for fd in self._private:
                os.close(fd)
            code = run()
        except BaseException as error:  # noqa: BLE001 - nothing may climb out of a fork into the supervisor's own loop
            sys.stderr.write(format_error(error))
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def wait(self, timeout_s: float = _PARENT_CHECK_S) -> set[int] | None:
        """Wait until a descriptor of ``poller`` is ready or a child ends. Returns the ready descriptors.

        Returns None when the controller has ended.
        """
        ready = {fd for fd, _ in self.poller.poll(1000 * min(timeout_s, _PARENT_CHECK_S))}
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 4096)
        return ready if os.getppid() == self._controller else None

    def reap(self) -> Iterator[tuple[int, int]]:
        """Yield the process id and the wait status of each child that has ended, and kill what those had started."""
        reaped = False
        with contextlib.suppress(ChildProcessError):
            while (ending := os.waitpid(-1, os.WNOHANG))[0]:
                reaped = True
                if ending[0] in self._children:
                    self._children.remove(ending[0])
                    yield ending
        if reaped:  # what a killed process had started comes here when that one is reaped
            for pid in children_of(os.getpid()):
                if pid not in self._children and pid not in self._spared:
                    kill(pid)

    def kill(self, pid: int) -> None:
        """Kill a child and its process group; :meth:`ended` yields the child when that is done."""
        if pid not in self._children:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        kill(pid)  # in case it has not begun its session yet

    def end(self, limit_s: float = 5.0) -> None:
        """Kill every descendant, and wait until none is left."""
        until = time.monotonic() + limit_s
        with contextlib.suppress(ChildProcessError):  # raised when none is left
            while time.monotonic() < until:
                for pid in {*descendants_of(os.getpid()), *self._children}:
                    kill(pid)
                while pid := os.waitpid(-1, os.WNOHANG)[0]:
                    self._children.discard(pid)
                time.sleep(0.002)


def supervise(work: Callable[[Supervisor, Channel], None], clean_up: Callable[[], None] = lambda: None) -> NoReturn:
    """Do the work of a supervisor, whose standard input is the channel to its controller, and then end with all
    descendants, and ``clean_up``. The work ends when the controller closes the channel. If the controller does that
    before :meth:`Supervisor.settle`, the process ends at once, in the middle of an import."""
    connection = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    supervisor = Supervisor(connection)
    code = 1

    def end() -> NoReturn:
        is_left = supervisor.is_left()  # otherwise the controller starts another one
        supervisor.end()
        if is_left:
            clean_up()
        sys.stderr.flush()
        os._exit(0 if is_left else code)

    try:
        supervisor.hear(end)
        work(supervisor, Channel(connection, trusted=True))
        code = 0
    except ConnectionError:
        code = 0  # the controller is gone
    except BaseException as error:  # noqa: BLE001 - what is below this process ends in any case
        sys.stderr.write(format_error(error))
    finally:
        end()


def _look_up(number: int, frame: FrameType | None) -> None:
    """Nothing to do: the signal's wake-up descriptor also says that a child has ended, and the loop reaps it."""
