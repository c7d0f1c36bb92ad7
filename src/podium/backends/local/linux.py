"""The three Linux calls that Python does not offer, and the process table."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

__all__ = ["become_subreaper", "children_of", "die_with_parent", "environment_has", "session_of"]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def die_with_parent(parent: int) -> None:
    """SIGKILL for this process when the thread that forked it ends; at once if ``parent`` has ended already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def become_subreaper() -> None:
    """Orphaned descendants become children of this process instead of init's."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _table() -> dict[int, tuple[int, int]]:
    """Parent and session of every process."""
    found: dict[int, tuple[int, int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it ended meanwhile
                continue
            found[int(entry.name)] = int(fields[1]), int(fields[3])
    return found


def children_of(pid: int) -> list[int]:
    """Direct children of ``pid``."""
    return [child for child, (parent, _) in _table().items() if parent == pid]


def environment_has(pid: int, entry: str) -> bool:
    """Whether a process was started with ``entry`` ("NAME=value") in its environment."""
    try:
        return entry.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it ended meanwhile
        return False


def session_of(leader: int) -> list[int]:
    """Processes whose session ``leader`` began."""
    return [pid for pid, (_, session) in _table().items() if session == leader]
