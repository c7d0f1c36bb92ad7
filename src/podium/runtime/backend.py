"""The contract between the runtime and a backend: everything else is written once, above it.

A backend has an inventory, reserves slots of it, starts one host (a process, an actor, an object) a slot, and carries
requests to hosts. A host runs :class:`podium.runtime.host.Host`, which knows workers, endpoints, errors and process
groups, so a backend need not. A backend is found by name through the entry-point group ``podium.backends``; its class
is called with the options of ``podium.connect(name, **options)``.

Threads: the runtime may call every method from any thread. ``done`` and ``on_death`` may be called from any thread, or
within ``invoke`` itself; they return quickly and never raise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

__all__ = ["Backend", "Capabilities", "Death", "HostHandle", "HostSpec", "Node", "Packed", "Reply", "Request"]


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a backend can do; tests and the runtime ask this, never a backend's name."""

    processes: bool  # hosts are processes of their own: they can be killed, restarted and given an environment
    collectives: bool  # torch.distributed works over several ranks
    concurrent: bool  # calls can be in flight while the controller goes on


@dataclass(frozen=True)
class Node:
    """One machine: a name and what it has, such as ``{"cpu": 8, "gpu": 2, "memory": 64e9}`` (memory in bytes)."""

    name: str
    resources: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class HostSpec:
    """One host to start.

    ``devices`` are the node's accelerator indices that it owns: the backend makes them, and only them, visible before
    the worker's code is imported. ``env`` is set before anything is imported. ``label`` is its name in logs.
    """

    label: str
    rank: int
    node: str
    threads: int
    devices: tuple[int, ...] = ()
    resources: Mapping[str, float] = field(default_factory=lambda: dict[str, float]())
    env: Mapping[str, str] = field(default_factory=lambda: dict[str, str]())


class Death(NamedTuple):
    """How a host ended: "signal SIGKILL" or "exit code 3", and the last lines of its stderr."""

    cause: str
    last_words: tuple[str, ...] = ()


Packed = Any
"""A value as the backend carries it; the runtime only passes it on. It may be sent to many hosts."""


@dataclass(slots=True)
class Request:
    """One call for one host: ``Host.handle(target, method, arguments)``, arguments being ``shared`` and ``own`` merged.

    ``wants_result`` is False where only the end of the call matters. A ``concurrent`` request runs at once, beside
    others; the rest run one at a time in the order sent. ``wire`` is the backend's to use.
    """

    call_id: int
    target: str
    method: str
    shared: Packed
    own: Packed | None = None
    wants_result: bool = True
    concurrent: bool = False
    wire: Any = None


class Reply(NamedTuple):
    """What came of a request. ``payload`` is Packed: the result, or for "error" a ``host.Failure``.

    Times are CLOCK_MONOTONIC nanoseconds of the host's machine.
    """

    status: Literal["ok", "error", "cancelled"]
    payload: Packed
    started_ns: int = 0
    ended_ns: int = 0


class HostHandle(ABC):
    """A running host. ``pid`` is 0 where it has no process of its own."""

    pid: int = 0

    @abstractmethod
    def invoke(self, request: Request, done: Callable[[Reply], None]) -> None:
        """Send; never waits for the answer. ``done`` is called once, or never if the host dies (then ``on_death``)."""

    @abstractmethod
    def stop(self, timeout_s: float) -> None:
        """End it in order, by force after ``timeout_s``; returns when it has ended. Idempotent."""

    @abstractmethod
    def kill(self) -> None:
        """End it and its children by force; returns when it has ended. Idempotent."""


class Backend(ABC):
    """A place where hosts run."""

    capabilities: Capabilities

    @abstractmethod
    def nodes(self) -> Sequence[Node]:
        """All nodes with all they have, reserved or not."""

    def reserve(self, specs: Sequence[Mapping[str, float]], nodes: Sequence[str]) -> Any:
        """Hold resources for slots on the nodes named; the runtime has checked that they are free."""
        return None

    def release(self, reservation: Any) -> None:  # noqa: B027 - the backend's own token; nothing held by default
        """Give a reservation back."""

    @abstractmethod
    def start_hosts(
        self,
        reservation: Any,
        specs: Sequence[HostSpec],
        on_death: Callable[[int, Death], None],
    ) -> Sequence[HostHandle]:
        """Start one host for each spec; all or nothing. ``on_death(rank, death)`` reports each end, wanted or not.

        Replies that a host sent before its death are delivered before the death is reported.
        """

    @abstractmethod
    def rendezvous(self, hosts: Sequence[HostHandle]) -> str:
        """A fresh ``init_method`` for torch.distributed that these hosts can reach; "" without collectives."""

    @abstractmethod
    def pack(self, value: Any, readers: int) -> Packed:
        """Make ``value`` ready for ``readers`` hosts; stored once. Raises SerializationError."""

    @abstractmethod
    def unpack(self, payload: Packed) -> Any:
        """The value of a reply's payload. Raises SerializationError."""

    def wait(self, ended: Callable[[], bool], timeout_s: float | None) -> bool:
        """Deliver replies in the calling thread, which has nothing else to do, until ``ended()`` or ``timeout_s``.
        False at once where replies come in by themselves: the caller then sleeps until its call has ended."""
        return False

    def wake(self) -> None:  # noqa: B027 - nothing to wake by default
        """Let every thread in :meth:`wait` look at ``ended()`` again."""

    @abstractmethod
    def close(self) -> None:
        """End all hosts and free everything. Idempotent."""
