"""How soon the controller knows that one of four ranks failed while the others are busy, and how soon it can go on.

- exception: from a rank's raise to the error in the controller;
- kill: from SIGKILL of a rank to WorkerDied in the controller;
- restart: from `group.restart()` after that kill to the first answer of all ranks, torch imported in each.

Moments in two processes are compared by the monotonic clock, which all processes of one machine share. Nothing is
warmed up: a fault comes unprepared. Peers have no restart; they are made whole between the turns, in their own ways.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping

import podium
from bench.context import Context
from bench.groups import peer_calls, peer_clusters, peer_groups, probes
from bench.measure import Row, alternate, compare
from bench.peer import PeerClient
from bench.peers.faulty import NOBODY
from bench.probe import Probe
from podium import Handle
from podium.errors import EndpointError, WorkerDied

RANKS = 4
VICTIM = 1
LEAD_S = 0.3  # the others are busy by then
BUSY_S = 1.5
FLOORS = {
    "exception": "not measured: one message, and the controller's turn on a core",
    "kill": "not measured: the kernel's own end of the process, which frees its memory before anybody is told",
    "restart": "not measured: that end, and a fork for each rank",
}


class Victims:
    """A group of which one rank fails while the others are busy; it is restarted each time."""

    def __init__(self, group: Handle[Probe], *, computing: bool) -> None:
        self._group = group
        self._computing = computing
        self.restarts_s: list[float] = []  # after a kill

    def exception(self) -> float:
        try:
            self._group.fault(VICTIM, LEAD_S, BUSY_S, self._computing)
        except EndpointError as error:
            seen_ns = time.monotonic_ns()
            cause = error.__cause__
            if error.rank != VICTIM or not isinstance(cause, RuntimeError):
                raise
        else:
            raise AssertionError("a rank raised, and the call returned")
        self._restart_s()
        return (seen_ns - cause.args[0]) / 1e9

    def kill(self) -> float:
        pid = self._group.pid()[VICTIM]
        call = self._group.fault.submit(NOBODY, LEAD_S, BUSY_S, self._computing)
        time.sleep(LEAD_S)
        started = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        try:
            call.result()
        except WorkerDied as error:
            seconds = time.perf_counter() - started
            if error.rank != VICTIM:
                raise
        else:
            raise AssertionError("a rank was killed, and the call returned")
        self.restarts_s.append(self._restart_s())
        return seconds

    def _restart_s(self) -> float:
        started = time.perf_counter()
        self._group.group.restart()
        self._group.noop()
        return time.perf_counter() - started


def faults(context: Context) -> Iterator[Row]:
    """On local workers, while the other ranks sleep, and while they compute and leave no core idle."""
    with podium.connect("local", echo=False) as cluster, peer_clusters(context, ("ray",)) as peers:
        yield from fault_rows(context, cluster, peers)
        yield from fault_rows(context, cluster, peers, computing=True)


def fault_rows(
    context: Context, cluster: podium.Cluster, peers: Mapping[str, PeerClient], *, computing: bool = False
) -> Iterator[Row]:
    """Rows `exception_4_BACKEND`, `kill_4_BACKEND` and `restart_4_BACKEND`."""
    place = f"{'computing_' if computing else ''}{RANKS}_{cluster.backend_name}"
    load = {"rank": VICTIM, "lead_s": LEAD_S, "busy_s": BUSY_S, "computing": computing}
    repetitions = context.repetitions(3, 2)
    with probes(cluster, RANKS) as group, peer_groups(peers, RANKS):
        victims = Victims(group, computing=computing)
        for fault, podium_s in (("exception", victims.exception), ("kill", victims.kill)):
            subjects = {"podium": podium_s, **peer_calls(peers, fault, **load)}
            figures = alternate(subjects, repetitions=repetitions, warmups=0)
            yield compare(f"{fault}_{place}", figures, unit="ms", scale=1e3, floor=FLOORS[fault])
        yield compare(f"restart_{place}", {"podium": victims.restarts_s}, unit="s", floor=FLOORS["restart"])
