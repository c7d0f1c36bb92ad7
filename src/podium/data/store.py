"""The contract of a store, which holds the bytes behind references, and a plain store.

A *block* is the bytes of one :meth:`TensorStore.put`: several tensors laid end to end, written once. A block lives as
long as a :class:`Block` object for it does, in any process. Its backend decides how the block crosses to another
process: beside a message, as a descriptor or a name, or, if it is plain, inside the message.
"""

import contextlib
import os
import pickle
import threading
import weakref
import zlib
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from podium.errors import DataError, StoreFullError

Bytes = npt.NDArray[np.uint8]

ALIGN = 64
CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
CHECKS = "PODIUM_CHECK_REFS"
"""If this environment variable is set, every block has a checksum, which each reader compares."""


class BlockInfo(NamedTuple):
    """The facts about a block that travel with its references."""

    nbytes: int
    label: str  # who made it, such as "policy.rollout of rank 1 on node-0"
    checksum: int | None = None  # CRC-32 of its bytes, where blocks are checked


class Block(ABC):
    """The bytes of one put."""

    def __init__(self, info: BlockInfo) -> None:
        self.info = info

    @abstractmethod
    def open(self) -> Bytes:
        """Return uint8 ``[nbytes]``, alive as long as it is used. If the array is writeable, writes are private to this
        process.

        Raises:
            RefLostError: The bytes are gone with the process that owned them.
        """

    def lend(self) -> Bytes:
        """Do as :meth:`open`, for a reader that does not write."""
        return self.open()

    def prefetch(self) -> None:  # noqa: B027 - nothing to fetch by default
        """Begin to bring the bytes to this process. Never waits."""

    def read(self, *, readonly: bool = False) -> Bytes:
        """Do :meth:`open` or, if ``readonly``, :meth:`lend`, and compare the checksum.

        Raises:
            DataError: Somebody has written to the bytes since they were put.
        """
        checked = self.info.checksum is not None  # then the reader gets its own pages, to see whether it wrote to them
        memory = self.lend() if readonly and not checked else self.open()
        if not self.is_intact(memory):
            raise DataError(
                f"the tensors made by {self.info.label} have changed while they were shared by reference: a worker "
                "that declares readonly=True, or the worker that made them, wrote to them; write to a copy there"
            )
        return memory

    def is_intact(self, memory: Bytes) -> bool:
        """Return whether ``memory`` is what was put; True where blocks are not checked."""
        return self.info.checksum is None or zlib.crc32(memory.data) == self.info.checksum

    def __reduce__(self) -> Any:
        return refuse_pickle()


class Usage(NamedTuple):
    """Bytes in a store, its limit, and how many bytes each maker's blocks take, the largest first."""

    nbytes: int
    limit: int
    holders: Sequence[tuple[str, int]]


