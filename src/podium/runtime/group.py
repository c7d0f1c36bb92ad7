"""Groups of workers, and the handles by which a script calls them."""

from __future__ import annotations

import threading
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import GenericAlias, MappingProxyType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Final,
    Generic,
    NamedTuple,
    NoReturn,
    ParamSpec,
    TypeVar,
    cast,
    overload,
)

from podium.errors import ConfigError, DeadlineExceeded
from podium.functions import nearest
from podium.runtime.calls.call import Call, CallArgument, CurrentProcess, fill_in, find_calls
from podium.runtime.calls.process_calls import WAITS_FOR_ITSELF
from podium.runtime.calls.relay import Outbox, Wanted, reachable, travelled
from podium.runtime.codec import copy_value
from podium.runtime.collect import Collect, check_ranks, concat, first, gather, reduce
from podium.runtime.dispatch import Dispatch, Mesh, OnRanks, PerRank, Ranks, ShippedDispatch, World, broadcast
from podium.runtime.endpoints import Endpoint, EndpointSpec, endpoints_of, spec_of_function
from podium.runtime.pool import ResourcePool
from podium.runtime.process_set import ProcessSet, Role
from podium.runtime.worker import Worker
from podium.spelling import write_count

if TYPE_CHECKING:
    from typing import TypeAlias

    from podium.data import Usage

P = ParamSpec("P")
T = TypeVar("T")
Out = TypeVar("Out")
W = TypeVar("W")
H = TypeVar("H", bound=type[Worker])
Shippable = Callable[Concatenate[Any, P], T]


class _Waiting(NamedTuple):
    """A call that waits for its arguments, or for the calls that were submitted before it."""

    call: Call[Any]
    spec: EndpointSpec
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    takes: Sequence[Call[Any]] = ()  # whose results it waits for

    def unfinished(self) -> list[Call[Any]]:
        """The calls among the arguments that have not ended."""
        return [call for value in (self.args, self.kwargs) for call in find_calls(value) if not call.done()]


def _same(value: Any) -> Any:
    return value


def _stays(obj: Any) -> bool:
    """Whether an argument of a call that waits is as it is in the copy of its arguments."""
    awaits = type(obj) is CallArgument and (not obj.call.done() or obj.call.failed())
    return awaits or isinstance(obj, WorkerHandle)


_REDUCTIONS: Final[Mapping[type[Any], Callable[[Any], Any]]] = {
    PerRank: lambda values: (PerRank, (values.values,)),
    CallArgument: lambda argument: (_same, (argument.call.take(),)),
}


