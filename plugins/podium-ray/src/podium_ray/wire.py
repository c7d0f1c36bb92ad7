"""Values and references on their way through Ray: small ones inside the message, large ones in its object store.

A message is one ``bytes``, because every further argument costs Ray time. Large values lie in the object store as a
list of byte arrays, which readers map without a copy. Where there is one reader (a result, a rank's own part of an
argument), the mapping is its own to write into. One of several readers gets private pages over it (private.py), or a
copy in memory that was touched before.

What a worker keeps by reference is an object of Ray's store too, put by the worker, which so owns it. References to
such objects go beside the value. Ray counts who holds them, frees them when nobody does, brings them to other nodes and
spills them to disk. They end with their owner.
"""

import ctypes
import pickle
import struct
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from ray.exceptions import ObjectLostError, ObjectStoreFullError, OutOfDiskError

from podium.data.store import ALIGN, Block, BlockInfo, Bytes, PlainBlock, TensorStore
from podium.errors import RefLostError, SerializationError, StoreFullError
from podium.runtime.codec import decode, encode
from podium.runtime.worker_process import Outcome, pack_outcome
from podium_ray.connect import ray
from podium_ray.private import map_privately

__all__ = ["FULL", "NO_VALUES", "Parcel", "RayStore", "bare_name", "no_room", "outcome_to_wire", "pack"]
__all__ += ["read_bare_name", "wire_to_outcome"]

INLINE_BYTES = 64 << 10
"""Buffers up to here travel inside the message; Ray itself keeps results above 100 kB in the object store."""

FULL = (ObjectStoreFullError, OutOfDiskError)


# -- values ------------------------------------------------------------------------------------------------------------


class Parcel(NamedTuple):
    """A value on its way.

    Attributes:
        data, buffers: Pickle bytes and their out-of-band buffers.
        stored: Reference to a list of the buffers in Ray's store, where they do not travel inside.
        alone: Whether the value has one reader.
        blocks: References to the objects to which the value refers.
    """

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
        return decode(self.data, buffers, what, [partial(_RayBlock, block) for block in self.blocks])


def pack(value: Any, what: str, readers: int) -> Parcel:
    """``value`` for ``readers`` processes; stored once. Raises SerializationError."""
    if type(value) is dict and not value:
        return NO_VALUES
    data, buffers, blocks = _encode(value, what)
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
    outcome, packed = pack_outcome(outcome, wants_result, lambda value: _encode(value, "the result"))
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


def bare_name(number: int, target: str, method: str, wants_result: bool) -> str:
    """The name of a task that is a call without arguments, as Ray's own tools show it."""
    return f"{target}.{method}{'' if wants_result else '!'} {number}"


def read_bare_name(name: str) -> tuple[int, str, str, bool]:
    """Call, target, method and whether its result is wanted."""
    label, _, number = name.rpartition(" ")
    target, _, method = label.rpartition(".")
    return int(number), target, method.removesuffix("!"), not method.endswith("!")


def _encode(value: Any, what: str) -> tuple[bytes, list[Bytes], list[Any]]:
    """Pickle bytes, buffers, and references to the blocks in it. Raises SerializationError."""
    blocks: list[Any] = []
    data, raw = encode(value, what, blocks)
    return data, [np.frombuffer(buffer.raw(), np.uint8) for buffer in raw], [_reference(block) for block in blocks]


def _size(buffers: Sequence[Bytes]) -> int:
    return sum(buffer.nbytes for buffer in buffers)


def _writable(buffer: Any, alone: bool) -> Any:
    """The bytes of ``buffer`` to write into: its own pages if nobody else reads them, or a copy."""
    if isinstance(buffer, bytes):
        return bytearray(buffer)
    if alone:  # numpy marks them read-only, as Ray cannot know; the pages themselves are not
        return _pages(buffer.ctypes.data, buffer.nbytes, buffer)
    private = map_privately(buffer.ctypes.data, buffer.nbytes, buffer)
    if private is not None:
        return private
    if "torch" not in sys.modules:
        return bytearray(buffer)
    from podium.data.memory import copy_bytes

    return copy_bytes(buffer)


def _pages(place: int, nbytes: int, owner: object) -> Any:
    """Memory at address ``place``, which ``owner`` keeps in Ray's store."""
    pages: Any = (ctypes.c_uint8 * nbytes).from_address(place)
    pages.owner = owner
    return pages


