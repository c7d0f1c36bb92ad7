"""Anonymous shared memory that is written once, read by others, and used again after its last reader.

A *segment* is a memfd of its writer. It is passed as a descriptor, so there is no name that could leak, and the kernel
frees it when the last process has closed it, however that process ended. Its key is its inode, which is the same in
every process. A reader says when it is done; only then is the segment written again. Segments are kept for that,
because memory that was touched before is three times faster to write than fresh memory. What is first written to a
segment goes there by pwrite, and then all its pages are mapped in one system call: a fresh page that is faulted in is
zeroed first, and takes almost twice as long.

A reader maps a segment in one of two ways. A private mapping is copy-on-write, so that what the reader writes stays its
own. A reader that does not write shares the pages. Both kinds of mappings are kept, because a released segment is
mostly written and sent again, and to make a mapping, fault its pages in and take it down costs as much as to copy them.
A private mapping is kept if the kernel says that none of its pages was written (PAGEMAP_SCAN, Linux 6.7). It shows what
the segment holds, now and later.

A process may pass on a segment that it was sent. It *adopts* the segment, and tells the sender that it is done when
neither this process nor any process to which it passed the segment needs it any more:

    writer ──fd──▶ controller ──fd──▶ reader          each holds a descriptor of its own; the writer may die
           ◀─done─            ◀─done─                 each tells the one that it got the segment from
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import struct
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np

from podium.backends.process import MEMORY
from podium.data.store import Bytes, fill_block
from podium.errors import RefLostError, StoreFullError
from podium.processes import open_own

INLINE_LIMIT = 32 << 10  # bytes of a parcel that still go in the message; below it, descriptors cost more than copies
KEPT_IDLE = max(1 << 30, MEMORY // 12)  # bytes of idle segments that a process keeps; the longest idle go first
KEPT_VIEWS = max(256 << 20, MEMORY // 24)  # bytes that a process keeps mapped, though they may be freed elsewhere
SMALLEST_KEPT = 1 << 16  # bytes of a private mapping; to ask whether it was written costs as much as a smaller one
KEPT_COUNT = 64  # idle segments, and mappings, that a process keeps: each takes a descriptor

Key = tuple[int, int]
"""Device and inode of a segment's file."""

_MADV_POPULATE_WRITE = 23  # of linux/mman.h, Linux 5.14
_madvise = ctypes.CDLL(None).madvise
_PAGEMAP_SCAN = 0xC0606610  # of linux/fs.h, as what follows
_IS_FILE, _IS_PRESENT, _IS_SWAPPED = 4, 8, 16
_SCAN = struct.Struct("12Q")


class Segment:
    """One memfd, or unlinked file, of this process.

    Attributes:
        label: Maker of the tensors in it, where they are kept by reference.
        ended: Called when nobody here holds the segment any more. None for a memfd of this process's own, which is then
            used again.
        holders: How many times the segment was sent to each holder.
    """

    def __init__(self, fd: int, label: str = "", ended: Callable[[], None] | None = None) -> None:
        status = os.fstat(fd)
        self.key: Key = (status.st_dev, status.st_ino)
        self.nbytes = status.st_size
        self.fd = fd
        self.label = label
        self.ended = ended
        self.holders: dict[object, int] = {}
        self._mapping: mmap.mmap | None = None
        self._has_pages = ended is not None

    @property
    def mapping(self) -> mmap.mmap:
        """The segment itself, to write into."""
        if self._mapping is None:
            if not self._has_pages:
                os.posix_fallocate(self.fd, 0, self.nbytes)
            self._mapping, self._has_pages = mmap.mmap(self.fd, self.nbytes), True
            if self.ended is None:
                _fault_in(self._mapping)
        return self._mapping

    @property
    def memory(self) -> Bytes:
        """uint8 ``[nbytes]`` over :attr:`mapping`, for as long as a lease is held."""
        return np.frombuffer(self.mapping, dtype=np.uint8)

    def fill(self, buffers: Sequence[Bytes], offsets: Sequence[int]) -> None:
        """Copy each buffer to its offset. Raises OSError where there is no memory for it."""
        if self._has_pages:
            fill_block(self.memory, buffers, offsets)
            return
        self._has_pages = True
        for buffer, start in zip(buffers, offsets, strict=True):
            left = memoryview(cast(Any, buffer))
            while left:  # the kernel writes less than 2 GiB in one call
                left = left[os.pwrite(self.fd, left, start + buffer.nbytes - len(left)) :]
        _ = self.mapping  # or no process would seem to have this memory

    def free(self) -> None:
        self._mapping = None  # it ends with its last user
        os.close(self.fd)
        self.fd = -1
        if self.ended is not None:
            self.ended()


