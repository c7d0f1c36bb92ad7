"""How a process sees a segment: privately, to read and to write, or, if it only reads, through a mapping that is kept.

A private mapping is made and taken down for every message, which costs a third of reading it once: all its pages are
found anew. A reader that does not write can share the pages; its mappings are kept, since a segment that was released
is mostly written again, as buckets of weights are.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from podium.errors import RefLostError, StoreFullError

if TYPE_CHECKING:
    from podium.backends.local.shared_memory import Bytes, Lease

__all__ = ["KEPT_VIEWS", "MEMORY", "Views", "map_segment", "map_writable"]

MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
KEPT_VIEWS = max(256 << 20, MEMORY // 24)  # bytes that a process keeps mapped, though they may be freed elsewhere
KEPT_COUNT = 64  # and at most so many, each of which takes a descriptor


def map_segment(lease: Lease, nbytes: int, what: str = "a result") -> Bytes:
    """uint8 ``[nbytes]``: the segment's bytes, copy-on-write. The lease is held as long as anything uses them.

    Raises:
        RefLostError: the pool is closed; names ``what``.
        StoreFullError: this process may not map more.
    """
    return _array(_map(lease, nbytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE, what), nbytes, lease)


def map_writable(lease: Lease, nbytes: int) -> Bytes:
    """uint8 ``[nbytes]``: the segment itself: others see what is written. The lease is held while anything uses it."""
    return _array(_map(lease, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, "memory"), nbytes, lease)


class Views:
    """The shared mappings of one process; those used last are kept."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[int, int], mmap.mmap] = OrderedDict()
        self._lock = threading.RLock()  # a collection inside it may end a mapping

    def lend(self, lease: Lease, nbytes: int, what: str) -> Bytes:
        """As :func:`map_segment`, for a reader that does not write: a write ends the process by SIGSEGV."""
        segment = lease.segment
        with self._lock:
            mapping = self._kept.pop(segment.inode, None)
            if mapping is None:
                mapping = _map(lease, segment.nbytes, mmap.MAP_SHARED, mmap.PROT_READ, what)
            if segment.nbytes <= KEPT_VIEWS:
                self._kept[segment.inode] = mapping
            while len(self._kept) > KEPT_COUNT or sum(len(kept) for kept in self._kept.values()) > KEPT_VIEWS:
                self._kept.popitem(last=False)  # it ends with its last reader
        return _array(mapping, nbytes, lease)

    def clear(self) -> None:
        """Keep none."""
        with self._lock:
            self._kept.clear()


def _map(lease: Lease, nbytes: int, flags: int, protection: int, what: str) -> mmap.mmap:
    if lease.segment.fd < 0:
        raise RefLostError(f"{what} went with its cluster, which is closed: fetch it inside the 'with' block")
    try:
        return mmap.mmap(lease.segment.fd, nbytes, flags, protection)
    except OSError as error:
        raise StoreFullError(
            f"{what} of {nbytes} bytes cannot be mapped here: {error}; hold fewer at a time"
        ) from error


def _array(mapping: mmap.mmap, nbytes: int, lease: Lease) -> Bytes:
    memory = np.frombuffer(mapping, dtype=np.uint8, count=nbytes)
    weakref.finalize(memory, _let_go, lease).atexit = False
    return memory


def _let_go(lease: Lease) -> None:
    """Drops the last thing that kept a lease: the finalizer's own argument."""
