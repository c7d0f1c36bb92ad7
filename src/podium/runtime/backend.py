"""The contract between the runtime and a backend; everything else is written once, above it.

A backend lists nodes, reserves slots on them, starts one host a slot and carries requests to hosts. What a host does is
:class:`podium.runtime.host.Host`, in whatever process or object the backend makes. A backend is found by name through
the entry-point group ``podium.backends``; its class is called with the options of ``podium.connect(name, **options)``.
Any thread may call any method here, and ``done`` and ``on_death``, which return quickly and never raise.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from podium.runtime.messages import Capabilities, Death, HostSpec, Node, Packed, Place, Reply, Request

__all__ = ["Backend", "Capabilities", "Death", "HostHandle", "HostSpec", "Node", "Packed", "Place", "Reply", "Request"]


class HostHandle(ABC):
    """A running host. ``pid`` is 0 where it has no process of its own."""

    pid: int = 0

    @abstractmethod
    def invoke(self, request: Request, done: Callable[[Reply], None]) -> None:
        """Send; never waits for the answer. ``done`` is called once, or never if the host dies (then ``on_death``)."""

    @abstractmethod
    def kill(self) -> None:
        """End it and its children by force; returns when it has ended and ``on_death`` has said so. Idempotent. Where
        there is time, the request ``("", "shutdown")`` came before, which closes its workers and not the process."""


class Backend(ABC):
    """A place where hosts run. ``capabilities`` stands in the class, unless it depends on the options."""

    capabilities: Capabilities

    @abstractmethod
    def nodes(self) -> Sequence[Node]:
        """All nodes, in a stable order, as they are now."""

    def reserve(self, places: Sequence[Place], detached: bool) -> tuple[Any, Sequence[Place]]:
        """Hold ``places``, which the runtime has chosen where they are free. Returns a token, which pickles, and the
        places, with other ``devices`` where the cluster hands them out. ``detached``: it outlives this controller.

        Raises PlacementError if they cannot be had within seconds; nothing is held then."""
        return None, places

    def release(self, token: Any) -> None:  # noqa: B027 - nothing is held by default
        """Give a reservation back."""

    @abstractmethod
    def start_hosts(self, specs: Sequence[HostSpec], on_death: Callable[[int, Death], None]) -> Sequence[HostHandle]:
        """Start one host for each spec; all or nothing. A host has started when it takes requests: its workers come
        later, by requests. ``on_death(rank, death)`` reports each end, wanted or not, after all replies that the host
        sent before it. Raises WorkerStartError, or ConfigError for unknown options."""

    def attach(self, name: str, on_death: Callable[[int, Death], None]) -> Sequence[HostHandle]:
        """The hosts, in rank order, of a group that another controller started ``detached``; none if there is none."""
        return ()

    def let_go(self, hosts: Sequence[HostHandle]) -> None:  # noqa: B027 - only where there are detached hosts
        """Forget hosts that go on without this controller."""

    @abstractmethod
    def rendezvous(self, hosts: Sequence[HostHandle]) -> str:
        """A fresh ``init_method`` for torch.distributed that these hosts can reach; "" without collectives."""

    @abstractmethod
    def pack(self, value: Any, readers: int) -> Packed:
        """Make ``value`` ready for ``readers`` hosts; stored once. Raises SerializationError."""

    @abstractmethod
    def unpack(self, payload: Packed) -> Any:
        """The value of a reply's payload, the reader's own to change; at most once. Raises SerializationError."""

    def wait(self, ended: Callable[[], bool], timeout_s: float | None) -> bool | None:
        """Deliver replies in the calling thread, which has nothing else to do, until ``ended()`` or ``timeout_s``.
        False at once if another thread does that just now; None, as here, where replies come in by themselves."""
        return None

    def wake(self) -> None:  # noqa: B027 - nothing to wake by default
        """Let every thread in :meth:`wait` look at ``ended()`` again."""

    @abstractmethod
    def close(self) -> None:
        """End all hosts that are not detached and free everything. Idempotent."""
