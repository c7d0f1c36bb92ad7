"""What a process that runs a user's code may use: time to start, memory, descriptors, bytes of a message."""

import os
import re
import resource
from contextlib import suppress
from pathlib import Path
from typing import Final

START_LIMIT_S: Final = 300.0  # to import a user's code
LARGEST_KEPT: Final = 32 << 20
"""Bytes of the largest block that a worker process keeps for itself once it is freed, where malloc is glibc's. glibc
maps larger ones by themselves, and gives them back."""
LONGEST_BODY: Final = 1 << 26  # bytes of one message

_MOST_CAUSES: Final = 16
_NO_SPACE: Final = re.compile(
    "MemoryError|failed to map segment|[Cc]annot allocate memory|can't allocate memory|bad_alloc|mmap.*failed"
)
_NO_THREADS: Final = re.compile("can't start new thread|Resource temporarily unavailable|pthread_create")
_NO_FILES: Final = re.compile("Too many open files(?! in system)")
_LACKING: Final = {
    "No usable temporary directory": "no directory for temporary files can be written: set TMPDIR to one that can",
    "Unable to find address for: lo": "this system has no loopback address, at which worker processes of one machine "
    "meet: bring it up, as with `ip link set lo up`, or name another interface by GLOO_SOCKET_IFNAME",
}
"""What a system lacks and how to bring it, by words of the library that needs it."""
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


def explain_limit(error: BaseException) -> str:
    """Return a sentence that names the limit of the system which ``error`` or its cause has met, or what the system
    lacks, and the remedy; "" if it is neither."""
    texts: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(texts) < _MOST_CAUSES:
        texts.append(f"{type(cause).__name__}: {cause}")
        cause = cause.__cause__ or cause.__context__
    text = "\n".join(texts)
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY and (_NO_SPACE.search(text) or _NO_THREADS.search(text)):  # stacks are mapped
        return (
            f"the limit on the memory that a process may map (ulimit -v) is {space >> 10} KiB, which is too little for "
            "torch, the libraries and the model: raise it, as with `ulimit -v unlimited`"
        )
    if _NO_THREADS.search(text):
        number, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        most = "" if number == resource.RLIM_INFINITY else f" is {number}, and"
        return (
            f"the system lets this user start no more threads and processes: the limit (ulimit -u){most} counts all of "
            "the user's, and a container may have a limit of its own (pids.max): raise it, or end other processes"
        )
    if _NO_FILES.search(text):
        number, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return (
            f"the limit on the files that a process may have open (ulimit -n) is {number}, which is too little here: "
            "raise it, as with `ulimit -n 4096`"
        )
    return next((sentence for words, sentence in _LACKING.items() if words in text), "")


def raise_descriptor_limit() -> None:
    """Allow this process as many open files as the system lets it, up to 65,536."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        most = min(hard, _MOST_DESCRIPTORS) if hard > 0 else _MOST_DESCRIPTORS
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
