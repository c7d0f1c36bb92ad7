"""The backend ``local``: one process a rank on this machine.

    controller's threads ──invoke──▶ calls socket (one a process) ──▶ worker process's main thread
                                 └─▶ control socket               ──▶ worker process's control thread
    I/O (io.py) ◀── answers and releases on the calls sockets
                ◀── "started", "ended" from the fork server
                ──▶ messages that a full socket did not take at once

Sending never waits: what a socket does not take is queued, and the I/O sends it. The I/O does not unpickle values:
whoever asks for a result does.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from podium.backends.devices import accelerators, machine
from podium.backends.local.io import IoLoop
from podium.backends.local.process import START_TIMEOUT_S, LocalProcess
from podium.backends.local.server import Spawn
from podium.backends.local.shared_memory import SegmentPool
from podium.backends.local.wire import NOTHING, Inbound, Parcel, pack
from podium.backends.logs import Logs
from podium.backends.process import THREAD_VARIABLES, Surroundings, command, environment_of
from podium.errors import ConfigError, WorkerStartError
from podium.runtime.backend import Backend, ProcessHandle
from podium.runtime.messages import Capabilities, Death, Node, OnDeath, ProcessSpec
from podium.supervisor import describe_exit

__all__ = ["LocalBackend"]

FIRST = ("OMP_", "MKL_", "OPENBLAS_", "KMP_", "CUDA_", "HIP_", "ROCR_", "ROCM_", "ASCEND_", "LD_", "MALLOC_", "PYTHON")
"""Names of variables that libraries read when they are loaded: a worker given one starts in a fresh interpreter."""


class LocalBackend(Backend):
    """Args:
    preload: Modules that the fork server imports, so that workers have them at once.
    log_dir: Directory for the output of each worker process, ``LABEL.log``; a private directory unless given.
    echo: Also print that output here, each line with its worker's label. Default: unless there is a ``log_dir``.
    nodes: Number of nodes that this machine pretends to be, to try a layout for several nodes.
    store_bytes: Bytes that each worker may keep by reference; half of the memory unless given.
    spill_dir: Directory on disk for references above that limit, which are an error unless it is given.
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
        self._nodes = machine(self._accelerators, nodes)
        _raise_descriptor_limit()
        self._private = tempfile.mkdtemp(prefix="podium-")  # mode 0700
        self._logs = Logs(log_dir or Path(self._private, "logs"), echo=log_dir is None if echo is None else echo)
        self.segments = SegmentPool()
        self._tokens = itertools.count(1)
        self._processes: dict[int, LocalProcess] = {}
        self._closed = False
        self._server_socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server = _start_server(theirs, list(preload), self._private)
        self._io = IoLoop()
        self._io.watch(self._server_socket.fileno(), self._on_server)

    # -- contract ------------------------------------------------------------------------------------------------

    @classmethod
    def expected_nodes(cls, options: Mapping[str, Any]) -> Sequence[Node]:
        return machine(accelerators(), options.get("nodes", 1))

    def nodes(self) -> Sequence[Node]:
        return self._nodes

    def start_processes(self, specs: Sequence[ProcessSpec], on_death: OnDeath) -> Sequence[ProcessHandle]:
        for name in specs[0].options:
            raise ConfigError(f"start(options={{{name!r}: ...}}): local has no options for a worker process")
        processes = [self._spawn(spec, on_death) for spec in specs]
        until = time.monotonic() + START_TIMEOUT_S
        for process in processes:
            if not process.started.wait(max(0.0, until - time.monotonic())) or process.ended.is_set():
                for other in processes:
                    other.kill()
                words = "\n".join(process.log.last_lines())
                raise WorkerStartError(
                    f"{process.label}: the fork server did not start its process; see {process.log.path}\n{words}",
                    rank=process.rank,
                )
        return processes

    def rendezvous(self, processes: Sequence[ProcessHandle]) -> str:
        return f"file://{self._private}/rendezvous-{next(self._tokens)}"

    def pack(self, value: Any, readers: int) -> Parcel:
        return NOTHING if value == {} else pack(value, self.segments, "an argument")

    def unpack(self, payload: Inbound | None) -> Any:
        return None if payload is None else payload.read("the result")

    def wait(self, ended: Callable[[], bool], timeout_s: float | None) -> bool:
        return self._io.drive(ended, timeout_s)

    def wake(self) -> None:
        self._io.wake()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for process in list(self._processes.values()):
            process.kill()
        self._logs.close()  # while the logs are there: the server removes the private directory
        self._io.stop()
        self._server_socket.close()  # the server's signal to end
        try:
            self._server.wait(5.0)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        shutil.rmtree(self._private, ignore_errors=True)
        self.segments.close()

    # -- worker processes ----------------------------------------------------------------------------------------

    def _spawn(self, spec: ProcessSpec, on_death: OnDeath) -> LocalProcess:
        calls, their_calls = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control, their_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        token = next(self._tokens)
        log = self._logs.begin(spec.label)
        process = LocalProcess(self, token, spec, calls, control, log, on_death, self._io.flush_later)
        self._processes[token] = process
        self._io.watch(calls.fileno(), process.on_readable, process.calls_out.flush)
        self._io.watch(control.fileno(), lambda: True, process.control_out.flush)
        order = Spawn(
            token=token,
            rank=spec.rank,
            env=environment_of(spec, self._accelerators),
            fresh=any(name.startswith(FIRST) for name in spec.env),
            surroundings=Surroundings.here(spec.threads),
            log_path=str(log.path),
            store=self._store,
        )
        try:
            fds = [their_calls.fileno(), their_control.fileno()]
            socket.send_fds(self._server_socket, [pickle.dumps(order)], fds)
        except OSError as error:
            process.end(Death("the fork server is gone"))
            raise WorkerStartError(f"{spec.label}: the fork server is gone: {error}", rank=spec.rank) from error
        finally:
            their_calls.close()
            their_control.close()
        return process

    def order_kill(self, pid: int) -> None:
        """Have the server end its child ``pid``. Only a parent can know that the number means no other process."""
        with contextlib.suppress(OSError):  # the server is gone, and its children with it
            self._server_socket.send(pickle.dumps(("kill", pid)))

    def forget(self, process: LocalProcess) -> None:
        """``process`` has ended."""
        self._processes.pop(process.token, None)
        self.segments.forget(process.token)

    def unwatch(self, *connections: socket.socket) -> None:
        """Stop polling ``connections``, before they are closed."""
        self._io.unwatch(*(connection.fileno() for connection in connections))

    def _on_server(self) -> bool:
        try:
            message = self._server_socket.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            message = b""
        if not message:
            for process in list(self._processes.values()):
                process.end(Death("the fork server ended, and the worker processes with it"))
            return False
        kind, token, number = pickle.loads(message)
        process = self._processes.get(token)
        if process is not None and kind == "started":
            process.pid = number
            process.started.set()
        elif process is not None:
            process.drain()
            process.end(Death(describe_exit(os.waitstatus_to_exitcode(number)), process.log.last_lines()))
        return True


def _start_server(theirs: socket.socket, preload: list[str], private: str) -> subprocess.Popen[bytes]:
    one_thread = dict.fromkeys(THREAD_VARIABLES, "1")
    with theirs:
        return subprocess.Popen(
            command("podium.backends.local.server", theirs.fileno(), preload, private),
            env={**os.environ, **one_thread},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )


def _raise_descriptor_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1 << 16) if hard > 0 else 1 << 16, hard))
