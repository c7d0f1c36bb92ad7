"""The faults: what is done to a run, and what the run must do then.

survives   the controller goes on, and finishes its next step
restarts   the controller ends with the fault, and a new one finishes the next step
surfaces   the controller ends with one error that names the first cause; a new one finishes the next step
either     one of `survives` and `surfaces`, by the moment at which the fault came
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bench.chaos.leftovers import below
from bench.chaos.pairs import HELPERS, PAIRS
from bench.chaos.training import HOARD, ON_PURPOSE
from bench.chaos.victim import PATIENCE_S, Failed, Victim

__all__ = ["FAULTS", "OF_SESSIONS", "OF_SINGLE_TURNS", "ON_RAY", "Fault"]

Outcome = Literal["survives", "restarts", "surfaces", "either"]

SURFACES_S = 60.0  # within which an error ends the run and all that it had, also on a machine with other work
PAUSE_S = 0.7
SLOW_S = 1.5
_PIDFD_GETFD = 438  # the number of this system call on every architecture


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    Attributes:
        strike: Does harm. It raises ProcessLookupError if there was nobody to harm at that moment.
        outcome: What the run must do.
        error: What the error says, as a regular expression, where the fault may surface.
        heal: Takes the cause away, before the run is resumed.
        at_once: The fault chooses its moment itself.
    """

    strike: Callable[[Victim], None]
    outcome: Outcome = "survives"
    error: str = ""
    heal: Callable[[Victim], None] = lambda victim: None
    at_once: bool = False


def _kill(role: str) -> Callable[[Victim], None]:
    return lambda victim: os.kill(victim.controller if role == "controller" else victim.worker(role), signal.SIGKILL)


def _kill_helper(module: str) -> Callable[[Victim], None]:
    return lambda victim: os.kill(victim.helper(module), signal.SIGKILL)


def _kill_pair(name: str) -> Callable[[Victim], None]:
    """Kill a process, and have the controller kill another one at an event that follows."""
    first = PAIRS[name].first

    def strike(victim: Victim) -> None:
        pid = victim.helper(HELPERS[first]) if first in HELPERS else victim.worker(first)
        order = victim.order("second", name)
        os.kill(pid, signal.SIGKILL)
        until = time.monotonic() + PATIENCE_S
        while order.exists() and victim.running() and time.monotonic() < until:
            time.sleep(0.02)
        if order.exists():
            order.unlink()
            what = f"gave no event {PAIRS[name].event} within {PATIENCE_S:g} s" if victim.running() else "ended"
            raise Failed(f"the run {what}, and the second fault has not struck: {victim.said()}")

    return strike


def _kill_in_save(victim: Victim) -> None:
    until = time.monotonic() + 60.0
    while not list((victim.directory / "checkpoints").glob(".step-*.tmp")):
        if not victim.running() or time.monotonic() > until:
            raise Failed("the run does not save")
        time.sleep(0.0005)
    os.kill(victim.controller, signal.SIGKILL)


def _kill_grading(victim: Victim) -> None:
    """Kill the process that grades, not the one that hands out items."""
    children = below(victim.helper(HELPERS["dispatcher"]))
    if not children:
        raise ProcessLookupError("nothing is graded")
    os.kill(children[0], signal.SIGKILL)


def _stop(victim: Victim) -> None:
    os.kill(victim.controller, signal.SIGTERM)


def _pause(victim: Victim) -> None:
    pid = victim.worker(victim.random.choice(("policy", "generator")))
    os.kill(pid, signal.SIGSTOP)
    time.sleep(PAUSE_S)
    os.kill(pid, signal.SIGCONT)


def _slow(victim: Victim) -> None:
    """Have one process run a tenth of the time, so that what it is sent piles up in its sockets."""
    role = victim.random.choice(("controller", "policy", "generator"))
    pid = victim.controller if role == "controller" else victim.worker(role)
    until = time.monotonic() + SLOW_S
    while time.monotonic() < until:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.045)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.005)


def _clock(victim: Victim) -> None:
    """Have the clock jump by hours, in every process of the run."""
    for _ in range(2):
        victim.order("clock", str(victim.random.randint(-20, 20) * 3600))
        time.sleep(0.2)


def _half_close(victim: Victim) -> None:
    """Close one direction of a socket between the controller and a worker, or both."""
    pid = victim.worker(victim.random.choice(("policy", "generator")))
    sockets = sorted(_sequenced(pid))
    if not sockets:
        raise ProcessLookupError(f"process {pid} has no socket")
    how = victim.random.choice((socket.SHUT_WR, socket.SHUT_RD, socket.SHUT_RDWR))
    with _taken(pid, victim.random.choice(sockets[:2])) as end:
        end.shutdown(how)


