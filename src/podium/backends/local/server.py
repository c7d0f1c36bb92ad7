"""The fork server: a supervisor that imports once and never computes, whose children are the worker processes.

    controller ──"spawn" + two sockets──▶ server ──fork──▶ worker process (and exec, where the environment comes first)
               ◀──"started" pid──────────        ◀─SIGCHLD──
               ◀──"ended" pid status─────
               ──"kill" pid──────────────▶

It imports the modules to preload with one thread and runs nothing of them. When it ends, it removes the private
directory. It sits in a session of its own, where a terminal's SIGINT does not reach.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import shutil
import socket
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from podium.backends.process import Surroundings, command, keep_freed_memory
from podium.supervisor import Supervisor

__all__ = ["Spawn", "main"]

LIMIT = 1 << 18


@dataclass(frozen=True)
class Spawn:
    """One worker process to start."""

    token: int
    rank: int
    env: dict[str, str]
    fresh: bool
    surroundings: Surroundings
    log_path: str
    store: tuple[int | None, str]


def main(fd: int, preload: list[str], private: str) -> None:
    """Serve until the controller is gone. ``fd`` is this end of the socket to it."""
    connection = socket.socket(fileno=fd)
    supervisor = Supervisor(connection)
    keep_freed_memory()
    for name in preload:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - any import may raise anything; the worker that needs it will say so
            sys.stderr.write(f"preload of {name} failed: {type(error).__name__}: {error}\n")
    supervisor.settle()
    try:
        _Server(supervisor, connection).serve()
    finally:
        supervisor.end()
        shutil.rmtree(private, ignore_errors=True)
        os._exit(0)


class _Server:
    def __init__(self, supervisor: Supervisor, connection: socket.socket) -> None:
        self._supervisor = supervisor
        self._connection = connection
        self._tokens: dict[int, int] = {}  # by process id

    def serve(self) -> None:
        while (ready := self._supervisor.wait()) is not None:
            for pid, status in self._supervisor.ended():
                self._tell(("ended", self._tokens.pop(pid), status))
            if self._connection.fileno() in ready and not self._obey():
                return

    def _obey(self) -> bool:
        message, fds, _, _ = socket.recv_fds(self._connection, LIMIT, 2)
        if not message:
            return False
        order = pickle.loads(message)
        if isinstance(order, Spawn):
            pid = self._supervisor.fork(partial(_become_worker_process, order, fds))
            self._tokens[pid] = order.token
            self._tell(("started", order.token, pid))
            for fd in fds:
                os.close(fd)
        else:
            self._supervisor.kill(order[1])
        return True

    def _tell(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # the controller is gone: the loop ends next
            self._connection.send(pickle.dumps(message))


def _become_worker_process(order: Spawn, fds: list[int]) -> NoReturn:
    _redirect(order.log_path)
    low = [os.dup(fd) for fd in fds]
    keep = {0, 1, 2, *low}
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if int(entry) not in keep:
                os.close(int(entry))
    if order.fresh:
        for fd in low:
            os.set_inheritable(fd, True)
        start = command("podium.backends.local.child", low[0], low[1], tuple(order.surroundings), order.store)
        os.execve(sys.executable, start, {**os.environ, **order.env})
    os.environ.update(order.env)
    from podium.backends.local import child

    child.main(low[0], low[1], order.surroundings, order.store)


def _redirect(log_path: str) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
