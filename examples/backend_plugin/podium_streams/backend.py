"""The backend ``streams``: for each worker process one thread sends and one receives."""

import contextlib
import os
import pickle
import queue
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from podium.backends.files import Files
from podium.backends.process import THREAD_VARIABLES, Surroundings, accelerators, environment_of, machine
from podium.errors import WorkerStartError
from podium.processes import command, describe_exit, is_stopped
from podium.runtime.backend import CONTRACT_VERSION, Backend, ProcessHandle
from podium.runtime.codec import decode
from podium.runtime.messages import Capabilities, Death, Node, OnDeath, ProcessSpec, Reply, Request
from podium_streams.wire import Parcel, pack, receive, send

KILL_S = 10.0
if CONTRACT_VERSION != 1:
    raise ImportError(f"podium-streams keeps version 1 of Podium's backend contract, which is at {CONTRACT_VERSION}")


class StreamsBackend(Backend):
    """``preload``: modules imported once for all worker processes; one with an environment of its own imports anew."""

    capabilities = Capabilities(processes=True, collectives=True, concurrent=True, this_machine=True)

    def __init__(self, *, preload: Sequence[str] = ("torch",)) -> None:
        self.files = Files()
        self.processes: set[StreamsProcess] = set()
        self.accelerators = accelerators()
        self.orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1")}  # a process with threads must not fork
        with theirs:
            start = command("podium_streams.nursery", str(self.files.private), list(preload))
            self._nursery = subprocess.Popen(start, stdin=theirs.fileno(), env=env, start_new_session=True)

    def nodes(self) -> Sequence[Node]:
        return machine(self.accelerators)

    def start_processes(self, specs: Sequence[ProcessSpec], on_death: OnDeath) -> Sequence[ProcessHandle]:
        until = time.monotonic() + specs[0].timeout_s
        processes = [StreamsProcess(self, spec, on_death) for spec in specs]
        try:
            for process, spec in zip(processes, specs, strict=True):
                if not process.started.wait(max(0.0, until - time.monotonic())) or not process.pid:
                    raise WorkerStartError(f"{spec.label}: no process within {spec.timeout_s:g} s", rank=spec.rank)
        except BaseException:
            for process in processes:
                process.kill()
            raise
        return processes

    def rendezvous(self, processes: Sequence[ProcessHandle]) -> str:
        return self.files.rendezvous()

    def pack(self, value: Any, readers: int) -> Parcel:
        return pack(value, "an argument")

    def unpack(self, payload: Parcel) -> Any:
        return decode(memoryview(payload[0]), payload[1:], "the result")

    def close(self) -> None:
        for process in list(self.processes):
            process.kill()
        self.orders.close()  # the nursery's signal to end
        self._nursery.wait()
        self.files.close()


class StreamsProcess(ProcessHandle):
    """One worker process, as the controller sees it."""

    def __init__(self, backend: StreamsBackend, spec: ProcessSpec, on_death: OnDeath) -> None:
        self.started, self._ended = threading.Event(), threading.Event()
        self._backend, self._rank, self._on_death = backend, spec.rank, on_death
        self._log = backend.files.begin_log(spec.label)
        env = environment_of(spec, backend.accelerators)
        order = env, bool(spec.env), str(self._log.path), Surroundings.here(spec.threads)
        self._pending: dict[int, Callable[[Reply], None]] = {}
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._connection, its_connection = socket.socketpair()
        self._leash, its_leash = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        backend.processes.add(self)
        for step in (self._send, self._live):
            threading.Thread(target=step, name="podium-streams", daemon=True).start()
        with its_connection, its_leash, contextlib.suppress(OSError):  # a nursery that is gone tells no pid
            socket.send_fds(backend.orders, [pickle.dumps(order)], [its_connection.fileno(), its_leash.fileno()])

    def invoke(self, request: Request, done: Callable[[Reply], None]) -> None:
        self._pending[request.number] = done
        self._requests.put(request)

    def kill(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._leash.shutdown(socket.SHUT_WR)
        self._ended.wait(KILL_S)

    def stopped(self) -> bool:
        return is_stopped(self.pid)

    def _send(self) -> None:
        with contextlib.suppress(OSError):
            while request := self._requests.get():
                head = (request.number, request.target, request.method, request.wants_result, request.concurrent)
                send(self._connection, head, request.shared, *([] if request.own is None else [request.own]))

    def _live(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            self.pid, _ = receive(self._connection)
            self.started.set()
            while True:
                (number, status, *times), (payload,) = receive(self._connection)
                if done := self._pending.pop(number, None):
                    done(Reply(status, payload, *times))
        code = self._leash.recv(16)
        cause = describe_exit(int(code)) if code else "the nursery of worker processes ended"
        self._requests.put(None)
        self._connection.close()
        self._leash.close()
        self._backend.processes.discard(self)
        if self.pid:
            self._on_death(self._rank, Death(cause, self._log.last_lines()))
        self._ended.set()
        self.started.set()
