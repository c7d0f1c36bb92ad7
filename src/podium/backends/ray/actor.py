# pyright: basic
"""What runs inside a Ray actor: a Host behind three kinds of calls.

The actor is a threaded one with concurrency groups, not an async one: a call through an async actor took 1.45 times as
long. Ray keeps a caller's calls in the order sent, and the default group has one thread.

    call     one request at a time, in order            (default group: one thread)
    control  the host's own: status, cancel, …          (a few threads)
    aside    endpoints marked concurrent                (THREADS threads)
    watch    never returns: its failure is the host's end
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import pickle
import random
import socket
import struct
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ray

from podium.backends.devices import visibility
from podium.backends.ray.wire import Parcel, outcome_to_wire
from podium.errors import SerializationError
from podium.runtime.host import Failure, Host, Outcome

__all__ = ["GROUPS", "HostActor", "Setting", "Settled"]

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
GROUPS = {"control": 4, "aside": 32, "watch": 1}


class Setting(NamedTuple):
    """What an actor is told before anything is imported in it."""

    threads: int
    visible: Sequence[str]
    env: Mapping[str, str]
    log_path: str
    cwd: str
    sys_path: Sequence[str]
    preload: Sequence[str]


class Settled(NamedTuple):
    """An actor that is ready: its process, and where its log begins."""

    pid: int
    log_start: int


class HostActor:
    """One host. Its own errors are the runtime's to report: a method raises only if Podium itself is at fault."""

    def __init__(self) -> None:
        self._host = Host()

    def settle_in(self, setting: Setting) -> Settled:
        """Take over the controller's surroundings, then import what workers need."""
        limits = dict.fromkeys(THREADS, setting.env.get("OMP_NUM_THREADS", str(setting.threads)))
        shown = visibility(range(len(setting.visible)), setting.visible)
        os.environ.update({**limits, **shown, **setting.env})
        address = ray.util.get_node_ip_address()
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _interface_of(address) or "lo")
        log_start = _log_to(Path(setting.log_path))
        with contextlib.suppress(OSError):
            os.chdir(setting.cwd)
        sys.path[:] = [*setting.sys_path, *(path for path in sys.path if path not in setting.sys_path)]
        for module in setting.preload:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
        random.seed()
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_num_threads(setting.threads)
        return Settled(os.getpid(), log_start)

    def call(self, message: bytes, *stored: Any) -> bytes | list[Any]:
        """Run one request to its end."""
        call_id, target, method, wants, values = _read(message, stored)
        if isinstance(values, SerializationError):
            return _answer(Outcome("error", _unreadable(values), 0, 0), wants)
        return _answer(self._host.execute(call_id, target, method, values), wants)

    @ray.method(concurrency_group="control")
    def control(self, message: bytes, *stored: Any) -> bytes | list[Any]:
        """A request to the host itself, beside whatever it runs."""
        return self.call(message, *stored)

    @ray.method(concurrency_group="aside")
    def aside(self, message: bytes, *stored: Any) -> bytes | list[Any]:
        """An endpoint that runs beside others."""
        return self.call(message, *stored)

    @ray.method(concurrency_group="watch")
    def watch(self) -> None:
        """Never returns."""
        threading.Event().wait()

    @ray.method(concurrency_group="control")
    def hello(self) -> Settled:
        """For a controller that attaches."""
        return Settled(os.getpid(), 0)

    @ray.method(concurrency_group="control")
    def free_address(self) -> str:
        """``host:port`` where this host can listen."""
        with socket.create_server(("", 0)) as server:
            return f"{ray.util.get_node_ip_address()}:{server.getsockname()[1]}"


def _read(message: bytes, stored: Sequence[Any]) -> tuple[int, str, str, bool, Any]:
    call_id, target, method, wants, parcels = pickle.loads(message)
    lists = iter(stored)
    values: dict[str, Any] = {}
    try:
        for data, buffers in parcels:
            values |= Parcel(data, next(lists) if buffers is None else buffers).read(
                f"an argument of {target}.{method}"
            )
    except SerializationError as error:
        return call_id, target, method, wants, error
    return call_id, target, method, wants, values


def _answer(outcome: Outcome, wants: bool) -> bytes | list[Any]:
    status, value, started, ended = outcome
    try:
        return outcome_to_wire(status, started, ended, value if wants or status == "error" else None)
    except SerializationError as error:
        return outcome_to_wire("error", started, ended, Failure("SerializationError", str(error), "", error, False))


def _unreadable(error: SerializationError) -> Failure:
    return Failure("SerializationError", str(error), str(error.__cause__ or ""), error, False)


def _log_to(path: Path) -> int:
    """Send this process's output to ``path``; the file's size before. Where that fails it stays in Ray's own logs."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError:
        return 0
    start = os.fstat(log).st_size
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - Ray had put its own objects there
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    return start


def _interface_of(address: str) -> str | None:
    """The network interface that has ``address``; gloo otherwise goes by the host's name, which may be loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None