class SegmentPool:
    """The segments that this process writes, and those that it was sent and may pass on.

    A segment is idle once no holder is left: neither the parcel for which it was written nor any reader.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a garbage collection inside the lock may release a segment
        self._idle: list[Segment] = []
        self._used: dict[Key, Segment] = {}
        self._views: dict[tuple[Key, int], mmap.mmap] = {}  # by their kind, too; those used last at the end
        self._pages: WrittenPages | None = None
        self._process = os.getpid()

    def take(self, nbytes: int, what: str, label: str = "") -> Lease:
        """A segment of at least ``nbytes``, mapped to be written.

        Raises:
            StoreFullError: There is no memory for it. The message names ``what``.
        """
        with _make_room(nbytes, what):
            lease = self._take(nbytes, label)
            _ = lease.segment.mapping
            return lease

    def store(self, buffers: Sequence[Bytes], offsets: Sequence[int], nbytes: int, what: str, label: str = "") -> Lease:
        """A segment of at least ``nbytes``, with each buffer at its offset. Raises as :meth:`take`."""
        with _make_room(nbytes, what):
            lease = self._take(nbytes, label)
            lease.segment.fill(buffers, offsets)
            return lease

    def _take(self, nbytes: int, label: str) -> Lease:
        size = _round_up(nbytes)
        with self._lock:
            lease = Lease(self, self._take_idle_segment(size) or self._add(Segment(_memfd(size))))
            lease.segment.label = label
            return lease

    def take_file(self, nbytes: int, directory: Path, label: str) -> Lease:
        """As :meth:`take`, on disk: a file without a name, which ends with its last descriptor and is not used again.

        Raises:
            StoreFullError: There is no room for it.
        """
        try:
            with tempfile.TemporaryFile(dir=directory) as file:
                os.posix_fallocate(file.fileno(), 0, nbytes)
                segment = Segment(os.dup(file.fileno()), label, lambda: None)
            with self._lock:
                lease = Lease(self, self._add(segment))
                _ = segment.mapping
                return lease
        except OSError as error:
            raise StoreFullError(
                f"no room in spill_dir {directory} for {nbytes} bytes made by {label}: {error}"
            ) from error

    def adopt(self, fd: int, ended: Callable[[], None]) -> Lease:
        """A segment that another process writes, received as ``fd``. ``ended`` is called when nobody here holds it.

        A segment that is here already, this process's own that comes back or another's that comes again, gets one more
        holder and no second descriptor. Otherwise a reference passed to and fro would be a chain of descriptors, each
        of which keeps the one before.
        """
        segment = Segment(fd, ended=ended)
        with self._lock:
            used = self._used.get(segment.key)
            lease = Lease(self, used or self._add(segment))
        if used is not None:
            segment.free()
        return lease

    def hold(self, segment: Segment, holder: object) -> None:
        """``holder`` gets the segment once more."""
        with self._lock:
            segment.holders[holder] = segment.holders.get(holder, 0) + 1

    def release(self, key: Key, holder: object) -> None:
        """``holder`` is done with one sending of a segment."""
        if os.getpid() != self._process:  # a fork of this process, such as a data loader's: it never received anything
            return
        with self._lock:
            segment = self._used.get(key)
            if segment is None or holder not in segment.holders:
                return
            segment.holders[holder] -= 1
            if not segment.holders[holder]:
                del segment.holders[holder]
            self._retire(segment)

    def forget(self, holder: object) -> None:
        """``holder`` has died, so it reads nothing any more."""
        with self._lock:
            for segment in list(self._used.values()):  # a copy: a collection may release any of them
                if segment.holders.pop(holder, None) is not None:
                    self._retire(segment)

    def view(self, segment: Segment, what: str) -> mmap.mmap:
        """The shared mapping of a segment for readers that do not write."""
        with self._lock:
            mapping = self._views.pop((segment.key, mmap.MAP_SHARED), None)
            if mapping is None:
                mapping = _map(segment, segment.nbytes, mmap.MAP_SHARED, mmap.PROT_READ, what)
            self._keep((segment.key, mmap.MAP_SHARED), mapping)
        return mapping

    def private(self, segment: Segment, what: str) -> mmap.mmap:
        """A private mapping of a segment for one reader, who gives it back."""
        with self._lock:
            mapping = self._views.pop((segment.key, mmap.MAP_PRIVATE), None)
        access = mmap.PROT_READ | mmap.PROT_WRITE
        return mapping or _map(segment, segment.nbytes, mmap.MAP_PRIVATE, access, what)

    def give_back(self, segment: Segment, mapping: mmap.mmap, address: int) -> None:
        """Keep a private mapping, which begins at ``address``, unless it was written or is not worth it."""
        if not SMALLEST_KEPT <= len(mapping) <= KEPT_VIEWS or os.getpid() != self._process or segment.fd < 0:
            return
        if segment.key[0] != _memory_device():  # a file on disk, whose room a mapping would keep
            return
        with self._lock:
            if self._pages is None:
                self._pages = WrittenPages()
            if not self._pages.any(address, len(mapping)):
                self._keep((segment.key, mmap.MAP_PRIVATE), mapping)

    def _keep(self, name: tuple[Key, int], mapping: mmap.mmap) -> None:
        if len(mapping) <= KEPT_VIEWS:
            self._views[name] = mapping
        while len(self._views) > KEPT_COUNT or sum(len(kept) for kept in list(self._views.values())) > KEPT_VIEWS:
            del self._views[next(iter(self._views))]  # it ends with its last reader

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
            self._views.clear()
            self._pages = None

    def _add(self, segment: Segment) -> Segment:
        self._used[segment.key] = segment
        return segment

    def _take_idle_segment(self, nbytes: int) -> Segment | None:
        """The smallest idle segment that fits, and is not more than twice as large."""
        fits = [segment for segment in list(self._idle) if nbytes <= segment.nbytes <= 2 * nbytes]
        best = min(fits, key=lambda segment: segment.nbytes, default=None)
        if best is None or best not in self._idle:  # a collection has released others and freed this one
            return None
        self._idle.remove(best)
        return self._add(best)

    def _retire(self, segment: Segment) -> None:
        if segment.holders or self._used.pop(segment.key, None) is None:
            return
        if segment.ended is not None:
            segment.free()
            return
        self._idle.append(segment)
        while len(self._idle) > KEPT_COUNT or sum(idle.nbytes for idle in self._idle) > KEPT_IDLE:
            self._idle.pop(0).free()


class Lease:
    """This process's own hold on a segment, which ends with the object and all arrays made by it."""

    def __init__(self, pool: SegmentPool, segment: Segment) -> None:
        self.pool = pool
        self.segment = segment
        pool.hold(segment, "here")

    def __del__(self) -> None:
        self.pool.release(self.segment.key, "here")

    def write(self, nbytes: int) -> Bytes:
        """uint8 ``[nbytes]``: the segment itself. Others see what is written."""
        return self._array(self.segment.mapping, nbytes)

    def open(self, nbytes: int, what: str = "a result") -> Bytes:
        """uint8 ``[nbytes]``: the segment's bytes, copy-on-write.

        Raises:
            RefLostError: The pool is closed. The message names ``what``.
            StoreFullError: This process may not map more.
        """
        mapping = self.pool.private(self.segment, what)
        memory = np.frombuffer(mapping, dtype=np.uint8, count=nbytes)
        weakref.finalize(memory, _end_array, self, mapping, memory.ctypes.data).atexit = False
        return memory

    def lend(self, nbytes: int, what: str) -> Bytes:
        """As :meth:`open`, for a reader that does not write: a write ends the process by SIGSEGV."""
        return self._array(self.pool.view(self.segment, what), nbytes)

    def _array(self, mapping: mmap.mmap, nbytes: int) -> Bytes:
        memory = np.frombuffer(mapping, dtype=np.uint8, count=nbytes)
        weakref.finalize(memory, _end_array, self).atexit = False
        return memory


