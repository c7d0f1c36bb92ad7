"""The fork server: a process that imports once and never computes, whose children are the hosts.

    controller ──"spawn" + two sockets──▶ server ──fork──▶ host (or fork + exec, where the environment must come first)
               ◀──"started" pid──────────        ◀─SIGCHLD──
               ◀──"ended" pid status─────
               ──"kill" pid──────────────▶

It imports the modules to preload with one thread and runs nothing of them: a forked child of a process that ran a
multi-threaded operation may hang for ever. It forks from its main thread, which never ends before the process, so that
the children's parent-death signal means what it says.

It is the warden of the controller's processes: when the controller's end of the socket closes, or the controller is no
longer its parent, it kills every descendant (it is their subreaper, so none escapes by losing its parent), removes the
private directory and ends. When a host ends, it ends what that host had started, in whatever session. It sits in a
session of its own, where a terminal's SIGINT does not reach.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import select
import shutil
import signal
import socket
import sys
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

from podium.backends.local.linux import become_subreaper, children_of, die_with_parent, environment_has, session_of
from podium.backends.process import keep_freed_memory

__all__ = ["Spawn", "main"]

LIMIT = 1 << 18
PARENT_CHECK_S = 0.5


@dataclass(frozen=True)
class Spawn:
    """One host to start."""

    token: int
    rank: int
    env: dict[str, str]
    fresh: bool
    threads: int
    log_path: str
    cwd: str
    sys_path: list[str]
    store: tuple[int | None, str]


def main(fd: int, preload: list[str], private: str) -> None:
    """Serve until the controller is gone. ``fd`` is this end of the socket to it."""
    controller = os.getppid()
    connection = socket.socket(fileno=fd)
    become_subreaper()
    keep_freed_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wake_in, wake_out = socket.socketpair()
    for end in (wake_in, wake_out):
        end.setblocking(False)
    signal.set_wakeup_fd(wake_in.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, _look_up)
    for name in preload:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - any import may raise anything; the host that needs it will say so
            sys.stderr.write(f"preload of {name} failed: {type(error).__name__}: {error}\n")
    gc.collect()
    gc.freeze()  # the hosts' collections leave these objects' pages shared
    server = _Server(connection, wake_out, controller)
    try:
        server.serve()
    finally:
        _kill_descendants()
        shutil.rmtree(private, ignore_errors=True)
        os._exit(0)


def _look_up(number: int, frame: FrameType | None) -> None:
    """A child has ended: the wake-up descriptor says so too, and the loop reaps it."""


class _Server:
    def __init__(self, connection: socket.socket, wake: socket.socket, controller: int) -> None:
        self._connection = connection
        self._wake = wake
        self._controller = controller
        self._hosts: dict[int, int] = {}  # pid: token

    def serve(self) -> None:
        incoming = select.poll()  # select() cannot take a descriptor above 1023
        incoming.register(self._connection, select.POLLIN)
        incoming.register(self._wake, select.POLLIN)
        while os.getppid() == self._controller:
            ready = [fd for fd, _ in incoming.poll(1000 * PARENT_CHECK_S)]
            if self._wake.fileno() in ready:
                with contextlib.suppress(BlockingIOError):
                    self._wake.recv(4096)
            self._reap()
            if self._connection.fileno() in ready and not self._obey():
                return

    def _obey(self) -> bool:
        message, fds, _, _ = socket.recv_fds(self._connection, LIMIT, 2)
        if not message:
            return False
        order = pickle.loads(message)
        if isinstance(order, Spawn):
            self._spawn(order, fds)
            for fd in fds:
                os.close(fd)
        elif order[1] in self._hosts:
            with contextlib.suppress(ProcessLookupError):
                os.kill(order[1], signal.SIGKILL)
        return True

    def _spawn(self, order: Spawn, fds: list[int]) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                _become_host(order, fds, parent)
            except BaseException as error:  # noqa: BLE001 - the end of the process: say why, then go
                sys.excepthook(type(error), error, error.__traceback__)
                sys.stderr.flush()
            finally:
                os._exit(70)  # only reached if becoming a host failed before its own boundary
        self._hosts[pid] = order.token
        self._tell(("started", order.token, pid))

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._hosts:
                token = self._hosts.pop(pid)
                self._tell(("ended", token, status))
                self._end_what_it_started(pid, token)

    def _end_what_it_started(self, pid: int, token: int) -> None:
        """Processes of its session, and those in sessions of their own, which came to us when it ended."""
        orphans = [child for child in children_of(os.getpid()) if child not in self._hosts]
        marked = [child for child in orphans if environment_has(child, _mark(token))]
        for child in {*session_of(pid), *marked}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)

    def _tell(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # the controller is gone: the loop ends next
            self._connection.send(pickle.dumps(message))


def _mark(token: int) -> str:
    """An entry in the environment of a host, by which what it started is known for its own."""
    return f"PODIUM_HOST={token}"


def _become_host(order: Spawn, fds: list[int], parent: int) -> NoReturn:
    die_with_parent(parent)
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _redirect(order.log_path)
    mark, _, value = _mark(order.token).partition("=")
    env = {**order.env, mark: value}
    low = [os.dup(fd) for fd in fds]
    keep = {0, 1, 2, *low}
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if int(entry) not in keep:
                os.close(int(entry))
    if order.fresh:
        for fd in low:
            os.set_inheritable(fd, True)
        code = (
            f"import sys; sys.path[:] = {order.sys_path!r}; from podium.backends.local.child import main; "
            f"main({low[0]}, {low[1]}, {order.threads}, {order.cwd!r}, {order.sys_path!r}, {order.store!r})"
        )
        os.execve(sys.executable, [sys.executable, "-c", code], {**os.environ, **env})
    os.environ.update(env)
    from podium.backends.local import child

    child.main(low[0], low[1], order.threads, order.cwd, order.sys_path, order.store)


def _redirect(log_path: str) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)


def _kill_descendants() -> None:
    """Until none is left: a child killed may leave children of its own, which come to us."""
    until = time.monotonic() + 5.0
    while time.monotonic() < until:
        children = children_of(os.getpid())
        if not children:
            return
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.002)
