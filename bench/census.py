"""What a process and all its descendants hold: memory, descriptors, threads, shared memory, temporary files. Linux."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
MEMFD = "/memfd:"
BLOCK = 512  # bytes, the unit of st_blocks
GONE = (FileNotFoundError, ProcessLookupError, PermissionError)  # a process may end while it is looked at


@dataclass(frozen=True, kw_only=True)
class Census:
    """Sums over the processes; memory in bytes. Shared memory counts once, whoever holds or maps it.

    `object_store_bytes` are in use in the object stores of Ray, if this process is connected to one. `files` are the
    files, directories and sockets below the directory for temporary files, which all programs of a machine may share.
    """

    processes: int
    threads: int
    controller_rss: int
    rss: int
    pss: int
    descriptors: int
    files: int
    segments: int
    segment_bytes: int
    object_store_bytes: int


def take_census(root: int) -> Census:
    """Of `root` and its descendants, now."""
    pids = [root, *descendants(root)]
    segments: dict[int, int] = {}
    for pid in pids:
        with suppress(*GONE):
            segments |= segments_of(pid)
    memory = {pid: memory_of(pid) for pid in pids}
    return Census(
        processes=len(pids),
        threads=sum(threads_of(pid) for pid in pids),
        controller_rss=memory[root][0],
        rss=sum(rss for rss, _ in memory.values()),
        pss=sum(pss for _, pss in memory.values()),
        descriptors=sum(descriptors_of(pid) for pid in pids),
        files=sum(len(folders) + len(files) for _, folders, files in os.walk(tempfile.gettempdir())),
        segments=len(segments),
        segment_bytes=sum(segments.values()),
        object_store_bytes=object_store_bytes(),
    )


def object_store_bytes() -> int:
    """In all nodes of the Ray cluster that this process is connected to; 0 if it has not even imported Ray."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return 0
    from ray._private.internal_api import node_stats

    nodes = [node for node in ray.nodes() if node["Alive"]]
    stats = [node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], False) for node in nodes]
    return sum(one.store_stats.object_store_bytes_used for one in stats)


def descendants(root: int) -> list[int]:
    """Children of `root`, their children and so on; a process whose parent ended belongs to init and is not found."""
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdecimal():
            with suppress(*GONE):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for pid in found:
        found.extend(children.get(pid, ()))
    return found[1:]


def memory_of(pid: int) -> tuple[int, int]:
    """Resident bytes, and the same with what is shared divided by the number of its users."""
    figures = {"Rss:": 0, "Pss:": 0}
    with suppress(*GONE):
        for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in figures:
                figures[name] = int(value.split()[0]) * 1024
    return figures["Rss:"], figures["Pss:"]


def descriptors_of(pid: int) -> int:
    with suppress(*GONE):
        return len(os.listdir(PROC / str(pid) / "fd"))
    return 0


def threads_of(pid: int) -> int:
    with suppress(*GONE):
        return len(os.listdir(PROC / str(pid) / "task"))
    return 0


def segments_of(pid: int) -> dict[int, int]:
    """Bytes of each memfd that a process holds open or maps, by inode."""
    found = dict(_mapped(pid))
    for entry in (PROC / str(pid) / "fd").iterdir():
        with suppress(*GONE):
            if os.readlink(entry).startswith(MEMFD):
                status = entry.stat()
                found[status.st_ino] = status.st_blocks * BLOCK
    return found


def _mapped(pid: int) -> Iterator[tuple[int, int]]:
    for line in (PROC / str(pid) / "maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith(MEMFD):
            start, _, stop = fields[0].partition("-")
            yield int(fields[4]), int(stop, 16) - int(start, 16)
