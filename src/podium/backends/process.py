"""What a host process takes over from its controller, on whatever backend: directory, path, output, threads."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import socket
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["THREAD_VARIABLES", "interface_of", "keep_freed_memory", "log_to", "settle_in"]

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
KEPT_FREE = min((2 << 30) - 1, max(256 << 20, MEMORY // 24))  # bytes; mallopt takes an int
LARGEST_KEPT = 32 << 20  # bytes: the most that glibc does not map by itself, and gives back by itself
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h

_SIOCGIFADDR = 0x8915


def settle_in(threads: int, cwd: str, sys_path: Sequence[str], interface: str) -> None:
    """Work where the controller works, with ``threads`` threads; gloo listens on ``interface`` unless told."""
    sys.path[:] = [*sys_path, *(path for path in sys.path if path not in sys_path)]
    with contextlib.suppress(OSError):
        os.chdir(cwd)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    keep_freed_memory()
    random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(threads)


def keep_freed_memory() -> None:
    """Before torch is imported: what a step frees stays with the process for the next one, up to ``KEPT_FREE``, and
    large tensors lie in huge pages. By itself glibc gives back all that is free above 64 MiB at every step, and a fresh
    page costs three times the copy that fills it. What the user set in the environment stands; without glibc this does
    nothing."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch's; the kernel must allow it ("madvise" or "always")
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_TRIM_THRESHOLD, KEPT_FREE)
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)


def log_to(path: Path) -> int:
    """Send this process's output to the end of ``path``; its size before. Where it cannot be opened nothing changes."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError:
        return 0
    start = os.fstat(log).st_size
    for number, name in ((1, "stdout"), (2, "stderr")):
        getattr(sys, name).flush()
        os.dup2(log, number)
        setattr(sys, name, open(number, "w", buffering=1, closefd=False))  # noqa: SIM115 - for the process's life
    os.close(log)
    return start


def interface_of(address: str) -> str:
    """The network interface that has ``address``, or "lo". gloo by itself goes by the host's name, which is often
    mapped to loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return "lo"
