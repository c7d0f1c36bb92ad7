"""Records of a call on its way to the hosts and back."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from podium.errors import PodiumError
from podium.runtime.call import Call
from podium.runtime.host import Status

__all__ = ["Flight", "Numbers", "Outgoing", "describe"]

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
        number: what its hosts call it, and a later call too, once no host can hear of this one any more.
        generation: the hosts it was sent to, as their set counts its restarts.
        open: the ranks that have not replied.
        failed: the ranks that raised.
        held: an error that waits for its cause to arrive.
        expired: its deadline has passed and its ranks are being asked what they do.
        cancelled: its hosts were told to drop it.
        breaking: a rank that failed is destroying its process groups.
        next_stall: seconds of waiting after which to warn next.
    """

    call: Call[Any]
    out: Outgoing
    call_id: int
    number: int
    generation: int
    open: set[int]
    submitted_ns: int
    failed: list[int] = field(default_factory=lambda: list[int]())
    held: PodiumError | None = None
    expired: bool = False
    cancelled: bool = False
    breaking: bool = False
    next_stall: float = STALL_S


class Numbers:
    """What hosts call the calls in the air. Used again, since a backend's own software may keep something for each
    that it ever saw; two controllers that call the same host use others."""

    def __init__(self) -> None:
        self._next = itertools.count((int.from_bytes(os.urandom(4)) >> 1) << 32)
        self._free: list[int] = []

    def take(self) -> int:
        try:
            return self._free.pop()
        except IndexError:
            return next(self._next)

    def give_back(self, flight: Flight) -> None:
        """All its hosts have replied or ended. One that was told to drop it may hear of that only now."""
        if not flight.cancelled:
            self._free.append(flight.number)


def describe(status: Status) -> str:
    """What a host is doing, for the message of a deadline."""
    if not status.running:
        return "idle: the request is queued or lost"
    return "; ".join(
        f"runs {label} since {seconds:.1f} s, at\n{_indent(stack)}" for label, seconds, stack in status.running
    )


def _indent(stack: str) -> str:
    return "\n".join("      " + line for line in stack.rstrip().splitlines())
