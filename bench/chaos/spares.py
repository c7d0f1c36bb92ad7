"""Fork servers of `local` that are forks of the controller, made before it computes. They have imported everything.

The imports of a new fork server take more than half of a campaign's time, and are always the same. A campaign with
spares strikes twice as often in an hour, and its times are without imports, which bench/recovery.py measures. Nothing
else differs: to the kernel, a spare in use is a child of the controller with the command and the mark of a fork server.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
import subprocess
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from podium.backends.local import backend, server
from podium.backends.process import THREAD_VARIABLES
from podium.processes import Channel, launcher
from podium.processes.fork_server import ForkServer

__all__ = ["MODULE", "SURROUNDINGS", "make_spares"]

MODULE: Final = "podium.backends.local.server"
_SPARES: Final = 8  # for the start of a run, and for losses until its controller is started again
_PATH: Final = 512  # bytes of the first message, which names the private directory
_MARK: Final = "PODIUM_LAUNCHED"
NO_MARK: Final = "0" * 16  # of the interpreter whose forks the spares are
SURROUNDINGS: Final = {**dict.fromkeys(THREAD_VARIABLES, "1"), _MARK: NO_MARK}
"""The environment of that interpreter: the threads are those of a fork server."""


class Spare(NamedTuple):
    """A process that becomes a fork server when it gets the name of a private directory."""

    pid: int
    connection: socket.socket
    mark: str


def make_spares(preload: Sequence[str]) -> None:
    """Have the next fork servers of this process, which must have a single thread, be forks that are made now. The
    modules ``preload`` must be imported."""
    spares: list[Spare] = []
    for _ in range(_SPARES):
        mark = secrets.token_hex(8)
        near, far = socket.socketpair()
        if (pid := os.fork()) == 0:
            _serve(far, mark, preload)
        far.close()
        spares.append(Spare(pid, near, mark))

    class WarmServer(backend.WorkerServer):
        def __init__(self, preload: Sequence[str], private: Path) -> None:
            if not spares:
                super().__init__(preload, private)
                return
            spare = spares.pop(0)
            spare.connection.sendall(str(private).encode().ljust(_PATH, b"\0"))
            _adopt(self, spare)

    backend.WorkerServer = WarmServer


def _adopt(own: ForkServer, spare: Spare) -> None:
    """Do what the starts of ForkServer and Launched do."""
    process: subprocess.Popen[bytes] = subprocess.Popen.__new__(subprocess.Popen)
    state: Mapping[str, Any] = {"pid": spare.pid, "returncode": None, "args": [MODULE], "_child_created": True}
    process.__dict__ |= {**state, "_waitpid_lock": threading.Lock(), "stdin": None, "stdout": None, "stderr": None}
    own.__dict__ |= {"_mark": spare.mark, "_on_end": {}}
    own.channel, own.process = Channel(spare.connection), process
    launcher._LAUNCHED.add(own)  # as Launched itself does


def _serve(connection: socket.socket, mark: str, preload: Sequence[str]) -> None:
    """Be a spare, and then a fork server."""
    try:
        os.setsid()
        os.dup2(connection.fileno(), 0)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        channel = socket.socket(fileno=0)
        private = channel.recv(_PATH, socket.MSG_WAITALL).rstrip(b"\0").decode()
        channel.detach()
        if private:
            os.environ[_MARK] = mark
            _show(mark)
            server.main(list(preload), private)
    except BaseException:  # noqa: BLE001 - nothing may climb out of a fork into the controller's own code
        traceback.print_exc()
    finally:
        os._exit(0)


def _show(mark: str) -> None:
    """Have the kernel show the command and the mark of a fork server for this process."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end, variables, last = map(int, fields[45:49])
    ctypes.memmove(start, MODULE.encode().ljust(end - start, b"\0"), end - start)
    marked = ctypes.string_at(variables, last - variables).find(f"{_MARK}={NO_MARK}".encode())
    if marked < 0:
        raise RuntimeError(f"the first interpreter had no {_MARK}={NO_MARK} in its environment")
    ctypes.memmove(variables + marked, f"{_MARK}={mark}".encode(), len(f"{_MARK}={mark}"))
