"""What tests send to worker processes: workers and functions in a module that imports neither torch nor pytest.

A worker process imports the module of what it is sent, and torch alone takes a second of a process that needs none.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from podium.errors import EndpointError
from podium.runtime import Handle, Worker, endpoint, first, nothing, per_rank
from podium_testing.workers import Agent, Counter, Probe, Sleeper

__all__ = [
    "CamelCaseName",
    "ClosesSlowly",
    "Fails",
    "FailsUnheard",
    "FarFromScript",
    "Heir",
    "KeepsItsResults",
    "ask_echo",
    "begin_note",
    "change_rank",
    "coordinate_in",
    "exit_on",
    "leave",
    "listen",
    "listen_to_records",
    "make_locks",
    "make_two_values",
    "make_values_of_three_ranks",
    "note_in_order",
    "reach",
    "read_cause",
    "read_devices",
    "read_helper",
    "read_pid",
    "read_surroundings",
    "read_thread",
    "read_threads",
    "scatter_on_one",
    "start_child",
]


class Fails(Worker):
    def __init__(self) -> None:
        raise ValueError("not today")


class CamelCaseName(Worker):
    pass


class Heir(Probe):
    @endpoint
    def rank(self) -> int:
        return super().rank() + 100

    def echo(self, value: int) -> int:  # pyright: ignore[reportIncompatibleVariableOverride, reportIncompatibleMethodOverride]
        """No endpoint any more."""
        return value


class KeepsItsResults(Worker):
    @endpoint(collect=first())
    def lock_unless_first(self) -> Any:
        return threading.Lock() if self.ctx.rank else 0

    @endpoint(collect=nothing())
    def lock(self) -> Any:
        return threading.Lock()


class FailsUnheard(Worker):
    """Raises on the ranks whose results nobody wants."""

    @endpoint(collect=nothing())
    def fail(self, text: str) -> None:
        raise KeyError("not wanted" + text)

    @endpoint(collect=first())
    def fail_but_on_first(self, text: str) -> None:
        if self.ctx.rank:
            raise KeyError("not wanted" + text)


class ClosesSlowly(Worker):
    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def close(self) -> None:
        """Leave a file after a while. The runtime calls this method when the group is closed."""
        time.sleep(2.0)
        (self.directory / f"closed-{self.ctx.rank}").touch()


def listen(worker: Worker) -> tuple[str, int]:
    port = worker.ctx.free_port()
    server = socket.create_server((worker.ctx.address, port))

    def serve() -> None:
        with server, server.accept()[0] as connection:
            connection.sendall(b"heard")

    threading.Thread(target=serve, daemon=True).start()
    return worker.ctx.address, port


def reach(worker: Worker, address: str, port: int) -> str:
    with socket.create_connection((address, port), 60.0) as connection:
        return connection.recv(100).decode()


def listen_to_records(worker: Counter) -> None:
    worker.records = list[str]()  # pyright: ignore[reportAttributeAccessIssue]

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "told.add" in record.getMessage():
                worker.records.append(record.getMessage())  # pyright: ignore[reportAttributeAccessIssue]

    logging.getLogger("podium").addHandler(Heard())


def change_rank(worker: Worker) -> None:
    worker.ctx.rank = 5  # pyright: ignore[reportAttributeAccessIssue] - the point: it is frozen


def coordinate_in(worker: Worker, mesh: str) -> dict[str, int]:
    return worker.ctx.meshes[mesh].coordinate(worker.ctx.rank)


def exit_on(worker: Worker, rank: int) -> None:
    if worker.ctx.rank == rank:
        sys.stderr.write("these are my last words\n")
        sys.stderr.flush()
        os._exit(7)


def read_devices(worker: Worker) -> tuple[tuple[int, ...], str]:
    names = ("HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    return worker.ctx.devices, next(os.environ[name] for name in names if name in os.environ)


def read_surroundings(worker: Worker) -> tuple[str, str]:
    return os.getcwd(), importlib.import_module("found_by_path").FOUND


def read_pid(worker: Worker) -> int:
    return os.getpid()


def read_thread(worker: Worker) -> int:
    return threading.get_native_id()  # Python's own number of a thread that has ended is given again


def read_threads(worker: Worker) -> tuple[int, int]:
    import torch

    return worker.ctx.threads, torch.get_num_threads()


def start_child(worker: Worker) -> int:
    return subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"]).pid


def leave(worker: Worker) -> None:
    os._exit(3)


class FarFromScript:
    """Unpickles everywhere but in the process ``pid``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def made(self) -> list[Any]:
        return [_Refused(self.pid)]


class _Refused(FarFromScript):
    def __reduce__(self) -> tuple[Any, ...]:
        return _unless_in, (self.pid,)


def _unless_in(pid: int) -> _Refused:
    if os.getpid() == pid:
        raise RuntimeError("not for the script")
    return _Refused(pid)


def make_two_values() -> list[Any]:
    return [1, 2]


def make_values_of_three_ranks() -> list[Any]:
    return [per_rank([1, 2, 3])]


def make_locks() -> list[Any]:
    return [threading.Lock()]


def read_helper(worker: Agent) -> Any:
    return worker.helper


def scatter_on_one(worker: Agent) -> Any:
    return worker.helper.group.on(1).scattered(per_rank([7]))


def begin_note(worker: Agent) -> None:
    worker.helper.note.submit("unheard")


def note_in_order(worker: Agent, slow: Handle[Sleeper], count: int) -> None:
    calls = [slow.note.submit(f"{worker.ctx.rank}:{at}") for at in range(count)]
    for call in calls:
        call.result()


def read_cause(worker: Agent) -> str:
    try:
        worker.helper.fail([0], KeyError("why"))
    except EndpointError as error:
        return repr(error.__cause__)
    return "no error"


def ask_echo(worker: Agent, make: Any) -> Any:
    return worker.helper.echo(*make())
