"""What stays with a worker by reference: an object of Ray's store, put by the worker, which so owns it.

Blocks travel as nested ``ObjectRef``s, so Ray counts who holds them, frees them when nobody does, brings them to other
nodes and spills them to disk. They end with their owner.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from ray.exceptions import ObjectLostError, ObjectStoreFullError, OutOfDiskError

from podium.backends.ray.untyped import ray
from podium.data import Block, BlockInfo, PlainBlock, TensorStore
from podium.data.store import ALIGN, Bytes
from podium.errors import RefLostError, SerializationError, StoreFullError
from podium.runtime.codec import Opener

__all__ = ["FULL", "INLINE_BYTES", "RayBlock", "RayStore", "no_room", "openers"]

INLINE_BYTES = 64 << 10
"""Buffers up to here travel inside the message; Ray itself keeps results above 100 kB in the object store."""

FULL = (ObjectStoreFullError, OutOfDiskError)


class RayBlock(Block):
    """An object that holds tensors, as a list of byte arrays. On the owner's node it is mapped, not copied."""

    def __init__(self, reference: Any, info: BlockInfo) -> None:
        super().__init__(info)
        self.reference = reference

    def open(self) -> Bytes:
        try:
            return _joined(ray.get(self.reference), self.info.nbytes)
        except ObjectLostError as error:
            raise RefLostError(
                f"the tensors made by {self.info.label} are gone: {str(error).partition(chr(10))[0]} What a worker "
                "keeps ends with it; make it again"
            ) from error

    def prefetch(self) -> None:
        ray.wait([self.reference], timeout=0, fetch_local=True)


class _Made(NamedTuple):
    key: bytes
    info: BlockInfo


class RayStore(TensorStore):
    """The blocks made in this process. ``kept`` counts those that Ray has in memory here, not those it spilled."""

    def __init__(self, limit: int | None = None) -> None:
        super().__init__(limit)
        self._made: list[_Made] = []

    def make(self, buffers: Sequence[Bytes], offsets: Sequence[int], info: BlockInfo) -> Block:
        lines = list(_in_lines(buffers))
        if info.nbytes <= INLINE_BYTES:
            return PlainBlock(np.concatenate([np.zeros(0, np.uint8), *lines]), info)
        try:
            reference = ray.put(lines)
        except FULL as error:
            raise StoreFullError(str(no_room(f"{info.nbytes >> 20} MiB made by {info.label}"))) from error
        self._made.append(_Made(reference.binary(), info))
        return RayBlock(reference, info)

    def kept(self) -> Counter[str]:
        self._made = [made for made in self._made if _is_here(made.key)]
        kept: Counter[str] = Counter()
        for _, info in self._made:
            kept[info.label] += info.nbytes
        return kept


def openers(references: Sequence[Any]) -> list[Opener]:
    """What makes the blocks that came beside a message."""
    return [partial(RayBlock, reference) for reference in references]


def _in_lines(buffers: Sequence[Bytes]) -> Iterator[Bytes]:
    """In pieces of whole lines of ALIGN bytes, which Ray lays end to end; only the last line of each is copied."""
    for buffer in buffers:
        whole = buffer.nbytes // ALIGN * ALIGN
        if whole:
            yield buffer[:whole]
        if whole < buffer.nbytes:
            line = np.zeros(ALIGN, np.uint8)
            line[: buffer.nbytes - whole] = buffer[whole:]
            yield line


def _joined(pieces: Sequence[Bytes], nbytes: int) -> Bytes:
    """The pieces as one: where they lie, or copied together if Ray did not lay them end to end."""
    start = pieces[0].ctypes.data
    places = accumulate((piece.nbytes for piece in pieces), initial=start)
    if any(piece.ctypes.data != place for piece, place in zip(pieces, places, strict=False)):
        return np.concatenate(pieces)
    pages: Any = (ctypes.c_uint8 * nbytes).from_address(start)
    pages.keeps = pieces  # and with them the object in Ray's store
    memory = np.frombuffer(pages, np.uint8)
    memory.flags.writeable = False
    return memory


def _is_here(key: bytes) -> bool:
    """Whether this node's store still has an object; Ray's API has no way to ask that does not hold it."""
    from ray._private.worker import global_worker

    worker: Any = global_worker
    return worker.core_worker.object_exists(ray.ObjectRef(key, skip_adding_local_ref=True))


def no_room(what: str) -> SerializationError:
    """What to say, and to do, where Ray raises one of FULL."""
    return SerializationError(
        f"{what}: Ray's object store has no room for it, and the disk it spills to is full. Free some disk, or give "
        "the store more memory: connect('ray', init={'object_store_memory': BYTES}) or ray start --object-store-memory"
    )
