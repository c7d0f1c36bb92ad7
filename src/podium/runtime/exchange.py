"""Calls to a set of hosts: requests out, replies in, causes found.

How a failure becomes one error (the first cause, not the last victim):

    rank's reply "error" ──primary───────────────▶ the call fails with EndpointError at once
                         ──secondary (a broken ──▶ held up to SETTLE_S for a primary error or a death to arrive;
                            collective)            then it is the error
    host's death ────────────────────────────────▶ every call that waits for it fails with WorkerDied at once
    deadline ────────────────────────────────────▶ the stuck hosts are asked for their stacks; DeadlineExceeded

A failed call whose siblings still run after BREAK_S may have left them in a collective: the hosts that failed are told
to destroy their process groups, which frees the siblings, and the set is broken until it is restarted.
If all ranks fail alike (a bad argument, say), nobody waits and nothing breaks. Until it is known which of these holds,
the next call waits to be sent: its collectives would meet those that the siblings are still in.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from podium import telemetry
from podium.errors import (
    CallCancelled,
    DeadlineExceeded,
    EndpointError,
    PodiumError,
    SerializationError,
    StoreFullError,
    WorkerDied,
)
from podium.runtime.backend import Backend, Death, HostHandle, Packed, Reply, Request
from podium.runtime.call import Call
from podium.runtime.flight import Flight, Numbers, Outgoing, describe
from podium.runtime.host import Failure
from podium.runtime.pool import ResourcePool
from podium.runtime.watch import Watch

__all__ = ["Exchange"]

BREAK_S = 0.2
SETTLE_S = 1.0
STATUS_S = 1.0
SHUT_DOWN_NAP_S = 0.05  # between two offers to deliver replies for the backend

_log = logging.getLogger("podium")
_call_ids = itertools.count()
_numbers = Numbers()


class Exchange:
    """What is called on a set of hosts, and what comes of it. Who starts and ends them is :class:`HostSet`."""

    def __init__(self, backend: Backend, watch: Watch, pool: ResourcePool, name: str) -> None:
        self.backend = backend
        self.watch = watch
        self.pool = pool
        self.name = name
        self.size = len(pool)
        self.dead: dict[int, Death] = {}
        self.broken = ""
        self._handles: Sequence[HostHandle] = ()
        self._flights: dict[int, Flight] = {}
        self._send = threading.Lock()
        self._unsettled: set[int] = set()  # calls that failed on one rank while others still ran
        self._settled = threading.Condition()
        self._generation: int = 0
        self._closing = False
        self._leaving: set[int] = set()  # ranks that have been asked to shut down
        self._left = threading.Event()
        self._forget_tick = watch.every_tick(self._tick)

    # -- calls out -----------------------------------------------------------------------------------------------

    def request(self, label: str, out: Outgoing, timeout_s: float) -> Call[list[Any]]:
        """Send a call of the host's own (construct, run, …); its result is the list of the wanted results."""
        call: Call[list[Any]] = Call(label, timeout_s)
        self.launch(call, out, list)
        return call

    def launch(self, call: Call[Any], out: Outgoing, join: Callable[[list[Any]], Any]) -> None:
        """Send ``out``; ``join`` makes the call's result of the wanted ranks' results. Fails the call, never raises
        what belongs to it, except for arguments that do not pickle.

        Raises:
            SerializationError: an argument cannot cross.
            WorkerDied, EndpointError: the set lost a rank or is broken, until it is restarted.
        """
        if self._unsettled:
            with self._settled:
                self._settled.wait_for(lambda: not self._unsettled, BREAK_S + STATUS_S)
        self._refuse_if_unusable(call.label)
        ranks, wanted = out.ranks, out.wanted
        try:
            shared = self.backend.pack(out.shared, len(ranks))
            own = self._pack_own(out.own)
        except SerializationError as error:
            raise SerializationError(f"{call.label}: {error}") from error.__cause__
        call_id = next(_call_ids)
        places = {rank: place for place, rank in enumerate(ranks)}

        def joined(replies: list[Reply]) -> Any:
            return join([self.backend.unpack(replies[places[rank]].payload) for rank in wanted])

        call.begin(len(ranks), joined, self.backend)
        flight = Flight(call, out, call_id, _numbers.take(), self._generation, set(ranks), time.monotonic_ns())
        self._flights[call_id] = flight  # from here on a death fails it; one while it was packed shows now
        try:
            self._refuse_if_unusable(call.label)
        except PodiumError:
            self._flights.pop(call_id, None)
            raise
        call.on_cancel(lambda: self._tell_cancelled(flight))
        if call.timeout_s < 2.0:
            self.watch.later(call.timeout_s, lambda: self._tick(time.monotonic()))
        try:
            with self._send:  # every rank sees two callers' calls in the same order, or collectives would deadlock
                self._send_to_all(flight, shared, own)
        except (SerializationError, StoreFullError) as error:  # no room for an argument: some ranks may have begun
            call.fail(type(error)(f"{call.label}: {error}"))
            self._tell_cancelled(flight)
        for rank, death in list(self.dead.items()):  # it died since we looked, and may have missed this flight
            self._lose(flight, rank, death)

    def _send_to_all(self, flight: Flight, shared: Packed, own: Sequence[Packed] | None) -> None:
        out = flight.out
        common: dict[bool, Request] = {}
        for place, rank in enumerate(out.ranks):
            wants = rank in out.wanted
            request = common.get(wants) if own is None else None
            if request is None:
                mine = None if own is None else own[place]
                request = Request(flight.number, out.target, out.method, shared, mine, wants, out.concurrent)
                common[wants] = request
            self._handles[rank].invoke(request, lambda reply, p=place, r=rank: self._on_reply(flight, p, r, reply))

    def _pack_own(self, own: Sequence[Mapping[str, Any]] | None) -> list[Any] | None:
        if own is None:
            return None
        packed: dict[int, Any] = {}  # ranks along the other axes of a mesh hold the very same part: pack it once
        readers = [id(part) for part in own]
        return [
            packed.get(id(part)) or packed.setdefault(id(part), self.backend.pack(part, readers.count(id(part))))
            for part in own
        ]

    def _refuse_if_unusable(self, label: str) -> None:
        for rank, death in self.dead.items():
            raise self._died(label, rank, death, "has ended; call group.restart() to go on")
        if self.broken:
            raise EndpointError(
                f"{label}: group {self.name} is broken: {self.broken}; call group.restart() to go on",
                method=label,
                rank=-1,
                role=self.name,
            )
        if self._closing or not self._handles:
            raise CallCancelled(f"{label}: group {self.name} is closed")

    # -- replies in ----------------------------------------------------------------------------------------------

    def _on_reply(self, flight: Flight, place: int, rank: int, reply: Reply) -> None:
        flight.open.discard(rank)
        if reply.status == "ok":
            flight.call.record(place, reply)
        elif reply.status == "error":
            try:
                failure = self.backend.unpack(reply.payload)
            except PodiumError as error:  # no descriptor left to read it with, say
                flight.call.fail(error)
            else:
                self._on_error(flight, rank, failure)
        else:
            flight.call.fail(CallCancelled(f"{flight.call.label} was cancelled on rank {rank}"))
        if not flight.open:
            self._flown(flight)
            if not flight.breaking:
                self._settle(flight)
            if flight.held is not None:
                flight.call.fail(flight.held)
        if telemetry.active():
            telemetry.emit(
                telemetry.CallFinished(
                    role=flight.out.target or self.name,
                    method=flight.out.method,
                    rank=rank,
                    node=self.pool[rank].node,
                    call_id=flight.call_id,
                    submitted_ns=flight.submitted_ns,
                    started_ns=reply.started_ns,
                    ended_ns=reply.ended_ns,
                    ok=reply.status == "ok",
                )
            )

    def _on_error(self, flight: Flight, rank: int, failure: Failure) -> None:
        error = EndpointError(
            f"{flight.call.label} raised {failure.type_name} on rank {rank} of {self.size} "
            f"({self.pool[rank].node}): {failure.message}\n\nTraceback of rank {rank}:\n{failure.traceback.rstrip()}",
            method=flight.out.method,
            rank=rank,
            role=flight.out.target or self.name,
            remote_traceback=failure.traceback,
        )
        error.__cause__ = failure.original()
        flight.failed.append(rank)
        if flight.open:
            self._unsettled.add(flight.call_id)
            self.watch.later(BREAK_S, lambda: self._break(flight, rank, failure))
        if failure.secondary and flight.open:
            if flight.held is None:
                flight.held = error
                self.watch.later(SETTLE_S, partial(flight.call.fail, flight.held))
        else:
            flight.call.fail(error)

    def _on_death(self, rank: int, death: Death) -> None:
        if self._closing:
            self._has_left(rank)
            return
        self.dead[rank] = death
        telemetry.emit(telemetry.WorkerLost(role=self.name, rank=rank, node=self.pool[rank].node, cause=death.cause))
        waiting = [flight for flight in list(self._flights.values()) if rank in flight.open]
        if not waiting:
            _log.warning("%s rank %d (%s) ended: %s", self.name, rank, self.pool[rank].node, death.cause)
        for flight in waiting:
            self._lose(flight, rank, death)

    def _lose(self, flight: Flight, rank: int, death: Death) -> None:
        if rank in flight.open:
            flight.open.discard(rank)
            flight.call.fail(self._died(flight.call.label, rank, death, "ended while this call waited for it"))
            if not flight.open:
                self._flown(flight)
            self._settle(flight)

    def _flown(self, flight: Flight) -> None:
        if self._flights.pop(flight.call_id, None) is not None:
            _numbers.give_back(flight)

    def _died(self, label: str, rank: int, death: Death, what: str) -> WorkerDied:
        words = "".join(f"\n  | {line}" for line in death.last_words)
        node = self.pool[rank].node
        return WorkerDied(
            f"{label}: rank {rank} of {self.name} on {node} {what}: {death.cause}"
            + (f"; its last words:{words}" if words else "; it left no last words"),
            rank=rank,
            node=node,
            cause=death.cause,
            role=self.name,
            last_words=death.last_words,
        )

    def _break(self, flight: Flight, rank: int, failure: Failure) -> None:
        """A rank failed and siblings still run: they may wait for it in a collective."""
        if not flight.open or self._closing or rank in self.dead or flight.generation != self._generation:
            self._settle(flight)
            return

        others = sorted(flight.open)

        def broke(reply: Reply) -> None:
            current = flight.generation == self._generation
            if current and reply.status == "ok" and self.backend.unpack(reply.payload) and not self.broken:
                self.broken = (
                    f"rank {rank} raised {failure.type_name} in {flight.call.label} while ranks "
                    f"{others} went on, so its process group was destroyed to free them"
                )

            self._settle(flight)

        flight.breaking = True
        self._ask(rank, "break_collectives", {}, broke)

    def _settle(self, flight: Flight) -> None:
        if flight.call_id in self._unsettled:
            with self._settled:
                self._unsettled.discard(flight.call_id)
                self._settled.notify_all()

    # -- deadlines and cancelling --------------------------------------------------------------------------------

    def _tell_cancelled(self, flight: Flight) -> None:
        flight.cancelled = True  # before a look at who has not replied: after the last reply its number is another's
        for rank in list(flight.open):
            self._ask(rank, "cancel", {"cancelled": flight.number}, lambda reply: None)

    def _ask(self, rank: int, method: str, values: Mapping[str, Any], done: Callable[[Reply], None]) -> None:
        """A question to the host itself, answered beside whatever it runs."""
        if rank < len(self._handles) and rank not in self.dead:
            packed = self.backend.pack(values, 1)
            self._handles[rank].invoke(Request(_numbers.take(), "", method, packed, None, True, True), done)

    def _tick(self, now: float) -> None:
        for flight in list(self._flights.values()):
            if flight.call.done():
                continue
            waited = now - flight.call.deadline + flight.call.timeout_s
            if now >= flight.call.deadline and not flight.expired:
                flight.expired = True
                threading.Thread(target=self._expire, args=(flight,), name="podium-deadline", daemon=True).start()
            elif waited > flight.next_stall:
                flight.next_stall *= 2
                open_ranks = tuple(sorted(flight.open))
                _log.warning(
                    "%s has waited %.0f s for rank(s) %s of %s", flight.call.label, waited, open_ranks, self.name
                )
                telemetry.emit(
                    telemetry.Stalled(role=self.name, method=flight.out.method, waiting_for=open_ranks, seconds=waited)
                )

    def _expire(self, flight: Flight) -> None:
        stuck = sorted(flight.open)
        reports = self._statuses(stuck)
        if flight.call.done():
            return
        lines = [f"  rank {rank} ({self.pool[rank].node}): {reports[rank]}" for rank in stuck]
        message = (
            f"{flight.call.label} passed its deadline of {flight.call.timeout_s:g} s; "
            f"{len(stuck)} of {len(flight.out.ranks)} ranks have not answered:\n" + "\n".join(lines)
        )
        if flight.call.fail(DeadlineExceeded(message, method=flight.out.method, running=stuck)):
            self._tell_cancelled(flight)

    def _statuses(self, ranks: Sequence[int]) -> dict[int, str]:
        reports = dict.fromkeys(ranks, f"no answer within {STATUS_S:g} s: its code holds the interpreter's lock")
        left = threading.Semaphore(0)

        def note(rank: int, reply: Reply) -> None:
            if reply.status == "ok":
                reports[rank] = describe(self.backend.unpack(reply.payload))
            left.release()

        for rank in ranks:
            self._ask(rank, "status", {}, lambda reply, rank=rank: note(rank, reply))
        until = time.monotonic() + STATUS_S
        for _ in ranks:
            if not left.acquire(timeout=max(0.0, until - time.monotonic())):
                break
        return reports

    # -- the end -------------------------------------------------------------------------------------------------

    def _fail_flights(self, reason: str) -> None:
        self._closing = True
        for flight in list(self._flights.values()):
            flight.call.fail(CallCancelled(f"{flight.call.label}: {reason}"))
        self._flights.clear()
        with self._settled:
            self._unsettled.clear()
            self._settled.notify_all()

    def _shut_down(self, timeout_s: float) -> None:
        """Let every host close its workers; returns when all have answered or ended, or after ``timeout_s``."""
        self._leaving = set(range(len(self._handles))) - self.dead.keys()
        self._left = threading.Event()
        nothing = self.backend.pack({}, self.size)
        for rank in sorted(self._leaving):
            request = Request(_numbers.take(), "", "shutdown", nothing, None, False)
            self._handles[rank].invoke(request, lambda reply, rank=rank: self._has_left(rank))
        until = time.monotonic() + timeout_s
        while self._leaving and (left := until - time.monotonic()) > 0:
            if not self.backend.wait(self._left.is_set, left):
                self._left.wait(min(left, SHUT_DOWN_NAP_S))

    def _has_left(self, rank: int) -> None:
        self._leaving.discard(rank)
        if not self._leaving:
            self._left.set()
            self.backend.wake()
