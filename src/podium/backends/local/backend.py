"""The backend ``local``: one process a host on this machine.

    controller's threads ──invoke──▶ calls socket (one a host) ──▶ host's main thread
                                 └─▶ control socket            ──▶ host's control thread
    I/O (io.py) ◀── answers and releases on the calls sockets
                ◀── "started", "ended" from the fork server
                ──▶ messages that a full socket did not take at once

Sending never waits: what a socket does not take is queued, and the I/O sends it. The I/O only reads headers; whoever
asks for a result unpickles it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from podium.backends.devices import accelerators, visibility
from podium.backends.local.io import IoLoop
from podium.backends.local.outbox import Outbox
from podium.backends.local.segments import Lease, SegmentPool
from podium.backends.local.server import Spawn
from podium.backends.local.wire import (
    ANSWER,
    CALL,
    RELEASE,
    STATUSES,
    Inbound,
    Parcel,
    Receiver,
    Releases,
    pack,
    read_answer,
    released,
)
from podium.backends.logs import LogEcho, last_lines
from podium.backends.process import THREAD_VARIABLES
from podium.errors import ConfigError, StoreFullError, WorkerStartError
from podium.runtime.backend import Backend, Capabilities, Death, HostHandle, HostSpec, Node, Reply, Request

__all__ = ["LocalBackend"]

START_TIMEOUT_S = 120.0
FIRST = ("OMP_", "MKL_", "OPENBLAS_", "KMP_", "CUDA_", "HIP_", "ROCR_", "ROCM_", "ASCEND_", "LD_", "MALLOC_", "PYTHON")
"""Names of variables that libraries read when they are loaded: a worker given one starts in a fresh interpreter."""

Done = Callable[[Reply], None]
_NO_FDS: list[int] = []


class LocalBackend(Backend):
    """Args:
    preload: modules that the fork server imports, so that workers have them at once.
    log_dir: where each host's output goes, ``LABEL.log``; a private directory unless given.
    echo: also print each host's output here, every line with its host's label; done unless there is a ``log_dir``.
    nodes: how many nodes to pretend this machine is, to try a multi-node layout.
    store_bytes: how much each worker may keep by reference; half of the memory unless given.
    spill_dir: a directory on disk for what is above; an error unless given.
    """

    capabilities = Capabilities(processes=True, collectives=True, concurrent=True)

    def __init__(
        self,
        *,
        preload: Sequence[str] = ("torch",),
        log_dir: str | Path | None = None,
        echo: bool | None = None,
        nodes: int = 1,
        store_bytes: int | None = None,
        spill_dir: str | Path | None = None,
    ) -> None:
        if not sys.platform.startswith("linux"):
            raise ConfigError(
                f"backend 'local' needs Linux (memfd, descriptor passing); on {sys.platform} use 'inline'"
            )
        if nodes < 1:
            raise ConfigError(f"connect('local', nodes={nodes}): at least one")
        if isinstance(preload, str):
            raise ConfigError(f"connect('local', preload={preload!r}): a sequence of module names, as in [{preload!r}]")
        if spill_dir is not None and not Path(spill_dir).is_dir():
            raise ConfigError(f"connect('local', spill_dir={str(spill_dir)!r}): there is no such directory")
        self._store = store_bytes, "" if spill_dir is None else str(Path(spill_dir).absolute())
        self._accelerators = accelerators()
        self._nodes = _nodes(nodes, len(self._accelerators))
        _raise_descriptor_limit()
        self._private = tempfile.mkdtemp(prefix="podium-")  # mode 0700
        self._log_dir = Path(log_dir or Path(self._private) / "logs").absolute()
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self.segments = SegmentPool()
        self._echo = LogEcho() if (log_dir is None if echo is None else echo) else None
        self._tokens = itertools.count(1)
        self._hosts: dict[int, _LocalHost] = {}
        self._empty = pack({}, self.segments)
        self._closed = False
        self._server_socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server = _start_server(theirs, list(preload), self._private)
        self._io = IoLoop()
        self._io.watch(self._server_socket.fileno(), self._on_server)

    # -- contract ------------------------------------------------------------------------------------------------

    def nodes(self) -> Sequence[Node]:
        return self._nodes

    def start_hosts(self, specs: Sequence[HostSpec], on_death: Callable[[int, Death], None]) -> Sequence[HostHandle]:
        for name in specs[0].options:
            raise ConfigError(f"start(options={{{name!r}: ...}}): local has no options for a host")
        hosts = [self._spawn(spec, on_death) for spec in specs]
        until = time.monotonic() + START_TIMEOUT_S
        for host in hosts:
            if not host.started.wait(max(0.0, until - time.monotonic())) or host.ended.is_set():
                for other in hosts:
                    other.kill()
                words = "\n".join(host.last_words())
                raise WorkerStartError(
                    f"{host.label}: the fork server did not start its process; see {host.log_path}\n{words}",
                    rank=host.rank,
                )
        return hosts

    def rendezvous(self, hosts: Sequence[HostHandle]) -> str:
        return f"file://{self._private}/rendezvous-{next(self._tokens)}"

    def pack(self, value: Any, readers: int) -> Parcel:
        return self._empty if value == {} else pack(value, self.segments, "an argument")

    def unpack(self, payload: Inbound) -> Any:
        return payload.read("the result")

    def wait(self, ended: Callable[[], bool], timeout_s: float | None) -> bool:
        return self._io.drive(ended, timeout_s)

    def wake(self) -> None:
        self._io.wake()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for host in list(self._hosts.values()):
            host.kill()
        if self._echo is not None:
            self._echo.stop()  # while the logs are there: the server removes the private directory
        self._io.stop()
        self._server_socket.close()  # the server's signal to end
        try:
            self._server.wait(5.0)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        shutil.rmtree(self._private, ignore_errors=True)
        self.segments.close()

    # -- hosts ---------------------------------------------------------------------------------------------------

    def _spawn(self, spec: HostSpec, on_death: Callable[[int, Death], None]) -> _LocalHost:
        calls, their_calls = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control, their_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        token = next(self._tokens)
        log_path = self._log_dir / f"{spec.label}.log"
        host = _LocalHost(self, token, spec, calls, control, log_path, on_death, self._io.flush_later)
        self._hosts[token] = host
        self._io.watch(calls.fileno(), host.on_readable, host.calls_out.flush)
        self._io.watch(control.fileno(), lambda: True, host.control_out.flush)
        order = Spawn(
            token=token,
            rank=spec.rank,
            env={**_thread_limits(spec), **visibility(spec.place.devices, self._accelerators), **spec.env},
            fresh=any(name.startswith(FIRST) for name in spec.env),
            threads=spec.threads,
            log_path=str(log_path),
            cwd=os.getcwd(),
            sys_path=[path or os.getcwd() for path in sys.path],
            store=self._store,
        )
        try:
            fds = [their_calls.fileno(), their_control.fileno()]
            socket.send_fds(self._server_socket, [pickle.dumps(order)], fds)
        except OSError as error:
            host.end(Death("the fork server is gone"))
            raise WorkerStartError(f"{spec.label}: the fork server is gone: {error}", rank=spec.rank) from error
        finally:
            their_calls.close()
            their_control.close()
        if self._echo is not None:
            self._echo.follow(spec.label, log_path)
        return host

    def order_kill(self, pid: int) -> None:
        """Ask the server, whose child it is, so that the pid cannot mean another process."""
        with contextlib.suppress(OSError):  # the server is gone, and its children with it
            self._server_socket.send(pickle.dumps(("kill", pid)))

    def forget(self, host: _LocalHost) -> None:
        self._hosts.pop(host.token, None)
        self.segments.forget(host.token)

    def unwatch(self, *connections: socket.socket) -> None:
        self._io.unwatch(*(connection.fileno() for connection in connections))

    def _on_server(self) -> bool:
        try:
            message = self._server_socket.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            message = b""
        if not message:
            for host in list(self._hosts.values()):
                host.end(Death("the fork server ended, and its hosts with it"))
            return False
        kind, token, number = pickle.loads(message)
        host = self._hosts.get(token)
        if host is not None and kind == "started":
            host.pid = number
            host.started.set()
        elif host is not None:
            host.drain()
            host.end(Death(_cause(number), host.last_words()))
        return True


class _LocalHost(HostHandle):
    """One host process, as the controller sees it."""

    def __init__(
        self,
        backend: LocalBackend,
        token: int,
        spec: HostSpec,
        calls: socket.socket,
        control: socket.socket,
        log_path: Path,
        on_death: Callable[[int, Death], None],
        flush_later: Callable[[int], None],
    ) -> None:
        self.token = token
        self.rank = spec.rank
        self.label = spec.label
        self.log_path = log_path
        self.started = threading.Event()
        self.ended = threading.Event()
        self._backend = backend
        self._calls = calls
        self._control = control
        self._on_death = on_death
        self._pending: dict[int, Done] = {}
        self._releases = Releases(control)
        self._receiver = Receiver()
        self.calls_out = Outbox(calls, flush_later)
        self.control_out = Outbox(control, flush_later)
        self._reading = threading.Lock()
        self._log_start = log_path.stat().st_size if log_path.exists() else 0

    def invoke(self, request: Request, done: Done) -> None:
        if self.ended.is_set():
            return
        if request.wire is None:
            request.wire = _encode(request)
        message, leases = request.wire
        for lease in leases:
            self._backend.segments.hold(lease.segment, self.token)
        if self.ended.is_set():  # just now: it has been forgotten before it held these
            self._backend.segments.forget(self.token)
            return
        self._pending[request.call_id] = done
        fds = [lease.segment.fd for lease in leases] if leases else _NO_FDS
        try:
            (self.control_out if request.concurrent else self.calls_out).send(message, fds)
        except StoreFullError:
            self._pending.pop(request.call_id, None)
            for lease in leases:
                self._backend.segments.release(lease.segment.number, self.token)
            raise

    def kill(self) -> None:
        if not self.ended.is_set() and self.started.wait(START_TIMEOUT_S):
            self._backend.order_kill(self.pid)
            self.ended.wait(10.0)

    def last_words(self) -> tuple[str, ...]:
        """The last lines that it wrote."""
        return last_lines(self.log_path, self._log_start)

    def end(self, death: Death) -> None:
        """Its process is gone."""
        if self.ended.is_set():
            return
        self._backend.unwatch(self._calls, self._control)
        self.calls_out.close()
        self.control_out.close()
        self._pending.clear()
        self._receiver.close()
        self.started.set()
        self.ended.set()
        self._backend.forget(self)
        self._on_death(self.rank, death)

    def on_readable(self) -> bool:
        """Take one message in; the poll reports what is left. False once the host's end is closed."""
        with self._reading:
            try:
                message, fds = self._receiver.receive(self._calls, wait=False)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not message:
                return False
            if message[0] == RELEASE:
                for number in released(message):
                    self._backend.segments.release(number, self.token)
                return True
            _, call_id, status, started, ended = ANSWER.unpack_from(message)
            payload = read_answer(message, fds, self._releases, self._backend.segments)
        done = self._pending.pop(call_id, None)
        if done is not None:
            done(Reply(STATUSES[status], payload, started, ended))
        return True

    def drain(self) -> None:
        """Take in all that it sent before it ended."""
        incoming = select.poll()  # select() cannot take a descriptor above 1023
        incoming.register(self._calls, select.POLLIN)
        while incoming.poll(0) and self.on_readable():
            pass


