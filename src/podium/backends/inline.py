"""Every worker in the controller's own process: breakpoints, prints and profilers simply work.

Arguments and results are copied as a process boundary would copy them, so that sharing bugs show here too. Endpoints
run in the caller's thread, within ``submit``. With ``threads=True`` every rank has a thread of its own, so that calls
overlap. Deadlines are checked when an endpoint has returned. There are no collectives over several ranks and nothing to
kill: where a script asks for that, the error names the local backend.
"""

import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from podium.backends.process import accelerators, machine
from podium.data.store import Block, BlockInfo, MemoryStore
from podium.processes import temporary_directory
from podium.runtime.backend import Backend, ProcessHandle
from podium.runtime.codec import decode, encode
from podium.runtime.messages import Capabilities, Failure, Node, OnDeath, ProcessSpec, Reply, Request
from podium.runtime.worker_process import Outcome, WorkerProcess, pack_outcome


class _Copy:
    """A value as bytes; every reader unpickles its own."""

    def __init__(self, value: Any, where: str) -> None:
        self._blocks: list[Block] = []
        self._data, buffers = encode(value, where, self._blocks)
        self._buffers = [bytes(buffer.raw()) for buffer in buffers]  # now: the caller may change its tensors later

    def read(self, where: str) -> Any:
        openers = [partial(_itself, block) for block in self._blocks]
        return decode(self._data, [bytearray(buffer) for buffer in self._buffers], where, openers)


class InlineBackend(Backend):
    """Args:
    threads: Give every rank a thread of its own, so that calls are in flight while the controller goes on.
    nodes: Number of nodes to simulate, for debugging a layout of several nodes.
    store_bytes: Number of bytes that all ranks together may keep by reference. Default: half of the memory.
    log_dir, preload, echo: Ignored; accepted so that a script for another backend runs here. Workers' output goes where
        the controller's goes.
    """

    capabilities = Capabilities(processes=False, collectives=False, concurrent=False, this_machine=True)

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
        self.capabilities = replace(InlineBackend.capabilities, concurrent=threads)
        self._store = MemoryStore(store_bytes, shared=True)
        self._nodes = machine(accelerators(), nodes)
        self._threads = threads
        self._processes: list[_InlineProcess] = []
        self._directories: list[tempfile.TemporaryDirectory[str]] = []

    @classmethod
    def expected_nodes(cls, options: Mapping[str, Any]) -> Sequence[Node]:
        return machine(accelerators(), options.get("nodes", 1))

    def nodes(self) -> Sequence[Node]:
        return self._nodes

    def start_processes(self, specs: Sequence[ProcessSpec], on_death: OnDeath) -> Sequence[ProcessHandle]:
        processes = [_InlineProcess(self._store, alone=len(specs) == 1, threaded=self._threads) for _ in specs]
        self._processes += processes
        return processes

    def rendezvous(self, processes: Sequence[ProcessHandle]) -> str:
        if len(processes) > 1:
            return ""
        self._directories.append(temporary_directory())
        return f"file://{self._directories[-1].name}/rendezvous"

    def pack(self, value: Any, readers: int) -> _Copy:
        return _Copy(value, "an argument")

    def unpack(self, payload: Any) -> Any:
        return payload.read("the result") if isinstance(payload, _Copy) else payload

    def store(self) -> MemoryStore:
        return self._store

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for directory in self._directories:
            directory.cleanup()


class _InlineProcess(ProcessHandle):
    def __init__(self, store: MemoryStore, *, alone: bool, threaded: bool) -> None:
        self._process = WorkerProcess(ships_exceptions=False, make_store=lambda: store)
        self._alone = alone
        self._modes: tuple[Any, ...] = ()  # of torch, as the worker has left them
        self._executor = ThreadPoolExecutor(1, "podium-inline") if threaded else None

    def invoke(self, request: Request, done: Callable[[Reply], None]) -> None:
        if self._executor is None:
            self._run(request, done)
        elif request.concurrent:
            self._process.execute_concurrently(*_call(request), lambda outcome: done(_reply(request, outcome)))
        else:
            self._executor.submit(self._run, request, done)

    def kill(self) -> None:
        """There is no process: its workers are let go, and what waits for its thread is dropped."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
        self._process.do_shutdown()

    def _run(self, request: Request, done: Callable[[Reply], None]) -> None:
        with _no_process_group(unless=self._alone):
            outcome = self._execute(request)
        if outcome.status == "error" and not self._alone:
            outcome = outcome._replace(value=explain_error(outcome.value))
        done(_reply(request, outcome))

    def _execute(self, request: Request) -> Outcome:
        """Execute ``request`` in torch's modes of this rank. The ranks and the script share a thread, and each of them
        has modes of its own, as in a process."""
        torch: Any = sys.modules.get("torch")
        if torch is None or self._executor is not None:
            return self._process.execute(*_call(request))
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            outer = _read_modes(torch)
            usual = True, torch.float32, (False, False), (torch.bfloat16, torch.float16)
            _change_modes(torch, outer, self._modes or usual)
            try:
                return self._process.execute(*_call(request))
            finally:
                self._modes = _read_modes(torch)
                _change_modes(torch, self._modes, outer)


def _call(request: Request) -> tuple[int, str, str, Callable[[], Mapping[str, Any]]]:
    return request.number, request.target, request.method, partial(_values, request)


def _values(request: Request) -> Mapping[str, Any]:
    values: dict[str, Any] = request.shared.read("an argument")
    return values if request.own is None else {**values, **request.own.read("an argument")}


def _reply(request: Request, outcome: Outcome) -> Reply:
    outcome, payload = pack_outcome(outcome, request.wants_result, _crossing)
    return Reply(outcome.status, payload, outcome.started_ns, outcome.ended_ns)


def _crossing(value: Any) -> Any:
    return value if isinstance(value, Failure) else _Copy(value, "the result")  # an exception stays the object it is


def _itself(block: Block, info: BlockInfo) -> Block:
    """A block crosses to another rank of this process as the object it is."""
    return block


def explain_error(failure: Failure) -> Failure:
    if "process group" not in failure.message:
        return failure
    hint = "inline has no collectives over several ranks: use podium.connect('local') on Linux"
    return replace(failure, message=f"{failure.message}; {hint}")


def _read_modes(torch: Any) -> tuple[Any, ...]:
    """Return whether gradients are recorded, the default dtype, and autocast of the CPU and of accelerators."""
    casts = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
    dtypes = torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda")
    return torch.is_grad_enabled(), torch.get_default_dtype(), casts, dtypes


def _change_modes(torch: Any, old: tuple[Any, ...], new: tuple[Any, ...]) -> None:
    if old == new:
        return
    has_gradients, dtype, casts, dtypes = new
    torch.set_grad_enabled(has_gradients)
    torch.set_default_dtype(dtype)
    for kind, is_enabled, cast_dtype in zip(("cpu", "cuda"), casts, dtypes, strict=True):
        torch.set_autocast_enabled(kind, is_enabled)
        torch.set_autocast_dtype(kind, cast_dtype)


@contextmanager
def _no_process_group(*, unless: bool) -> Generator[None]:
    """Hide the one-rank default process group of this process from a group of several ranks. A collective must fail
    there, not quietly gather from one rank."""
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
