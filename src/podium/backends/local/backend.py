"""The backend ``local``: one process a rank on this machine.

    controller's threads ──invoke──▶ calls socket (one a process) ──▶ worker process's main thread
                                 └─▶ control socket               ──▶ worker process's control thread
    I/O (io.py) ◀── answers and releases on the calls sockets
                ◀── ends of processes from the fork server, and before it from the kernel
                ──▶ messages that a full socket did not take at once

Sending never waits: what a socket does not take is queued, and the I/O sends it. The I/O does not unpickle values:
whoever asks for a result does.
"""

import itertools
import os
import select
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

from podium.backends.files import Files
from podium.backends.local.io import IoLoop
from podium.backends.local.process import LocalProcess
from podium.backends.local.shared_memory import SegmentPool
from podium.backends.local.store import LocalStore
from podium.backends.local.wire import NOTHING, Inbound, Parcel, pack
from podium.backends.process import THREAD_VARIABLES, accelerators, machine
from podium.errors import ConfigError, WorkerStartError
from podium.processes import ForkServer, close_memory, command, make_private_directory, raise_descriptor_limit
from podium.runtime.backend import Backend, ProcessHandle
from podium.runtime.messages import Capabilities, Node, OnDeath, ProcessSpec

_NEEDED = {
    **dict.fromkeys(("memfd_create", "eventfd", "pidfd_open"), os),
    **dict.fromkeys(("SOCK_SEQPACKET", "MSG_CMSG_CLOEXEC"), socket),
    "epoll": select,
}
"""What macOS lacks: the segments of memory, wake-ups, ends of processes, messages with bounds, and waiting for all."""


