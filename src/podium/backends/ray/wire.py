# pyright: basic
"""Values on their way through Ray: small ones inside the message, large ones in its object store.

A message is one ``bytes``: Ray spends about 30 µs on every further argument. Large values lie in the object store as a
list of byte arrays, which the reader maps without a copy. Ray maps them read-only and for all readers alike, so a
reader that may write gets a copy, in memory that was touched before where that is worth while.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import ray
from ray.exceptions import ObjectStoreFullError

from podium.errors import SerializationError
from podium.runtime.codec import decode, encode

__all__ = ["Parcel", "outcome_to_wire", "pack", "wire_to_outcome"]

INLINE_BYTES = 64 << 10
"""Buffers up to here travel inside the message; Ray itself keeps results above 100 kB in the object store."""

Bytes = npt.NDArray[np.uint8]


class Parcel(NamedTuple):
    """A value as pickle bytes and its buffers, inside or, if ``stored``, as a reference to a list of them."""

    data: bytes
    buffers: Sequence[Any] = ()
    stored: Any = None

    def read(self, what: str) -> Any:
        """The value, the caller's own to change. Raises SerializationError."""
        return decode(self.data, [_own_copy(buffer) for buffer in self.buffers], what)


def pack(value: Any, what: str) -> Parcel:
    """``value`` for any number of hosts; stored once. Raises SerializationError."""
    data, raw = encode(value, what)
    if not raw:
        return Parcel(data)
    buffers = [np.frombuffer(buffer.raw(), np.uint8) for buffer in raw]
    if sum(buffer.nbytes for buffer in buffers) <= INLINE_BYTES:
        return Parcel(data, [buffer.tobytes() for buffer in buffers])
    try:
        return Parcel(data, (), ray.put(buffers))
    except ObjectStoreFullError as error:
        size = sum(buffer.nbytes for buffer in buffers) >> 20
        raise SerializationError(f"{what}: Ray's object store has no room for its {size} MiB") from error


def outcome_to_wire(status: str, started: int, ended: int, value: Any) -> bytes | list[Any]:
    """An outcome as an actor returns it: one ``bytes``, or a list of the head and the buffers that Ray stores."""
    if status == "ok" and value is None:
        return pickle.dumps((status, started, ended, _NONE, ()), 5)
    data, raw = encode(value, "the result")
    buffers = [np.frombuffer(buffer.raw(), np.uint8) for buffer in raw]
    if sum(buffer.nbytes for buffer in buffers) <= INLINE_BYTES:
        return pickle.dumps((status, started, ended, data, [buffer.tobytes() for buffer in buffers]), 5)
    return [pickle.dumps((status, started, ended, data, None), 5), *buffers]


def wire_to_outcome(answer: bytes | list[Any]) -> tuple[Any, int, int, Parcel]:
    """Status, start, end (monotonic nanoseconds) and the payload."""
    head = answer if isinstance(answer, bytes) else answer[0]
    status, started, ended, data, inside = pickle.loads(head)
    return status, started, ended, Parcel(data, answer[1:] if inside is None else inside)


def _own_copy(buffer: Any) -> Any:
    if isinstance(buffer, np.ndarray) and "torch" in sys.modules:
        from podium.data.memory import copy_bytes

        return copy_bytes(buffer)
    return bytearray(buffer)


_NONE = encode(None)[0]
