"""The single controller's door: ``connect`` to a backend, reserve pools, start groups."""

from __future__ import annotations

import atexit
import difflib
import inspect
import logging
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from types import TracebackType
from typing import Any, Self, TypeVar, cast, overload

from podium.errors import ConfigError, PlacementError
from podium.runtime.backend import Backend, Capabilities, Node
from podium.runtime.endpoint import Returns
from podium.runtime.group import Colocated, WorkerGroup, WorkerHandle
from podium.runtime.hosts import HostSet, StartOptions
from podium.runtime.mesh import Mesh
from podium.runtime.pool import Inventory, ResourcePool
from podium.runtime.replicas import Replicas
from podium.runtime.watch import Watch
from podium.runtime.worker import Bound, Worker

__all__ = ["Cluster", "ColocatedBound", "backend_class", "backends", "colocate", "connect"]

W = TypeVar("W", bound=Worker)

CALL_TIMEOUT_S = 30 * 60.0
START_TIMEOUT_S = 10 * 60.0
WAIT_LOOKS_S, WAIT_SAYS_S = 0.25, 5.0  # for a pool: how often to look, and to say what is missing

PROTECTED = {
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
}
"""Variables that ``env`` cannot set: which devices a worker sees is its slot's, and its place is in ``self.ctx``."""

_log = logging.getLogger("podium")


@dataclass(frozen=True)
class ColocatedBound:
    """Several workers for the same host processes. Made by :func:`colocate`."""

    workers: Mapping[str, Bound[Any]]


def colocate(**workers: Bound[Any]) -> ColocatedBound:
    """Several named workers in the same host processes, where ``self.ctx.colocated["name"]`` is the plain object.

    They are made in the order given, so a later one may use an earlier one in its constructor.
    """
    if not workers:
        raise ConfigError(
            "colocate() needs at least one worker, as in colocate(actor=Actor.bind(), critic=Critic.bind())"
        )
    return ColocatedBound(dict(workers))


def backends() -> dict[str, EntryPoint]:
    """The backends that are installed, by name."""
    return {entry.name: entry for entry in entry_points(group="podium.backends")}


def connect(backend: str = "local", *, hints: Mapping[str, Any] | None = None, **options: Any) -> Cluster:
    """Connect to a backend by name: "inline", "local", "ray", or any installed one.

    Args:
        backend: a name, or an address of the form ``NAME://…``.
        hints: options for a backend that has them, such as ``log_dir`` and ``preload``; another goes without.
        options: the backend's own.

    Raises:
        ConfigError: no such backend (names the nearest), or an option it does not know.
    """
    cls = backend_class(backend, options)
    known = inspect.signature(cls).parameters
    given = {name: value for name, value in (hints or {}).items() if name in known} | _with_address(backend, options)
    return Cluster(cls(**given), _scheme(backend))


def backend_class(backend: str, options: Mapping[str, Any] | None = None) -> type[Backend]:
    """The class that :func:`connect` would make with these options; nothing is started.

    Raises:
        ConfigError: as :func:`connect`.
    """
    scheme, found = _scheme(backend), backends()
    if scheme not in found:
        near = difflib.get_close_matches(scheme, found, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"no backend {backend!r}; installed are {sorted(found)}{hint}")
    try:
        cls: type[Backend] = found[scheme].load()
    except ImportError as error:
        raise ConfigError(
            f"backend {scheme!r} cannot be loaded: {error}; try: pip install 'podium[{scheme}]'"
        ) from error
    try:
        inspect.signature(cls).bind(**_with_address(backend, options or {}))
    except TypeError as error:
        raise ConfigError(f"connect({backend!r}): {error}; see help({cls.__module__}.{cls.__name__})") from error
    return cls


def _scheme(backend: str) -> str:
    return backend.partition("://")[0]


