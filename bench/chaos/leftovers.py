"""What a run must not leave behind: processes, shared memory, temporary files, sockets."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from podium.supervisor import children_of

__all__ = ["alive", "below", "leftovers", "segments"]


def below(pid: int) -> list[int]:
    """All processes that ``pid`` started, and that those started."""
    children = children_of(pid)
    return children + [further for child in children for further in below(child)]


def alive(pid: int) -> bool:
    """Whether a process runs. One that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def segments() -> set[str]:
    """Names in shared memory that Podium may have made. The backend ``local`` makes none; its memory has no name."""
    return {entry.name for entry in Path("/dev/shm").iterdir() if "podium" in entry.name}


def leftovers(pids: Iterable[int], temporary: Path, before: set[str], within_s: float) -> list[str]:
    """Say what is still there after ``within_s`` seconds.

    Sockets and ports belong to processes: where no process is left, they are closed.

    Args:
        pids: Processes that the run had.
        temporary: The directory for temporary files, which the run had for itself.
        before: The names in shared memory before the run.
    """
    pids = set(pids)
    until = time.monotonic() + within_s
    while True:
        found = [f"process {pid} is left: {_command(pid)}" for pid in sorted(pids) if alive(pid)]
        found += [f"{name} is left in shared memory" for name in sorted(segments() - before)]
        found += [f"{path} is left" for path in sorted(temporary.iterdir())]
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.02)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:120]
    except OSError:
        return "?"
