"""What a run must not leave behind: processes, shared memory, temporary files, sockets."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from podium.processes import children_of

__all__ = ["Process", "alive", "below", "leftovers", "process", "segments"]


def below(pid: int) -> list[int]:
    """All processes that ``pid`` started, and that those started."""
    children = children_of(pid)
    return children + [further for child in children for further in below(child)]


class Process(NamedTuple):
    """A process, which another one that gets its number later is not.

    Attributes:
        started: When it started, in clock ticks since the machine did.
    """

    pid: int
    started: int


def process(pid: int) -> Process | None:
    """The process that has the number ``pid`` now, if it runs. One that has ended and was not waited for does not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else Process(pid, int(fields[19]))


def alive(one: Process) -> bool:
    """Whether a process runs."""
    return process(one.pid) == one


def segments() -> set[str]:
    """Names in shared memory that Podium may have made. The backend ``local`` makes none; its memory has no name."""
    return {entry.name for entry in Path("/dev/shm").iterdir() if "podium" in entry.name}


_CACHES: Final = ("torchinductor_", "tiktoken-rs-cache")  # of torch and of openai-harmony: all programs share them


def leftovers(had: Iterable[Process], temporary: Path, before: set[str], within_s: float) -> list[str]:
    """Say what is still there after ``within_s`` seconds.

    Sockets and ports belong to processes: where no process is left, they are closed.

    Args:
        had: Processes that the run had.
        temporary: The directory for temporary files, which the run had for itself.
        before: The names in shared memory before the run.
    """
    had = set(had)
    until = time.monotonic() + within_s
    while True:
        found = [f"process {one.pid} is left: {_command(one.pid)}" for one in sorted(had) if alive(one)]
        found += [f"{name} is left in shared memory" for name in sorted(segments() - before)]
        found += [f"{path} is left" for path in sorted(temporary.iterdir()) if not path.name.startswith(_CACHES)]
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.02)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:120]
    except OSError:
        return "?"
