"""The life of a set of worker processes: started together on a pool, restarted together, ended together."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from podium import telemetry
from podium.errors import ConfigError, DeadlineExceeded, EndpointError, WorkerDied, WorkerStartError
from podium.runtime.backend import Backend
from podium.runtime.calls.call import refuse_in_a_fork
from podium.runtime.calls.deadlines import DeadlineWatch
from podium.runtime.calls.in_flight import Kept
from podium.runtime.calls.process_calls import ProcessCalls, limit_of
from podium.runtime.dispatch import Mesh, World, join_meshes
from podium.runtime.endpoints import Returns
from podium.runtime.messages import Place, ProcessSpec
from podium.runtime.pool import Reservation, ResourcePool
from podium.runtime.profiling import Profile
from podium.runtime.worker import Bound, WorkerContext

START_TIMEOUT_S = 10 * 60.0
ATTACH_S = CLOSE_WORKER_S = 30.0
BUSY_END_S = 0.5  # for processes to close their workers where a call is in flight

_log = logging.getLogger("podium")


@dataclass(frozen=True, kw_only=True)
class StartOptions:
    """How a set of processes is started; see ``Cluster.start``."""

    env: Mapping[str, str] = field(default_factory=dict[str, str])
    start_timeout_s: float = START_TIMEOUT_S
    distributed: bool | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    detached: bool = False


@dataclass(frozen=True)
class Role:
    """A worker that runs in every process of a set, with its meshes by name and the default deadline of its calls. Once
    it is made, ``bound`` is without the arguments. ``join_timeout_s`` is the deadline of its start if it was added to
    processes that ran."""

    bound: Bound[Any]
    meshes: Mapping[str, Mesh]
    timeout_s: float
    returns: Returns
    seed: int = 0
    profile: Profile | None = None
    join_timeout_s: float | None = None

    def seed_of(self, rank: int) -> int:
        """The seed of one rank."""
        return int.from_bytes(hashlib.blake2b(f"{self.seed}/{rank}".encode(), digest_size=4).digest())


@dataclass(frozen=True)
class Record:
    """What a detached group leaves with its processes for those who attach to it."""

    places: Sequence[Place]
    token: Any
    roles: Mapping[str, Role]
    env: Mapping[str, str] = field(default_factory=dict[str, str])


class ProcessSet:
    """The worker processes on a pool. They share one process group of torch.distributed."""

    def __init__(
        self,
        backend: Backend,
        watch: DeadlineWatch,
        pool: ResourcePool,
        name: str,
        threads: Sequence[int],
        options: StartOptions,
        attached: ProcessCalls | None = None,
    ) -> None:
        self.pool = pool
        self.name = name
        self.size = len(pool)
        self.options = options
        self.workers: dict[str, Role] = {}  # what runs in every process; empty once the set is closed
        self.worlds: dict[str, World] = {}  # by worker, with the meshes that its ranks declare
        self.backend = backend
        self.watch = watch
        self._arguments: dict[str, Kept] = {}  # by worker, what it was made of when it was first made
        self._threads = threads
        self._rendezvous = ""
        self._attached = attached is not None
        self._ending = threading.Lock()
        self._closed = False
        self.calls = attached or self._boot(time.monotonic() + options.start_timeout_s)  # a restart replaces them
        for reservation in pool.reservations:
            reservation.holders.append(name)

    @classmethod
    def attach(cls, backend: Backend, watch: DeadlineWatch, name: str) -> tuple[ProcessSet, Record]:
        """The processes of a detached group that another controller started as ``name``. Raises ConfigError if there is
        no such group, or if it is still starting."""
        calls = ProcessCalls(backend, watch, name, ())
        calls.handles = backend.attach(name, calls.on_death)
        calls.relays = True  # the calls of its workers are for the script that started it
        record = None
        if calls.handles:
            (record,) = calls.request(f"{name}.attach", "record", ATTACH_S, {}, ranks=(0,), concurrent=True)
        if not isinstance(record, Record):
            calls.end("")
            state = "is still starting, or its start failed" if calls.handles else "runs here"
            raise ConfigError(f"{'' if calls.handles else 'no '}detached group {name!r} {state}")
        pool = ResourcePool(Reservation(record.token, record.places, detached=True).slots)
        calls.nodes = [slot.node for slot in pool]
        options = StartOptions(detached=True, env=record.env)
        processes = cls(backend, watch, pool, name, (), options, attached=calls)
        processes.workers.update(record.roles)
        processes.worlds.update({role: World(len(pool), how.meshes) for role, how in record.roles.items()})
        return processes, record

    def construct(self, name: str, role: Role, timeout_s: float, until: float) -> None:
        """Make a worker in every process, within ``timeout_s``, which end at ``until``.

        Raises:
            WorkerStartError: A constructor raised or took too long, or a process ended. Its ``rank`` failed first.
            ConfigError: The processes are another controller's.
        """
        if self._attached:
            raise ConfigError(f"group {self.name} belongs to another controller: no worker can be added to it")
        nodes = [slot.node for slot in self.pool]
        visible = self.backend.capabilities.processes
        contexts = [
            WorkerContext(
                rank=rank,
                world_size=self.size,
                local_rank=nodes[:rank].count(slot.node),
                local_world_size=nodes.count(slot.node),
                node=slot.node,
                devices=tuple(range(len(slot.devices))) if visible else slot.devices,
                role=name,
                seed=role.seed_of(rank),
                threads=self._threads[rank],
                rendezvous=self._rendezvous,
                meshes=role.meshes,
            )
            for rank, slot in enumerate(self.pool)
        ]
        shared = {"name": name, "bound": role.bound, "distributed": self.options.distributed, "returns": role.returns}
        shared |= {"profile": role.profile, "share_devices": _share_devices(self.pool)}
        if visible:  # a restart makes it of these, whatever the script has changed in them meanwhile
            shared = self._arguments.setdefault(name, Kept(shared))
        now: dict[str, Any] = {"debug": _log.isEnabledFor(logging.DEBUG)}  # and of these, which may be others by then
        if self._rendezvous and self.size > 1:
            self.calls.collectives_s = self.calls.collectives_s or timeout_s
            now["collectives_s"] = limit_of(timeout_s)
        by_rank = [{"context": context, **now} for context in contexts]
        label = f"{role.bound.cls.__name__}.__init__"
        try:
            declared = self.calls.request(label, "construct", timeout_s, shared, by_rank, until=until)
        except EndpointError as error:
            raise WorkerStartError(
                f"{name}: {error}", rank=error.rank, remote_traceback=error.remote_traceback
            ) from error.__cause__
        except (WorkerDied, DeadlineExceeded) as error:
            rank = error.rank if isinstance(error, WorkerDied) else min(error.running, default=None)
            raise WorkerStartError(f"{name} did not start: {error}", rank=rank, lost=error.lost) from error
        self.worlds[name] = World(self.size, {**role.meshes, **join_meshes(name, role.meshes, declared)})
        self.workers[name] = replace(role, bound=cast(Any, Bound)(role.bound.cls, (), {}))

    def restart(self) -> None:
        """Kill all processes, start new ones in the same slots, and make their workers again. Raises what
        ``WorkerGroup.restart`` raises."""
        if not self.backend.capabilities.processes:
            raise ConfigError(f"{self.name}: this backend has no processes to kill and restart; use 'local', on Linux")
        if self._attached:
            raise ConfigError(
                f"group {self.name} belongs to another controller; stop it with cluster.stop({self.name!r})"
            )
        refuse_in_a_fork(self.watch.process, f"{self.name}.restart()")
        self._end(f"group {', '.join(self.workers)} was restarted while this call was in flight", 0.0)
        timeout_s = self.options.start_timeout_s
        until = time.monotonic() + timeout_s
        try:
            self._take_up(self._boot(until))
            for name, role in list(self.workers.items()):
                own_s = role.join_timeout_s
                if own_s is None:
                    self.construct(name, role, timeout_s, until)
                else:
                    self.construct(name, role, own_s, time.monotonic() + own_s)
        except BaseException as error:
            self.calls.lost.clear()
            self.calls.broken = f"its restart failed ({type(error).__name__})"
            raise

    def close(self, timeout_s: float = 5.0, *, stop_detached: bool = False) -> None:
        """End the processes and leave the pool. Idempotent.

        Idle processes close their workers first, within ``timeout_s``. Where a call is in flight, whose result is lost
        anyway, they have less time. Processes of a detached group run on, unless ``stop_detached``.
        """
        if os.getpid() != self.watch.process:  # a fork ends nothing of its parent's
            return
        with self._ending:
            self._closed = True
        reason = f"group {self.name} was closed while this call was in flight"
        if self.options.detached and not stop_detached:
            self.calls.end(reason)
            self.backend.let_go(self.calls.handles)
            self.calls.handles = ()
        else:
            self._end(reason, min(timeout_s, BUSY_END_S) if self.calls.busy() else timeout_s)
        self.workers.clear()
        self._arguments.clear()
        for reservation in self.pool.reservations:
            if self.name in reservation.holders:
                reservation.holders.remove(self.name)

    def keep_record(self) -> None:
        """Leave a record with every process, so that whoever attaches finds it although other processes have ended."""
        bare = {name: replace(role, meshes=self.worlds[name].meshes) for name, role in self.workers.items()}
        record = Record([slot.place for slot in self.pool], self.pool[0].reservation.token, bare, self.options.env)
        self.calls.request(f"{self.name}.keep_record", "record", ATTACH_S, {"record": record})

    def forget(self, name: str) -> None:
        """Have every process that made a worker close it, behind what the process runs now, since its start failed."""
        self.workers.pop(name, None)
        self._arguments.pop(name, None)
        self.calls.tell("close_worker", {"name": name})

    def close_worker(self, name: str) -> None:
        """Close one of several colocated workers: behind its own calls, and beside those of its siblings. A process
        that is stuck in a call is not asked."""
        del self.workers[name]
        self._arguments.pop(name, None)
        if self.calls.usable and not self.calls.stuck():
            beside = self.calls.busy() and not self.calls.busy(name)
            label = f"{name}.close"
            self.calls.request(label, "close_worker", CLOSE_WORKER_S, {"name": name}, concurrent=beside)

    def _take_up(self, calls: ProcessCalls) -> None:
        """Call these new processes from now on. They end at once where another thread has closed the set meanwhile."""
        with self._ending:
            if not self._closed:
                self.calls = calls
                return
        calls.end("")
        calls.kill(0.0)
        raise ConfigError(f"group {self.name} was closed while it was restarted")

    def _end(self, reason: str, shut_down_s: float) -> None:
        self.calls.end(reason)
        self.calls.kill(shut_down_s)

    def _boot(self, until: float) -> ProcessCalls:
        """Start the processes, which take requests at ``until``."""
        slots = list(self.pool)
        specs = [
            ProcessSpec(
                label=f"{self.name}-{rank}",
                rank=rank,
                place=slot.place,
                token=slot.reservation.token,
                slot=slot.number,
                threads=self._threads[rank],
                env=self.options.env,
                options=self.options.options,
                detached=self.name if self.options.detached else "",
                timeout_s=round(max(0.0, until - time.monotonic()), 2),
            )
            for rank, slot in enumerate(slots)
        ]
        calls = ProcessCalls(self.backend, self.watch, self.name, [slot.node for slot in slots])
        try:
            calls.handles = self.backend.start_processes(specs, calls.on_death)
            self._rendezvous = self.backend.rendezvous(calls.handles) if self.options.distributed is not False else ""
        except BaseException:
            calls.end("")
            calls.kill(0.0)
            raise
        for rank, handle in enumerate(calls.handles):
            telemetry.emit(telemetry.WorkerStarted(role=self.name, rank=rank, node=slots[rank].node, pid=handle.pid))
        return calls


def _share_devices(pool: ResourcePool) -> bool:
    """Whether two slots have the same accelerator: fractions of one, or a slot that is in the pool twice."""
    owners = [
        (slot.node, *slot.devices) if slot.resources.get("gpu", 0.0) < 1 else (id(slot.reservation), slot.number)
        for slot in pool
        if slot.devices
    ]
    return len({*owners}) < len(owners)
