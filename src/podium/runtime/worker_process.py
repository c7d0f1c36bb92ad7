"""A worker process holds named workers and runs requests on them.

The same code runs in a forked process, in a Ray actor, and in the controller. A backend calls it from two threads:

    main thread    ── execute ──────────────▶ the request runs here; one at a time, in the order received
    second thread  ── execute_concurrently ─▶ a request to the process itself (status, cancel, …) runs here, at once;
                                              a request to a worker runs in a pool of threads

An async endpoint runs in the event loop of this process, in a thread of its own, and the thread that runs the request
waits for it. The first async endpoint starts the loop.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import sys
import threading
import time
import traceback
from bdb import BdbQuit
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from textwrap import indent
from types import FrameType, MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from podium.errors import SerializationError, StoreFullError
from podium.exceptions import describe_error, format_error, is_readable, name_class, read_text
from podium.runtime import event_loop
from podium.runtime.calls.call import CurrentProcess, end_fork
from podium.runtime.calls.relay import Outbox, Wanted
from podium.runtime.calls.siblings import Collectives
from podium.runtime.calls.stacks import is_inside_collective
from podium.runtime.codec import Reading, check_lent_memory, read_references
from podium.runtime.endpoints import Returns, endpoints_of
from podium.runtime.event_loop import UNDONE, run_loop, wait_for_result
from podium.runtime.exception_pickling import pack_exception, unpack_exception
from podium.runtime.messages import Failure
from podium.runtime.profiling import Profile, Recorded
from podium.runtime.worker import Bound, Worker, WorkerContext, check_made, current_context
from podium.telemetry.events import Count
from podium.telemetry.progress import read_counts

if TYPE_CHECKING:
    from podium.data import TensorStore, Usage

P = TypeVar("P")
Values = Mapping[str, Any] | Callable[[], Mapping[str, Any]]
"""The arguments of a request, or a function that reads them. If it raises, the request has raised."""

_log = logging.getLogger("podium")

_LONG = ("close_worker", "take_call")
"""Requests to the process itself that may take long."""

MOST_CONCURRENT = 32
"""So many calls of concurrent endpoints run at a time. Further ones wait, weight syncs among them."""

COLLECTIVES_S = 30 * 60.0
LOOP_END_S = 1.0  # for async endpoints that still run when their process shuts down

_OF_COLLECTIVES = (
    "gloo",
    "nccl",
    "NCCL",
    "ProcessGroup",
    "Connection closed by peer",
    "Connection reset",
    "Broken pipe",
)
"""Texts in errors of broken collectives."""


class _Function(NamedTuple):
    """What a request runs, how it reads references, and the label under which its results are kept here, if any."""

    call: Callable[..., Any]
    context: WorkerContext | None
    reads: Reading = "tensor"
    keeps: str = ""


class Outcome(NamedTuple):
    """The outcome of a request. ``value`` is the result, a :class:`Failure`, or None if the request was cancelled.
    ``keep`` is set where the endpoint returns references: it replaces tensors of the result by references."""

    status: Literal["ok", "error", "cancelled"]
    value: Any
    started_ns: int
    ended_ns: int
    keep: Callable[[Any], Any] | None = None


def pack_outcome(outcome: Outcome, wants_result: bool, pack: Callable[[Any], P]) -> tuple[Outcome, P]:
    """An outcome, and its value packed by ``pack``. A result that does not pickle becomes an error, and so does a
    result for which the store has no room, or that cannot be packed for any other reason."""
    value = None if outcome.status == "ok" and not wants_result else outcome.value
    try:
        if value is not None and outcome.keep is not None:
            value = outcome.keep(value)
        return outcome, pack(value)
    except (SerializationError, StoreFullError) as error:
        cause = "" if error.__cause__ is None else read_text(error.__cause__)
        failure = Failure(type(error).__name__, str(error), cause, error, False)
    except Exception as error:  # noqa: BLE001 - the caller would wait for ever
        failure = Failure(name_class(error), f"the result cannot be sent: {describe_error(error)}", "", None, False)
    return outcome._replace(status="error", value=failure), pack(failure)


class _Running:
    """A request that runs, in the thread that makes this object."""

    __slots__ = ("cancelled", "coroutine", "method", "since_ns", "target", "task", "thread")

    def __init__(self, target: str, method: str, since_ns: int) -> None:
        self.target, self.method, self.since_ns = target, method, since_ns
        self.thread = threading.get_ident()
        self.task: asyncio.Task[Any] | None = None
        self.coroutine: Coroutine[Any, Any, Any] | None = None
        self.cancelled = False

    @property
    def label(self) -> str:
        return f"{self.target}.{self.method}" if self.target else self.method


class WorkerProcess:
    """Named workers and the requests that run on them.

    Args:
        ships_exceptions: Outcomes leave this process, so exceptions are pickled.
        make_store: Makes the store of tensors that stay here by reference. Default: a MemoryStore.
        address: Address at which the other processes of a group reach this one.
    """

    def __init__(
        self,
        *,
        ships_exceptions: bool = True,
        make_store: Callable[[], TensorStore] | None = None,
        address: str = "127.0.0.1",
    ) -> None:
        self.workers: dict[str, Worker] = {}
        self._ships_exceptions = ships_exceptions
        self._process = CurrentProcess.pid if ships_exceptions else 0
        self._make_store = make_store
        self._address = address
        self._store: TensorStore | None = None
        self._making = threading.Lock()
        self._returns: dict[str, Returns] = {}
        self._running: dict[int, _Running] = {}
        self._cancelled: set[int] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: threading.Thread | None = None
        self._loop_ends = threading.Event()
        self._pool = ThreadPoolExecutor(MOST_CONCURRENT, "podium-concurrent")
        self._functions: dict[tuple[str, str], _Function] = {}
        self._recorded: dict[tuple[str, str], Recorded] = {}
        self._owns_process_group = False
        self._record: Any = None
        self._outbox = Outbox(self._keep)
        if ships_exceptions:
            Outbox.here = self._outbox

    # -- running requests ----------------------------------------------------------------------------------------

    def execute(self, number: int, target: str, method: str, values: Values) -> Outcome:
        """Run one request to its end in this thread. Only KeyboardInterrupt in the main thread is raised."""
        started = time.monotonic_ns()
        if number in self._cancelled:
            self._cancelled.discard(number)
            return Outcome("cancelled", None, started, started)
        running = self._running[number] = _Running(target, method, started)
        token = None
        try:
            function, context, reads, keeps = self._functions.get((target, method)) or self._find(target, method)
            if current_context.get() is not context:
                token = current_context.set(context)
            result = (
                function(**(read_references(reads, values) if callable(values) else values)) if values else function()
            )
            if isinstance(result, UNDONE):
                result = self._await(running, result)
            if reads == "readonly":
                check_lent_memory(f"{target}.{method}")
            keep = partial(self._keep, keeps) if keeps else None
            return Outcome("ok", result, started, time.monotonic_ns(), keep)
        except BaseException as error:  # the boundary: everything a worker raises is translated
            end_fork(self._process, running.label, error)
            if isinstance(error, asyncio.CancelledError) and running.cancelled:
                return Outcome("cancelled", None, started, time.monotonic_ns())
            is_main = threading.current_thread() is threading.main_thread()
            if isinstance(error, KeyboardInterrupt) and is_main and not self._ships_exceptions:
                raise  # Ctrl-C of the script, which this process is
            return Outcome("error", self._failure(error), started, time.monotonic_ns())
        finally:
            end_fork(self._process, running.label)
            if token is not None and not self._ships_exceptions:  # a process of its own runs nothing else
                current_context.reset(token)
            del self._running[number]
            running.task = running.coroutine = None  # an error's traceback leads to both: the arguments shall go now

    def execute_concurrently(
        self, number: int, target: str, method: str, values: Values, done: Callable[[Outcome], None]
    ) -> None:
        """Run one request beside others. ``done`` receives its outcome, in any thread. If ``done`` raises, it receives
        that as an error: no caller would see an exception of such a thread, and this one would wait for ever."""

        def execute() -> None:
            outcome = self.execute(number, target, method, values)
            try:
                done(outcome)
            except Exception as error:  # noqa: BLE001 - see above
                text = f"the answer of {method} cannot be sent: {describe_error(error)}"
                failure = Failure(name_class(error), text, "", None, False)
                done(outcome._replace(status="error", value=failure, keep=None))

        if not target and method not in _LONG:
            execute()
        elif not target:  # the pool may be full of endpoints that wait for this
            threading.Thread(target=execute, name="podium-long", daemon=True).start()
        else:
            self._pool.submit(self._execute_beside, execute)

    def _execute_beside(self, execute: Callable[[], None]) -> None:
        execute()
        _leave_cores()

    def _find(self, target: str, method: str) -> _Function:
        if not target:
            function = _Function(getattr(self, f"do_{method}"), None, "ref" if method == "deliver" else "tensor")
        else:
            if target not in self.workers:
                raise RuntimeError(f"no worker {target!r} in this worker process; it has {sorted(self.workers)}")
            worker = self.workers[target]
            spec = endpoints_of(type(worker)).get(method)
            returns = (spec.returns if spec else None) or self._returns.get(target)
            keeps = f"{target}.{method} of rank {worker.ctx.rank} on {worker.ctx.node}" if returns == "ref" else ""
            call = self._recorded.get((target, method)) or getattr(worker, method)
            function = _Function(call, worker.ctx, spec.reads if spec else "tensor", keeps)
        self._functions[target, method] = function
        return function

    def _keep(self, label: str, value: Any) -> Any:
        """``value`` with references in the place of its tensors, which this process's store keeps."""
        from podium.data import MemoryStore, keep

        with self._making:
            self._store = self._store or (self._make_store or MemoryStore)()
        try:
            return keep(value, self._store, label)
        except StoreFullError:
            raise
        except Exception as error:  # an accelerator may report here what failed before
            what = f"the result of {label} cannot be kept: {describe_error(error)}"
            raise SerializationError(what) from error

    def _await(self, running: _Running, undone: Any) -> Any:
        coroutine = undone if inspect.iscoroutine(undone) else wait_for_result(undone)
        loop = self._start_loop()

        async def watch() -> tuple[Any, BaseException | None]:
            running.task, running.coroutine = asyncio.current_task(), coroutine
            running.thread = threading.get_ident()
            if running.cancelled:
                coroutine.close()
                raise asyncio.CancelledError
            try:
                return await wait_for_result(await coroutine), None
            except BaseException as error:
                if isinstance(error, asyncio.CancelledError) and running.cancelled:
                    raise
                # A future has another TimeoutError and another CancelledError, without traceback, notes and cause, and
                # a SystemExit or a KeyboardInterrupt that is raised in a task ends the loop's thread.
                return None, error
            finally:
                _leave_cores()

        future = asyncio.run_coroutine_threadsafe(watch(), loop)
        try:
            result, left = future.result()
        except BaseException as error:
            if future.cancelled():
                raise asyncio.CancelledError from error
            raise
        finally:
            del future  # an error's traceback leads here, and with it the arguments
        try:
            if left is not None:
                raise left
        finally:
            del left
        return result

    def _start_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop of all asynchronous endpoints, which a thread of its own runs from the first call on.
        Calls that come side by side get the same loop."""
        with self._making:
            if self._loop is None:
                runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
                self._loop_ends = threading.Event()
                work = partial(run_loop, runner, self._loop_ends)
                self._loop_thread = threading.Thread(target=work, name="podium-loop", daemon=True)
                self._loop = runner.get_loop()
                self._loop_thread.start()
            return self._loop

    # -- what the controller asks of the process itself ---------------------------------------------------------------

    def do_construct(
        self,
        name: str,
        bound: Bound[Any],
        context: WorkerContext,
        distributed: bool | None,
        returns: Returns = "value",
        debug: bool = False,
        profile: Profile | None = None,
        collectives_s: float = COLLECTIVES_S,
        share_devices: bool = False,
    ) -> dict[str, Any]:
        """Join the process group if there is one to join, and make the worker. Return the meshes that it declares.

        Args:
            debug: Log what is made and called here from now on.
            profile: The calls of the worker that are recorded.
            collectives_s: As in :meth:`do_limit_collectives`.
            share_devices: Two ranks of the group are on one device.
        """
        if debug:
            self._log_calls()
        self._returns[name] = returns
        wanted = distributed or (distributed is None and "torch" in sys.modules)
        if wanted and context.rendezvous:
            self._join(context, collectives_s, share_devices=share_devices)
        context = replace(context, colocated=MappingProxyType(self.workers), address=self._address)
        token = current_context.set(context)
        _log.debug("%s of %s begins on rank %d", bound.cls.__name__, name, context.rank)
        try:
            worker = bound.cls(*bound.args, **bound.kwargs)
        finally:
            current_context.reset(token)
        check_made(worker, bound.cls, context)
        self.workers[name] = worker
        context.declared.closed = True
        _log.debug("%s of %s is made on rank %d", bound.cls.__name__, name, context.rank)
        if profile is None or context.rank not in profile.ranks:
            return dict(context.declared)
        for role, _, method in (call.rpartition(".") for call in profile.calls):
            if role in ("", name) and (call := getattr(self.workers[name], method, None)) is not None:
                self._recorded[name, method] = Recorded(call, profile, f"{name}-{context.rank}-{method}")
        self._functions.clear()
        return dict(context.declared)

    def _log_calls(self) -> None:
        """Log the begin and the end of every call of a worker, which costs nothing where it is not asked for."""
        if self._ships_exceptions and not _log.isEnabledFor(logging.DEBUG):
            _log.setLevel(logging.DEBUG)
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
            _log.addHandler(handler)
        self.execute = self._execute_logged

    def _execute_logged(self, number: int, target: str, method: str, values: Values) -> Outcome:
        if target not in self.workers:
            return WorkerProcess.execute(self, number, target, method, values)
        rank = self.workers[target].ctx.rank
        _log.debug("%s.%s begins on rank %d", target, method, rank)
        outcome = WorkerProcess.execute(self, number, target, method, values)
        took_ms = (outcome.ended_ns - outcome.started_ns) / 1e6
        _log.debug("%s.%s is %s on rank %d after %.3f ms", target, method, outcome.status, rank, took_ms)
        return outcome

    def do_run(
        self, worker: str, function: Callable[..., Any], values: Mapping[str, Any], own: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a shipped function on a worker. Arguments whose names are numbers are positional."""
        named = {**values, **(own or {})}
        args = [named.pop(str(at)) for at in range(len(named)) if str(at) in named]
        context = self.workers[worker].ctx
        token = current_context.set(context)
        try:
            result = function(self.workers[worker], *args, **named)
        finally:
            current_context.reset(token)
        return _wait_within(context, result) if isinstance(result, UNDONE) else result

    def do_record(self, record: Any = None) -> Any:
        """Keep ``record`` for controllers that attach later, if one is given. Returns the record that is kept."""
        self._record = record or self._record
        return self._record

    def do_take_call(self) -> Wanted | None:
        """Wait for the next call that a worker of this process makes; see ``calls/relay.py``."""
        return self._outbox.take()

    def do_deliver(
        self, number: int | None, value: Any = None, error: BaseException | None = None, cause: bytes | None = None
    ) -> None:
        """End a call that a worker of this process made."""
        if error is not None:
            error.__cause__ = unpack_exception(cause)
        self._outbox.deliver(number, value, error)

    def do_store(self) -> Usage | None:
        """The usage of this process's store, or None if it never kept anything."""
        return None if self._store is None else self._store.usage()

    def do_close_worker(self, name: str) -> None:
        """Close a worker and forget it, if it is here."""
        worker = self.workers.pop(name, None)
        self._functions.clear()
        close = getattr(worker, "close", None)
        closing = close() if callable(close) else None
        if isinstance(closing, UNDONE):
            self._await(_Running(name, "close", time.monotonic_ns()), closing)

    def do_shutdown(self) -> None:
        """Close all workers, the last started first, and leave the process group."""
        for name in reversed(list(self.workers)):
            try:
                self.do_close_worker(name)
            except (Exception, SystemExit, GeneratorExit) as error:  # noqa: BLE001 - the others are closed, too
                logging.getLogger("podium").error("close() of worker %r raised: %s", name, format_error(error))
        if self._owns_process_group:
            self.do_break_collectives()
        if self._loop is not None and self._loop_thread is not None:
            self._loop_ends.set()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop_thread.join(LOOP_END_S)
            self._loop = self._loop_thread = None
        self._outbox.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def do_status(self) -> str:
        """What runs here, for how long, and where in the code, for the message of a deadline."""
        now = time.monotonic_ns()
        states = [
            f"runs {request.label} since {(now - request.since_ns) / 1e9:.1f} s, at\n{indent(stack.rstrip(), ' ' * 6)}"
            for request, stack in self._read_stacks().items()
        ]
        return "; ".join(states) or "idle: the request is queued or lost"

    def _read_stacks(self) -> dict[_Running, str]:
        """Return the requests that run beside this one, and the stack of each."""
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage] - nothing else shows another thread's stack
        requests = [request for request in list(self._running.values()) if request.label != "take_call"]
        thread = threading.get_ident()
        return {request: "".join(_stack(frames, request)) for request in requests if request.thread != thread}

    def do_counts(self) -> Sequence[Count]:
        """How far the work is that is counted here."""
        return read_counts()

    def do_cancel(self, cancelled: int) -> bool:
        """Drop request ``cancelled`` if it is queued; cancel it if it is an async endpoint that runs. Returns False if
        it goes on."""
        running = self._running.get(cancelled)
        if running is None:
            self._cancelled.add(cancelled)
            return True
        running.cancelled = True  # where its task does not run yet
        if running.task is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(running.task.cancel)
        return running.task is not None

    def do_break_collectives(self) -> bool:
        """Destroy the process groups, which frees the ranks that wait for this one. Returns False without any."""
        if not self._owns_process_group:
            return False
        import torch.distributed as dist

        self._owns_process_group = False
        world = dist.get_world_size()
        dist.destroy_process_group()
        return world > 1

    def do_collectives(self) -> Collectives | None:
        """The collectives that this rank has begun, and whether a worker is inside one; None without process groups."""
        if not self._owns_process_group:
            return None
        from torch.distributed import distributed_c10d as c10d

        begun: dict[str, int] = {}
        world: Any = c10d._world  # pyright: ignore[reportPrivateUsage] - torch has no public list of all groups
        names: dict[Any, str] = world.pg_names
        for group, name in [*names.items()]:
            with suppress(RuntimeError):  # a group that has not been used yet may have no count
                begun[name] = group._get_sequence_number_for_group()
        stacks = self._read_stacks().values()
        return Collectives(begun, next((stack for stack in stacks if is_inside_collective(stack)), ""))

    def do_limit_collectives(self, timeout_s: float) -> None:
        """Have each collective that begins from now on fail after ``timeout_s`` seconds, in all process groups."""
        if not self._owns_process_group:
            return
        from torch.distributed import distributed_c10d as c10d

        for group in [*c10d._world.pg_map]:  # pyright: ignore[reportPrivateUsage] - a subgroup's ranks know no other
            c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)  # pyright: ignore[reportPrivateUsage]

    def _join(self, context: WorkerContext, timeout_s: float = COLLECTIVES_S, *, share_devices: bool = False) -> None:
        try:
            import torch.distributed as dist

            from podium.devices import collectives_of
        except ImportError:
            return
        if not dist.is_available() or dist.is_initialized():
            self.do_limit_collectives(timeout_s)
            return
        collectives, device = collectives_of(context.devices, shared=share_devices)
        excepthook = sys.excepthook
        dist.init_process_group(
            collectives,
            init_method=context.rendezvous,
            rank=context.rank,
            world_size=context.world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device,
        )
        sys.excepthook = excepthook  # torch's own writes "[rank0]:" before each line of a script's traceback
        self._owns_process_group = True

    def _failure(self, error: BaseException) -> Failure:
        text = format_error(error, _own_part(error))
        kind, message = type(error), read_text(error)
        if isinstance(error, BdbQuit) and self._ships_exceptions:
            message = (
                "a worker process has no terminal for a debugger: run the script on podium.connect('inline'), or "
                f"attach a debugger to process {os.getpid()}"
            )
        name = name_class(error)
        secondary = str(kind.__module__).startswith("torch.distributed") or name.startswith("Dist")
        if isinstance(error, RuntimeError):
            secondary = secondary or any(hint in message or hint in text for hint in _OF_COLLECTIVES)
        original = pack_exception(error) if self._ships_exceptions else error if is_readable(error) else None
        return Failure(name, message, text, original, secondary)