class WorkerServer(ForkServer):
    """The process that starts worker processes. It has imported the modules ``preload``."""

    def __init__(self, preload: Sequence[str], private: Path) -> None:
        super().__init__(
            command("podium.backends.local.server", list(preload), str(private)),
            env={**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1")},
        )

    def close(self) -> None:
        """End the server and all its worker processes."""
        self.end()
        self.channel.close()


class LocalBackend(Backend):
    """Args:
    preload: Modules that the fork server imports, so that workers do not import them again.
    log_dir: Directory for the output of each worker process, ``LABEL.log``. Default: a private directory.
    echo: Whether to print that output here too, each line with its worker's label. Default: True unless ``log_dir`` is
        given.
    nodes: Number of nodes to simulate on this machine, for trying a layout of several nodes.
    store_bytes: Number of bytes that each worker may keep by reference. Default: half of the memory.
    spill_dir: Directory on disk for references above that limit. Without a directory, references above the limit are an
        error.
    """

    capabilities = Capabilities(processes=True, collectives=True, concurrent=True, this_machine=True)
    _prepared: ClassVar[dict[tuple[str, ...], tuple[Path, WorkerServer]]] = {}  # servers that import already

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
        if missing := _missing():
            raise ConfigError(f"backend 'local' needs Linux, and this system has no {missing}; use 'inline'")
        if isinstance(preload, str):
            raise ConfigError(f"connect('local', preload={preload!r}): a sequence of module names, as in [{preload!r}]")
        if spill_dir is not None and not Path(spill_dir).is_dir():
            raise ConfigError(f"connect('local', spill_dir={str(spill_dir)!r}): this directory does not exist")
        self.accelerators = accelerators()
        self._nodes = machine(self.accelerators, nodes)
        raise_descriptor_limit()
        close_memory()
        self.store_options = store_bytes, "" if spill_dir is None else str(Path(spill_dir).absolute())
        private, self._spare = self._prepared.pop(tuple(preload), None) or (make_private_directory(), None)
        self.files = Files(log_dir, echo, private)
        self.segments = SegmentPool()
        self.processes: dict[int, LocalProcess] = {}
        self._preload = list(preload)
        self._tokens = itertools.count(1)
        self._closed = False
        self._closing = threading.RLock()
        self._serving = threading.Lock()
        with ExitStack() as undo:  # if no process or thread can be started, or at Ctrl-C
            undo.callback(self.files.close)
            self.io = IoLoop()
            undo.callback(self.io.stop)
            self._server = self._new_server()
            undo.pop_all()

    def check_options(self, options: Mapping[str, Any]) -> None:
        """The option ``prefix`` begins the command of a rank's process: ``{0: ["nsys", "profile", "-o", "rank0"]}``."""
        super().check_options({name: value for name, value in options.items() if name != "prefix"})
        prefix = cast("dict[Any, Any]", options.get("prefix", {}))
        lines = list(prefix.values()) if isinstance(prefix, dict) else [""]  # pyright: ignore[reportUnnecessaryIsInstance]
        if any(isinstance(line, str) for line in lines):
            raise ConfigError(
                f"start(options={{'prefix': {prefix!r}}}): expected the beginning of a command by rank, as in "
                "{0: ['nsys', 'profile', '-o', 'rank0']}"
            )
        for line in lines:
            if line and shutil.which(line[0]) is None:
                raise ConfigError(f"start(options={{'prefix': ...}}): there is no command {line[0]!r} on this machine")

    # -- contract ------------------------------------------------------------------------------------------------

    @classmethod
    def stand_in(cls) -> tuple[str, str] | None:
        missing = _missing()
        return ("inline", f"it needs Linux, and this system has no {missing}") if missing else None

    @classmethod
    def prepare(cls, preload: Sequence[str]) -> None:
        if not _missing() and tuple(preload) not in cls._prepared:
            private = make_private_directory()
            try:
                cls._prepared[tuple(preload)] = private, WorkerServer(preload, private)
            except BaseException:  # no server has begun that would remove it: no process is left, or it was Ctrl-C
                shutil.rmtree(private, ignore_errors=True)
                raise

    @classmethod
    def expected_nodes(cls, options: Mapping[str, Any]) -> Sequence[Node]:
        return machine(accelerators(), options.get("nodes", 1))

    def nodes(self) -> Sequence[Node]:
        return self._nodes

    def start_processes(self, specs: Sequence[ProcessSpec], on_death: OnDeath) -> Sequence[ProcessHandle]:
        until = time.monotonic() + specs[0].timeout_s
        with self._serving:
            if not self._server.alive():
                self._server.reap()  # the I/O closes its socket, once that has told it of the processes' end
                self._server = self._new_server()
        processes: list[LocalProcess] = []
        try:
            for spec in specs:
                processes.append(LocalProcess(self, self._server, next(self._tokens), spec, on_death))
            for process in processes:
                in_time = process.started.wait(max(0.0, until - time.monotonic()))
                if not in_time or process.ended.is_set():
                    raise _not_started(process, specs[0].timeout_s, in_time)
        except BaseException:
            for process in processes:
                process.kill()
            raise
        return processes

    def rendezvous(self, processes: Sequence[ProcessHandle]) -> str:
        return self.files.rendezvous()

    def pack(self, value: Any, readers: int) -> Parcel:
        return NOTHING if value == {} else pack(value, self.segments, "an argument")

    def unpack(self, payload: Inbound | None) -> Any:
        return None if payload is None else payload.read("the result")

    def store(self) -> LocalStore:
        return LocalStore(self.segments, *self.store_options)

    def wait(self, ended: Callable[[], bool], timeout_s: float | None) -> bool:
        return self.io.drive(ended, timeout_s)

    def wake(self) -> None:
        self.io.wake()

    def close(self) -> None:
        with self._closing:  # a second thread returns when the first one is done
            if self._closed:
                return
            self._closed = True
            for process in list(self.processes.values()):
                process.kill()
            self.files.close()
            self.io.stop()
            self._server.close()
            self.segments.close()

    def _new_server(self) -> WorkerServer:
        server, self._spare = self._spare or WorkerServer(self._preload, self.files.private), None
        self.io.watch(server.channel.fileno(), partial(self._on_server, server))
        return server

    def _on_server(self, server: WorkerServer) -> bool:
        if not server.read_ends(wait=False):
            self.io.unwatch(server.channel.fileno())
            server.channel.close()
        return True


def _missing() -> str:
    """Those of the calls that this backend is built on which this system lacks; "" on Linux."""
    lacking = [name for name, module in _NEEDED.items() if not hasattr(module, name)]
    return ", ".join(lacking if os.path.isdir("/proc/self/fd") else [*lacking, "/proc"])


def _not_started(process: LocalProcess, timeout_s: float, in_time: bool) -> WorkerStartError:
    why, lost = f"its process did not start within {timeout_s:g} s", ""
    if in_time:
        cause = process.death.cause if process.death else "given up"
        why, lost = f"its process ended before it took a request: {cause}", f"{process.label} ({cause})"
    words = "".join(f"\n  | {line}" for line in process.log.last_lines())
    return WorkerStartError(f"{process.label}: {why}; see {process.log.path}{words}", rank=process.rank, lost=lost)
