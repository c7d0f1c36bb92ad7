"""What tests of loads and ends send to worker processes, in a module that imports neither torch nor pytest."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from podium.runtime import Worker, endpoint, first, scatter

__all__ = [
    "Crowd",
    "Holdings",
    "end_as",
    "end_when_told",
    "read_environment",
    "read_holdings",
    "resist",
    "start_family",
]
__all__ += ["sum_parts", "weigh_parts"]

MEETING_S = 60.0
SLEEP = "import time; time.sleep(600)"
RESIST = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); {SLEEP}"
DAEMON = f"""
import subprocess, sys
print(subprocess.Popen([sys.executable, "-S", "-c", "{SLEEP}"], stdout=subprocess.DEVNULL).pid, flush=True)
"""


class Holdings(NamedTuple):
    """What a process holds: descriptors, threads, children that run or were not reaped, and bytes of memory of its own
    and of shared memory."""

    descriptors: int
    threads: int
    children: int
    nbytes: int
    shared_nbytes: int


class Crowd(Worker):
    """Counts what runs, keeps what it gets, and has calls meet each other."""

    def __init__(self) -> None:
        self.runs: Counter[int] = Counter()
        self.order: list[int] = []
        self.values: list[Any] = []
        self._lock = threading.Lock()
        self._meetings: dict[str, threading.Barrier] = {}
        self._arrivals = 0

    @endpoint(concurrent=True)
    def answer(self, token: int, load: Any = None) -> Any:
        with self._lock:
            self.runs[token] += 1
        return token, load

    @endpoint(concurrent=True)
    async def answer_async(self, token: int, load: Any = None) -> Any:
        await asyncio.sleep(0)
        return self.answer(token, load)

    @endpoint(concurrent=True)
    def meet(self, name: str, calls: int) -> bool:
        """Return whether so many calls of this endpoint ran at one time."""
        with self._lock:
            meeting = self._meetings.setdefault(name, threading.Barrier(calls))
        try:
            meeting.wait(MEETING_S)
        except threading.BrokenBarrierError:
            return False
        return True

    @endpoint(concurrent=True)
    async def meet_async(self, calls: int) -> bool:
        """Do as :meth:`meet`, in the event loop."""
        self._arrivals += 1
        for _ in range(int(MEETING_S * 100)):
            if self._arrivals >= calls:
                return True
            await asyncio.sleep(0.01)
        return False

    @endpoint
    def note(self, token: int, load: Any = None) -> int:
        self.order.append(token)
        return token

    @endpoint(collect=first())
    def note_first(self, token: int, load: Any = None) -> int:
        self.order.append(token)
        return token

    @endpoint(dispatch=scatter())
    def note_own(self, token: int) -> int:
        self.order.append(token)
        return token

    @endpoint
    def notes(self) -> list[int]:
        """Return what was noted since the last time."""
        notes, self.order = self.order, []
        return notes

    @endpoint
    def counts(self) -> dict[int, int]:
        """Return how many times each token ran since the last time."""
        counts, self.runs = dict(self.runs), Counter()
        return counts

    @endpoint
    def keep(self, value: Any) -> None:
        self.values.append(value)

    @endpoint
    def take_values(self) -> list[Any]:
        """Return what was kept, and keep it no longer."""
        values, self.values = self.values, []
        return values


def read_holdings(worker: Worker | None = None) -> Holdings:
    """Return what this process holds."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    nbytes, shared_nbytes = (int(status[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))
    children = sum(_parent_of(entry) == os.getpid() for entry in Path("/proc").iterdir() if entry.name.isdigit())
    descriptors, threads = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task"))
    return Holdings(descriptors, threads, children, nbytes, shared_nbytes)


def _parent_of(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def end_as(worker: Worker, end: int) -> None:
    """Write last words, and end with exit code ``end`` or, if it is negative, by that signal."""
    os.write(2, "".join(f"word {at}\n" for at in range(8)).encode())
    if end >= 0:
        os._exit(end)
    os.kill(os.getpid(), -end)
    signal.pause()


def draw(worker: Worker) -> list[float]:
    """Return random numbers of Python, numpy and torch, which nobody has seeded."""
    import random

    import numpy as np
    import torch

    return [random.random(), float(np.random.rand()), float(torch.rand(1))]


def end_when_told(worker: Worker, directory: str, code: int) -> None:
    """Leave a file in ``directory``, and end with exit code ``code`` once there is a file ``go``, with last words."""
    (Path(directory) / str(code)).touch()
    while not (Path(directory) / "go").exists():
        time.sleep(0.001)
    os.write(2, f"word of {code} ".encode() + b"\xff\n" + f"last word of {code}".encode())
    os._exit(code)


def resist(worker: Worker) -> list[int]:
    """Ignore SIGTERM, and start a child that does. Returns its process id."""
    ctypes.CDLL(None).signal(int(signal.SIGTERM), ctypes.c_void_p(int(signal.SIG_IGN)))  # in whatever thread this runs
    child = subprocess.Popen([sys.executable, "-S", "-c", RESIST], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    return [child.pid]


def sum_parts(worker: Worker, parts: list[Any]) -> tuple[int, int, list[Any]]:
    return len(parts), sum(int(part.sum()) for part in parts), parts


def weigh_parts(worker: Worker | None, parts: list[tuple[Any, bytes]]) -> list[tuple[int, int]]:
    """Return the sums of the bytes of each part."""
    return [(int(values.sum()), sum(text)) for values, text in parts]


def start_family(worker: Worker) -> list[int]:
    """Start a child, one that lost its parent, and a child in a session of its own. Returns their process ids."""
    sleep = [sys.executable, "-S", "-c", SLEEP]
    plain, apart = subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)
    daemon = subprocess.run([sys.executable, "-S", "-c", DAEMON], stdout=subprocess.PIPE, check=True, text=True)
    return [plain.pid, int(daemon.stdout), apart.pid]


def read_environment(worker: Worker, names: list[str]) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in names}
