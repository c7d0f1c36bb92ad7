"""Records of a call on its way to the hosts and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from podium.errors import PodiumError
from podium.runtime.call import Call
from podium.runtime.host import Status

__all__ = ["Flight", "Outgoing", "describe"]

STALL_S = 60.0


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A call ready to be sent: which ranks, with what, and whose results are wanted in which order."""

    target: str
    method: str
    ranks: Sequence[int]
    shared: Mapping[str, Any]
    own: Sequence[Mapping[str, Any]] | None
    wanted: Sequence[int]
    concurrent: bool = False


@dataclass(slots=True, eq=False)
class Flight:
    """One call in the air.

    Attributes:
        generation: the hosts it was sent to, as their set counts its restarts.
        open: the ranks that have not replied.
        failed: the ranks that raised.
        held: an error that waits for its cause to arrive.
        expired: its deadline has passed and its ranks are being asked what they do.
        breaking: a rank that failed is destroying its process groups.
        next_stall: seconds of waiting after which to warn next.
    """

    call: Call[Any]
    out: Outgoing
    call_id: int
    generation: int
    open: set[int]
    submitted_ns: int
    failed: list[int] = field(default_factory=lambda: list[int]())
    held: PodiumError | None = None
    expired: bool = False
    breaking: bool = False
    next_stall: float = STALL_S


def describe(status: Status) -> str:
    """What a host is doing, for the message of a deadline."""
    if not status.running:
        return "idle: the request is queued or lost"
    return "; ".join(
        f"runs {label} since {seconds:.1f} s, at\n{_indent(stack)}" for label, seconds, stack in status.running
    )


def _indent(stack: str) -> str:
    return "\n".join("      " + line for line in stack.rstrip().splitlines())
