"""What passes between the runtime and a backend: places, hosts, requests, replies, deaths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

__all__ = ["Capabilities", "Death", "HostSpec", "Node", "Packed", "Place", "Reply", "Request"]

Resources = Mapping[str, float]
"""Amounts by name: "cpu", "gpu" (accelerators of any make), "memory" (bytes), and whatever else a node has."""

Packed = Any
"""A value as the backend carries it; the runtime only passes it on. It may be sent to many hosts."""


def _nothing() -> dict[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a backend can do; tests and the runtime ask this, never a backend's name."""

    processes: bool  # hosts are processes of their own: they can be killed, restarted and given an environment
    collectives: bool  # torch.distributed works over several ranks
    concurrent: bool  # calls can be in flight while the controller goes on
    exit_status: bool = True  # a death's cause is the exit code or the signal
    detached: bool = False  # a group can outlive its controller and be found by name


@dataclass(frozen=True)
class Node:
    """One machine: a name, all it has, reserved or not, and what others than this controller hold of it, by holder."""

    name: str
    resources: Resources
    taken: Mapping[str, Resources] = field(default_factory=_nothing)


@dataclass(frozen=True)
class Place:
    """Room for one host on a node; ``devices`` are indices of the node's accelerators."""

    node: str
    resources: Resources
    devices: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HostSpec:
    """One host to start.

    Attributes:
        label: its name in logs.
        place: where; the backend makes ``place.devices``, and only them, visible before the worker's code is imported.
        token: what ``Backend.reserve`` gave for the reservation, of which this is place number ``slot``.
        threads: for computing.
        env: set before anything is imported.
        options: the backend's own, from ``cluster.start(options=...)``.
        detached: it outlives this controller; its group's name.
    """

    label: str
    rank: int
    place: Place
    token: Any
    slot: int
    threads: int
    env: Mapping[str, str] = field(default_factory=_nothing)
    options: Mapping[str, Any] = field(default_factory=_nothing)
    detached: str = ""


class Death(NamedTuple):
    """How a host ended: "signal SIGKILL" or "exit code 3", and the last lines of its stderr."""

    cause: str
    last_words: tuple[str, ...] = ()


@dataclass(slots=True)
class Request:
    """One call for one host: ``Host.execute(call_id, target, method, arguments)``, the arguments being ``shared`` and
    ``own`` merged.

    ``wants_result`` is False where only the end of the call matters. A ``concurrent`` request runs at once, beside
    others (``Host.execute_concurrently``); the rest run one at a time in the order sent. ``wire`` is the backend's to
    use: the same request goes to many hosts.
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