def no_room(what: str) -> SerializationError:
    """What to say, and to do, where Ray raises one of FULL."""
    return SerializationError(
        f"{what}: Ray's object store has no room for it, and the disk it spills to is full. Free disk space, or give "
        "the store more memory: connect('ray', init={'object_store_memory': BYTES}) or ray start "
        "--object-store-memory"
    )


# -- references --------------------------------------------------------------------------------------------------------


class _RayBlock(Block):
    """An object that holds tensors, as a list of byte arrays. On the owner's node it is mapped, not copied."""

    def __init__(self, reference: Any, info: BlockInfo) -> None:
        super().__init__(info)
        self.reference = reference

    def open(self) -> Bytes:
        memory = self.lend()
        private = map_privately(memory.ctypes.data, memory.nbytes, memory)
        return memory if private is None else private

    def lend(self) -> Bytes:
        try:
            return _join(ray.get(self.reference), self.info.nbytes)
        except ObjectLostError as error:
            raise RefLostError(
                f"the tensors made by {self.info.label} are gone: {str(error).partition(chr(10))[0]} A worker's "
                "tensors end with the worker; make them again"
            ) from error

    def prefetch(self) -> None:
        ray.wait([self.reference], timeout=0, fetch_local=True)


class RayStore(TensorStore):
    """The blocks made in this process. ``kept`` counts those that Ray has in memory here, not those it spilled."""

    def __init__(self, limit: int | None = None) -> None:
        super().__init__(limit)
        self._made: dict[bytes, BlockInfo] = {}  # by the binary form of a reference, which does not keep the object

    def make(self, buffers: Sequence[Bytes], offsets: Sequence[int], info: BlockInfo) -> Block:
        lines = list(_in_lines(buffers))
        if info.nbytes <= INLINE_BYTES:
            return PlainBlock(np.concatenate([np.zeros(0, np.uint8), *lines]), info)
        try:
            reference = ray.put(lines)
        except FULL as error:
            raise StoreFullError(str(no_room(f"{info.nbytes >> 20} MiB made by {info.label}"))) from error
        self._made[reference.binary()] = info
        return _RayBlock(reference, info)

    def kept(self) -> Counter[str]:
        kept: Counter[str] = Counter()
        for key, info in list(self._made.items()):  # a copy, because other threads put meanwhile
            if _is_here(key):
                kept[info.label] += info.nbytes
            else:
                self._made.pop(key, None)
        return kept


def _reference(block: Block) -> Any:
    """A block's object in Ray's store, or a copy there of a block of another cluster's workers."""
    return block.reference if isinstance(block, _RayBlock) else ray.put([block.read(readonly=True)])


def _in_lines(buffers: Sequence[Bytes]) -> Iterator[Bytes]:
    """In pieces of whole lines of ALIGN bytes, which Ray lays end to end; only the last line of each is copied."""
    for buffer in buffers:
        aligned_bytes = buffer.nbytes // ALIGN * ALIGN
        if aligned_bytes:
            yield buffer[:aligned_bytes]
        if aligned_bytes < buffer.nbytes:
            line = np.zeros(ALIGN, np.uint8)
            line[: buffer.nbytes - aligned_bytes] = buffer[aligned_bytes:]
            yield line


def _join(pieces: Sequence[Bytes], nbytes: int) -> Bytes:
    """The pieces as one: where they lie, or copied together if Ray did not lay them end to end."""
    start = pieces[0].ctypes.data
    places = accumulate((piece.nbytes for piece in pieces), initial=start)
    if any(piece.ctypes.data != address for piece, address in zip(pieces, places, strict=False)):
        return np.concatenate(pieces)
    memory = np.frombuffer(_pages(start, nbytes, pieces), np.uint8)
    memory.flags.writeable = False
    return memory


def _is_here(key: bytes) -> bool:
    """Whether this node's store still has an object. Through Ray's client, which cannot tell, no object is here.

    Ray asks this of a reference, so one is made and counted for the time of the question. A reference with
    ``skip_adding_local_ref`` would not be counted, but Ray would count its end all the same. The object would lose a
    reference that somebody else in this process holds, and Ray would free it.
    """
    from ray._private.worker import global_worker

    core: Any = getattr(global_worker, "core_worker", None)
    return core is not None and core.object_exists(ray.ObjectRef(key))


_TIMES = struct.Struct("<qq")
_NONE = Parcel(encode(None)[0])
NO_VALUES = Parcel(encode({})[0])
