"""What a worker process takes over from its controller, on whatever backend: environment, directory, path, output."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib
import os
import random
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from podium.backends.devices import MEMORY, visibility
from podium.runtime.messages import ProcessSpec

__all__ = [
    "THREAD_VARIABLES",
    "Surroundings",
    "command",
    "environment_of",
    "interface_of",
    "keep_freed_memory",
    "log_to",
    "run_to_the_end",
]

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
KEPT_FREE = min((2 << 30) - 1, max(256 << 20, MEMORY // 24))  # bytes; mallopt takes an int
LARGEST_KEPT = 32 << 20  # bytes: the most that glibc does not map by itself, and gives back by itself
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h

_SIOCGIFADDR = 0x8915


def environment_of(spec: ProcessSpec, accelerators: Sequence[str]) -> dict[str, str]:
    """The variables to set before anything is imported: numbers of threads, visible devices, and the user's own."""
    threads = dict.fromkeys(THREAD_VARIABLES, spec.env.get("OMP_NUM_THREADS", str(spec.threads)))
    return {**threads, **visibility(spec.place.devices, accelerators), **spec.env}


class Surroundings(NamedTuple):
    """Where the controller works, for a worker process to work there too.

    Attributes:
        threads: Number of threads for computing.
        preload: Modules that the worker process imports before its workers are made.
    """

    threads: int
    cwd: str
    sys_path: list[str]
    preload: Sequence[str] = ()

    @classmethod
    def here(cls, threads: int, preload: Sequence[str] = ()) -> Surroundings:
        """The surroundings of this process."""
        return cls(threads, os.getcwd(), _sys_path(), preload)

    def settle_in(self, interface: str) -> None:
        """Work there from now on. gloo listens on ``interface`` unless the environment names another one."""
        sys.path[:] = [*self.sys_path, *(path for path in sys.path if path not in self.sys_path)]
        with contextlib.suppress(OSError):
            os.chdir(self.cwd)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        keep_freed_memory()
        random.seed()
        for module in self.preload:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_num_threads(self.threads)


def command(module: str, *args: Any) -> list[str]:
    """The command of a fresh interpreter that calls ``main(*args)`` of ``module``, with this process's ``sys.path``.
    ``args`` must have a ``repr`` that Python reads."""
    code = f"import sys; sys.path[:] = {_sys_path()!r}; from {module} import main; main(*{args!r})"
    return [sys.executable, "-c", code]


def _sys_path() -> list[str]:
    return [path or os.getcwd() for path in sys.path]


def keep_freed_memory() -> None:
    """Keep up to ``KEPT_FREE`` bytes that are freed, and put large tensors into huge pages. Call it before torch is
    imported.

    By itself glibc gives back all that is free above 64 MiB at every step, and a fresh page costs three times the copy
    that fills it. The user's own settings in the environment stand. Without glibc this does nothing.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch's; the kernel must allow it ("madvise" or "always")
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_TRIM_THRESHOLD, KEPT_FREE)
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)


def run_to_the_end(run: Callable[[], None]) -> NoReturn:
    """Call ``run``, and end this process when it returns, or raises in whichever thread: then say why first."""
    code = 1
    try:
        run()
        code = 0
    except BaseException as error:  # noqa: BLE001 - without this thread no call ends
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def log_to(path: Path) -> int:
    """Append this process's output to ``path``, and return the size of that file before. If it cannot be opened,
    nothing changes."""
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
    """The network interface that has ``address``, or "lo". By itself gloo takes the address of the machine's name,
    which is often a loopback address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return "lo"
