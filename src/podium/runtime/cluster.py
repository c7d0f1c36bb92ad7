"""Reserve pools on a connected backend, and start groups of workers."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import re
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from numbers import Real
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from podium.errors import ConfigError, PlacementError
from podium.runtime.backend import Backend
from podium.runtime.calls.call import refuse_in_a_fork
from podium.runtime.calls.deadlines import DeadlineWatch
from podium.runtime.calls.process_calls import ProcessCalls
from podium.runtime.calls.progress import ProgressWatch
from podium.runtime.codec import copy_value
from podium.runtime.colocation import Colocated, is_colocated
from podium.runtime.dispatch import Mesh
from podium.runtime.endpoints import Returns, endpoints_of
from podium.runtime.group import Replicas, WorkerGroup, WorkerHandle
from podium.runtime.messages import Capabilities, Node
from podium.runtime.pool import Inventory, ResourcePool, Strategy, whole_numbers
from podium.runtime.process_set import BUSY_END_S, START_TIMEOUT_S, ProcessSet, Role, StartOptions
from podium.runtime.profiling import Profile
from podium.runtime.worker import Bound, Worker
from podium.spelling import write_count

if TYPE_CHECKING:
    from podium.data import TensorStore
    from podium.telemetry.events import Count

T = TypeVar("T")
H = TypeVar("H", bound=type[Worker])

CALL_TIMEOUT_S = 30 * 60.0
LONGEST_VARIABLE = (128 << 10) - 2  # bytes of name and value; "=" and the zero at the end are Linux's
WAIT_LOOKS_S, WAIT_SAYS_S = 0.25, 5.0  # for a pool: how often to look, and to say what is missing

PROTECTED = {
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
}
"""Variables that ``env`` cannot set. The slot decides which devices a worker sees, and its place is in ``self.ctx``."""

_log = logging.getLogger("podium")


class Cluster:
    """A connected backend. The end of the ``with`` block, or :meth:`close`, ends all that the cluster started."""

    def __init__(self, backend: Backend, name: str = "") -> None:
        self.backend_name = name or type(backend).__name__
        self._backend = backend
        self._inventory = Inventory(backend)
        self._watch = DeadlineWatch()
        self._progress = ProgressWatch(self._read_counts)
        self._groups: dict[str, WorkerGroup[Any]] = {}
        self._names = threading.Lock()
        self._starting: set[str] = set()
        self._store: TensorStore | None = None
        self._closed = False
        atexit.register(self.close)

    @property
    def capabilities(self) -> Capabilities:
        return self._backend.capabilities

    @property
    def nodes(self) -> Sequence[Node]:
        return self._backend.nodes()

    @property
    def groups(self) -> Mapping[str, WorkerGroup[Any]]:
        """The groups that run, by name."""
        return {name: group for name, group in self._groups.copy().items() if name in group.processes.workers}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Cluster {self.backend_name} groups={sorted(self._groups)}>"

    def pool(
        self,
        slots: Sequence[int] | int | None = None,
        *,
        spread: int | None = None,
        strategy: Strategy = "pack",
        labels: Mapping[str, str] | None = None,
        cpus: float | Sequence[float] = 0,
        gpus: float | Sequence[float] = 0,
        memory: float | Sequence[float] = 0,
        resources: Mapping[str, float | Sequence[float]] | None = None,
        accelerator: str = "",
        wait_s: float = 0.0,
        detached: bool = False,
    ) -> ResourcePool:
        """Reserve slots, each for one worker process.

        ``pool(4)`` and ``pool([4])`` are four slots on one node, ``pool([4, 2])`` is two nodes with unequal numbers of
        slots, and ``pool(spread=6)`` is six slots on whichever nodes have room. ``pool()`` is one slot.

        Args:
            slots: Number of slots on each node. Every entry gets a node of its own.
            spread: Total number of slots, instead of ``slots``. They go to as few nodes as have room for all of them,
                divided as equally as the room allows.
            strategy: "spread" takes the nodes with the most room, and with ``spread=N`` as many nodes as there are.
                "pack" takes as few nodes as possible, the fullest ones that have room.
            labels: Labels that every node has to have, such as ``{"zone": "a"}``.
            cpus: Cores that each slot holds, or a sequence of numbers, one for each slot. A slot without ``cpus``
                shares the node's cores with the other slots.
            gpus: Accelerators of each slot, likewise. A slot may have a fraction of an accelerator.
            memory: Bytes of each slot likewise.
            resources: Amounts of other resources likewise, by their names.
            accelerator: Kind of the accelerators, by words of their model, such as "H100" or "A100 80GB".
            wait_s: Seconds to wait for room. Every few seconds the log says which resources are missing.
            detached: The slots are for a detached group, and stay reserved until that group is stopped.

        Raises:
            PlacementError: There is no room. The message says what is free where and who holds the rest.
            ConfigError: Both ``slots`` and ``spread`` are given, or a number is out of its range.
        """
        self._refuse_unless_open("pool", detached)
        if slots is not None and spread is not None:
            raise ConfigError(
                f"pool({slots}, spread={spread}): give slots, as in pool(4) for four on one node, or spread, as in "
                "pool(spread=4) for four on whichever nodes have room"
            )
        layout = whole_numbers(spread if spread is not None else 1 if slots is None else slots, "pool")
        if spread is None and isinstance(layout, int):
            layout = [layout]
        if not isinstance(accelerator, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"pool(accelerator={accelerator!r}): expected words of a model, such as 'A100 80GB'")
        amounts = {"cpu": cpus, "gpu": gpus, "memory": memory, **(resources or {})}
        want = _slot_by_slot(layout, amounts)
        until, say = time.monotonic() + wait_s, 0.0
        while True:
            try:
                return self._inventory.reserve(
                    layout, want, strategy=strategy, labels=labels, accelerator=accelerator, detached=detached
                )
            except PlacementError as error:
                now = time.monotonic()
                if now >= until:
                    raise
                if now >= say:
                    _log.warning("waiting up to %.0f s more for a pool: %s", until - now, error)
                    say = now + WAIT_SAYS_S
                time.sleep(min(WAIT_LOOKS_S, until - now))

    def release(self, pool: ResourcePool) -> None:
        """Release the slots of a pool. Raises PlacementError while a group runs on them, or ConfigError if the pool
        belongs to another cluster.
        """
        self._inventory.release(pool)

    def put(self, value: T) -> T:
        """Store the tensors of ``value`` once, and return the value with a :class:`podium.TensorRef` in place of each
        tensor. Calls that take the result send references, so a batch for three groups is stored once.

        The same tensors become references as in a result with ``returns="ref"``. The memory is freed with the last
        reference.

        Raises:
            ConfigError: ``value`` has no tensors.
            StoreFullError: There is no room.
        """
        self._refuse_unless_open("put", detached=False)
        from podium.data.structure import keep, map_tensors

        tensors: list[object] = []

        def note(tensor: object) -> object:
            tensors.append(tensor)
            return tensor

        map_tensors(value, note)
        if not tensors:
            raise ConfigError(
                f"put(): {type(value).__name__} holds no tensors; put() stores a tensor, or a Batch, dict, list or "
                "tuple of tensors. Pass other values to calls directly"
            )

        with self._names:
            self._store = self._store or self._backend.store()
        return keep(value, self._store, "the controller")

    def start(
        self,
        worker: Bound[T],
        pool: ResourcePool | None = None,
        *,
        into: Any = None,
        name: str | None = None,
        meshes: Mapping[str, Mesh] | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
        start_timeout_s: float = START_TIMEOUT_S,
        distributed: bool | None = None,
        options: Mapping[str, Any] | None = None,
        detached: bool = False,
        returns: Returns = "value",
        seed: int = 0,
        profile: Profile | None = None,
    ) -> T:
        """Start a worker on every slot of ``pool`` and wait until all are made.

        The endpoints of the handle that is returned are called on all ranks, and its ``group`` restarts and closes the
        workers. The handle of a ``Scorer`` is a :data:`~podium.runtime.Handle`, ``Handle[Scorer]``, for a type checker.

        Args:
            worker: ``Cls.bind(...)``, or ``colocate(...)`` of several.
            pool: The slots, one a rank. Default: one slot of its own.
            into: Handle of a group whose processes also hold this worker, instead of a pool.
            name: Role and name in logs. Default: the class's name in lower case. For ``colocate(...)``, whose workers
                have names, it names their processes. Default: the workers' names joined by "+".
            meshes: Meshes over the ranks, by name. "default" is ``Mesh(dp=world_size)`` unless given.
            env: Environment variables of the processes, which are set before anything is imported there.
            timeout_s: Default deadline of the group's calls.
            start_timeout_s: Deadline of the whole start, from the processes to the last constructor, and likewise of
                a restart.
            distributed: Whether the processes form a torch.distributed process group before the constructors run.
                Default: if torch is loaded and the backend has collectives.
            options: Options of the backend for each process, such as those of an actor.
            detached: The group outlives this controller. Others find it by ``attach(name)``, and ``stop(name)`` ends
                it. A pool that holds resources must be detached too.
            returns: Default for endpoints that do not set ``returns``. "ref" leaves the tensors of results with the
                workers.
            seed: Seed of the group, from which each rank's ``ctx.seed`` follows.
            profile: Calls to record with torch.profiler. Colocated workers record those that they have;
                "policy.update" means one of them.

        Raises:
            WorkerStartError: A process or a constructor failed. Processes that had started are ended.
            ConfigError: ``worker`` is not a bound Podium worker, a mesh does not fit, or the backend cannot do this.
        """
        self._refuse_unless_open("start", detached)
        _check_start(timeout_s, start_timeout_s, returns, seed)
        start_timeout_s = min(start_timeout_s, threading.TIMEOUT_MAX)
        until = time.monotonic() + start_timeout_s
        how = StartOptions(
            env=_check_env(env or {}),
            start_timeout_s=start_timeout_s,
            distributed=distributed,
            options=copy_value(dict(options or {})),  # a restart starts as now
            detached=detached,
        )
        with self._naming(worker, name, into) as (label, bounds):
            shared = None if into is None else _processes_of(into, pool, how, self._backend)
            slots = self._check_pool(pool, how) if shared is None else shared.pool
            meshes = _with_default(meshes, len(slots))
            if profile is not None:
                methods = [(role, method) for role, bound in bounds.items() for method in endpoints_of(bound.cls)]
                profile.check([*(method for _, method in methods), *map(".".join, methods)], len(slots))
            joins_s = None if shared is None else start_timeout_s
            roles = {
                role: Role(bound, meshes, timeout_s, returns, int(seed), profile, joins_s)
                for role, bound in bounds.items()
            }
            processes = shared or ProcessSet(self._backend, self._watch, slots, label, self._threads(slots), how)
            handles = self._construct(processes, roles, how, until, into_running=shared is not None)
        several: type[Any] | None = worker.cls if issubclass(worker.cls, Colocated) else None
        return cast(T, several(handles) if several else next(iter(handles.values())))

    def start_replicas(
        self, worker: Bound[H], count: int, slots: Sequence[int] | int = 1, *, name: str | None = None,
        cpus: float = 0, gpus: float = 0, memory: float = 0, resources: Mapping[str, float] | None = None,
        accelerator: str = "", wait_s: float = 0.0, seed: int = 0, **how: Any,
    ) -> Replicas[H]:  # fmt: skip
        """Start ``count`` independent groups of one worker, ``NAME-0`` and so on, each on a pool of its own.

        Args:
            count: Number of replicas.
            slots: Number of slots of each replica on each node. The arguments from ``slots`` to ``wait_s`` are as in
                :meth:`pool`.
            name: Beginning of the replicas' names.
            cpus: Cores of each slot.
            gpus: Accelerators of each slot.
            memory: Bytes of each slot.
            resources: Other resources of each slot.
            accelerator: Kind of the accelerators.
            wait_s: Seconds to wait for room for a replica.
            seed: Seed of the first replica. Each further replica has the next number.
            how: Further arguments of :meth:`start`, for each replica.

        Raises:
            PlacementError, WorkerStartError, ConfigError: A replica could not be started. Replicas that had started are
                ended.
        """
        if not hasattr(count, "__index__") or count < 1:
            raise ConfigError(f"start_replicas(count={count}): a whole number from 1 up")
        base = name or self._free_name(worker)
        pools: list[ResourcePool] = []
        handles: list[H] = []
        try:
            for _ in range(count):
                own_pool = self.pool(
                    slots, cpus=cpus, gpus=gpus, memory=memory, resources=resources, accelerator=accelerator,
                    wait_s=wait_s,
                )  # fmt: skip
                pools.append(own_pool)  # all are placed before the first one starts
            for number, pool in enumerate(pools):
                handles.append(self.start(worker, pool, name=f"{base}-{number}", seed=seed + number, **how))
        except BaseException:
            for handle in handles:
                handle.group.close()
            for pool in pools:
                self._inventory.release(pool)
            raise
        return Replicas(handles, self.release)

    def attach(self, name: str) -> Any:
        """The handle of a group that another script started with ``detached=True``.

        The group continues when the handle or this cluster is closed. The name of a group of colocated workers is the
        ``name`` given to ``start``, or else their names joined by "+", and its handle is a ``Colocated``.

        Raises:
            ConfigError: There is no group of this name, it has lost ranks, or this backend has no detached groups.
        """
        self._refuse_unless_open("attach", detached=True)
        processes, record = ProcessSet.attach(self._backend, self._watch, name)
        if (alive := len(processes.calls.handles)) < processes.size:
            processes.close()
            raise ConfigError(
                f"group {name!r} has lost {processes.size - alive} of its {write_count(processes.size, 'rank')}; end "
                f"it with cluster.stop({name!r})"
            )
        handles = {role_name: self._add_group(processes, role_name, role) for role_name, role in record.roles.items()}
        return Colocated(handles) if len(handles) > 1 else next(iter(handles.values()))

    def stop(self, name: str) -> None:
        """End a detached group, whoever started it, and release its pool.

        Raises:
            ConfigError: There is no group of this name.
        """
        self._refuse_unless_open("stop", detached=True)
        processes, record = ProcessSet.attach(self._backend, self._watch, name)
        for group in self._groups.values():
            if group.processes.name == name and group.processes.options.detached:
                group.close()  # or its end would be told as a loss
        processes.close(BUSY_END_S, stop_detached=True)
        self._inventory.stopped(record.token)

    def close(self) -> None:
        """End all groups, the last started first, then the backend. Idempotent."""
        if self._closed or os.getpid() != self._watch.process:  # a fork ends nothing of its parent's
            return
        self._closed = True
        atexit.unregister(self.close)
        try:
            for processes in dict.fromkeys(group.processes for group in reversed(self._groups.values())):
                processes.close()
            self._groups.clear()
        finally:
            self._progress.close()
            self._watch.close()
            self._backend.close()

    def _read_counts(self, after_s: float) -> list[Count]:
        ticking = self._watch.registered()
        return [count for calls in ticking if isinstance(calls, ProcessCalls) for count in calls.read_counts(after_s)]

    @contextmanager
    def _naming(
        self, worker: Bound[Any], name: str | None, into: object
    ) -> Generator[tuple[str, Mapping[str, Bound[Any]]]]:
        """Give the name of the processes, and the workers by their names. No other start takes these names during the
        block."""
        with self._names:
            bounds = self._bounds(worker, name, into)
            label = name or "+".join(bounds)
            mine = {label, *bounds}
            self._starting |= mine
        try:
            yield label, bounds
        finally:
            with self._names:
                self._starting -= mine

    def _bounds(self, worker: Bound[Any], name: str | None, into: object) -> Mapping[str, Bound[Any]]:
        """The workers to start by their names, which nobody else has."""
        several = is_colocated(worker)
        if several and name and into is not None:
            raise ConfigError(f"start(colocate(...), into=..., name={name!r}): the processes have their name already")
        bounds: dict[str, Bound[Any]] = worker.kwargs if several else {name or self._free_name(worker): worker}
        taken = self._starting | self.groups.keys() | {group.processes.name for group in self.groups.values()}
        for bound in bounds.values():
            if not isinstance(bound, Bound) or is_colocated(bound):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigError(
                    f"start() takes Cls.bind(...) of a podium.Worker, not {_kind(bound)}; "
                    "a class that a backend has already wrapped (such as @ray.remote) is passed as the plain class"
                )
        for worker_name in {*bounds, name or next(iter(bounds))}:
            if not isinstance(worker_name, str) or not re.fullmatch(r"\w[\w.-]{0,99}", worker_name):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigError(
                    f"name={worker_name!r}: a name has at most 100 letters, digits, '_', '-' and '.', because it "
                    "becomes part of the names of log files"
                )
            if worker_name in taken:
                raise ConfigError(f"a group named {worker_name!r} runs already; pass another name=")
        return bounds

    def _free_name(self, worker: Any) -> str:
        if not isinstance(worker, Bound):
            return "worker"
        base = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cast(Any, worker).cls.__name__).lower().strip("_")
        taken = self.groups.keys() | self._starting
        names = itertools.chain([base], (f"{base}_{number}" for number in itertools.count(2)))
        return next(name for name in names if name not in taken)

    def _add_group(self, processes: ProcessSet, name: str, role: Role) -> WorkerHandle:
        self._groups[name] = WorkerGroup(processes, name, role)
        return WorkerHandle(self._groups[name])

    def _construct(
        self, processes: ProcessSet, roles: Mapping[str, Role], how: StartOptions, until: float, *, into_running: bool
    ) -> dict[str, WorkerHandle]:
        """Make the workers ``roles`` in ``processes`` until ``until``. After an error none of them is left, and neither
        are the processes, unless they ran before."""
        handles: dict[str, WorkerHandle] = {}
        try:
            for name, role in roles.items():
                processes.construct(name, role, how.start_timeout_s, until)
                handles[name] = self._add_group(processes, name, role)
            if how.detached:
                processes.keep_record()
        except BaseException:
            if into_running:
                for name in roles:
                    processes.forget(name)
            else:
                processes.close(0.0, stop_detached=True)
            raise
        return handles

    def _check_pool(self, pool: ResourcePool | None, options: StartOptions) -> ResourcePool:
        """Return ``pool``, or a slot reserved in its place. Raises ConfigError if no group can be started there with
        these options."""
        pool = pool if pool is not None else self.pool(detached=options.detached)
        if not isinstance(cast(object, pool), ResourcePool):
            raise ConfigError(f"start(pool={pool!r}): a pool is reserved by the cluster, as cluster.pool(2)")
        if not len(pool):
            raise ConfigError("cannot start a group on an empty pool")
        if any(reservation.released for reservation in pool.reservations):
            raise ConfigError(f"{pool} has been released; reserve another with cluster.pool(...)")
        if not any(reservation.detached for reservation in pool.reservations):  # one may be of a group attached to
            self._inventory.refuse_others(pool)
        can = self._backend.capabilities
        if options.distributed and len(pool) > 1 and not can.collectives:
            raise ConfigError(
                f"backend {self.backend_name!r} has no collectives over several ranks; use 'local', on Linux"
            )
        self._backend.check_options(options.options)
        if options.env and not can.processes:
            raise ConfigError(
                f"backend {self.backend_name!r} has no processes to give an environment; use 'local', on Linux"
            )
        for name in sorted(PROTECTED & options.env.keys()):
            raise ConfigError(
                f"start(env={{{name!r}: ...}}): {name} cannot be set: a worker sees the devices of its slot, and its "
                "rank and world size are in self.ctx"
            )
        reservations = [slot.reservation for slot in pool if slot.resources]
        if options.detached and not all(reservation.detached for reservation in reservations):
            raise ConfigError("start(detached=True): its pool holds resources, so reserve it with pool(detached=True)")
        return pool

    def _threads(self, pool: ResourcePool) -> list[int]:
        """Number of threads for computing of each slot: its own cores, or its share of the node's. More threads than
        cores would slow one another down."""
        cores = {node.name: node.resources.get("cpu", 1) for node in self._backend.nodes()}
        return [
            max(1, int(slot.resources.get("cpu", 0) or cores[slot.node] // max(1, self._inventory.slots_on(slot.node))))
            for slot in pool
        ]

    def _refuse_unless_open(self, what: str, detached: bool) -> None:
        if self._closed:
            raise ConfigError("this cluster is closed; podium.connect() gives another")
        if self.capabilities.concurrent:
            refuse_in_a_fork(self._watch.process, f"{what}()")
        if detached and not self._backend.capabilities.detached:
            raise ConfigError(
                f"{what}(): backend {self.backend_name!r} has no detached groups; `podium backends` shows who has"
            )


def _slot_by_slot(
    layout: Sequence[int] | int, amounts: Mapping[str, float | Sequence[float]]
) -> Mapping[str, float] | list[Mapping[str, float]]:
    """The amounts of every slot, or of each if they differ."""
    lists = {name: [*amount] for name, amount in amounts.items() if isinstance(amount, Sequence)}
    if not lists:
        return cast("Mapping[str, float]", amounts)
    if isinstance(layout, int):
        raise ConfigError(
            f"pool(spread={layout}): slots that differ need a node each, as in pool([2, 1], gpus=[1, 1, 4]); "
            f"{', '.join(lists)} is given slot by slot"
        )
    total = sum(layout)
    for name, values in lists.items():
        if len(values) != total:
            raise ConfigError(
                f"pool({[*layout]}): {write_count(total, 'slot')}, and {write_count(len(values), 'amount')} of "
                f"{name}: {values}"
            )
    return [
        {name: lists[name][at] if name in lists else cast(float, amount) for name, amount in amounts.items()}
        for at in range(total)
    ]


def _check_start(timeout_s: object, start_timeout_s: object, returns: object, seed: object) -> None:
    """Raise ConfigError for arguments of ``start`` that are of another type or have another value than it takes."""
    for argument, seconds in (("timeout_s", timeout_s), ("start_timeout_s", start_timeout_s)):
        if not isinstance(seconds, Real) or not float(seconds) > 0:
            raise ConfigError(f"start({argument}={seconds!r}): expected a number of seconds above 0")
    if returns not in ("value", "ref"):
        raise ConfigError(f"start(returns={returns!r}): expected 'value' or 'ref'")
    if not hasattr(seed, "__index__"):
        raise ConfigError(f"start(seed={seed!r}): a seed is a whole number")


def _check_env(env: Mapping[str, str]) -> dict[str, str]:
    """``env``, whose names and values an operating system takes. Raises ConfigError for others."""
    if not isinstance(env, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"start(env={_kind(env)}): expected a dict of names of variables and their texts")
    for name, value in env.items():
        texts = isinstance(name, str) and isinstance(value, str)  # pyright: ignore[reportUnnecessaryIsInstance]
        entry = b""
        if texts and name and "=" not in name and "\0" not in name + value:
            with suppress(UnicodeEncodeError):  # half of a surrogate pair, which no operating system takes
                entry = os.fsencode(name + value)
        if not entry:
            raise ConfigError(f"start(env={{{name!r}: {value!r}}}): expected the name of a variable and its text")
        if len(entry) > LONGEST_VARIABLE:
            raise ConfigError(
                f"start(env={{{name!r}: ...}}): {len(value):,} characters are too long for Linux, which "
                "gives a program at most 128 KiB of each variable; pass the text to the constructor, or a file's name"
            )
    return dict(env)


def _kind(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"{type(value).__name__} {value!r}"[:120]


def _processes_of(into: Any, pool: ResourcePool | None, how: StartOptions, backend: Backend) -> ProcessSet:
    if pool is not None or how.env or how.options or how.detached:
        raise ConfigError(
            "start(into=group): the group's processes run already; leave out pool, env, options and detached"
        )
    if not isinstance(into, WorkerHandle):
        raise ConfigError(f"start(into=...): expected a handle that start() returned, not {type(into).__name__}")
    if into.group.processes.backend is not backend:
        raise ConfigError(f"start(into={into}): this group is of another cluster; start the worker there")
    return into.group.processes


def _with_default(meshes: Mapping[str, Mesh] | None, ranks: int) -> Mapping[str, Mesh]:
    """``meshes`` and the default one. Raises a ConfigError if one does not fit the number of ranks."""
    for name, mesh in (meshes or {}).items():
        if not isinstance(mesh, Mesh):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"start(meshes={{{name!r}: {mesh!r}}}): expected a mesh, as in Mesh(dp={ranks})")
        if mesh.size != ranks:
            raise ConfigError(f"mesh {name!r} is {mesh} of {write_count(mesh.size, 'rank')}; the group has {ranks}")
    return MappingProxyType({"default": Mesh(dp=ranks), **(meshes or {})})
