"""A call on its way, and the numbers by which processes know calls."""

import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from podium.errors import PodiumError, SerializationError
from podium.runtime.backend import Backend
from podium.runtime.calls.call import Call
from podium.runtime.collect import Collect
from podium.runtime.dispatch import Split
from podium.runtime.messages import Packed, Reply

HearReply = Callable[[int, Reply], object]
"""A function that is called with the rank of a worker process and its reply."""

Ask = Callable[[Sequence[int], str, Mapping[str, Any], HearReply], None]
"""Sends one request to the worker processes of ranks themselves: its method, its arguments, and what hears replies."""

STALL_S = 60.0
_new_numbers = itertools.count((int.from_bytes(os.urandom(4)) >> 1) << 32)  # two controllers may call one process
_free_numbers: list[int] = []


def take_number() -> int:
    """The processes' name for a call. A number is used again once no process can hear of its call any more, since a
    backend may keep something for each number that it ever saw: Ray keeps 4 kB for every name of a task."""
    try:
        return _free_numbers.pop()
    except IndexError:
        return next(_new_numbers)


def return_number(number: int) -> None:
    """Give back the number of a call of which no process can hear any more."""
    _free_numbers.append(number)


class Kept(dict[str, Any]):
    """Arguments that are packed when they are first sent, and let go. Sent again, they are what they were then."""

    packed: Packed = None


def pack_arguments(backend: Backend, label: str, split: Split) -> tuple[Packed, Sequence[Packed] | None]:
    """The arguments that all ranks of ``split`` get, and those of each rank. Raises SerializationError."""
    try:
        shared = _pack_shared(backend, split.shared, len(split.ranks))
        if split.own is None:
            return shared, None
        packed: dict[int, Packed] = {}  # ranks along the other axes of a mesh hold the very same part: pack it once
        parts = [id(part) for part in split.own]
        for part in split.own:
            if id(part) not in packed:
                packed[id(part)] = backend.pack(part, parts.count(id(part)))
        return shared, [packed[part] for part in parts]
    except SerializationError as error:
        raise SerializationError(f"{label}: {error}") from error.__cause__


def _pack_shared(backend: Backend, values: Mapping[str, Any], readers: int) -> Packed:
    if not isinstance(values, Kept):
        return backend.pack(values, readers)
    if values.packed is None:
        values.packed = backend.pack(dict(values), readers + 1)  # or the only reader might write into what is kept
        values.clear()
    return values.packed


@dataclass(slots=True, eq=False, weakref_slot=True)
class InFlight:
    """A call on its way."""

    call: Call[Any]
    target: str  # name of the worker; "" for a method of the worker process itself
    method: str
    split: Split
    collect: Collect[Any, Any]
    wanted: Sequence[int]  # the ranks whose results count, in the order in which to join them
    open: set[int]  # the ranks that have not replied
    number: int = field(default_factory=take_number)
    call_id: int = field(default_factory=itertools.count().__next__)  # telemetry's name, which is never used again
    submitted_ns: int = field(default_factory=time.monotonic_ns)
    replies: dict[int, Reply] = field(default_factory=dict[int, Reply])  # good ones, by rank
    held: PodiumError | None = None  # an error that waits for its cause to arrive
    expired: bool = False  # the deadline has passed, and the ranks are being asked for their stacks
    cancelled: bool = False  # the ranks were told to drop the call
    breaking: bool = False  # a rank that raised is destroying its process groups
    watched: bool = False  # a thread looks whether a rank waits in a collective for one that raised
    next_stall: float = STALL_S  # seconds of waiting after which the next warning is due
    reported: bool = False  # half the deadline has passed, and the ranks are being asked for their stacks
    counted: object = ()  # how far its ranks were when that warning was due
