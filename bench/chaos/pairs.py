"""A second fault, which strikes at an event that follows the first one, while that is being mended.

lost        the run has noticed that a worker has ended
loading     it begins to start all workers anew
started     the process of a worker takes requests, and has not made the worker yet
restored    the trained roles have loaded the checkpoint, if there is one, and the generators have no weights yet
recovered   the run goes on
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from bench.chaos.leftovers import Process, alive, below
from podium.telemetry import Event, Note, Recovered, Waiting, WorkerLost, WorkerStarted

__all__ = [
    "EVENTS",
    "HELPERS",
    "PAIRS",
    "Pair",
    "SecondFault",
    "find_helper",
    "find_worker",
    "is_held",
    "read_pair",
    "roles_of",
]

HELPERS: Final = {"fork_server": "podium.backends.local.server", "dispatcher": "podium.rewards.grading_dispatcher"}
"""The processes of a controller that hold no role, and the module that each runs."""


class Pair(NamedTuple):
    """Two faults: a process is killed, and one more at an event that follows.

    Attributes:
        first: The role of the first victim.
        event: The kind of the event, of :data:`EVENTS`.
        role: The role of the worker that the event is about, for the kinds that have one.
        second: The role of the second victim.
    """

    first: str
    event: str
    role: str
    second: str


PAIRS: Final = {
    "policy, fork_server": Pair("policy", "lost", "policy", "fork_server"),
    "policy, loading fork_server": Pair("policy", "loading", "", "fork_server"),
    "policy, starting policy": Pair("policy", "started", "policy", "policy"),
    "policy, starting generator": Pair("policy", "started", "generator", "generator"),
    "policy, restored policy": Pair("policy", "restored", "", "policy"),
    "policy, restored generator": Pair("policy", "restored", "", "generator"),
    "policy, dispatcher": Pair("policy", "lost", "policy", "dispatcher"),
    "generator, starting generator": Pair("generator", "started", "generator", "generator"),
    "generator, policy": Pair("generator", "started", "generator", "policy"),
    "fork_server, fork_server": Pair("fork_server", "started", "policy", "fork_server"),
    "rollout, starting rollout": Pair("rollout", "started", "rollout", "rollout"),
    "rollout, generator": Pair("rollout", "lost", "rollout", "generator"),
}
"""By name. The fork server is one of the backend ``local``, rollout workers are of sessions, the dispatcher is not."""

_RESTORED: Final = r"^resuming after step|has no checkpoint yet: starting"
EVENTS: Final[Mapping[str, Callable[[Event, str], bool]]] = {
    "lost": lambda event, role: isinstance(event, WorkerLost) and role in event.role,
    "loading": lambda event, role: isinstance(event, Waiting) and event.what.startswith("loading"),
    "started": lambda event, role: isinstance(event, WorkerStarted) and role in event.role,
    "restored": lambda event, role: isinstance(event, Note) and re.search(_RESTORED, event.text) is not None,
    "recovered": lambda event, role: isinstance(event, Recovered),
}


class SecondFault:
    """Kills a process of this controller's run at the first event of a kind.

    Args:
        event: The kind of the event, of :data:`EVENTS`.
        role: The role of the worker that the event is about, for the kinds that have one.
        victim: Returns the process id of the victim.
    """

    def __init__(self, event: str, role: str, victim: Callable[[], int]) -> None:
        self._is_it, self._role, self._victim = EVENTS[event], role, victim
        self.struck: list[int] = []

    def __call__(self, event: Event) -> None:
        if self.struck or not self._is_it(event, self._role):
            return
        with suppress(ProcessLookupError):  # it has ended with the first one
            self.struck.append(self._victim())
            os.kill(self.struck[0], signal.SIGKILL)


def read_pair(home: Path) -> SecondFault | None:
    """Return the second fault that was ordered in the folder ``home`` of a run, if one was. This is its controller."""
    try:
        pair = PAIRS[(home / "orders" / "second").read_text()]
    except FileNotFoundError:
        return None
    if pair.second in HELPERS:
        return SecondFault(pair.event, pair.role, partial(find_helper, os.getpid(), HELPERS[pair.second]))
    return SecondFault(pair.event, pair.role, partial(find_worker, home, pair.second))


def find_worker(home: Path, role: str) -> int:
    """Return the newest process that holds ``role``. Raises ProcessLookupError if it does not run."""
    path = home / "pids"
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    workers = [Process(*map(int, numbers)) for names, *numbers in reversed(lines) if role in names.split("+")]
    if not workers or not alive(workers[0]):
        raise ProcessLookupError(f"no process holds {role}")
    return workers[0].pid


def roles_of(pids: Path) -> set[str]:
    """The roles in the file ``pids`` of a run."""
    return {role for line in pids.read_text().splitlines() for role in line.split()[0].split("+")}


def is_held(pids: Path, role: str) -> bool:
    """Whether the newest process of a role runs."""
    try:
        return bool(find_worker(pids.parent, role))
    except ProcessLookupError:
        return False


def find_helper(controller: int, module: str) -> int:
    """Return the process below ``controller`` whose command has ``module``. Raises ProcessLookupError if there is
    none."""
    for pid in below(controller):
        with suppress(OSError):
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if parent == controller and module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    raise ProcessLookupError(f"no process runs {module}")