class TensorStore(ABC):
    """Makes blocks in this process.

    Args:
        limit: Bytes that the blocks made here may take together. Half of the memory of the machine or container unless
            given.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = _half_of_memory() if limit is None else limit
        self.checks = bool(os.environ.get(CHECKS))

    def put(self, buffers: Sequence[Bytes], label: str) -> Block:
        """Return a block with a copy of ``buffers`` at the offsets of :func:`lay_out`.

        Raises:
            StoreFullError: The block does not fit. The message names who holds most.
        """
        offsets, nbytes = lay_out(buffers)
        info = BlockInfo(nbytes, label)
        used, _, holders = self.usage()
        if used + nbytes <= self.limit:
            block = self.make(buffers, offsets, info)
        else:
            block = self.overflow(buffers, offsets, info) or self._refuse(info, used, holders)
        if self.checks:
            block.info = block.info._replace(checksum=zlib.crc32(block.open().data))
        return block

    @abstractmethod
    def make(self, buffers: Sequence[Bytes], offsets: Sequence[int], info: BlockInfo) -> Block:
        """Copy ``buffers`` to ``offsets`` of a new block. Raises StoreFullError if there is no room."""

    def overflow(self, buffers: Sequence[Bytes], offsets: Sequence[int], info: BlockInfo) -> Block | None:
        """Make a block in some slower place, where the limit is reached. Returns None if there is no such place."""
        return None

    def room(self, nbytes: int, label: str) -> tuple[Block, Bytes] | None:
        """Return a new block and its bytes, which this process may go on writing. The block does not count as kept.

        Readers see what is there when they read. The result is None where readers share no memory with this process.
        """
        return None

    @abstractmethod
    def kept(self) -> Counter[str]:
        """Return the bytes that the blocks made here take now, by the label of their maker."""

    def usage(self) -> Usage:
        """Return what the blocks made here take now."""
        kept = self.kept()
        return Usage(sum(kept.values()), self.limit, kept.most_common())

    def _refuse(self, info: BlockInfo, used: int, holders: Sequence[tuple[str, int]]) -> NoReturn:
        most = "; ".join(f"{_mib(size)} made by {who}" for who, size in holders[:5]) or "nobody"
        raise StoreFullError(
            f"no room for {_mib(info.nbytes)} made by {info.label}: the store of this process holds {_mib(used)} of "
            f"at most {_mib(self.limit)}. It is held by: {most}. Drop references that are not needed any more, or give "
            "connect(..., store_bytes=...) more (local also takes spill_dir=..., a directory for the rest)"
        )


class PlainBlock(Block):
    """Bytes that travel with the message that refers to them: small ones, and all where a backend has no store."""

    def __init__(self, memory: Bytes, info: BlockInfo) -> None:
        super().__init__(info)
        self._memory = memory
        self._memory.flags.writeable = False

    def open(self) -> Bytes:
        return self._memory

    def __reduce__(self) -> Any:
        return _plain, (pickle.PickleBuffer(self._memory.data), self.info)


class MemoryStore(TensorStore):
    """Blocks in this process's own memory.

    Args:
        shared: Readers are in this process too, so that a block crosses as an object.
    """

    def __init__(self, limit: int | None = None, *, shared: bool = False) -> None:
        super().__init__(limit)
        self._kind = _SharedBlock if shared else PlainBlock
        self._kept: Counter[str] = Counter()
        self._changes: deque[tuple[str, int]] = deque()  # a block may end within any line, so its end only writes here
        self._lock = threading.Lock()

    def make(self, buffers: Sequence[Bytes], offsets: Sequence[int], info: BlockInfo) -> Block:
        block = self._kind(fill_block(np.empty(info.nbytes, dtype=np.uint8), buffers, offsets), info)
        self._changes.append((info.label, info.nbytes))
        weakref.finalize(block, self._changes.append, (info.label, -info.nbytes)).atexit = False
        return block

    def kept(self) -> Counter[str]:
        with self._lock:
            while self._changes:
                label, nbytes = self._changes.popleft()
                self._kept[label] += nbytes
                if not self._kept[label]:
                    del self._kept[label]
            return self._kept.copy()


class _SharedBlock(PlainBlock):
    __reduce__ = Block.__reduce__


def lay_out(buffers: Sequence[Bytes]) -> tuple[list[int], int]:
    """Return where each buffer begins in a block, and the size of the block."""
    offsets: list[int] = []
    at = 0
    for buffer in buffers:
        offsets.append(at)
        at += -(-buffer.nbytes // ALIGN) * ALIGN
    return offsets, at


def fill_block(memory: Bytes, buffers: Sequence[Bytes], offsets: Sequence[int]) -> Bytes:
    """Copy each buffer to its offset of ``memory``, and return this."""
    for buffer, at in zip(buffers, offsets, strict=True):
        np.copyto(memory[at : at + buffer.nbytes], buffer)
    return memory


def refuse_pickle() -> NoReturn:
    """Raise TypeError, which says how a reference is saved: a pickle made outside a call would lose its bytes."""
    raise TypeError(
        "a reference can be sent as an argument or a result of a call, but not saved; save the tensor of .get(), or "
        "the batch of batch.fetch()"
    )


def _plain(memory: Any, info: BlockInfo) -> PlainBlock:
    return PlainBlock(np.frombuffer(memory, dtype=np.uint8), info)


def _half_of_memory() -> int:
    return (
        min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_read_allowed_bytes(CGROUPS, OWN_CGROUP)]) // 2
    )


def _read_allowed_bytes(root: Path, own: Path) -> list[int]:
    """Return the bytes that each limited control group around this process may have: a container's or a batch job's."""
    limits: list[int] = []
    with contextlib.suppress(OSError):
        group_path = next((line[3:] for line in own.read_text().splitlines() if line.startswith("0::")), "/").lstrip(
            "/"
        )
        for group in (root / group_path, *(root / group_path).parents):
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                limits.append(int((group / "memory.max").read_text()))
    return limits


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.4g} MiB"
