"""What a process that runs a user's code may use: time to start, memory, descriptors, bytes of a message."""

import os
import resource
from contextlib import suppress
from pathlib import Path
from typing import Final

__all__ = ["LONGEST_BODY", "START_LIMIT_S", "limit_memory", "raise_descriptor_limit"]

START_LIMIT_S: Final = 300.0  # to import a user's code
LONGEST_BODY: Final = 1 << 26  # bytes of one message

_MOST_DESCRIPTORS: Final = 1 << 16


def limit_memory(limit_bytes: int | None) -> None:
    """Allow this process ``limit_bytes`` more memory than it has now; on Linux only."""
    if limit_bytes is None:
        return
    with suppress(FileNotFoundError):
        pages = int(Path("/proc/self/statm").read_text().split()[5])
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = pages * os.sysconf("SC_PAGE_SIZE") + limit_bytes
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def raise_descriptor_limit() -> None:
    """Allow this process as many open files as the system lets it, up to 65,536."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        most = min(hard, _MOST_DESCRIPTORS) if hard > 0 else _MOST_DESCRIPTORS
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
