"""Anonymous shared memory that is written once, read by others copy-on-write, and used again after its last reader.

A *segment* is a memfd of its writer. It is passed as a descriptor, so there is no name that could leak, and the kernel
frees it when the last process lets go, however that process ended. Readers map it privately: what they write stays
theirs (see views.py). A reader says when it is done; only then is the segment written again.
Memory touched before is three times faster to write than fresh memory, which is why segments are kept.

A process may pass on a segment that it was sent: it *adopts* it, and tells the sender that it is done when nobody here
and nobody whom it passed it on to needs it any more:

    writer ──fd──▶ controller ──fd──▶ reader          each holds its own descriptor; the writer may die
           ◀─done─            ◀─done─                 each tells the one that it got the segment from
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from podium.backends.local.views import MEMORY, Views

__all__ = ["INLINE_LIMIT", "Lease", "Segment", "SegmentPool"]

INLINE_LIMIT = 32 << 10  # bytes of a parcel that still go in the message; below it, descriptors cost more than copies
KEPT_IDLE = max(1 << 30, MEMORY // 12)  # bytes of idle segments that a process keeps; the longest idle go first
KEPT_COUNT = 64  # and at most so many, each of which takes descriptors
Bytes = npt.NDArray[np.uint8]


class Segment:
    """One memfd, or unlinked file, of this process. ``holders`` counts, for each holder, how many times it was sent
    there; ``label`` says what it holds, where it is kept by reference."""

    def __init__(self, number: int, nbytes: int, fd: int, ended: Callable[[], None] | None = None) -> None:
        self.number = number
        self.nbytes = nbytes
        self.fd = fd
        self.ended = ended
        self.label = ""
        self.inode = _inode(fd)
        self.holders: dict[object, int] = {}
        self._map: mmap.mmap | None = None
        self._memory: Bytes | None = None

    @property
    def memory(self) -> Bytes:
        """uint8 ``[nbytes]`` to write into."""
        if self._memory is None:
            self._map = mmap.mmap(self.fd, self.nbytes)
            self._memory = np.frombuffer(self._map, dtype=np.uint8)
        return self._memory

    def free(self) -> None:
        self._memory = None
        if self._map is not None:
            self._map.close()
        os.close(self.fd)
        self.fd = -1
        if self.ended is not None:
            self.ended()


class SegmentPool:
    """The segments that this process writes, and those that it was sent and may pass on.

    A segment is idle once no holder is left: neither the parcel it was written for nor any reader.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a garbage collection inside the lock may release a segment
        self._idle: list[Segment] = []
        self._used: dict[int, Segment] = {}
        self._named: dict[tuple[int, int], Segment] = {}  # those in use, by the inode of their memory
        self._next = 1
        self._process = os.getpid()
        self.views = Views()

    def take(self, nbytes: int, label: str = "") -> Lease:
        """A segment of at least ``nbytes``; held until the lease is dropped and its readers have let go."""
        size = _rounded(nbytes)
        with self._lock:
            segment = self._reused(size) or self._add(size, _memfd(size))
            segment.label = label
            return Lease(self, segment)

    def take_file(self, nbytes: int, directory: Path, label: str) -> Lease:
        """As :meth:`take`, on disk: a file without a name, which ends with its last descriptor."""
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            fd = os.dup(file.fileno())
        with self._lock:
            segment = self._add(nbytes, fd, _nothing)
            segment.label = label
            return Lease(self, segment)

    def adopt(self, fd: int, nbytes: int, ended: Callable[[], None]) -> Lease:
        """A segment that another process writes, received as ``fd``. ``ended`` is called when nobody here holds it.

        What is here already, our own that comes back or another's that comes again, is held once more and no second
        time: else a reference passed to and fro would be a chain of descriptors, each of which keeps the one before.
        """
        with self._lock:
            known = self._named.get(_inode(fd))
            if known is None:
                return Lease(self, self._add(nbytes, fd, ended))
            lease = Lease(self, known)
        os.close(fd)
        ended()
        return lease

    def hold(self, segment: Segment, holder: object) -> None:
        """``holder`` gets the segment once more."""
        with self._lock:
            segment.holders[holder] = segment.holders.get(holder, 0) + 1

    def release(self, number: int, holder: object) -> None:
        """``holder`` is done with one sending of segment ``number``."""
        if os.getpid() != self._process:  # a fork of this process, such as a data loader's: it never received anything
            return
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
            for segment in list(self._used.values()):  # a copy: a collection may release any of them
                if segment.holders.pop(holder, None) is not None:
                    self._retire(segment)

    def usage(self) -> tuple[int, int]:
        """Bytes in use and bytes idle."""
        with self._lock:
            return sum(s.nbytes for s in list(self._used.values())), sum(s.nbytes for s in list(self._idle))

    def kept(self) -> Counter[str]:
        """Bytes of segments in memory that are kept by reference, by label."""
        kept: Counter[str] = Counter()
        with self._lock:
            for segment in list(self._used.values()):
                if segment.label and segment.ended is None:
                    kept[segment.label] += segment.nbytes
        return kept

    def close(self) -> None:
        with self._lock:
            for segment in [*self._idle, *self._used.values()]:
                segment.ended = None
                segment.free()
            self._idle.clear()
            self._used.clear()
            self._named.clear()
        self.views.clear()

    def _add(self, nbytes: int, fd: int, ended: Callable[[], None] | None = None) -> Segment:
        segment = Segment(self._next, nbytes, fd, ended)
        self._next += 1
        self._use(segment)
        return segment

    def _use(self, segment: Segment) -> None:
        self._used[segment.number] = self._named[segment.inode] = segment

    def _reused(self, nbytes: int) -> Segment | None:
        """The smallest idle segment that fits, and is not more than twice as large."""
        fits = [segment for segment in list(self._idle) if nbytes <= segment.nbytes <= 2 * nbytes]
        best = min(fits, key=lambda segment: segment.nbytes, default=None)
        if best not in self._idle:  # none, or a collection has released others and freed this one
            return None
        self._idle.remove(best)
        self._use(best)
        return best

    def _retire(self, segment: Segment) -> None:
        if segment.holders or self._used.pop(segment.number, None) is None:
            return
        del self._named[segment.inode]
        if segment.ended is not None:
            segment.free()
            return
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


def _nothing() -> None:
    """A segment that is nobody else's, and is not used again."""


def _inode(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _memfd(nbytes: int) -> int:
    fd = os.memfd_create("podium", os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    return fd


def _rounded(nbytes: int) -> int:
    """Up to a page, and to a sixteenth of the next power of two, so that similar sizes share segments."""
    step = max(mmap.PAGESIZE, 1 << max(0, nbytes.bit_length() - 5))
    return -(-nbytes // step) * step