async def _wait_within(context: WorkerContext, undone: Any) -> Any:
    """What comes of ``undone``, which makes workers at the place of ``context``."""
    current_context.set(context)
    return await wait_for_result(undone)


def _leave_cores() -> None:
    """This thread has computed, and others compute next: see :func:`podium.devices.end_idle_threads`."""
    if "torch" in sys.modules:
        from podium.devices import end_idle_threads

        end_idle_threads()


def _own_part(error: BaseException) -> TracebackType | None:
    """The traceback from the worker's own first frame on, without this module's frames."""
    step, start = error.__traceback__, error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename in (__file__, event_loop.__file__) and step.tb_next is not None:
            start = step.tb_next
        step = step.tb_next
    return start


def _stack(frames: Mapping[int, FrameType], running: _Running) -> list[str]:
    waiting: Any = running.coroutine
    lines: list[str] = []
    if waiting is not None and not waiting.cr_running:  # suspended: it is on no thread's stack
        while (frame := getattr(waiting, "cr_frame", None) or getattr(waiting, "gi_frame", None)) is not None:
            lines += traceback.format_stack(frame, 1)
            waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "gi_yieldfrom", None)
    elif running.thread in frames:
        summary = traceback.extract_stack(frames[running.thread])
        inside = [at + 1 for at, entry in enumerate(summary) if entry.filename == __file__] or [0]
        lines = traceback.format_list(summary[inside[-1] :])
    return lines