def _with_address(backend: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """``options``, and the address if ``backend`` is one."""
    return {**options, **({"address": backend} if backend != _scheme(backend) else {})}


class Cluster:
    """A connected backend. ``with`` or :meth:`close` ends everything that was started through it."""

    def __init__(self, backend: Backend, name: str = "") -> None:
        self.backend_name = name or type(backend).__name__
        self._backend = backend
        self._inventory = Inventory(backend)
        self._watch = Watch()
        self._groups: dict[str, WorkerGroup] = {}
        self._names = threading.Lock()
        self._starting: set[str] = set()
        self._closed = False
        atexit.register(self.close)

    @property
    def capabilities(self) -> Capabilities:
        return self._backend.capabilities

    @property
    def nodes(self) -> Sequence[Node]:
        return self._backend.nodes()

    @property
    def groups(self) -> Mapping[str, WorkerGroup]:
        """The groups that run, by name."""
        return {name: group for name, group in list(self._groups.items()) if name in group.hosts.workers}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Cluster {self.backend_name} groups={sorted(self._groups)}>"

    def pool(
        self,
        slots: Sequence[int] = (1,),
        *,
        cpus: float = 0,
        gpus: float = 0,
        memory: float = 0,
        resources: Mapping[str, float] | None = None,
        wait_s: float = 0.0,
        detached: bool = False,
    ) -> ResourcePool:
        """Reserve slots, one host each: ``pool([4])`` is four on one node, ``pool([4, 2])`` two unequal nodes.

        Args:
            slots: slots on each node; every entry gets a node of its own.
            cpus, gpus, memory, resources: what each slot holds (memory in bytes). A slot without ``cpus`` shares
                the node's cores with the other slots. ``gpus`` may be a fraction of one.
            wait_s: how long to wait for what cannot be had at once; every few seconds the log says for what.
            detached: for a detached group: the slots stay reserved until it is stopped.

        Raises:
            PlacementError: it cannot be had; says what is free where and who holds the rest.
        """
        self._refuse_if_closed()
        self._refuse_unless_detached(detached, "pool")
        every = {"cpu": cpus, "gpu": gpus, "memory": memory, **(resources or {})}
        want = {name: amount for name, amount in every.items() if amount}
        until = time.monotonic() + wait_s
        say = 0.0
        while True:
            try:
                return self._inventory.reserve(slots, want, detached=detached)
            except PlacementError as error:
                left = until - time.monotonic()
                if left <= 0:
                    raise
                if time.monotonic() >= say:
                    _log.warning("waiting up to %.0f s more for a pool: %s", left, error)
                    say = time.monotonic() + WAIT_SAYS_S
                time.sleep(min(WAIT_LOOKS_S, left))

    def release(self, pool: ResourcePool) -> None:
        """Give a pool's slots back; PlacementError while a group runs on them."""
        self._inventory.release(pool)

    @overload
    def start(
        self, worker: Bound[W], pool: ResourcePool | None = None, *, into: Any = None, name: str | None = None,
        meshes: Mapping[str, Mesh] | None = None, env: Mapping[str, str] | None = None,
        timeout_s: float = ..., start_timeout_s: float = ..., distributed: bool | None = None,
        options: Mapping[str, Any] | None = None, detached: bool = False, returns: Returns = "value",
    ) -> W: ...  # fmt: skip
    @overload
    def start(
        self, worker: ColocatedBound, pool: ResourcePool | None = None, *, into: Any = None, name: str | None = None,
        meshes: Mapping[str, Mesh] | None = None, env: Mapping[str, str] | None = None,
        timeout_s: float = ..., start_timeout_s: float = ..., distributed: bool | None = None,
        options: Mapping[str, Any] | None = None, detached: bool = False, returns: Returns = "value",
    ) -> Colocated: ...  # fmt: skip
    def start(
        self,
        worker: Bound[Any] | ColocatedBound,
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
    ) -> Any:
        """Start a worker on every slot of ``pool`` (one slot of its own if None) and wait until all are made.

        Args:
            worker: ``Cls.bind(...)``, or ``colocate(...)`` of several.
            into: the handle of a group whose hosts shall hold this worker too, instead of a pool.
            name: role and name in logs; the class's name in lower case unless given.
            meshes: named meshes over the ranks; "default" is ``Mesh(dp=world_size)`` unless given.
            env: environment of the hosts, set before anything is imported there.
            timeout_s: default deadline of the group's calls.
            start_timeout_s: deadline of start-up.
            distributed: whether the hosts form a torch.distributed process group before the constructors run. None:
                where torch is loaded and the backend can.
            options: the backend's own for each host, such as Ray's actor options.
            detached: the group outlives this controller; others find it by ``attach(name)``, and ``stop(name)`` ends
                it. Its pool, if that holds anything, is detached too.
            returns: of its endpoints that do not say themselves: "ref" leaves the tensors of results with the workers.

        Returns:
            A handle typed as the class: its endpoints are called on all ranks. Its ``group`` restarts and closes it.

        Raises:
            WorkerStartError: a host or a constructor failed; what had started is ended.
            ConfigError: not a bound Podium worker, a mesh that does not fit, or what this backend cannot do.
        """
        self._refuse_if_closed()
        if returns not in ("value", "ref"):
            raise ConfigError(f"start(returns={returns!r}): expected 'value' or 'ref'")
        with self._names:
            bounds = self._bounds(worker, name)
            self._starting |= bounds.keys()
        try:
            how = StartOptions(
                env=dict(env or {}),
                start_timeout_s=start_timeout_s,
                distributed=distributed,
                options=dict(options or {}),
                detached=detached,
            )
            return self._start(worker, bounds, pool, into, meshes or {}, how, timeout_s, returns)
        finally:
            with self._names:
                self._starting -= bounds.keys()

    def _start(
        self,
        worker: Bound[Any] | ColocatedBound,
        bounds: Mapping[str, Bound[Any]],
        pool: ResourcePool | None,
        into: Any,
        meshes: Mapping[str, Mesh],
        how: StartOptions,
        timeout_s: float,
        returns: Returns,
    ) -> Any:
        if into is not None:
            hosts = self._hosts_of(into, pool, how)
        else:
            pool = pool if pool is not None else self.pool(detached=how.detached)
            self._check(pool, meshes, how)
            hosts = self._start_hosts(pool, "+".join(bounds), how)
        for mesh_name, mesh in meshes.items():
            if mesh.size != hosts.size:
                raise ConfigError(f"mesh {mesh_name!r} is {mesh} of {mesh.size} ranks; the group has {hosts.size}")
        handles: dict[str, WorkerHandle] = {}
        try:
            for worker_name, bound in bounds.items():
                hosts.construct(worker_name, bound, meshes, returns)
                group = WorkerGroup(hosts, worker_name, bound.cls, meshes, timeout_s)
                self._groups[worker_name] = group
                handles[worker_name] = WorkerHandle(group)
            if how.detached:
                hosts.keep_record({name: (bound.cls, meshes, timeout_s) for name, bound in bounds.items()})
        except BaseException:
            if into is None:
                self._abandon(hosts, list(bounds))
            raise
        return Colocated(handles) if isinstance(worker, ColocatedBound) else next(iter(handles.values()))

    def start_replicas(
        self, worker: Bound[W], count: int, slots: Sequence[int] = (1,), *, name: str | None = None,
        cpus: float = 0, gpus: float = 0, memory: float = 0, resources: Mapping[str, float] | None = None,
        wait_s: float = 0.0, **how: Any,
    ) -> Replicas[W]:  # fmt: skip
        """Start ``count`` independent groups of one worker, ``NAME-0`` and so on, each on a pool of its own.

        Args:
            slots, cpus, gpus, memory, resources, wait_s: of each replica, as in :meth:`pool`.
            how: of each replica, as in :meth:`start`.

        Raises:
            PlacementError, WorkerStartError, ConfigError: all replicas or none; what had started is ended.
        """
        if count < 1:
            raise ConfigError(f"start_replicas(count={count}): at least one")
        with self._names:
            base = name or self._free_name(worker)
        pools: list[ResourcePool] = []
        handles: list[W] = []
        try:
            for _ in range(count):
                own = self.pool(slots, cpus=cpus, gpus=gpus, memory=memory, resources=resources, wait_s=wait_s)
                pools.append(own)  # all are placed before the first one starts
            for number, pool in enumerate(pools):
                handles.append(self.start(worker, pool, name=f"{base}-{number}", **how))
        except BaseException:
            for handle in handles:
                cast(Any, handle).group.close()
            for pool in pools:
                self._inventory.release(pool)
            raise
        return Replicas(handles, self.release)

    def attach(self, name: str) -> Any:
        """The handle of a group that another script started with ``detached=True``; a ``Colocated`` if it holds several
        workers (its name is theirs, joined by "+"). Closing it, or this cluster, leaves it running.

        Raises:
            ConfigError: there is none of this name, it has lost ranks, or this backend has no detached groups.
        """
        self._refuse_if_closed()
        self._refuse_unless_detached(True, "attach")
        hosts, record = HostSet.attach(self._backend, self._watch, name)
        if (alive := len(hosts.pids)) < hosts.size:
            hosts.close()
            raise ConfigError(
                f"group {name!r} has lost {hosts.size - alive} of its {hosts.size} ranks; end it with "
                f"cluster.stop({name!r})"
            )
        handles: dict[str, WorkerHandle] = {}
        for worker, (cls, meshes, timeout_s) in record.workers.items():
            self._groups[worker] = WorkerGroup(hosts, worker, cls, meshes, timeout_s)
            handles[worker] = WorkerHandle(self._groups[worker])
        return Colocated(handles) if len(handles) > 1 else next(iter(handles.values()))

    def stop(self, name: str) -> None:
        """End a detached group, whoever started it, and give its pool back.

        Raises:
            ConfigError: there is none of this name.
        """
        self._refuse_if_closed()
        self._refuse_unless_detached(True, "stop")
        hosts, record = HostSet.attach(self._backend, self._watch, name)
        for group in self._groups.values():
            if group.hosts.name == name and group.hosts.options.detached:
                group.close()  # or its end would be told as a loss
        hosts.stop()
        self._inventory.stopped(record.token)

    def close(self) -> None:
        """End all groups, the last started first, then the backend. Idempotent."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        try:
            for hosts in reversed(list({id(group.hosts): group.hosts for group in self._groups.values()}.values())):
                hosts.close()
            self._groups.clear()
        finally:
            self._watch.close()
            self._backend.close()

    def _bounds(self, worker: Bound[Any] | ColocatedBound, name: str | None) -> dict[str, Bound[Any]]:
        if isinstance(worker, ColocatedBound):
            bounds = dict(worker.workers)
        else:
            bounds = {name or self._free_name(worker): worker}
        for role, bound in bounds.items():
            if not isinstance(bound, Bound):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigError(
                    f"start() takes Cls.bind(...) of a podium.Worker, not {_kind(bound)}; "
                    "a class that a backend has already wrapped (such as @ray.remote) is passed as the plain class"
                )
            if not re.fullmatch(r"\w[\w.-]*", role):
                raise ConfigError(
                    f"name={role!r}: names are letters, digits, '_', '-' and '.'; they name log files too"
                )
            if role in self._starting or role in self.groups:
                raise ConfigError(f"a group named {role!r} runs already; pass another name=")
        return bounds

    def _free_name(self, worker: Any) -> str:
        if not isinstance(worker, Bound):
            return "worker"
        base = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cast(Any, worker).cls.__name__).lower().strip("_")
        taken = self.groups.keys() | self._starting
        numbers = (f"{base}_{number}" for number in range(2, len(taken) + 3))
        return base if base not in taken else next(name for name in numbers if name not in taken)

    def _hosts_of(self, into: Any, pool: ResourcePool | None, how: StartOptions) -> HostSet:
        if pool is not None or how.env or how.options or how.detached:
            raise ConfigError("start(into=group): the hosts run already, so pool, env, options and detached are theirs")
        if not isinstance(into, WorkerHandle):
            raise ConfigError(f"start(into=...): expected a handle that start() returned, not {type(into).__name__}")
        return into.group.hosts

    def _check(self, pool: ResourcePool, meshes: Mapping[str, Mesh], options: StartOptions) -> None:
        can = self._backend.capabilities
        if options.distributed and len(pool) > 1 and not can.collectives:
            raise ConfigError(f"backend {self.backend_name!r} has no collectives over several ranks; use 'local'")
        if options.env and not can.processes:
            raise ConfigError(f"backend {self.backend_name!r} has no processes to give an environment; use 'local'")
        for name in sorted(PROTECTED & options.env.keys()):
            raise ConfigError(
                f"start(env={{{name!r}: ...}}): {name} cannot be set: a worker sees the devices of its slot, and its "
                "rank and world size are in self.ctx"
            )
        self._refuse_unless_detached(options.detached, "start")
        held = [slot.reservation for slot in pool if slot.resources]
        if options.detached and not all(reservation.detached for reservation in held):
            raise ConfigError("start(detached=True): its pool holds resources, so reserve it with pool(detached=True)")
        for mesh_name, mesh in meshes.items():
            if mesh.size != len(pool):
                raise ConfigError(f"mesh {mesh_name!r} is {mesh} of {mesh.size} ranks; the pool has {len(pool)} slots")

    def _start_hosts(self, pool: ResourcePool, name: str, options: StartOptions) -> HostSet:
        if not len(pool):
            raise ConfigError("cannot start a group on an empty pool")
        reservations = list({id(slot.reservation): slot.reservation for slot in pool}.values())
        for reservation in reservations:
            if reservation.released:
                raise ConfigError(f"{pool} has been released; reserve another with cluster.pool(...)")
        hosts = HostSet(self._backend, self._watch, pool, name, self._threads(pool), options)
        for reservation in reservations:
            reservation.holders.append(name)
        return hosts

    def _threads(self, pool: ResourcePool) -> list[int]:
        """Compute threads of each slot: its own cores, or its share of the node's. More threads than cores on one node
        made training steps 15 times slower."""
        cores = {node.name: node.resources.get("cpu", 1) for node in self._backend.nodes()}
        return [
            max(1, int(slot.resources.get("cpu", 0) or cores[slot.node] // max(1, self._inventory.slots_on(slot.node))))
            for slot in pool
        ]

    def _abandon(self, hosts: HostSet, names: Sequence[str]) -> None:
        for worker_name in names:
            self._groups.pop(worker_name, None)
        hosts.stop(timeout_s=0.0)
        for slot in hosts.pool:
            if hosts.name in slot.reservation.holders:
                slot.reservation.holders.remove(hosts.name)

    def _refuse_unless_detached(self, wanted: bool, what: str) -> None:
        if wanted and not self._backend.capabilities.detached:
            raise ConfigError(f"{what}(): backend {self.backend_name!r} has no detached groups; use 'ray'")

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise ConfigError("this cluster is closed; podium.connect() gives another")


def _kind(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"{type(value).__name__} {value!r}"[:120]
