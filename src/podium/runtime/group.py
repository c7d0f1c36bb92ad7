"""A group of workers as the controller holds it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Concatenate, NoReturn, ParamSpec, TypeVar

from podium.errors import ConfigError, DeadlineExceeded
from podium.runtime.call import Call
from podium.runtime.dispatch import World
from podium.runtime.endpoint import Endpoint, EndpointSpec, endpoints_of
from podium.runtime.flight import Outgoing
from podium.runtime.hosts import HostSet
from podium.runtime.markers import CallArgument
from podium.runtime.mesh import Mesh

if TYPE_CHECKING:
    from podium.data import Usage

__all__ = ["Colocated", "WorkerGroup", "WorkerHandle"]

P = ParamSpec("P")
T = TypeVar("T")

SOON_S = 2.0  # deadlines below it are not left to the watch's next tick


class WorkerGroup:
    """The same worker on every rank: its size, its life, and functions shipped to it. Endpoints are on the handle."""

    def __init__(self, hosts: HostSet, name: str, cls: type, meshes: Mapping[str, Mesh], timeout_s: float) -> None:
        self._hosts = hosts
        self.name = name
        self.cls = cls
        self.world = World(hosts.size, {"default": Mesh(dp=hosts.size), **meshes})
        self.timeout_s = timeout_s
        self._waiting: deque[tuple[Call[Any], EndpointSpec, tuple[Any, ...], dict[str, Any]]] = deque()
        self._waiting_lock = threading.RLock()
        self._forget_tick: Callable[[], None] | None = None

    def __repr__(self) -> str:
        return f"{self.name}[{self.world_size}]"

    @property
    def hosts(self) -> HostSet:
        """The hosts it runs in, shared with the workers colocated with it."""
        return self._hosts

    @property
    def world_size(self) -> int:
        return self.world.size

    @property
    def meshes(self) -> Mapping[str, Mesh]:
        return self.world.meshes

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids in rank order; 0 where a rank has no process of its own."""
        return self._hosts.pids

    @property
    def shares_hosts_with(self) -> tuple[str, ...]:
        """Names of the workers colocated with it: they restart with it."""
        return tuple(name for name in self._hosts.workers if name != self.name)

    def run(self, function: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Ship ``function(worker, *args, **kwargs)`` to every rank; results in rank order."""
        return self._run(range(self.world_size), function, args, kwargs)

    def run_on(self, rank: int, function: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Ship ``function(worker, *args, **kwargs)`` to one rank."""
        if not -self.world_size <= rank < self.world_size:
            raise ConfigError(f"run_on(rank={rank}) in {self.name}, which has {self.world_size} ranks")
        return self._run((rank % self.world_size,), function, args, kwargs)[0]

    def _run(self, ranks: Any, function: Callable[..., T], args: Any, kwargs: Any) -> list[T]:
        shared = {"worker": self.name, "function": function, "args": args, "kwargs": kwargs}
        label = f"{self.name}.{getattr(function, '__name__', 'run')}"
        return self._hosts.request(label, Outgoing("", "run", ranks, shared, None, ranks), self.timeout_s).result()

    def stores(self) -> list[Usage | None]:
        """What each rank keeps by reference, in rank order; None for those that never kept anything."""
        everyone = range(self.world_size)
        out = Outgoing("", "store", everyone, {}, None, everyone, concurrent=True)
        return self._hosts.request(f"{self.name}.stores", out, self.timeout_s).result()

    def restart(self) -> None:
        """Kill the hosts, start new ones in the same slots and make the workers again, colocated ones included.

        No call is repeated: whatever state the workers had is gone.

        Raises:
            ConfigError: it is closed, or the backend has no processes to kill.
            WorkerStartError: a host or a constructor failed; the group is broken until a restart succeeds.
        """
        if self.name not in self._hosts.workers:
            raise ConfigError(f"group {self.name} is closed; start another with cluster.start(...)")
        self._hosts.restart()

    def close(self) -> None:
        """End this worker; the hosts end with the last worker in them. Idempotent."""
        if self.name not in self._hosts.workers:
            return
        if len(self._hosts.workers) > 1:
            self._hosts.close_worker(self.name)
            return
        self._hosts.workers.clear()
        self._hosts.close()
        for reservation in {id(slot.reservation): slot.reservation for slot in self._hosts.pool}.values():
            if self._hosts.name in reservation.holders:
                reservation.holders.remove(self._hosts.name)

    # -- calls ---------------------------------------------------------------------------------------------------

    def submit(
        self, spec: EndpointSpec, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float | None
    ) -> Call[Any]:
        """Submit one call of an endpoint; a call whose arguments are unfinished calls waits for them, and so do the
        calls behind it."""
        call: Call[Any] = Call(f"{self.name}.{spec.name}", timeout_s or self.timeout_s)
        unfinished = _unfinished(args, kwargs)
        if not unfinished and not self._waiting:
            self._launch(call, spec, args, kwargs)
            return call
        with self._waiting_lock:
            self._waiting.append((call, spec, args, kwargs))
            self._forget_tick = self._forget_tick or self._hosts.watch.every_tick(self._tick)
        if call.timeout_s < SOON_S:
            self._hosts.watch.later(call.timeout_s, lambda: self._tick(time.monotonic()))
        call.when_done(self._advance)
        for producer in unfinished:
            producer.when_done(self._advance)
        if not unfinished:
            self._advance()
        return call

    def _advance(self) -> None:
        """Send the waiting calls whose arguments are done, in order. A thread of its own, since packing takes time and
        this is called where a reply came in."""
        threading.Thread(target=self._drain, name="podium-pipeline", daemon=True).start()

    def _drain(self) -> None:
        with self._waiting_lock:
            while self._waiting:
                call, spec, args, kwargs = self._waiting[0]
                if not call.done() and _unfinished(args, kwargs):
                    return
                try:
                    if not call.done():
                        self._launch(call, spec, args, kwargs)
                except Exception as error:  # noqa: BLE001 - nobody waits here: it belongs to the call, whatever it is
                    call.fail(error)
                self._waiting.popleft()  # only now: submit() sends at once when nobody waits, and would overtake it
            if self._forget_tick is not None:
                self._forget_tick()
                self._forget_tick = None

    def _tick(self, now: float) -> None:
        """Waiting for an argument counts: a deadline is fixed at submission."""
        for call, spec, args, kwargs in list(self._waiting):
            if now >= call.deadline and not call.done():
                waits_for = ", ".join(producer.label for producer in _unfinished(args, kwargs)) or "the calls before it"
                call.fail(
                    DeadlineExceeded(
                        f"{call.label} passed its deadline of {call.timeout_s:g} s while it waited for {waits_for}",
                        method=spec.name,
                    )
                )

    def _launch(self, call: Call[Any], spec: EndpointSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if args or kwargs:
            try:
                args = tuple(v.call.result() if type(v) is CallArgument else v for v in args)
                kwargs = {k: v.call.result() if type(v) is CallArgument else v for k, v in kwargs.items()}
            except Exception as error:  # noqa: BLE001 - whether it has failed yet or fails later: it fails the call
                call.fail(error)
                return
        split = spec.dispatch.split(spec.arguments(call.label, args, kwargs), self.world)
        wanted = spec.collect.ranks(split)
        out = Outgoing(self.name, spec.name, split.ranks, split.shared, split.own, wanted, spec.concurrent)
        self._hosts.launch(call, out, lambda results: spec.collect.collect(call.label, results, split))


def _unfinished(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Call[Any]]:
    """The calls among the arguments that are not done."""
    return [v.call for v in (*args, *kwargs.values()) if type(v) is CallArgument and not v.call.done()]


class WorkerHandle:
    """What ``cluster.start`` returns: an :class:`Endpoint` for each endpoint of the class, and ``group``."""

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group
        for name, spec in endpoints_of(group.cls).items():
            setattr(self, name, Endpoint[Any, Any](group, spec))

    def __getattr__(self, name: str) -> Any:
        endpoints = sorted(endpoints_of(self.group.cls)) if "group" in vars(self) else []
        if hasattr(WorkerGroup, name):
            raise AttributeError(
                f"{self.group.name}.{name}: what concerns the group is at {self.group.name}.group.{name}"
            )
        raise AttributeError(f"{name!r} is no endpoint of {self.group.cls.__name__}; its endpoints are {endpoints}")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a handle stays in the controller; colocated workers reach each other by self.ctx.colocated")

    def __repr__(self) -> str:
        return f"<{self.group.cls.__name__} {self.group}>"


class Colocated(Mapping[str, Any]):
    """Handles of several workers that share the same hosts: ``both.policy`` or ``both["policy"]``."""

    def __init__(self, handles: Mapping[str, Any]) -> None:
        self._handles = dict(handles)

    def __getitem__(self, name: str) -> Any:
        return self._handles[name]

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_handles"][name]
        except KeyError:
            raise AttributeError(f"no worker {name!r} here; there are {sorted(self._handles)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._handles)

    def __len__(self) -> int:
        return len(self._handles)
