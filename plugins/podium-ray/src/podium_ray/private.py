"""Private pages over an object in Ray's store: to read them copies nothing, and to write copies the page.

Ray maps its store's file shared, read and write, and closes the descriptor. The store of this node is the raylet, which
keeps it, and a process of the same user may open it again: /proc/RAYLET/fd/N. A second mapping of the object's pages,
with MAP_PRIVATE, is its reader's own. An object never changes while a reader holds it, so pages that nobody wrote show
what was put. Where the file cannot be opened (another user's raylet, another system), the reader copies as before.
"""

import contextlib
import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from podium.data.store import Bytes

__all__ = ["map_privately"]

SMALLEST = 1 << 20
"""Bytes of an object below which a copy is as fast as a mapping, its faults and its end."""


class _File(NamedTuple):
    """A file of the store as this process has it mapped: addresses, the offset at the first, and its identity."""

    start: int
    end: int
    offset: int
    device: int
    inode: int


_libc = ctypes.CDLL(None, use_errno=True)  # Python's own mmap keeps a descriptor for each mapping
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value
_files: list[_File] = []  # those that were mapped when somebody last looked
_paths: dict[tuple[int, int], str] = {}  # by device and inode, where the file can be opened; "" where it cannot
_looking = threading.Lock()


def map_privately(address: int, nbytes: int, owner: object) -> Bytes | None:
    """Return uint8 ``[nbytes]`` over private pages of what Ray has mapped at ``address``, to be read and written.

    ``owner`` keeps the object in the store, and is kept as long as the array. Returns None where the object is small,
    or its pages cannot be mapped again.
    """
    if nbytes < SMALLEST:
        return None
    try:
        with _looking:
            file = _find_file(address, address + nbytes)
            path = file and _find_path(file)
        if not file or not path:
            return None
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if (status.st_dev, status.st_ino) != (file.device, file.inode):
                _paths.pop((file.device, file.inode), None)
                return None
            at = file.offset + address - file.start
            before = at % mmap.PAGESIZE
            access = mmap.PROT_READ | mmap.PROT_WRITE
            pages = _libc.mmap(None, before + nbytes, access, mmap.MAP_PRIVATE, descriptor, at - before)
        finally:
            os.close(descriptor)
    except OSError:
        return None
    if pages == _FAILED:
        return None
    memory: Any = (ctypes.c_uint8 * nbytes).from_address(pages + before)
    memory.owner = owner
    weakref.finalize(memory, _libc.munmap, pages, before + nbytes).atexit = False
    return np.frombuffer(memory, np.uint8)


def _find_file(start: int, end: int) -> _File | None:
    """Return the shared mapping that holds these addresses."""
    for _ in range(2):
        for file in _files:
            if file.start <= start and end <= file.end:
                return file
        _files[:] = _read_files()
    return None


def _read_files() -> Iterator[_File]:
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, offset, device, inode, *_ = line.split()
        if access.endswith("s") and inode != "0":
            start, end = (int(part, 16) for part in addresses.split("-"))
            major, minor = (int(part, 16) for part in device.split(":"))
            yield _File(start, end, int(offset, 16), os.makedev(major, minor), int(inode))


def _find_path(file: _File) -> str:
    """Return where a raylet of this node has the file open; "" where it cannot be opened."""
    key = file.device, file.inode
    if key not in _paths:
        _paths[key] = next((path for pid in _read_raylets() for path in _paths_of(pid, key)), "")
    return _paths[key]


def _read_raylets() -> Iterator[int]:
    """Yield the process ids of raylets. This process's own parent, which is one in a worker process, comes first."""
    yield os.getppid()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "comm").read_text().strip() == "raylet":
                yield int(entry.name)


def _paths_of(pid: int, key: tuple[int, int]) -> Iterator[str]:
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                status = entry.stat()
                if (status.st_dev, status.st_ino) == key:
                    yield str(entry)
