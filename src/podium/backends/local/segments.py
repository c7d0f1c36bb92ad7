"""Anonymous shared memory that is written once, read by others copy-on-write, and used again after its last reader.

A *segment* is a memfd of its writer. It is passed as a descriptor, so there is no name that could leak, and the kernel
frees it when the last process lets go, however that process ended. Readers map it privately: what they write stays
theirs. A reader says when it is done (:func:`map_segment`'s ``release``); only then is the segment written again.
Memory touched before is three times faster to write than fresh memory, which is why segments are kept.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Lease", "Segment", "SegmentPool", "map_segment"]

KEPT_IDLE = 1 << 30  # bytes of idle segments that a process keeps; the longest idle go first
KEPT_COUNT = 64  # and at most so many, each of which takes descriptors
Bytes = npt.NDArray[np.uint8]


class Segment:
    """One memfd, mapped for writing. ``holders`` counts, for each reader, how many times it was sent there."""

    def __init__(self, number: int, nbytes: int) -> None:
        self.number = number
        self.nbytes = nbytes
        self.fd = os.memfd_create(f"podium-{number}", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, nbytes)
        self._map = mmap.mmap(self.fd, nbytes)
        self.memory: Bytes = np.frombuffer(self._map, dtype=np.uint8)
        self.holders: dict[object, int] = {}

    def free(self) -> None:
        del self.memory
        self._map.close()
        os.close(self.fd)


class SegmentPool:
    """The segments that this process writes.

    A segment is idle once no holder is left: neither the parcel it was written for nor any reader.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a garbage collection inside the lock may release a segment
        self._idle: list[Segment] = []
        self._used: dict[int, Segment] = {}
        self._next = 1

    def take(self, nbytes: int) -> Lease:
        """A segment of at least ``nbytes``; held until the lease is dropped and its readers have let go."""
        size = _rounded(nbytes)
        with self._lock:
            fits = [at for at, segment in enumerate(self._idle) if size <= segment.nbytes <= 2 * size]
            best = min(fits, key=lambda at: self._idle[at].nbytes, default=None)
            if best is None:
                segment = Segment(self._next, size)
                self._next += 1
            else:
                segment = self._idle.pop(best)
            self._used[segment.number] = segment
            return Lease(self, segment)

    def hold(self, segment: Segment, holder: object) -> None:
        """``holder`` gets the segment once more."""
        with self._lock:
            segment.holders[holder] = segment.holders.get(holder, 0) + 1

    def release(self, number: int, holder: object) -> None:
        """``holder`` is done with one sending of segment ``number``."""
        with self._lock:
            segment = self._used.get(number)
            if segment is None or holder not in segment.holders:
                return
            segment.holders[holder] -= 1
            if not segment.holders[holder]:
                del segment.holders[holder]
            self._retire(segment)

    def forget(self, holder: object) -> None:
        """``holder`` has died: it reads nothing any more."""
        with self._lock:
            for segment in [segment for segment in self._used.values() if holder in segment.holders]:
                del segment.holders[holder]
                self._retire(segment)

    def usage(self) -> tuple[int, int]:
        """Bytes in use and bytes idle."""
        with self._lock:
            return sum(s.nbytes for s in self._used.values()), sum(s.nbytes for s in self._idle)

    def close(self) -> None:
        with self._lock:
            for segment in [*self._idle, *self._used.values()]:
                segment.free()
            self._idle.clear()
            self._used.clear()

    def _retire(self, segment: Segment) -> None:
        if segment.holders:
            return
        del self._used[segment.number]
        self._idle.append(segment)
        while len(self._idle) > KEPT_COUNT or sum(idle.nbytes for idle in self._idle) > KEPT_IDLE:
            self._idle.pop(0).free()


class Lease:
    """The writer's own hold on a segment, let go when the object dies."""

    def __init__(self, pool: SegmentPool, segment: Segment) -> None:
        self.pool = pool
        self.segment = segment
        pool.hold(segment, self._key)

    @property
    def _key(self) -> str:
        return "writer"

    def __del__(self) -> None:
        self.pool.release(self.segment.number, self._key)


def map_segment(fd: int, nbytes: int, release: Callable[[], Any]) -> Bytes:
    """Map ``nbytes`` of another process's segment, copy-on-write, and close ``fd``. ``release`` is called when nothing
    uses the array any more."""
    try:
        mapping = mmap.mmap(fd, nbytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)
    memory = np.frombuffer(mapping, dtype=np.uint8)
    weakref.finalize(memory, release).atexit = False
    return memory


def _rounded(nbytes: int) -> int:
    """Up to a page, and to a sixteenth of the next power of two, so that similar sizes share segments."""
    step = max(mmap.PAGESIZE, 1 << max(0, nbytes.bit_length() - 5))
    return -(-nbytes // step) * step
