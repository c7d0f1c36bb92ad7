"""What stays with a worker by reference: shared memory of its process, passed on as a descriptor.

The kernel counts who holds it, so nothing leaks however processes end, and what a worker made outlives the worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from podium.backends.local.shared_memory import INLINE_LIMIT, Lease, SegmentPool
from podium.backends.local.views import map_segment, map_writable
from podium.data import Block, BlockInfo, PlainBlock, TensorStore
from podium.data.store import Bytes, filled
from podium.errors import StoreFullError

__all__ = ["LocalBlock", "LocalStore", "brought"]


class LocalBlock(Block):
    """A segment that holds tensors. Readers map it copy-on-write: opening takes microseconds, whatever its size."""

    @property
    def _what(self) -> str:
        return f"what {self.info.label} made"

    def __init__(self, lease: Lease, info: BlockInfo) -> None:
        super().__init__(info)
        self.lease = lease

    def open(self) -> Bytes:
        return map_segment(self.lease, self.info.nbytes, self._what)

    def lend(self) -> Bytes:
        return self.lease.pool.views.lend(self.lease, self.info.nbytes, self._what)


def brought(block: Block, segments: SegmentPool) -> LocalBlock:
    """``block`` itself if it is in ``segments``; a copy there of what another cluster's workers keep."""
    if isinstance(block, LocalBlock) and block.lease.pool is segments:
        return block
    memory = block.read(readonly=True)
    try:
        lease = segments.take(memory.nbytes, block.info.label)
        np.copyto(lease.segment.memory[: memory.nbytes], memory)
    except OSError as error:
        raise StoreFullError(f"no shared memory for {memory.nbytes} bytes of {block.info.label}: {error}") from error
    return LocalBlock(lease, block.info)


class LocalStore(TensorStore):
    """The blocks made in this process.

    Args:
        spill: a directory on disk for what is above the limit; an error unless given.
    """

    def __init__(self, segments: SegmentPool, limit: int | None = None, spill: str = "") -> None:
        super().__init__(limit)
        self._segments = segments
        self._spill = Path(spill) if spill else None

    def make(self, buffers: Sequence[Bytes], offsets: Sequence[int], info: BlockInfo) -> Block:
        if info.nbytes <= INLINE_LIMIT:  # no descriptor for it
            return PlainBlock(filled(np.empty(info.nbytes, dtype=np.uint8), buffers, offsets), info)
        try:
            lease = self._segments.take(info.nbytes, info.label)
            memory = lease.segment.memory
        except OSError as error:
            raise StoreFullError(f"no shared memory for {info.nbytes} bytes made by {info.label}: {error}") from error
        filled(memory, buffers, offsets)
        return LocalBlock(lease, info)

    def overflow(self, buffers: Sequence[Bytes], offsets: Sequence[int], info: BlockInfo) -> Block | None:
        if self._spill is None:
            return None
        try:
            lease = self._segments.take_file(info.nbytes, self._spill, info.label)
            memory = lease.segment.memory
        except OSError as error:
            raise StoreFullError(
                f"no room in spill_dir {self._spill} for {info.nbytes} bytes made by {info.label}: {error}"
            ) from error
        filled(memory, buffers, offsets)
        return LocalBlock(lease, info)

    def room(self, nbytes: int, label: str) -> tuple[Block, Bytes] | None:
        try:
            lease = self._segments.take(nbytes)
            return LocalBlock(lease, BlockInfo(nbytes, label)), map_writable(lease, nbytes)
        except OSError as error:
            raise StoreFullError(f"no shared memory for {nbytes} bytes of {label}: {error}") from error

    def kept(self) -> Counter[str]:
        return self._segments.kept()