@contextlib.contextmanager
def _make_room(nbytes: int, what: str) -> Generator[None, None, None]:
    try:
        yield
    except OSError as error:
        raise StoreFullError(f"no shared memory for {nbytes} bytes of {what}: {error}") from error


def _fault_in(mapping: mmap.mmap) -> None:
    """Enter all pages of a mapping that is about to be written into the page table; an older kernel does so later.

    The method of ``mmap`` would hold the interpreter's lock meanwhile.
    """
    _madvise(ctypes.byref(ctypes.c_char.from_buffer(mapping)), ctypes.c_size_t(len(mapping)), _MADV_POPULATE_WRITE)


def _map(segment: Segment, nbytes: int, flags: int, protection: int, what: str) -> mmap.mmap:
    if segment.fd < 0:
        raise RefLostError(f"{what} was freed when its cluster was closed: fetch it inside the 'with' block")
    try:
        return mmap.mmap(segment.fd, nbytes, flags, protection)
    except OSError as error:
        raise StoreFullError(
            f"{what} of {nbytes} bytes cannot be mapped into this process: {error}; hold fewer references at a time"
        ) from error


class WrittenPages:
    """Tells which private mappings of this process were written to."""

    def __init__(self) -> None:
        self._fd = -1
        self._range = (ctypes.c_uint64 * 3)()  # room for one range of pages
        with contextlib.suppress(OSError):
            self._fd = open_own("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    @property
    def known(self) -> bool:
        """Whether the kernel tells, as far as it was asked."""
        return self._fd >= 0

    def any(self, address: int, nbytes: int) -> bool:
        """Whether a page of ``nbytes`` from ``address`` is the process's own. True as well where that is not known."""
        if self._fd < 0:
            return True
        end = -(-(address + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        wanted_pages, result_address = _IS_PRESENT | _IS_SWAPPED, ctypes.addressof(self._range)
        # One page in memory or swapped out that is not the file's is enough.
        request = bytearray(
            _SCAN.pack(
                _SCAN.size, 0, address, end, 0, result_address, 1, 1, _IS_FILE, _IS_FILE, wanted_pages, wanted_pages
            )
        )
        try:
            return fcntl.ioctl(self._fd, _PAGEMAP_SCAN, request, True) > 0
        except OSError:  # Linux before 6.7
            os.close(self._fd)
            self._fd = -1
            return True


def _end_array(lease: Lease, mapping: mmap.mmap | None = None, address: int = 0) -> None:
    """The last array over a segment has ended, and its lease with the finalizer's arguments. A private mapping, which
    begins at ``address``, is given back before."""
    if mapping is not None:
        lease.pool.give_back(lease.segment, mapping, address)


def _memfd(nbytes: int) -> int:
    fd = os.memfd_create("podium", os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    return fd


@lru_cache
def _memory_device() -> int:
    """The device of every memfd."""
    fd = os.memfd_create("podium", os.MFD_CLOEXEC)
    device = os.fstat(fd).st_dev
    os.close(fd)
    return device


def _round_up(nbytes: int) -> int:
    """Up to a page, and to a sixteenth of the next power of two, so that similar sizes share segments."""
    step = max(mmap.PAGESIZE, 1 << max(0, nbytes.bit_length() - 5))
    return -(-nbytes // step) * step
