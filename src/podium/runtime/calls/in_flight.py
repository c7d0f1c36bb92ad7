"""Records of calls on their way to worker processes and back."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from podium.errors import PodiumError
from podium.runtime.calls.call import Call
from podium.runtime.messages import Reply

__all__ = ["InFlight", "Numbers"]

STALL_S = 60.0


@dataclass(slots=True, eq=False)
class InFlight:
    """A call on its way.

    Attributes:
        target: Name of the worker; "" for a method of the worker process itself.
        wanted: The ranks whose results count, in the order in which to join them.
        join: Makes the call's result of theirs.
        concurrent: The call runs beside others.
        ranks: The ranks that are called.
        open: Those of them that have not replied.
        replies: Good replies by rank.
        number: The processes' name for the call. It is used again once no process can hear of this call any more.
        call_id: Telemetry's name for the call, which is never used again.
        held: An error that waits for its cause to arrive.
        expired: The deadline has passed, and the ranks are being asked for their stacks.
        cancelled: The ranks were told to drop the call.
        breaking: A rank that raised is destroying its process groups.
        next_stall: Seconds of waiting after which the next warning is due.
    """

    call: Call[Any]
    target: str
    method: str
    wanted: Sequence[int]
    join: Callable[[list[Any]], Any]
    concurrent: bool
    ranks: Sequence[int]
    open: set[int]
    number: int
    call_id: int
    submitted_ns: int
    replies: dict[int, Reply] = field(default_factory=lambda: dict[int, Reply]())
    held: PodiumError | None = None
    expired: bool = False
    cancelled: bool = False
    breaking: bool = False
    next_stall: float = STALL_S


class Numbers:
    """Numbers of calls in flight.

    They are used again, since a backend may keep something for each number that it ever saw: Ray keeps 4 kB for every
    name of a task. They start at random, since two controllers may call the same process.
    """

    def __init__(self) -> None:
        self._next = itertools.count((int.from_bytes(os.urandom(4)) >> 1) << 32)
        self._free: list[int] = []

    def take(self) -> int:
        try:
            return self._free.pop()
        except IndexError:
            return next(self._next)

    def give_back(self, flight: InFlight) -> None:
        """Call this when all ranks have replied or ended. A rank that was told to drop the call may hear of that only
        now, so the number of a cancelled call is not used again."""
        if not flight.cancelled:
            self._free.append(flight.number)
