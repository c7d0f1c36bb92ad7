"""Every worker in the controller's own process: breakpoints, prints and profilers simply work.

Arguments and results are copied as a process boundary would copy them, so that sharing bugs show here too. Endpoints
run in the caller's thread, within ``submit``; with ``threads=True`` every rank has a thread of its own, so that calls
overlap. Deadlines are checked afterwards. There are no collectives over several ranks and nothing to kill: where a
script asks for that, the error names the local backend.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from podium.errors import ConfigError
from podium.runtime.backend import Backend, ProcessHandle
from podium.runtime.codec import decode, encode
from podium.runtime.messages import Capabilities, Failure, Node, OnDeath, ProcessSpec, Reply, Request
from podium.runtime.worker_process import Outcome, WorkerProcess, pack_outcome

if TYPE_CHECKING:
    from collections.abc import Generator

    from podium.data import Block, BlockInfo, TensorStore

__all__ = ["InlineBackend"]


class _Copy(NamedTuple):
    """A value as bytes; every reader unpickles its own."""

    data: bytes
    buffers: list[Any]
    blocks: list[Block]

    def read(self, where: str) -> Any:
        openers = [partial(_itself, block) for block in self.blocks]
        return decode(self.data, [bytearray(buffer) for buffer in self.buffers], where, openers)


class InlineBackend(Backend):
    """Args:
    threads: give every rank a thread of its own, so that calls are in flight while the controller goes on.
    nodes: how many nodes to pretend, to see a multi-node layout in a debugger.
    store_bytes: how much all ranks together may keep by reference; half of the memory unless given.
    log_dir, preload, echo: accepted for the same script's sake; output goes where the controller's goes.
    """

    capabilities = Capabilities(processes=False, collectives=False, concurrent=False)

    def __init__(
        self,
        *,
        threads: bool = False,
        nodes: int = 1,
        store_bytes: int | None = None,
        log_dir: str | Path | None = None,
        preload: Sequence[str] = (),
        echo: bool | None = None,
    ) -> None:
        if nodes < 1:
            raise ConfigError(f"connect('inline', nodes={nodes}): at least one")
        self.capabilities = replace(InlineBackend.capabilities, concurrent=threads)
        self._threads = threads
        self._nodes = self.expected_nodes({"nodes": nodes})
        self._processes: list[_InlineProcess] = []
        self._store: TensorStore | None = None
        self._store_bytes = store_bytes
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._rendezvous = 0

    @classmethod
    def expected_nodes(cls, options: Mapping[str, Any]) -> Sequence[Node]:
        cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
        count = options.get("nodes", 1)
        names = ["localhost"] if count == 1 else [f"node-{at}" for at in range(count)]
        return [Node(name, {"cpu": cores}) for name in names]

    def nodes(self) -> Sequence[Node]:
        return self._nodes

    def start_processes(self, specs: Sequence[ProcessSpec], on_death: OnDeath) -> Sequence[ProcessHandle]:
        for name in specs[0].options:
            raise ConfigError(f"start(options={{{name!r}: ...}}): inline has no options for a worker process")
        processes = [_InlineProcess(self, alone=len(specs) == 1, threaded=self._threads) for _ in specs]
        self._processes += processes
        return processes

    def rendezvous(self, processes: Sequence[ProcessHandle]) -> str:
        if len(processes) > 1:
            return ""
        if self._directory is None:
            self._directory = tempfile.TemporaryDirectory(prefix="podium-")
        self._rendezvous += 1
        return f"file://{self._directory.name}/rendezvous-{self._rendezvous}"

    def pack(self, value: Any, readers: int) -> _Copy:
        return _copy(value, "an argument")

    def unpack(self, payload: Any) -> Any:
        return payload.read("the result") if isinstance(payload, _Copy) else payload

    def store(self) -> TensorStore:
        """The one store of all ranks."""
        if self._store is None:
            from podium.data import MemoryStore

            self._store = MemoryStore(self._store_bytes, shared=True)
        return self._store

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        if self._directory is not None:
            self._directory.cleanup()


class _InlineProcess(ProcessHandle):
    def __init__(self, backend: InlineBackend, *, alone: bool, threaded: bool) -> None:
        self._backend = backend
        self._process = WorkerProcess(ships_exceptions=False, make_store=backend.store)
        self._alone = alone
        self._executor = ThreadPoolExecutor(1, "podium-inline") if threaded else None
        self._stopped = False

    def invoke(self, request: Request, done: Callable[[Reply], None]) -> None:
        if self._executor is None:
            self._run(request, done)
        elif request.concurrent:
            self._process.execute_concurrently(
                request.number,
                request.target,
                request.method,
                partial(_values, request),
                lambda outcome: done(self._reply(request, outcome)),
            )
        else:
            self._executor.submit(self._run, request, done)

    def kill(self) -> None:
        """There is no process: its workers are let go, and what waits for its thread is dropped."""
        if not self._stopped:
            self._stopped = True
            if self._executor is not None:
                self._executor.shutdown(wait=False, cancel_futures=True)
            self._process.do_shutdown()

    def _run(self, request: Request, done: Callable[[Reply], None]) -> None:
        with _no_process_group(unless=self._alone):
            outcome = self._process.execute(request.number, request.target, request.method, partial(_values, request))
        if outcome.status == "error" and not self._alone:
            outcome = outcome._replace(value=_explained(outcome.value))
        done(self._reply(request, outcome))

    def _reply(self, request: Request, outcome: Outcome) -> Reply:
        outcome, payload = pack_outcome(outcome, request.wants_result, _crossing)
        return Reply(outcome.status, payload, outcome.started_ns, outcome.ended_ns)


def _values(request: Request) -> Mapping[str, Any]:
    values: dict[str, Any] = request.shared.read("an argument")
    return values if request.own is None else {**values, **request.own.read("an argument")}


def _crossing(value: Any) -> Any:
    return value if isinstance(value, Failure) else _copy(value, "the result")  # an exception stays the object it is


def _copy(value: Any, where: str) -> _Copy:
    blocks: list[Block] = []
    data, buffers = encode(value, where, blocks)
    copies = [bytes(buffer.raw()) for buffer in buffers]  # now: the caller may change its tensors later
    return _Copy(data, copies, blocks)


def _itself(block: Block, info: BlockInfo) -> Block:
    """A block crosses to another rank of this process as the object it is."""
    return block


def _explained(failure: Failure) -> Failure:
    if "process group" not in failure.message:
        return failure
    hint = "inline has no collectives over several ranks: use podium.connect('local')"
    return replace(failure, message=f"{failure.message}; {hint}")


@contextmanager
def _no_process_group(*, unless: bool) -> Generator[None]:
    """Hide the one-rank default process group of this process from a group of several ranks: a collective must fail
    there, not quietly gather from one rank."""
    import sys

    distributed = None if unless else sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is None:
        yield
        return
    hidden = distributed.GroupMember.WORLD
    distributed.GroupMember.WORLD = None
    try:
        yield
    finally:
        distributed.GroupMember.WORLD = hidden
