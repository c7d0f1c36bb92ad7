"""The processes of this machine, as the kernel's table (/proc) shows them, and how to end them."""

import contextlib
import ctypes
import os
import signal
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_PF_EXITING: Final = 4
_EXIT_CODE: Final = 49  # in /proc/PID/stat, of the fields after the name


def kill(pid: int) -> None:
    """Send SIGKILL to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def become_subreaper() -> None:
    """Have processes that lose their parent below this one become its children. Only Linux can."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the thread that forked it ends; 0 for none. Only Linux can."""
    _prctl(_PR_SET_PDEATHSIG, number)


def _prctl(option: int, value: int) -> None:
    """Set an attribute of this process. Only Linux has these."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl") and libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def children_of(pid: int) -> list[int]:
    """Process ids of the direct children of ``pid``, ended ones that were not waited for included."""
    pids: list[int] = []
    with contextlib.suppress(OSError):  # it has ended, or this system has no such table
        for task in Path(f"/proc/{pid}/task").iterdir():
            pids += map(int, (task / "children").read_text().split())
    return pids


def descendants_of(pid: int) -> list[int]:
    """Process ids of all that run below ``pid``. One that is about to end may still have children."""
    children = children_of(pid)
    further = [descendant for child in children for descendant in descendants_of(child)]
    return [*(child for child in children if not is_ending(child)), *further]


def is_ending(pid: int) -> bool:
    """Return whether a process of this machine has ended or is about to: the kernel closes its files by and by."""
    state, *fields = _read_stat(pid) or ["X"]
    return state in "ZX" or bool(int(fields[5]) & _PF_EXITING)


def end_of(pid: int) -> int | None:
    """Return the wait status with which a process of this machine ends: the kernel knows it from the signal on, and
    tells the parent when the process's memory is freed. None if nothing is known, or no longer."""
    fields = _read_stat(pid)
    return int(fields[_EXIT_CODE]) if len(fields) > _EXIT_CODE else None


def is_stopped(pid: int) -> bool:
    """Return whether a process of this machine does not run because a signal such as SIGSTOP has stopped it."""
    return _read_stat(pid)[:1] in (["T"], ["t"])


def _read_stat(pid: int) -> list[str]:
    """Return the fields of the kernel's table about a process that come after its name, the first of which is its
    state; none if the process has ended, or this system has no such table."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def kill_marked(entry: str) -> None:
    """Kill every process that was started with ``entry`` ("NAME=value") in its environment."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to somebody else
            if entry.encode() in (process / "environ").read_bytes().split(b"\0"):
                kill(int(process.name))


def describe_exit(code: int) -> str:
    """Return "exit code 3" or "signal SIGKILL". A negative ``code`` is a signal, as in ``subprocess``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"signal {-code}"
