"""Rewards that misbehave, and what tests see of processes from outside.

Grading processes import this module, so it imports little.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]

SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]

leaked: list[bytearray] = []


def misbehave(completion: str, row: Row) -> Any:
    """Does what the completion says, then returns 1."""
    deeds: dict[str, Callable[[], Any]] = {
        "spin": spin,
        "spin in C": lambda: ctypes.PyDLL(None).sleep(600),  # holds the GIL, as a stuck regular expression does
        "slow": lambda: time.sleep(0.5),
        "wait for a file": lambda: wait_for_file(Path(row["path"])),
        "raise": fail,
        "print": lambda: sys.stdout.write("words of the reward\n"),
        "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
        "exit": lambda: os._exit(3),
        "sys.exit": lambda: sys.exit(4),
        "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "stop the dispatcher": lambda: (os.kill(os.getppid(), signal.SIGSTOP), time.sleep(0.1)),
        "grandchild": lambda: subprocess.run([*SLEEPER, row["tag"]], check=False),
        "orphan": lambda: (subprocess.Popen([*SLEEPER, row["tag"]]), os._exit(3)),
        "leave a child": lambda: subprocess.Popen([*SLEEPER, row["tag"]]),
        "daemonize": lambda: daemonize(row["tag"]),
        "daemonize and spin": lambda: (daemonize(row["tag"]), spin()),
        "daemonize and exit": lambda: (daemonize(row["tag"]), os._exit(3)),
        "return from a fork": lambda: os.waitpid(pid, 0) if (pid := os.fork()) else None,
        "write": lambda: everywhere(row["data"]),
        "write and spin": lambda: (everywhere(row["data"]), spin()),
        "close everything": lambda: os.closerange(3, 1024),
        "allocate": lambda: bytearray(row["bytes"]),
        "leak": lambda: leaked.append(bytearray(row["bytes"])),
        "touch and spin": lambda: (Path(row["path"]).touch(), spin()),
    }
    deeds.get(completion, lambda: None)()
    return 1.0


def spin() -> None:
    while True:
        pass


def wait_for_file(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def fail() -> None:
    raise ValueError("no such unit: parsec")


def everywhere(data: bytes) -> None:
    """Write ``data`` to every descriptor that takes it."""
    for entry in os.listdir("/proc/self/fd"):
        try:
            os.set_blocking(int(entry), False)
            os.write(int(entry), data)
            os.set_blocking(int(entry), True)
        except OSError:
            continue


def daemonize(tag: str) -> None:
    """Start a process in a session of its own, without a parent that lives. Returns once ``tag`` is in its command
    line."""
    started, starts = os.pipe()  # the system closes it as the daemon begins its program
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            null = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(null, fd)
            os.closerange(3, starts)
            os.closerange(starts + 1, 1024)
            os.execv(sys.executable, [*SLEEPER, tag])
        os._exit(0)
    os.close(starts)
    os.wait()
    os.read(started, 1)
    os.close(started)


def own_pid(completion: str, row: Row) -> float:
    return float(os.getpid())


def returns(completion: str, row: Row) -> Any:
    return row["value"]


def has_variable(completion: str, row: Row) -> bool:
    return completion in os.environ


def alive_with(tag: str) -> list[int]:
    """Processes whose command line holds ``tag``."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if tag in (entry / "cmdline").read_bytes().decode(errors="replace"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def family_of(pid: int) -> dict[int, str]:
    """The descendants of ``pid`` and their states."""
    table: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            table[int(entry.name)] = int(fields[1]), fields[0]
    family: dict[int, str] = {}
    frontier = {pid}
    while frontier:
        frontier = {child for child, (parent, _) in table.items() if parent in frontier}
        family |= {child: table[child][1] for child in frontier}
    return family
