"""The backend ``streams``: for each host one thread sends and one receives; see host.py and wire.py for the rest."""

import contextlib
import os
import pickle
import queue
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from podium.backends.devices import accelerators, visibility
from podium.backends.logs import last_lines
from podium.backends.process import THREAD_VARIABLES
from podium.errors import ConfigError, WorkerStartError
from podium.runtime.backend import Backend, Capabilities, Death, HostHandle, HostSpec, Node, Reply, Request
from podium.runtime.codec import decode
from podium_streams.wire import Parcel, pack, receive, send

START_S, KILL_S = 120.0, 10.0
SIGNALS = {-number.value: f"signal {number.name}" for number in signal.Signals}


class StreamsBackend(Backend):
    """``preload``: modules imported once for all hosts; a host with an environment of its own imports anew."""

    capabilities = Capabilities(processes=True, collectives=True, concurrent=True)

    def __init__(self, *, preload: Sequence[str] = ("torch",)) -> None:
        self.private = tempfile.TemporaryDirectory(prefix="podium-streams-", ignore_cleanup_errors=True)
        self.hosts: set[StreamsHost] = set()
        self.accelerators = accelerators()
        self.orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        imports = f"import {', '.join(['os', *preload])}; from podium_streams.host import nurse"
        sys_path = [path or os.getcwd() for path in sys.path]
        code = f"import sys; sys.path[:] = {sys_path!r}; {imports}; nurse({self.private.name!r})"
        env = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1")}  # a process with threads must not fork
        with theirs:
            self._nursery = subprocess.Popen(
                [sys.executable, "-c", code], stdin=theirs.fileno(), env=env, start_new_session=True
            )

    def nodes(self) -> Sequence[Node]:
        memory = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        has = {"cpu": float(len(os.sched_getaffinity(0))), "gpu": float(len(self.accelerators)), "memory": memory}
        return [Node("localhost", has)]

    def start_hosts(self, specs: Sequence[HostSpec], on_death: Callable[[int, Death], None]) -> Sequence[HostHandle]:
        for name in specs[0].options:
            raise ConfigError(f"start(options={{{name!r}: ...}}): streams has no options for a host")
        hosts: list[StreamsHost] = []
        try:
            for spec in specs:
                hosts.append(StreamsHost(self, spec, on_death))
            for host, spec in zip(hosts, specs, strict=True):
                if not host.started.wait(START_S) or not host.pid:
                    raise WorkerStartError(f"{spec.label}: its process did not start", rank=spec.rank)
        except BaseException:
            for host in hosts:
                host.kill()
            raise
        return hosts

    def rendezvous(self, hosts: Sequence[HostHandle]) -> str:
        return f"file://{self.private.name}/{secrets.token_hex(8)}"

    def pack(self, value: Any, readers: int) -> Parcel:
        return pack(value, "an argument")

    def unpack(self, payload: Parcel) -> Any:
        return decode(memoryview(payload[0]), payload[1:], "the result")

    def close(self) -> None:
        for host in list(self.hosts):
            host.kill()
        self.orders.close()  # the nursery's signal to end
        self._nursery.wait()
        self.private.cleanup()


class StreamsHost(HostHandle):
    """One host process, as the controller sees it."""

    def __init__(self, backend: StreamsBackend, spec: HostSpec, on_death: Callable[[int, Death], None]) -> None:
        self.started, self._ended = threading.Event(), threading.Event()
        self._backend, self._rank, self._on_death = backend, spec.rank, on_death
        self._log = Path(backend.private.name, f"{spec.label}.log")
        self._log_start = self._log.stat().st_size if self._log.exists() else 0
        limits = dict.fromkeys(THREAD_VARIABLES, str(spec.threads))
        env = {**limits, **visibility(spec.place.devices, backend.accelerators), **spec.env}
        sys_path = [path or os.getcwd() for path in sys.path]
        order = env, bool(spec.env), str(self._log), (spec.threads, os.getcwd(), sys_path)
        self._pending: dict[int, Callable[[Reply], None]] = {}
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._connection, its_connection = socket.socketpair()
        self._leash, its_leash = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        backend.hosts.add(self)
        for step in (self._send, self._live):
            threading.Thread(target=step, name="podium-streams", daemon=True).start()
        with its_connection, its_leash, contextlib.suppress(OSError):  # a nursery that is gone tells no pid
            socket.send_fds(backend.orders, [pickle.dumps(order)], [its_connection.fileno(), its_leash.fileno()])

    def invoke(self, request: Request, done: Callable[[Reply], None]) -> None:
        self._pending[request.call_id] = done
        self._requests.put(request)

    def kill(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._leash.shutdown(socket.SHUT_WR)
        self._ended.wait(KILL_S)

    def _send(self) -> None:
        with contextlib.suppress(OSError):
            while request := self._requests.get():
                head = (request.call_id, request.target, request.method, request.wants_result, request.concurrent)
                send(self._connection, head, request.shared, *([] if request.own is None else [request.own]))

    def _live(self) -> None:
        self.pid = int(self._leash.recv(16) or 0)
        self.started.set()
        with contextlib.suppress(EOFError, OSError):
            while True:
                (call_id, status, *times), (payload,) = receive(self._connection)
                if done := self._pending.pop(call_id, None):
                    done(Reply(status, payload, *times))
        code = self._leash.recv(16)
        cause = SIGNALS.get(int(code), f"exit code {int(code)}") if code else "the hosts' nursery ended"
        self._requests.put(None)
        self._connection.close()
        self._leash.close()
        self._backend.hosts.discard(self)
        self._on_death(self._rank, Death(cause, last_lines(self._log, self._log_start)))
        self._ended.set()
