"""The life of a set of hosts: started together on a pool, restarted together, ended together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, cast

from podium import telemetry
from podium.errors import ConfigError, DeadlineExceeded, EndpointError, WorkerDied, WorkerStartError
from podium.runtime.backend import Backend, Death, HostHandle, HostSpec, Place, Reply, Request
from podium.runtime.context import WorkerContext
from podium.runtime.endpoint import Returns
from podium.runtime.exchange import Exchange
from podium.runtime.flight import Outgoing
from podium.runtime.mesh import Mesh
from podium.runtime.pool import Reservation, ResourcePool
from podium.runtime.watch import Watch
from podium.runtime.worker import Bound

__all__ = ["HostSet", "StartOptions"]

BUSY_END_S = 0.5
ATTACH_S = 30.0


@dataclass(frozen=True, kw_only=True)
class StartOptions:
    """How a set of hosts is started; see ``Cluster.start``."""

    env: Mapping[str, str]
    start_timeout_s: float
    distributed: bool | None
    options: Mapping[str, Any]
    detached: bool


@dataclass(frozen=True)
class _Constructed:
    name: str
    bound: Bound[Any]
    meshes: Mapping[str, Mesh]
    returns: Returns = "value"


@dataclass(frozen=True)
class Record:
    """What a detached group leaves with its hosts for those who attach to it."""

    places: Sequence[Place]
    token: Any
    workers: Mapping[str, tuple[type, Mapping[str, Mesh], float]]
    """Of each worker: its class, its meshes, the default deadline of its calls."""


class HostSet(Exchange):
    """The hosts on a pool, started together; they share one process group, and restart together."""

    def __init__(
        self,
        backend: Backend,
        watch: Watch,
        pool: ResourcePool,
        name: str,
        threads: Sequence[int],
        options: StartOptions,
    ) -> None:
        super().__init__(backend, watch, pool, name)
        self.options = options
        self.workers: dict[str, _Constructed] = {}
        self.attached = False
        self._threads = threads
        self._contexts: list[WorkerContext] = []
        self._closed = False
        self._boot()

    @classmethod
    def attach(cls, backend: Backend, watch: Watch, name: str) -> tuple[HostSet, Record]:
        """The hosts that another controller started detached as ``name``.

        Raises:
            ConfigError: there are none.
        """
        relay: list[Callable[[int, Death], None]] = []
        handles = backend.attach(name, lambda rank, death: relay[0](rank, death) if relay else None)
        if not handles:
            raise ConfigError(f"no detached group {name!r} runs here")
        record = _record_of(backend, handles[0], name)
        reservation = Reservation(record.token, record.places, detached=True)
        hosts = cls.__new__(cls)
        Exchange.__init__(hosts, backend, watch, ResourcePool(reservation.slots), name)
        hosts.options = StartOptions(env={}, start_timeout_s=ATTACH_S, distributed=False, options={}, detached=True)
        hosts.workers = {
            worker: _Constructed(worker, cast(Any, Bound)(of, (), {}), meshes)
            for worker, (of, meshes, _) in record.workers.items()
        }
        hosts.attached = True
        hosts._threads, hosts._contexts, hosts._closed = (), [], False
        hosts._handles = handles
        relay.append(hosts._on_death)
        return hosts, record

    @property
    def pids(self) -> tuple[int, ...]:
        """Process id of each host, in rank order; 0 where it has no process of its own."""
        return tuple(handle.pid for handle in self._handles)

    def construct(self, name: str, bound: Bound[Any], meshes: Mapping[str, Mesh], returns: Returns = "value") -> None:
        """Make a worker in every host.

        Raises:
            ConfigError: the hosts are another controller's.
            WorkerStartError: a constructor raised, took too long, or its host died; names the first rank that failed.
        """
        if self.attached:
            raise ConfigError(f"group {self.name} is another controller's: no worker can be added to it")
        worker = _Constructed(name, bound, MappingProxyType({"default": Mesh(dp=self.size), **meshes}), returns)
        self._construct(worker)
        self.workers[name] = worker

    def restart(self) -> None:
        """Kill all hosts, start new ones in the same slots and make their workers again. Calls in the air fail;
        nothing is called again.

        Raises:
            ConfigError: the set was closed, or this backend has no processes to kill.
            WorkerStartError: a host or a constructor failed; the set is broken until a restart succeeds.
        """
        if not self.backend.capabilities.processes:
            raise ConfigError(f"{self.name}: this backend has no processes to kill and restart; use 'local'")
        if self._closed:
            raise ConfigError(f"group {self.name} is closed; start another with cluster.start(...)")
        if self.attached:
            raise ConfigError(f"group {self.name} is another controller's; stop it with cluster.stop({self.name!r})")
        names = ", ".join(self.workers) or self.name
        self._end_all(f"group {names} was restarted while this call was in flight", 0.0)
        self.dead.clear()
        self.broken = ""
        self._closing = False
        try:
            self._boot()
            for worker in self.workers.values():
                self._construct(worker)
        except BaseException as error:
            self.broken = f"its restart failed ({type(error).__name__})"
            raise

    def close(self, timeout_s: float = 5.0) -> None:
        """End the hosts: in order where they are idle, by force after ``timeout_s``, or sooner where a call is in the
        air, whose result is lost anyway. Idempotent."""
        self._closed = True
        self._forget_tick()
        if self._flights:
            timeout_s = min(timeout_s, BUSY_END_S)
        reason = f"group {self.name} was closed while this call was in flight"
        if self.options.detached:
            self._fail_flights(reason)
            self.backend.let_go(self._handles)
            self._handles = ()
        else:
            self._end_all(reason, timeout_s)

    def stop(self, timeout_s: float = BUSY_END_S) -> None:
        """End the hosts, whoever started them; detached ones too."""
        self._closed = True
        self._forget_tick()
        self._end_all(f"group {self.name} was stopped while this call was in flight", timeout_s)

    def keep_record(self, workers: Mapping[str, tuple[type, Mapping[str, Mesh], float]]) -> None:
        """Leave with every host what whoever attaches must know, also if others have ended by then."""
        record = Record([slot.place for slot in self.pool], self.pool[0].reservation.token, workers)
        label = f"{self.name}.keep_record"
        self.request(label, Outgoing("", "keep", range(self.size), {"record": record}, None, ()), ATTACH_S).result()

    def close_worker(self, name: str) -> None:
        """Let one of several colocated workers go."""
        del self.workers[name]
        if not self.dead and not self.broken:
            everyone = range(self.size)
            self.request(
                f"{name}.close", Outgoing("", "close_worker", everyone, {"name": name}, None, ()), 30.0
            ).result()

    def _boot(self) -> None:
        self._generation += 1
        generation = self._generation
        slots = list(self.pool)
        specs = [
            HostSpec(
                label=f"{self.name}-{rank}",
                rank=rank,
                place=slot.place,
                token=slot.reservation.token,
                slot=slot.number,
                threads=self._threads[rank],
                env=self.options.env,
                options=self.options.options,
                detached=self.name if self.options.detached else "",
            )
            for rank, slot in enumerate(slots)
        ]

        def on_death(rank: int, death: Death) -> None:
            if generation == self._generation:
                self._on_death(rank, death)

        self._handles = self.backend.start_hosts(specs, on_death)
        rendezvous = self.backend.rendezvous(self._handles) if self.options.distributed is not False else ""
        places = [slot.node for slot in slots]
        self._contexts = [
            WorkerContext(
                rank=rank,
                world_size=self.size,
                local_rank=places[:rank].count(slot.node),
                local_world_size=places.count(slot.node),
                node=slot.node,
                devices=tuple(range(len(slot.devices))) if self.backend.capabilities.processes else slot.devices,
                threads=self._threads[rank],
                rendezvous=rendezvous,
            )
            for rank, slot in enumerate(slots)
        ]
        for rank, handle in enumerate(self._handles):
            telemetry.emit(telemetry.WorkerStarted(role=self.name, rank=rank, node=places[rank], pid=handle.pid))

    def _construct(self, worker: _Constructed) -> None:
        own = [{"context": replace(c, role=worker.name, meshes=worker.meshes)} for c in self._contexts]
        shared = {
            "name": worker.name,
            "bound": worker.bound,
            "distributed": self.options.distributed,
            "returns": worker.returns,
        }
        everyone = range(self.size)
        label = f"{worker.bound.cls.__name__}.__init__"
        out = Outgoing("", "construct", everyone, shared, own, ())
        try:
            self.request(label, out, self.options.start_timeout_s).result()
        except EndpointError as error:
            raise WorkerStartError(
                f"{worker.name}: {error}", rank=error.rank, remote_traceback=error.remote_traceback
            ) from error.__cause__
        except (WorkerDied, DeadlineExceeded) as error:
            rank = error.rank if isinstance(error, WorkerDied) else min(error.running, default=None)
            raise WorkerStartError(f"{worker.name} did not start: {error}", rank=rank) from error

    def _end_all(self, reason: str, timeout_s: float) -> None:
        """End the hosts, in order if they manage within ``timeout_s``."""
        self._fail_flights(reason)
        if timeout_s > 0:
            self._shut_down(timeout_s)
        enders = [threading.Thread(target=handle.kill, daemon=True) for handle in self._handles]
        for ender in enders:
            ender.start()
        for ender in enders:
            ender.join()
        self._generation += 1
        self._handles = ()


def _record_of(backend: Backend, handle: HostHandle, name: str) -> Record:
    replies: list[Reply] = []
    here = threading.Event()

    def note(reply: Reply) -> None:
        replies.append(reply)
        here.set()

    handle.invoke(Request(0, "", "kept", backend.pack({}, 1), None, True, True), note)
    if not here.wait(ATTACH_S):
        raise ConfigError(f"group {name!r} did not say what it is within {ATTACH_S:g} s")
    record = backend.unpack(replies[0].payload)
    if not isinstance(record, Record):
        raise ConfigError(f"group {name!r} is still starting, or its start failed: {record}")
    return record
