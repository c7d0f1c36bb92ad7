"""The calls to one set of running processes: requests, replies, and the causes of failures."""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from textwrap import indent
from typing import Any
from weakref import ref

from podium import telemetry
from podium.errors import (
    CallCancelled,
    ConfigError,
    DeadlineExceeded,
    EndpointError,
    PodiumError,
    SerializationError,
    StoreFullError,
    WorkerDied,
)
from podium.exceptions import read_text
from podium.runtime.backend import Backend, ProcessHandle
from podium.runtime.calls.call import Call, CurrentProcess, refuse_in_a_fork, run_later
from podium.runtime.calls.deadlines import DeadlineWatch
from podium.runtime.calls.in_flight import STALL_S, HearReply, InFlight, pack_arguments, return_number, take_number
from podium.runtime.calls.progress import RankCounts
from podium.runtime.calls.relay import Relay, travelled
from podium.runtime.calls.siblings import find_waiting_siblings
from podium.runtime.calls.stacks import collective_of, outside_stack
from podium.runtime.collect import Collect, gather
from podium.runtime.dispatch import Split
from podium.runtime.messages import Death, Failure, Packed, Reply, Request
from podium.spelling import write_share
from podium.telemetry.bus import AS_EVENT
from podium.telemetry.events import Count

WAITS_FOR_ITSELF = (
    "a worker of the same processes called it and would wait for itself. Call the method of self or of "
    "self.ctx.colocated[...], or declare the endpoint with concurrent=True"
)

SETTLE_S = 0.2  # after which the ranks are asked whether one of them is the cause of a broken collective
STATUS_S = 1.0
REPORT_S = 2.0
SHOWN = 5  # calls that wait behind another one
COLLECTIVES_LATER_S = 5.0  # for a deadline to find the ranks in their collectives, and to say who waits for whom
LONGEST_S = 365 * 86400.0  # that torch is told to wait
NAP_S = 0.005  # between two offers to deliver replies for the backend

_log = logging.getLogger("podium")


def limit_of(timeout_s: float) -> float:
    """Seconds after which a collective fails in a call with this deadline: later than the deadline, and not much."""
    return min(timeout_s, LONGEST_S) + COLLECTIVES_LATER_S