def _encode(request: Request) -> tuple[bytes, list[Lease]]:
    """The message for a request, the same for every host it goes to; see wire.py."""
    header = pickle.dumps((request.target, request.method, request.wants_result, request.own is not None), 5)
    parcels: list[Parcel] = [request.shared] if request.own is None else [request.shared, request.own]
    wires = [parcel.wire for parcel in parcels]
    message = b"".join([CALL.pack(b"C", request.call_id, len(header)), header, *wires])
    return message, [lease for parcel in parcels for lease in parcel.leases]


def _start_server(theirs: socket.socket, preload: list[str], private: str) -> subprocess.Popen[bytes]:
    paths = [path or os.getcwd() for path in sys.path]
    code = (
        f"import sys; sys.path[:] = {paths!r}; from podium.backends.local.server import main; "
        f"main({theirs.fileno()}, {preload!r}, {private!r})"
    )
    one_thread = dict.fromkeys(THREAD_VARIABLES, "1")
    given: Mapping[str, str] = os.environ
    with theirs:
        return subprocess.Popen(
            [sys.executable, "-c", code],
            env={**given, **one_thread},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


def _thread_limits(spec: HostSpec) -> dict[str, str]:
    """Instead of the fork server's one thread; torch starts with the fewest that any of them allows."""
    return dict.fromkeys(THREAD_VARIABLES, spec.env.get("OMP_NUM_THREADS", str(spec.threads)))


def _nodes(count: int, gpus: int) -> list[Node]:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    has = {"cpu": float(len(os.sched_getaffinity(0))), "gpu": float(gpus), "memory": float(pages)}
    return [Node("localhost" if count == 1 else f"node-{at}", has) for at in range(count)]


def _raise_descriptor_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1 << 16) if hard > 0 else 1 << 16, hard))


def _cause(status: int) -> str:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            return f"signal {signal.Signals(number).name}"
        except ValueError:
            return f"signal {number}"
    return f"exit code {os.WEXITSTATUS(status)}"
