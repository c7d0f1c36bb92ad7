"""The tensors that a worker keeps by reference: shared memory of its process, passed on as a descriptor.

The kernel counts who holds the memory. Nothing leaks however processes end, and tensors outlive the worker that made
them.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from podium.backends.local.shared_memory import INLINE_LIMIT, Lease, SegmentPool
from podium.data.store import Block, BlockInfo, Bytes, PlainBlock, TensorStore, fill_block


class LocalBlock(Block):
    """A segment that holds tensors. Readers map it copy-on-write: opening takes microseconds, whatever its size."""

    def __init__(self, lease: Lease, info: BlockInfo) -> None:
        super().__init__(info)
        self.lease = lease

    def open(self) -> Bytes:
        return self.lease.open(self.info.nbytes, _read_creator(self.info))

    def lend(self) -> Bytes:
        return self.lease.lend(self.info.nbytes, _read_creator(self.info))


def bring(block: Block, segments: SegmentPool) -> LocalBlock:
    """``block`` itself if it is in ``segments``, or a copy there of a block of another cluster's workers."""
    if isinstance(block, LocalBlock) and block.lease.pool is segments:
        return block
    memory = block.read(readonly=True)
    lease = segments.store([memory], [0], memory.nbytes, _read_creator(block.info), block.info.label)
    return LocalBlock(lease, block.info)


class LocalStore(TensorStore):
    """The blocks made in this process.

    Args:
        spill: Directory on disk for blocks above the limit, which are an error unless it is given.
    """

    def __init__(self, segments: SegmentPool, limit: int | None = None, spill: str = "") -> None:
        super().__init__(limit)
        self._segments = segments
        self._spill = Path(spill) if spill else None

    def make(self, buffers: Sequence[Bytes], offsets: Sequence[int], info: BlockInfo) -> Block:
        if info.nbytes <= INLINE_LIMIT:  # a copy costs less than a descriptor
            return PlainBlock(fill_block(np.empty(info.nbytes, dtype=np.uint8), buffers, offsets), info)
        lease = self._segments.store(buffers, offsets, info.nbytes, _read_creator(info), info.label)
        return LocalBlock(lease, info)

    def overflow(self, buffers: Sequence[Bytes], offsets: Sequence[int], info: BlockInfo) -> Block | None:
        if self._spill is None:
            return None
        lease = self._segments.take_file(info.nbytes, self._spill, info.label)
        fill_block(lease.segment.memory, buffers, offsets)
        return LocalBlock(lease, info)

    def room(self, nbytes: int, label: str) -> tuple[Block, Bytes] | None:
        lease = self._segments.take(nbytes, label)
        return LocalBlock(lease, BlockInfo(nbytes, label)), lease.write(nbytes)

    def kept(self) -> Counter[str]:
        return self._segments.kept()


def _read_creator(info: BlockInfo) -> str:
    return f"what {info.label} made"