class ProcessCalls:
    """The calls to the processes of one set, from their start to their end."""

    def __init__(self, backend: Backend, watch: DeadlineWatch, name: str, nodes: Sequence[str]) -> None:
        self.name = name  # of the group, for messages
        self.nodes = nodes  # each rank's node; empty while that is not known
        self.handles: Sequence[ProcessHandle] = ()  # set by whoever starts them and passes on_death to the backend
        self.lost: dict[int, Death] = {}  # the ranks whose process has ended
        self.broken = ""  # why no call can succeed before a restart
        self._needed: ProcessCalls | None = None  # have lost a rank, and these are of no use without them
        self._backend = backend
        self._in_flight: dict[int, InFlight] = {}  # by call_id: a number may be another call's by now
        self._sending = threading.RLock()
        self._sender = 0  # the thread that sends; a backend without processes runs endpoints in that thread
        self._unsettled: set[InFlight] = set()  # calls that failed on one rank while others still ran
        self._ended = False
        self._process = os.getpid() if backend.capabilities.concurrent else 0
        self._relay = Relay(self, self._ask, backend.unpack)
        self._counts = RankCounts(backend)
        self.collectives_s = 0.0  # the deadline with which collectives end in the processes; 0 where they have none
        self.relays = False  # the processes are asked for the calls of their workers
        watch.register(self)

    # -- requests out --------------------------------------------------------------------------------------------

    def request(
        self,
        label: str,
        method: str,
        timeout_s: float,
        shared: Mapping[str, Any],
        by_rank: Sequence[Mapping[str, Any]] | None = None,
        *,
        ranks: Sequence[int] | None = None,
        concurrent: bool = False,
        until: float | None = None,
    ) -> list[Any]:
        """Call a method of the worker processes themselves, of all unless ``ranks`` are given, and wait for their
        results. ``timeout_s`` are over at ``until``; by default they begin now. Raises what a call raises."""
        call: Call[list[Any]] = Call(label, timeout_s, self._backend)
        call.deadline = call.deadline if until is None else until
        ranks = range(len(self.handles)) if ranks is None else ranks
        self.send(call, "", method, Split(ranks, shared, by_rank, ranks), gather(), concurrent)
        return call.result()

    def send(
        self,
        call: Call[Any],
        target: str,
        method: str,
        split: Split,
        collect: Collect[Any, Any],
        concurrent: bool = False,
    ) -> None:
        """Send ``call`` to the ranks of ``split``. ``collect`` joins their results. Raises SerializationError, or
        WorkerDied, EndpointError or CallCancelled if the group has lost a rank, is broken or is closed."""
        if self._sender == threading.get_ident() and not concurrent:
            raise ConfigError(f"{call.label}: {WAITS_FOR_ITSELF}")
        if self._unsettled:
            self._wait_for_settlement(call, method, concurrent)
        if self._process not in (CurrentProcess.pid, 0) or not self.usable:
            self._refuse(call.label)
        packed = pack_arguments(self._backend, call.label, split)
        flight = InFlight(call, target, method, split, collect, collect.ranks(split), set(split.ranks))
        self._in_flight[flight.call_id] = flight  # from here on a death fails it; one while it was packed shows now
        if not self.usable:
            self._in_flight.pop(flight.call_id, None)
            self._refuse(call.label)
        call.on_cancel = partial(self._tell_cancelled, flight)
        try:
            if concurrent and not self._backend.capabilities.concurrent:
                # It runs here and now, and what another thread runs here may wait for it: completions for new weights.
                self._send_to_all(flight, packed, concurrent)
            else:
                with self._sending:  # every rank sees the calls of two callers in one order, as collectives need it
                    outer, self._sender = self._sender, threading.get_ident()
                    try:
                        self._send_to_all(flight, packed, concurrent)
                    finally:
                        self._sender = outer
        except BaseException as error:  # no room for it, or Ctrl-C, which is raised: some may have begun
            is_fault = isinstance(error, SerializationError | StoreFullError)
            interrupted = CallCancelled(f"{call.label} was interrupted while it was sent")
            call.fail(type(error)(f"{call.label}: {read_text(error)}") if is_fault else interrupted)
            self._tell_cancelled(flight)
            if not is_fault:
                raise
        if self.lost:
            for rank, death in list(self.lost.items()):  # it died just now, and may have missed this call
                self._lose(flight, rank, death)

    def _send_to_all(self, flight: InFlight, packed: tuple[Packed, Sequence[Packed] | None], concurrent: bool) -> None:
        handles, wanted, on_reply = self.handles, flight.wanted, self._on_reply
        if not handles:  # another thread has closed the group, and with it failed the call
            return
        timeout_s = flight.call.timeout_s
        is_of_worker = flight.target or flight.method in ("run", "construct")
        if timeout_s != self.collectives_s != 0 and not concurrent and is_of_worker:
            self.collectives_s = timeout_s
            self.tell("limit_collectives", {"timeout_s": limit_of(timeout_s)})
        shared, by_rank = packed
        head = flight.number, flight.target, flight.method, shared
        if by_rank is not None:
            for rank, part in zip(flight.split.ranks, by_rank, strict=True):
                request = Request(*head, part, rank in wanted, concurrent)
                handles[rank].invoke(request, partial(on_reply, flight, rank))
            return
        common: dict[bool, Request] = {}
        for rank in flight.split.ranks:
            wants = rank in wanted
            if wants not in common:
                common[wants] = Request(*head, None, wants, concurrent)
            handles[rank].invoke(common[wants], partial(on_reply, flight, rank))

    @property
    def usable(self) -> bool:
        """Whether a call can succeed."""
        return not (self._ended or self.lost or self.broken or self._needed)

    def check_alive(self, label: str) -> None:
        """Ask all ranks, so that an end of which nobody has heard yet is known. Raises as :meth:`send`."""
        self._ask_all(range(len(self.handles)), "status", STATUS_S)
        if not self.usable:
            self._refuse(label)

    def _refuse(self, label: str) -> None:
        """Say why no call can be sent."""
        refuse_in_a_fork(self._process, label)
        if self._ended and not self.broken:
            raise CallCancelled(f"{label}: group {self.name} is closed")
        for rank, death in self.lost.items():
            raise self._make_death_error(label, rank, death, "has ended; call group.restart() to go on")
        if self._needed is not None:
            raise self._lacks(label, self._needed)
        if self.broken:
            what = f"{label}: group {self.name} is broken: {self.broken}; call group.restart() to go on"
            raise EndpointError(what, method=label, rank=-1, role=self.name)

    # -- replies in ----------------------------------------------------------------------------------------------

    def _on_reply(self, flight: InFlight, rank: int, reply: Reply) -> None:
        if reply.status == "ok":
            flight.replies[rank] = reply
            flight.open.discard(rank)
        else:
            flight.open.discard(rank)
            self._on_failure(flight, rank, reply)
        if not flight.open:
            self._all_answered(flight)
        if telemetry.active():
            telemetry.emit(
                telemetry.CallFinished(
                    role=flight.target or self.name,
                    method=flight.method,
                    rank=rank,
                    node=self._node(rank),
                    call_id=flight.call_id,
                    submitted_ns=flight.submitted_ns,
                    started_ns=reply.started_ns,
                    ended_ns=reply.ended_ns,
                    ok=reply.status == "ok",
                )
            )

    def _all_answered(self, flight: InFlight) -> None:
        """Every rank has replied or ended."""
        if self._in_flight.pop(flight.call_id, None) is None:
            return
        if not flight.cancelled:  # a rank that was told to drop the call may hear of that only now
            return_number(flight.number)
        if flight.held is not None:
            flight.call.fail(flight.held)
        elif len(flight.replies) == len(flight.split.ranks):
            replies = [flight.replies[rank] for rank in flight.wanted]
            flight.call.succeed(partial(self._read, flight.call.label, flight.collect, flight.split, replies))
        if not flight.breaking:
            self._settle(flight)

    def _read(self, label: str, collect: Collect[Any, Any], split: Split, replies: Sequence[Reply]) -> Any:
        return collect.collect(label, [self._backend.unpack(reply.payload) for reply in replies], split)

    def _on_failure(self, flight: InFlight, rank: int, reply: Reply) -> None:
        if reply.status == "cancelled":
            flight.call.fail(CallCancelled(f"{flight.call.label} was cancelled on rank {rank}"))
            return
        try:
            failure: Failure = self._backend.unpack(reply.payload)
        except PodiumError as error:  # no descriptor left to read it with, say
            flight.call.fail(error)
            return
        error = EndpointError(
            f"{flight.call.label} raised {failure.type_name} on rank {rank} of {len(self.nodes)} "
            f"({self._node(rank)}): {failure.message}\n\nTraceback of rank {rank}:\n{failure.traceback.rstrip()}",
            method=flight.method,
            rank=rank,
            role=flight.target or self.name,
            remote_traceback=failure.traceback,
        )
        error.__cause__ = failure.original()
        if flight.open and self.collectives_s and not flight.watched:
            flight.watched = True
            self._unsettled.add(flight)
            run_later(0.0, self._free_siblings, flight, rank, failure)
        if not (failure.secondary and flight.open):
            flight.call.fail(error)
        elif flight.held is None:
            flight.held = error
            run_later(SETTLE_S, self._report_secondary, flight, error)

    def on_death(self, rank: int, death: Death) -> None:
        """The process of ``rank`` has ended: fail every call that waits for it."""
        try:  # before anyone can hear of the death: what is sent later finds the calls of its workers cancelled
            self._relay.drop(rank)
        finally:
            self.lost[rank] = death
        if self._ended:
            return
        lost = telemetry.WorkerLost(role=self.name, rank=rank, node=self._node(rank), cause=death.cause)
        waiting = [flight for flight in list(self._in_flight.values()) if rank in flight.open]
        if waiting:
            telemetry.emit(lost)
        else:
            self._warn(f"{self.name} rank {rank} ({self._node(rank)}) ended: {death.cause}", lost)
        for flight in waiting:
            self._lose(flight, rank, death)

    def _lose(self, flight: InFlight, rank: int, death: Death) -> None:
        if rank in flight.open:
            flight.open.discard(rank)
            flight.call.fail(
                self._make_death_error(flight.call.label, rank, death, "ended while this call waited for it")
            )
            if not flight.open:
                self._all_answered(flight)
            self._settle(flight)

    def give_up(self, needed: "ProcessCalls") -> None:
        """Fail the calls in flight, and refuse later ones, since a rank of ``needed`` has ended."""
        self._needed = needed
        for flight in list(self._in_flight.values()):
            flight.call.fail(self._lacks(flight.call.label, needed))

    def _lacks(self, label: str, needed: "ProcessCalls") -> WorkerDied:
        rank, death = next(iter(needed.lost.items()))
        return needed._make_death_error(label, rank, death, "has ended, and nobody waits for this call any more")

    def _make_death_error(self, label: str, rank: int, death: Death, what: str) -> WorkerDied:
        words = "".join(f"\n  | {line}" for line in death.last_words)
        return WorkerDied(
            f"{label}: rank {rank} of {self.name} on {self._node(rank)} {what}: {death.cause}"
            + (f"; its last words:{words}" if words else "; it left no last words"),
            rank=rank,
            node=self._node(rank),
            cause=death.cause,
            role=self.name,
            last_words=death.last_words,
        )

    def _node(self, rank: int) -> str:
        return self.nodes[rank] if rank < len(self.nodes) else "an unknown node"

    def _report_secondary(self, flight: InFlight, error: PodiumError) -> None:
        """Fail a call with the error of a broken collective once all ranks are known to live. The death of one of them
        would be the cause, and may be noticed later than the errors that it causes."""
        self._ask_all(range(len(self.handles)), "status", flight.call.deadline - time.monotonic(), flight.call.done)
        flight.call.fail(error)

    def _free_siblings(self, flight: InFlight, rank: int, failure: Failure) -> None:
        """Free the ranks that wait in a collective for ``rank``, which raised. A rank that computes may still end by
        itself, or begin a collective later, so this goes on until all have answered."""

        def is_over() -> bool:
            return not flight.open or self._ended or rank in self.lost

        def ask_for_collectives() -> dict[int, Any]:
            replies = self._ask_all([rank, *sorted(flight.open)], "collectives", STATUS_S)
            return {at: self._backend.unpack(reply.payload) for at, reply in replies.items() if reply.status == "ok"}

        waiting = find_waiting_siblings(rank, ask_for_collectives, is_over, self._wait_until)
        if is_over() or not waiting:
            self._settle(flight)
            return
        raised = f"rank {rank} raised {failure.type_name} in {flight.call.label}"
        why = f"{raised} while ranks {waiting} waited for it in a collective, so its process group was destroyed to"
        flight.breaking = True
        self._break(flight, rank, f"{why} free them")

    def _wait_for_settlement(self, call: Call[Any], method: str, concurrent: bool) -> None:
        """Wait until the ranks have heard of calls that passed their deadline or were cancelled. Unless ``call`` is
        concurrent, wait as well until no rank can be in a collective of a call that failed on another rank: it would
        meet the others there with the tensors of ``call``. Raises DeadlineExceeded."""

        def is_settled() -> bool:
            flights = list(self._unsettled)
            return not any(flight.expired or flight.cancelled or not concurrent for flight in flights)

        self._wait_until(is_settled, call.deadline - time.monotonic())
        for flight in () if concurrent else list(self._unsettled):
            running = tuple(sorted(flight.open))
            raise DeadlineExceeded(
                f"{call.label} passed its deadline of {call.timeout_s:g} s before it was sent: ranks {list(running)} "
                f"of {self.name} still run {flight.call.label}, which failed on another rank",
                method=method,
                running=running,
            )

    def _break(self, flight: InFlight, rank: int, why: str) -> None:
        """Destroy the process groups of ``rank``. If it had any, the group is broken, for the reason ``why``."""

        def broke(rank: int, reply: Reply) -> None:
            if not self._ended and reply.status == "ok" and self._backend.unpack(reply.payload) and not self.broken:
                self.broken = why
            self._settle(flight)

        self._ask([rank], "break_collectives", {}, broke)

    def _settle(self, flight: InFlight) -> None:
        if flight in self._unsettled:
            self._unsettled.discard(flight)
            self._backend.wake()

    # -- deadlines and cancelling --------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Fail calls that have passed their deadline, and warn of those that wait long. Ask the processes for calls of
        their workers once these may hold a handle."""
        if travelled.is_set() and not self.relays and self.handles and self._backend.capabilities.processes:
            self.relays = True
            self._relay.poll(range(len(self.handles)))
        for flight in list(self._in_flight.values()):
            call = flight.call
            if call.done():
                continue
            waited = now - flight.submitted_ns / 1e9
            if now >= call.deadline and not flight.expired:
                flight.expired = True
                run_later(0.0, self._expire, flight)
            elif waited > max(call.timeout_s / 2, REPORT_S) and not flight.reported and not flight.expired:
                flight.reported = True
                run_later(0.0, self._report, flight, waited)
            elif waited > flight.next_stall:
                counted = self._counts.of(flight.open)
                flight.next_stall = waited + STALL_S if counted != flight.counted else 2 * flight.next_stall
                if counted == flight.counted:  # else it goes on, and shows so
                    ranks = tuple(sorted(flight.open))
                    what = f"{call.label} has waited {waited:.0f} s for rank(s) {ranks} of {self.name}"
                    self._warn(what, telemetry.Stalled(self.name, flight.method, ranks, waited))
                flight.counted = counted

    def read_counts(self, after_s: float) -> list[Count]:
        """Ask the processes whose calls have taken ``after_s`` seconds what they count. The thread of deadlines does
        not call this, since a process may not answer."""
        if not (self._backend.capabilities.processes and self._backend.capabilities.concurrent):
            return []  # what workers count in this process is read without them
        until_ns = time.monotonic_ns() - after_s * 1e9
        flights = [flight for flight in list(self._in_flight.values()) if flight.submitted_ns <= until_ns]
        ranks = {rank for flight in flights if not flight.call.done() for rank in flight.open}
        return self._counts.read(self.name, self._ask, ranks - self.lost.keys(), self._wait_until)

    def _report(self, flight: InFlight, waited_s: float) -> None:
        """Say where a call is that has used half of its time."""
        ranks, call = tuple(sorted(flight.open)), flight.call
        where = self._where(flight, ranks)
        if call.done():
            return
        report = f"{call.label} has waited {waited_s:.0f} s of its {call.timeout_s:g} s; {where}"
        self._warn(report, telemetry.Stalled(self.name, flight.method, ranks, waited_s, report))

    def _warn(self, what: str, event: telemetry.Event) -> None:
        """Log ``what``, and emit the event, which says the same where a terminal shows events."""
        _log.warning("%s", what, extra={AS_EVENT: True})
        telemetry.emit(event)

    def _expire(self, flight: InFlight) -> None:
        ranks, call = tuple(sorted(flight.open)), flight.call
        message = f"{call.label} passed its deadline of {call.timeout_s:g} s; {self._where(flight, ranks)}"
        # Unsettled first: whoever hears of the deadline may submit the next call before the ranks are told of it.
        unsettle = partial(self._unsettled.add, flight) if len(flight.split.ranks) > 1 else None
        if call.fail(DeadlineExceeded(message, method=flight.method, running=ranks), unsettle):
            self._tell_cancelled(flight)

    def _where(self, flight: InFlight, ranks: Sequence[int]) -> str:
        """Who has not answered, what each runs, who waits for whom in a collective, and which calls wait behind."""
        answers = self._ask_all(ranks, "status", STATUS_S)
        statuses = {rank: self._status(rank, answers.get(rank)) for rank in ranks}
        lines = [f"{write_share(len(ranks), len(flight.split.ranks), 'rank', 'has', 'have')} not answered:"]
        lines += [f"  rank {rank} ({self._node(rank)}): {status}" for rank, status in statuses.items()]
        if collective := collective_of(statuses):
            lines.append(f"  {collective}")
        behind = [
            other.call.label
            for other in list(self._in_flight.values())
            if other.call_id > flight.call_id and other.open & flight.open and not other.call.done()
        ]
        if behind:
            more = f" and {len(behind) - SHOWN} more" if len(behind) > SHOWN else ""
            lines.append(f"  behind it: {', '.join(behind[:SHOWN])}{more}")
        return "\n".join(lines)

    def _status(self, rank: int, answer: Reply | None) -> str:
        if answer is not None and answer.status == "ok":
            return self._backend.unpack(answer.payload)
        if rank >= len(self.handles):
            return "it has ended"
        process = self.handles[rank]
        stack = outside_stack(process.pid)
        position = f", at\n{indent(stack, ' ' * 6)}" if stack else ""
        if process.stopped():
            return f"a signal has stopped process {process.pid}: kill -CONT lets it go on{position}"
        return (
            f"no answer within {STATUS_S:g} s: its code holds the interpreter's lock, or the machine is busy{position}"
        )

    def _tell_cancelled(self, flight: InFlight) -> None:
        """Have the ranks drop the call. If some drop it and others run it, the group is broken: those that run it may
        wait in a collective, where the others would meet them with the tensors of a later call."""
        flight.cancelled = True  # before a look at who has not replied: after the last reply its number is another's
        silent, dropped = set(flight.open), set[int]()
        if len(flight.split.ranks) > 1:
            self._unsettled.add(flight)
            run_later(STATUS_S, _settle_late, ref(self), ref(flight))  # which keeps no arguments of the call

        def note_reply(rank: int, reply: Reply) -> None:
            if rank in flight.open and reply.status == "ok" and self._backend.unpack(reply.payload):
                dropped.add(rank)
            silent.discard(rank)
            if not silent:
                self._after_drop(flight, dropped)

        self._ask(list(silent), "cancel", {"cancelled": flight.number}, note_reply)

    def _after_drop(self, flight: InFlight, dropped_by: set[int]) -> None:
        """Every rank has said whether it dropped the call: break the group if some did and others did not."""
        dropped, ran = sorted(dropped_by), sorted(set(flight.split.ranks) - dropped_by)
        if not dropped or not ran or self._ended:
            self._settle(flight)
            return
        why = f"ranks {dropped} dropped {flight.call.label}, which ranks {ran} ran, so its process group was destroyed"
        self._break(flight, dropped[0], why)

    def tell(self, method: str, values: Mapping[str, Any]) -> None:
        """Send a request to all worker processes themselves, in order with others, and do not wait for its end."""
        self._ask(range(len(self.handles)), method, values, lambda rank, reply: None, concurrent=False)

    def _ask(
        self, ranks: Sequence[int], method: str, values: Mapping[str, Any], hear: HearReply, concurrent: bool = True
    ) -> None:
        """Send one request to the worker processes of ``ranks`` themselves. ``hear`` is called with each reply."""
        handles = self.handles
        left = {rank for rank in ranks if rank < len(handles) and rank not in self.lost}
        if not left:
            return
        number, packed = take_number(), self._backend.pack(values, len(left))
        request = Request(number, "", method, packed, None, True, concurrent)

        def note_reply(rank: int, reply: Reply) -> None:
            left.discard(rank)
            if not left:
                return_number(number)
            hear(rank, reply)

        for rank in sorted(left):
            handles[rank].invoke(request, partial(note_reply, rank))

    def _ask_all(
        self,
        ranks: Sequence[int],
        method: str,
        timeout_s: float,
        is_over: Callable[[], bool] = lambda: False,
        *,
        concurrent: bool = True,
    ) -> dict[int, Reply]:
        """The replies of ``ranks`` when all have replied or ended, when ``is_over()``, or after ``timeout_s``."""
        answers: dict[int, Reply] = {}
        self._ask(ranks, method, {}, answers.__setitem__, concurrent)

        def is_ended() -> bool:
            return is_over() or all(rank in answers or rank in self.lost for rank in ranks)

        self._wait_until(is_ended, timeout_s)
        return answers

    def _wait_until(self, ended: Callable[[], bool], timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while not ended() and (left := until - time.monotonic()) > 0:
            if not self._backend.wait(ended, left):
                time.sleep(min(left, NAP_S))

    # -- the end -------------------------------------------------------------------------------------------------

    def busy(self, worker: str = "") -> bool:
        """Whether a call is in flight, to ``worker`` if one is given."""
        flights = list(self._in_flight.values())
        return any(not worker or worker in (flight.target, flight.split.shared.get("worker")) for flight in flights)

    def stuck(self) -> bool:
        """Whether a rank still runs a call whose deadline has passed."""
        return any(flight.expired and flight.open for flight in list(self._in_flight.values()))

    def end(self, reason: str) -> None:
        """Fail the calls in flight with ``reason``, and refuse further ones."""
        self._ended = True
        for flight in list(self._in_flight.values()):
            flight.call.fail(CallCancelled(f"{flight.call.label}: {reason}"))
        self._in_flight.clear()
        self._unsettled.clear()
        self._relay.drop()
        self._backend.wake()

    def kill(self, shut_down_s: float) -> None:
        """End the processes. They have ``shut_down_s`` seconds to close their workers first."""
        if shut_down_s > 0:
            self._ask_all(range(len(self.handles)), "shutdown", shut_down_s, concurrent=False)
        left = {*self.handles}

        def end(handle: ProcessHandle) -> None:
            try:
                handle.kill()
            finally:
                left.discard(handle)
                self._backend.wake()

        enders = [threading.Thread(target=end, args=(handle,), daemon=True) for handle in self.handles]
        for ender in enders:
            ender.start()
        with contextlib.suppress(ConfigError):  # a handler of a signal came inside a message: nobody can take in others
            while left:  # as this thread may be the one that takes in how they end
                self._wait_until(lambda: not left, REPORT_S)
        for ender in enders:
            ender.join()
        self.handles = ()


def _settle_late(calls: "ref[ProcessCalls]", flight: "ref[InFlight]") -> None:
    if (owner := calls()) is not None and (live_flight := flight()) is not None:
        owner._settle(live_flight)  # pyright: ignore[reportPrivateUsage]