def _sequenced(pid: int) -> list[int]:
    """The descriptors of a process that are connected sockets of sequenced packets, as those to its controller are."""
    table = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    wanted = {f"socket:[{row[6]}]" for row in table if row[4] == "0005"}
    found: list[int] = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            if os.readlink(entry) in wanted:
                found.append(int(entry.name))
    return found


def _taken(pid: int, fd: int) -> socket.socket:
    """Another process's socket, as one of this process."""
    process = os.pidfd_open(pid)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        ours = libc.syscall(_PIDFD_GETFD, process, fd, 0)
        if ours < 0:
            raise OSError(ctypes.get_errno(), f"pidfd_getfd: {os.strerror(ctypes.get_errno())}")
        return socket.socket(fileno=ours)
    finally:
        os.close(process)


def _files_end(victim: Victim) -> None:
    """Let no process of the run write to a file beyond its first bytes, as on a disk that is full."""
    for pid in [victim.controller, *below(victim.controller)]:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (16, resource.RLIM_INFINITY))


def _disk_full(victim: Victim) -> None:
    """Fill the disk that holds the run, which must be a small one."""
    space = os.statvfs(victim.directory)
    if space.f_bavail * space.f_frsize > 256 << 20:
        raise Failed(f"{victim.directory} is on a disk with too much room to fill; see --small-disk")
    with suppress(OSError), _filler(victim).open("ab", buffering=0) as file:
        block = bytes(1 << 16)
        while True:
            file.write(block)
    with suppress(OSError), _filler(victim).open("ab", buffering=0) as file:
        while True:
            file.write(b"\0")


def _make_room(victim: Victim) -> None:
    _filler(victim).unlink(missing_ok=True)


def _filler(victim: Victim) -> Path:
    return victim.directory.parent / "filler"


def _no_memory(victim: Victim) -> None:
    """Let a worker take 64 MiB more than it has, and have it take more."""
    role = victim.random.choice(("policy", "generator"))
    pid = victim.worker(role)
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    limit = (int(fields["VmSize"].split()[0]) << 10) + (64 << 20)
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    victim.order(role, HOARD)


_OUT_OF_MEMORY = r"MemoryError|[Cc]annot allocate memory|can't allocate memory|bad_alloc|out of memory"
_NO_ROOM = r"(No space left on device.*; make room|File too large; raise the limit)"
_GRADER = r"ended its process \(signal SIGKILL\)"

FAULTS: dict[str, Fault] = {
    "controller": Fault(_kill("controller"), "restarts"),
    "save": Fault(_kill_in_save, "restarts", at_once=True),
    "stop": Fault(_stop, "restarts"),
    "policy": Fault(_kill("policy")),
    "generator": Fault(_kill("generator")),
    "rollout": Fault(_kill("rollout")),
    "fork_server": Fault(_kill_helper(HELPERS["fork_server"])),
    "pause": Fault(_pause),
    "slow": Fault(_slow),
    "half_closed": Fault(_half_close),
    "clock": Fault(_clock),
    "policy_raises": Fault(
        lambda victim: victim.order("policy") and None, "surfaces", f"RuntimeError: the policy {ON_PURPOSE}"
    ),
    "generator_raises": Fault(
        lambda victim: victim.order("generator") and None, "surfaces", f"RuntimeError: the generator {ON_PURPOSE}"
    ),
    "memory": Fault(_no_memory, "either", _OUT_OF_MEMORY),  # a process that cannot start a thread ends
    "files_end": Fault(_files_end, "surfaces", _NO_ROOM),
    "disk_full": Fault(_disk_full, "surfaces", _NO_ROOM, heal=_make_room),
    "dispatcher": Fault(_kill_helper(HELPERS["dispatcher"])),
    "grading": Fault(_kill_grading, "either", _GRADER),
    **{name: Fault(_kill_pair(name)) for name in PAIRS},
}
"""By name. A grader that spins is no fault: the reward of every run does, for some of its completions."""

ON_RAY = (
    *("controller", "policy", "generator", "save"),
    *(name for name, pair in PAIRS.items() if "rollout" not in pair and not {*pair} & {*HELPERS}),
)

OF_SESSIONS = ("rollout", *(name for name, pair in PAIRS.items() if "rollout" in pair))
"""Faults that only runs of sessions can have."""

OF_SINGLE_TURNS = ("generator_raises", "memory", "dispatcher", "grading", "policy, dispatcher")
"""Faults that runs of sessions cannot have: nothing is graded, and their generators answer requests."""