class WorkerGroup(Generic[W]):
    """The workers of one class on all ranks, at ``handle.group``. Endpoints are attributes of the handle itself."""

    def __init__(self, processes: ProcessSet, name: str, role: Role) -> None:
        self.processes = processes  # shared with the workers that are colocated with these
        self.name = name
        self.cls: type = role.bound.cls
        self.timeout_s = role.timeout_s  # default deadline of calls
        self.key = uuid.uuid4().hex  # under which its handles travel
        reachable[self.key] = self
        self._waiting: deque[_Waiting] = deque()
        self._lock = threading.RLock()
        processes.watch.register(self)

    def __repr__(self) -> str:
        return f"{self.name}[{self.world_size}]"

    @property
    def world(self) -> World:
        """The ranks of the group, and its meshes."""
        return self.processes.worlds[self.name]

    @property
    def world_size(self) -> int:
        return self.processes.size

    @property
    def meshes(self) -> Mapping[str, Mesh]:
        return self.world.meshes

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids in rank order; 0 where a rank has no process of its own."""
        return tuple(handle.pid for handle in self.processes.calls.handles)

    @property
    def env(self) -> Mapping[str, str]:
        """The environment variables that ``cluster.start(env=...)`` gave the processes. Another group on the same pool
        has none of them by itself. ``start(..., env=group.env)`` gives it all of them, as a fork has them, and
        ``env={**group.env, "NAME": "..."}`` changes some."""
        return MappingProxyType(self.processes.options.env)

    @property
    def lost(self) -> Mapping[int, str]:
        """The ranks whose process has ended by itself, with the cause."""
        return {rank: death.cause for rank, death in self.processes.calls.lost.items()}

    @property
    def shares_processes_with(self) -> tuple[str, ...]:
        """Names of the workers that are colocated with these. They restart together."""
        return tuple(name for name in self.processes.workers if name != self.name)

    def on(self, ranks: Ranks) -> Handle[W]:
        """The handle of some ranks: ``group.on(1).score(batch)``, ``group.on(slice(2, 4))``, ``group.on([3, 0])``.

        The dispatch and collect of an endpoint work as if the group had these ranks alone, in this order.

        Raises:
            ConfigError: A rank is outside the group or given twice, or there is none.
        """
        return cast(Any, WorkerHandle(self, ranks))

    @overload
    def function(
        self, function: Shippable[P, T], *, on: Ranks | None = ..., dispatch: Dispatch = ..., collect: gather = ...
    ) -> Endpoint[P, list[T]]: ...
    @overload
    def function(
        self, function: Shippable[P, T], *, on: Ranks | None = ..., dispatch: Dispatch = ...,
        collect: concat | first | reduce,
    ) -> Endpoint[P, T]: ...  # fmt: skip
    @overload
    def function(
        self, function: Shippable[P, Any], *, on: Ranks | None = ..., dispatch: Dispatch = ...,
        collect: Collect[Any, Out],
    ) -> Endpoint[P, Out]: ...  # fmt: skip
    def function(
        self,
        function: Callable[..., Any],
        *,
        on: Ranks | None = None,
        dispatch: Dispatch | None = None,
        collect: Collect[Any, Any] | None = None,
    ) -> Endpoint[Any, Any]:
        """An endpoint that runs ``function(worker, ...)``, which travels with each call.

        >>> lengths = group.function(count, dispatch=shard(), collect=concat())  # doctest: +SKIP
        >>> call = lengths.within(timeout_s=60).submit(batch)  # doctest: +SKIP

        Args:
            on: The ranks on which it runs, as in :meth:`on`. Default: all.
            dispatch: As in :func:`~podium.runtime.endpoint`.
            collect: As there.
        """
        spec = spec_of_function(function, dispatch or broadcast(), collect or gather())
        chosen = spec.dispatch if on is None else OnRanks(spec.dispatch, on, self.world_size, self.name)
        return Endpoint(self, replace(spec, dispatch=ShippedDispatch(chosen, self.name, function)))

    def run(self, function: Shippable[P, T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Run ``function(worker, *args, **kwargs)`` on every rank, and return the results in rank order."""
        return self.function(function)(*args, **kwargs)

    def run_on(self, rank: int, function: Shippable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function(worker, *args, **kwargs)`` on one rank, and return its result. Raises ConfigError."""
        if not hasattr(rank, "__index__") or not -self.world_size <= rank < self.world_size:
            raise ConfigError(f"run_on(rank={rank!r}) in {self.name}, which has {write_count(self.world_size, 'rank')}")
        return self.function(function, on=rank, collect=first())(*args, **kwargs)

    def stores(self) -> list[Usage | None]:
        """For each rank, how much it keeps by reference, or None if it never kept anything."""
        label, calls = f"{self.name}.stores", self.processes.calls
        return calls.request(label, "store", self.timeout_s, {}, concurrent=True)

    def give_up(self, needed: WorkerGroup[Any]) -> None:
        """Fail the calls in flight, and refuse later ones until a restart, because the group ``needed`` has lost a
        rank.

        Whoever waits for a result that is of no use without the other group hears of the loss at once. The calls raise
        the WorkerDied of the lost rank. Endpoints that run go on.
        """
        self.processes.calls.give_up(needed.processes.calls)

    def check_alive(self) -> None:
        """Raise WorkerDied if a rank has ended, even if nobody has heard of that yet."""
        self.processes.calls.check_alive(f"{self.name}.check_alive")

    def restart(self) -> None:
        """Kill the processes, start new ones in the same slots, and make all their workers again, colocated ones too.

        Calls in flight fail, no call is repeated, and the state of the workers is lost.

        Raises:
            ConfigError: The group is closed or belongs to another controller, or the backend has no processes to kill.
            WorkerStartError: A process or a constructor failed. The group is broken until a restart succeeds.
        """
        if self.name not in self.processes.workers:
            raise ConfigError(f"group {self.name} is closed; start another with cluster.start(...)")
        self.processes.restart()

    def close(self) -> None:
        """Close these workers. The processes end with the last workers in them. Idempotent."""
        if self.processes.workers.keys() > {self.name}:
            self.processes.close_worker(self.name)
        elif self.name in self.processes.workers:
            self.processes.close()

    def submit(
        self, spec: EndpointSpec, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float | None
    ) -> Call[Any]:
        """Submit one call of an endpoint. It is sent when no argument is an unfinished call, and no earlier call waits.
        The arguments of a call that waits are copied now: the caller may change its tensors.

        What sending raises is raised here if the call is sent at once. Otherwise it fails the call.
        """
        call: Call[Any] = Call(f"{self.name}.{spec.name}", timeout_s or self.timeout_s, self.processes.backend)
        new = _Waiting(call, spec, args, kwargs)
        unfinished = new.unfinished() if args or kwargs else ()
        if not unfinished and not self._waiting:
            self._send(new)
            return call
        args, kwargs = copy_value((args, kwargs), _stays, _REDUCTIONS)
        for awaited in unfinished:
            awaited.lend(1)
        with self._lock:
            self._waiting.append(_Waiting(call, spec, args, kwargs, unfinished))
        for awaited in (call, *unfinished):
            awaited.when_done(self._advance)
        if not unfinished:
            self._advance()
        return call

    def submit_for(self, caller: object, wanted: Wanted) -> Call[Any]:
        """Submit a call that a worker in the processes ``caller`` makes. Raises ConfigError if it waits for itself."""
        spec = endpoints_of(self.cls)[wanted.method]
        if caller is self.processes.calls and not spec.concurrent:
            raise ConfigError(f"{wanted.label}: {WAITS_FOR_ITSELF}")
        if wanted.ranks is not None:
            spec = replace(spec, dispatch=OnRanks(spec.dispatch, wanted.ranks, self.world_size, self.name))
        if wanted.pad is not None:
            spec = replace(spec, dispatch=spec.dispatch.with_pad(wanted.pad))
        values = {name: PerRank(value) if name in wanted.apart else value for name, value in wanted.values.items()}
        return self.submit(spec, (), values, wanted.timeout_s)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a group cannot leave the script that started it; pass the handle")

    def _send(self, waiting: _Waiting) -> None:
        """Replace calls among the arguments by their results, and send. An error of such a call fails this one."""
        call, spec, args, kwargs, _ = waiting
        if args or kwargs:
            try:
                args, kwargs = fill_in(args), fill_in(kwargs)
            except Exception as error:  # noqa: BLE001 - whatever an argument's call failed with is this call's error
                call.fail(error)
                return
        split = spec.dispatch.split(spec.arguments(call.label, args, kwargs), self.world)
        check_ranks(call.label, spec.collect, split)
        target, method = ("", "run") if spec.shipped else (self.name, spec.name)
        self.processes.calls.send(call, target, method, split, spec.collect, spec.concurrent)

    def _advance(self) -> None:
        """Send what can be sent, from a new thread: packing takes time, and the caller may be taking in replies."""
        threading.Thread(target=self._drain, name="podium-pipeline", daemon=True).start()

    def _drain(self) -> None:
        with self._lock:
            while self._waiting:
                first = self._waiting[0]
                if not first.call.done():
                    if first.unfinished():
                        return
                    try:
                        self._send(first)
                    except Exception as error:  # noqa: BLE001 - nobody waits here: whatever it is belongs to the call
                        first.call.fail(error)
                for taken in first.takes:
                    taken.lend(-1)
                self._waiting.popleft()  # only now: submit() sends at once where nothing waits, and would overtake it

    def tick(self, now: float) -> None:
        """End calls whose deadline passes while they wait for their arguments: a deadline counts from submission."""
        for waiting in list(self._waiting):
            call = waiting.call
            if now >= call.deadline and not call.done():
                waits_for = ", ".join(producer.label for producer in waiting.unfinished()) or "the calls before it"
                what = f"{call.label} passed its deadline of {call.timeout_s:g} s while it waited for {waits_for}"
                call.fail(DeadlineExceeded(what, method=waiting.spec.name))


class RemoteGroup:
    """A group in the process of a worker that was given its handle. The script owns it: it restarts and closes it."""

    def __init__(self, key: str, name: str, cls: type, world_size: int, timeout_s: float) -> None:
        self.key, self.name, self.cls, self.world_size, self.timeout_s = key, name, cls, world_size, timeout_s

    def __repr__(self) -> str:
        return f"{self.name}[{self.world_size}]"

    def __getattr__(self, name: str) -> NoReturn:
        what = "is only available in the script that started the group" if hasattr(WorkerGroup, name) else "is unknown"
        raise AttributeError(f"{self.name}.group.{name} {what}; a worker has .on(...), .name and .world_size here")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a group cannot leave the script that started it; pass the handle")

    def on(self, ranks: Ranks) -> Any:
        """As :meth:`WorkerGroup.on`."""
        return WorkerHandle(self, ranks)

    def submit(
        self, spec: EndpointSpec, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float | None
    ) -> Call[Any]:
        """As :meth:`WorkerGroup.submit`, through the script."""
        label = f"{self.name}.{spec.name}"
        values = spec.arguments(label, args, kwargs).values
        for name, value in values.items():
            if any(find_calls(value)):
                raise ConfigError(
                    f"{label}: argument {name!r} is or holds call.arg(), which only the script can pass; a worker "
                    "passes call.result()"
                )
        if Outbox.here is None or Outbox.here.process != CurrentProcess.pid:
            raise ConfigError(
                f"{label}: process {CurrentProcess.pid} is neither the script that started the group nor a worker, and "
                "a process that a worker has started cannot call; call in the worker, and pass the result"
            )
        dispatch = spec.dispatch
        ranks = dispatch.ranks if isinstance(dispatch, OnRanks) else None
        apart = [name for name, value in values.items() if isinstance(value, PerRank)]
        values = {name: value.values if name in apart else value for name, value in values.items()}
        wanted = Wanted(0, self.key, label, spec.name, ranks, values, apart, timeout_s or self.timeout_s, dispatch.pad)
        return Outbox.here.submit(wanted, by_reference=spec.reads != "ref" and not spec.checked)


def _arrive(ranks: Ranks | None, key: str, *facts: Any) -> Any:
    """A handle where it has travelled to: in the script itself, of the group itself."""
    return WorkerHandle(cast(Any, reachable.get(key)) or RemoteGroup(key, *facts), ranks)


class WorkerHandle:
    """The handle that ``cluster.start`` returns. It has an :class:`Endpoint` for each endpoint of the class, and the
    :class:`WorkerGroup` as ``group``. A worker that receives a handle can call the endpoints too."""

    group: WorkerGroup[Any]
    _of: Ranks | None

    def __init__(self, group: WorkerGroup[Any] | RemoteGroup, ranks: Ranks | None = None) -> None:
        own: dict[str, Any] = vars(self)  # __setattr__ refuses
        own["group"], own["_of"] = group, ranks
        for name, spec in endpoints_of(group.cls).items():
            if ranks is not None:
                spec = replace(spec, dispatch=OnRanks(spec.dispatch, ranks, group.world_size, group.name))
            own[name] = Endpoint[Any, Any](self.group, spec)

    def __getattr__(self, name: str) -> Any:
        endpoints = sorted(endpoints_of(self.group.cls)) if "group" in vars(self) else []
        if hasattr(WorkerGroup, name):
            raise AttributeError(
                f"{self.group.name}.{name}: this attribute belongs to the group; use {self.group.name}.group.{name}"
            )
        cls = self.group.cls.__name__
        hint = nearest(name, endpoints)
        if hasattr(self.group.cls, name) and name != "bind" and not name.startswith("__"):
            hint = f"; {cls}.{name} is no method: group.run(lambda worker: worker.{name}) reads it"
            if callable(getattr(self.group.cls, name)):
                hint = (
                    f"; the method {cls}.{name} is not marked: put @endpoint before it, or call group.run({cls}.{name})"
                )
        raise AttributeError(f"{name!r} is no endpoint of {cls}; its endpoints are {endpoints}{hint}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"{self.group.name}.{name} cannot be set: the workers are in other processes, which would not see it; "
            f"{self.group.name}.group.run(setattr, {name!r}, value) sets it on every rank"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        travelled.set()
        group = self.group
        return _arrive, (self._of, group.key, group.name, group.cls, group.world_size, group.timeout_s)

    def __repr__(self) -> str:
        return f"<{self.group.cls.__name__} {self.group}>"

    def __class_getitem__(cls, worker: Any) -> GenericAlias:
        return GenericAlias(cls, worker)


if TYPE_CHECKING:
    Handle: TypeAlias = type[W]
    """The handle of a group of ``W``, for annotations: ``scorers: Handle[Scorer] = cluster.start(...)``.

    A type checker takes a handle for the class. On the class an endpoint is an :class:`Endpoint`, ``group`` is the
    :class:`WorkerGroup`, and what ``__init__`` sets is missing. On a worker an endpoint is the plain method. A method
    that is not marked is found on the class too, but there the checker misses its argument ``self``.
    """
else:
    Handle = WorkerHandle


class Replicas(Sequence[H], Generic[H]):
    """The handles of ``cluster.start_replicas``, in order: ``replicas[0].generate(prompts)``.

    Replicas are placed and restarted one by one. If a replica has lost a process, its calls raise WorkerDied until
    ``restart(number)``. The other replicas continue.
    """

    def __init__(self, handles: Sequence[H], release: Callable[[ResourcePool], None]) -> None:
        self._handles = tuple(handles)
        self._release = release

    @overload
    def __getitem__(self, at: int) -> H: ...
    @overload
    def __getitem__(self, at: slice) -> Replicas[H]: ...
    def __getitem__(self, at: int | slice) -> H | Replicas[H]:
        return Replicas(self._handles[at], self._release) if isinstance(at, slice) else self._handles[at]

    def __len__(self) -> int:
        return len(self._handles)

    def __reduce__(self) -> NoReturn:
        raise TypeError("replicas cannot leave the script that started them; pass list(replicas)")

    @property
    def alive(self) -> list[int]:
        """Numbers of the replicas that have lost no rank and are not broken."""
        calls = [handle.group.processes.calls for handle in self]
        return [number for number, of_one in enumerate(calls) if not (of_one.lost or of_one.broken)]

    def restart(self, number: int) -> None:
        """Restart one replica. Raises what WorkerGroup.restart raises."""
        if not 0 <= number < len(self):
            raise ConfigError(f"restart({number}): there are {write_count(len(self), 'replica')}, from 0")
        self[number].group.restart()

    def submit(self, method: str, *args: Any, **kwargs: Any) -> list[Call[Any]]:
        """Submit a call of the endpoint ``method`` to every replica that is alive, with the same arguments."""
        return [getattr(self[number], method).submit(*args, **kwargs) for number in self.alive]

    def close(self) -> None:
        """Close all replicas and release their slots. Idempotent."""
        for handle in self:
            handle.group.close()
            self._release(handle.group.processes.pool)
