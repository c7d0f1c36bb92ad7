"""Values on their way through Ray: small ones inside the message, large ones in its object store.

A message is one ``bytes``: Ray spends about 30 µs on every further argument. Large values lie in the object store as a
list of byte arrays, which readers map without a copy. Where there is one reader (a result, a rank's own part of an
argument) the mapping is its own to write into; one of several gets a copy, in memory that was touched before. What a
value refers to goes beside it as references to objects of the store.
"""

from __future__ import annotations

import ctypes
import pickle
import struct
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from podium.backends.ray.store import FULL, INLINE_BYTES, no_room, openers
from podium.backends.ray.untyped import ray
from podium.runtime.codec import decode, encode
from podium.runtime.worker_process import Outcome, pack_outcome

__all__ = [
    "NO_VALUES",
    "Parcel",
    "bare_name",
    "outcome_to_wire",
    "pack",
    "read_bare_name",
    "wire_to_outcome",
]

Bytes = npt.NDArray[np.uint8]


class Parcel(NamedTuple):
    """A value as pickle bytes and its buffers, inside or, if ``stored``, as a reference to a list of them; ``alone`` if
    it has one reader. ``blocks`` are references to what it refers to."""

    data: bytes
    buffers: Sequence[Any] = ()
    stored: Any = None
    alone: bool = True
    blocks: Sequence[Any] = ()

    def read(self, what: str) -> Any:
        """The value, the caller's own to change. Raises SerializationError, RefLostError."""
        if self is _NONE:
            return None
        buffers = [_writable(buffer, self.alone) for buffer in self.buffers]
        if not self.blocks:
            return decode(self.data, buffers, what)

        return decode(self.data, buffers, what, openers(self.blocks))


def _encoded(value: Any, what: str) -> tuple[bytes, list[Bytes], list[Any]]:
    """Pickle bytes, buffers, and references to the blocks in it. Raises SerializationError."""
    blocks: list[Any] = []
    data, raw = encode(value, what, blocks)
    return data, [np.frombuffer(buffer.raw(), np.uint8) for buffer in raw], [_reference(block) for block in blocks]


def _reference(block: Any) -> Any:
    """A block's object in Ray's store; a copy there of what another cluster's workers keep."""
    return block.reference if hasattr(block, "reference") else ray.put([block.read(readonly=True)])


def _size(buffers: Sequence[Bytes]) -> int:
    return sum(buffer.nbytes for buffer in buffers)


def pack(value: Any, what: str, readers: int) -> Parcel:
    """``value`` for ``readers`` processes; stored once. Raises SerializationError."""
    if type(value) is dict and not value:
        return NO_VALUES
    data, buffers, blocks = _encoded(value, what)
    if _size(buffers) <= INLINE_BYTES:
        return Parcel(data, [buffer.tobytes() for buffer in buffers], blocks=blocks)
    try:
        return Parcel(data, (), ray.put(buffers), readers == 1, blocks)
    except FULL as error:
        raise no_room(f"{what} of {_size(buffers) >> 20} MiB") from error


def outcome_to_wire(outcome: Outcome, wants_result: bool) -> bytes | list[Any]:
    """An outcome as an actor returns it: one ``bytes``, or a list of the head, the references to blocks in it, and the
    buffers that Ray stores. None is two times, which no pickle is as short as."""
    if outcome.status == "ok" and (outcome.value is None or not wants_result):
        return _TIMES.pack(outcome.started_ns, outcome.ended_ns)
    outcome, packed = pack_outcome(outcome, wants_result, lambda value: _encoded(value, "the result"))
    data, buffers, blocks = packed
    small = _size(buffers) <= INLINE_BYTES
    inside = [buffer.tobytes() for buffer in buffers] if small else None
    head = pickle.dumps((outcome.status, outcome.started_ns, outcome.ended_ns, data, inside), 5)
    return head if small and not blocks else [head, blocks, *(() if small else buffers)]


def wire_to_outcome(answer: bytes | list[Any]) -> tuple[Any, int, int, Parcel]:
    """Status, start, end (monotonic nanoseconds) and the payload."""
    if len(answer) == _TIMES.size and isinstance(answer, bytes):
        return "ok", *_TIMES.unpack(answer), _NONE
    head, blocks, *buffers = (answer, ()) if isinstance(answer, bytes) else answer
    status, started, ended, data, inside = pickle.loads(head)
    return status, started, ended, Parcel(data, buffers if inside is None else inside, blocks=blocks)


def _writable(buffer: Any, alone: bool) -> Any:
    """``buffer``'s bytes to write into: its own pages if nobody else reads them, or a copy."""
    if isinstance(buffer, bytes):
        return bytearray(buffer)
    if alone:  # numpy marks them read-only, as Ray cannot know; the pages themselves are not
        pages: Any = (ctypes.c_uint8 * buffer.nbytes).from_address(buffer.ctypes.data)
        pages.keeps = buffer  # and with it the object in Ray's store
        return pages
    if "torch" not in sys.modules:
        return bytearray(buffer)
    from podium.data.memory import copy_bytes

    return copy_bytes(buffer)


def bare_name(number: int, target: str, method: str, wants_result: bool) -> str:
    """The name of a task that is a call without arguments, as Ray's own tools show it."""
    return f"{target}.{method}{'' if wants_result else '!'} {number}"


def read_bare_name(name: str) -> tuple[int, str, str, bool]:
    """Call, target, method and whether its result is wanted."""
    label, _, number = name.rpartition(" ")
    target, _, method = label.rpartition(".")
    return int(number), target, method.removesuffix("!"), not method.endswith("!")


_TIMES = struct.Struct("<qq")
_NONE = Parcel(encode(None)[0])
NO_VALUES = Parcel(encode({})[0])
