"""A backend that breaks one sentence of the contract at a time: ``local``, with the fault that its option names."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any, ClassVar, NoReturn, cast
from unittest import mock

import numpy as np

from podium.backends.local import LocalBackend, server
from podium.backends.local.backend import WorkerServer
from podium.backends.local.process import LocalProcess
from podium.backends.process import Surroundings
from podium.data import Block, BlockInfo, MemoryStore
from podium.data.store import Bytes, PlainBlock
from podium.errors import ConfigError, PlacementError, SerializationError
from podium.processes import Channel, Frame, command, supervisor
from podium.runtime import Death, Node, Place, ProcessHandle, ProcessSpec, Reply, Request
from podium.runtime.messages import OnDeath

__all__ = ["FAULTS", "HANGS", "PATIENCE_S", "STAYS", "BrokenBackend", "main"]

FAULTS: dict[str, str] = {
    # -- nodes and reservations
    "nodes change their order": "test_nodes_have_a_stable_order_and_names_of_their_own",
    "expects another machine": "test_what_is_expected_without_a_start_is_what_there_is",
    "mixes up places": "test_a_reservation_has_the_places_asked_for_and_a_token_that_pickles",
    "token does not pickle": "test_a_reservation_has_the_places_asked_for_and_a_token_that_pickles",
    "holds what cannot be had": "test_a_reservation_that_cannot_be_had_holds_nothing",
    "keeps what is released": "test_what_cannot_be_placed_is_refused_at_once_and_says_why",
    "one rendezvous for all": "test_a_rendezvous_is_a_new_one_each_time",
    "shows all devices": "test_devices_of_a_slot_and_no_others_are_visible",
    # -- start
    "takes any option": "test_unknown_options_are_refused",
    "forgets process ids": "test_every_rank_has_a_process_of_its_own_whose_number_is_known",
    "one process for two ranks": "test_every_rank_has_a_process_of_its_own_whose_number_is_known",
    "ignores threads": "test_a_worker_computes_with_the_threads_of_its_slot",
    "ignores env": "test_workers_get_their_environment",
    "sets env late": "test_if_one_process_does_not_start_none_is_left",
    "stays where it was": "test_a_worker_works_where_the_controller_does",
    "belongs to one thread": "test_any_thread_may_start_and_close",
    "starts some of a group": "test_if_one_process_does_not_start_none_is_left",
    "ignores start limits": "test_a_start_ends_at_its_limit_and_leaves_nothing",
    # -- requests
    "waits in invoke": "test_submitting_does_not_wait",
    "answers twice": "test_each_request_has_one_reply_with_its_own_value",
    "mixes up replies": "test_each_request_has_one_reply_with_its_own_value",
    "overtakes": "test_calls_run_in_the_order_submitted",
    "runs all in order": "test_concurrent_endpoints_overlap_with_a_running_call",
    "wants every result": "test_a_result_that_nobody_wants_is_not_sent",
    "has no clock": "test_times_are_those_of_the_call",
    "waits too long": "test_waiting_less_long_does_not_cancel",
    "waits in line": "test_waiting_ends_when_it_is_asked_to",
    "does not wake": "test_waiting_ends_when_it_is_asked_to",
    "packs with errors of its own": "test_an_unpicklable_constructor_argument_is_named",
    "unpacks with errors of its own": "test_a_result_that_does_not_unpickle_fails_its_call_alone",
    "takes back what it unpacked": "test_results_outlive_the_calls_after_them",
    "loses what is put": "test_what_is_put_is_passed_on_by_reference_and_freed_with_the_last_one",
    "loses shutdown": "test_closing_a_group_calls_its_workers_close_and_refuses_calls",
    "sends late": "test_what_the_caller_changes_after_submitting_is_not_seen",
    # -- ends
    "attaches in another order": "test_a_detached_group_is_found_by_name_and_stopped",
    "finds what is not there": "test_a_detached_group_is_found_by_name_and_stopped",
    "ends what it lets go": "test_a_detached_group_is_found_by_name_and_stopped",
    "ends detached processes at close": "test_a_detached_group_outlives_its_controller_and_its_end_is_heard",
    "hears no end of what it attached to": "test_a_detached_group_outlives_its_controller_and_its_end_is_heard",
    "kills once": "test_kill_returns_when_the_end_was_reported",
    "sees all as stopped": "test_kill_returns_when_the_end_was_reported",
    "kills later": "test_kill_returns_when_the_end_was_reported",
    "reports ends twice": "test_kill_returns_when_the_end_was_reported",
    "reports no end": "test_an_end_is_reported_without_a_call_and_with_its_cause",
    "loses causes": "test_an_end_is_reported_without_a_call_and_with_its_cause",
    "loses last words": "test_a_death_is_named_now_and_later_until_restart",
    "reports ends before replies": "test_replies_that_were_sent_before_an_end_are_heard",
    "leaves children": "test_what_a_process_started_ends_with_it",
    "does not see what is stopped": "test_a_process_that_a_signal_stopped_is_called_so",
    "leaves processes at close": "test_closing_the_backend_ends_its_processes_and_may_be_repeated",
    "closes once": "test_closing_the_backend_ends_its_processes_and_may_be_repeated",
    # -- the script
    "loses output": "test_what_workers_print_appears_with_their_names",
    "gives output no name": "test_what_workers_print_appears_with_their_names",
    "ends at Ctrl-C": "test_a_terminals_ctrl_c_does_not_reach_the_workers",
    "outlives its controller": "test_workers_and_their_children_end_with_a_script_that_is_killed",
}
"""By fault, the test of the public suite that finds it."""

HANGS = (
    "one process for two ranks",
    "ignores start limits",
    "waits in invoke",
    "runs all in order",
    "waits too long",
    "waits in line",
    "does not wake",
    "finds what is not there",
    "hears no end of what it attached to",
    "reports no end",
)
"""The faults with which a test waits for what never comes. The limit of the test finds them, and no other fault."""
STAYS = ("starts some of a group", "leaves children", "leaves processes at close", "outlives its controller")
"""The faults with which a process stays. A test waits in vain for the end of the process."""
PATIENCE_S = 1.0
"""How long a test waits in vain, from the moment at which the fault acts."""


class _Limit:
    """The limit of the running test, which ends soon after a fault from HANGS has acted."""

    acted = False

    def shorten(self, seconds: float = PATIENCE_S) -> None:
        """Let the test end after ``seconds``, because the fault has acted just now."""
        if signal.getitimer(signal.ITIMER_REAL)[0] > seconds:
            self.acted = True
            signal.setitimer(signal.ITIMER_REAL, seconds)

    @property
    def over(self) -> bool:
        """Whether the test has ended at its limit. The fault is gone then, so that what it began can be ended."""
        return self.acted and signal.getitimer(signal.ITIMER_REAL)[0] == 0.0


limit = _Limit()

_tokens = itertools.count(1)  # of the processes that this server starts, for whichever backend


class _KeptServer(WorkerServer):
    """A fork server that stays for the next backend: to start one takes longer than most tests."""

    spare: ClassVar[list[WorkerServer]] = []

    def close(self) -> None:
        self.spare.append(self)


class _Detached:
    """The processes of a detached group, and who hears of their ends now. They belong to a backend that stays."""

    found: ClassVar[dict[str, _Detached]] = {}
    home: ClassVar[LocalBackend | None] = None

    def __init__(self, specs: Sequence[ProcessSpec], on_death: OnDeath) -> None:
        self.on_death = on_death
        _Detached.home = _Detached.home or LocalBackend(preload=(), echo=False)
        self.processes = _Detached.home.start_processes(specs, lambda rank, death: self.on_death(rank, death))
        self.found[specs[0].detached] = self

    @property
    def left(self) -> list[ProcessHandle]:
        return [process for process in self.processes if cast(LocalProcess, process).takes_calls]


class _Store(MemoryStore):
    """A store that keeps nothing but the size."""

    def make(self, buffers: Sequence[Bytes], offsets: Sequence[int], info: BlockInfo) -> Block:
        return PlainBlock(np.zeros(info.nbytes, dtype=np.uint8), info)


class BrokenBackend(LocalBackend):
    """Args:
    fault: One of FAULTS, or "" for a backend without a fault.
    preload: Modules that a fork server has loaded, which is used again. By default the backend starts a server of its
        own, which has a fault where one is asked for.
    """

    capabilities = dataclasses.replace(LocalBackend.capabilities, detached=True)

    def __init__(self, *, fault: str, preload: Sequence[str] = ()) -> None:
        if fault and fault not in FAULTS:
            raise ConfigError(f"no fault {fault!r}")
        self.fault = fault
        self._rendezvous = ""
        self._thread = threading.get_ident()
        self._closes = 0
        self._unpacked: Any = None
        self._order = 1
        self._late = list[Callable[[], object]]()  # what is done once somebody waits, or once a process has ended
        self._line = threading.Lock()
        self._kept: list[Place] = []
        with mock.patch("podium.backends.local.backend.command", partial(_command, fault)):
            super().__init__(preload=preload, echo=fault != "loses output", nodes=3 if "order" in fault else 1)
        if fault == "ends at Ctrl-C" and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._interrupted)

    def _new_server(self) -> WorkerServer:
        if not self._preload:
            return super()._new_server()
        kept = _KeptServer.spare.pop() if _KeptServer.spare else _KeptServer(self._preload, self.files.private)
        self._tokens = _tokens
        self.io.watch(kept.channel.fileno(), partial(self._on_server, kept))
        return kept

    # -- nodes and reservations --------------------------------------------------------------------------------------

    @classmethod
    def expected_nodes(cls, options: Mapping[str, Any]) -> Sequence[Node]:
        return [Node("elsewhere", {"cpu": 999.0})] if options["fault"] == "expects another machine" else ()

    def nodes(self) -> Sequence[Node]:
        nodes = [*super().nodes()]
        if self.fault == "nodes change their order":
            self._order = -self._order
            nodes = nodes[:: self._order]
        if self._kept:
            cpus = sum(place.resources.get("cpu", 0.0) for place in self._kept)
            nodes = [dataclasses.replace(node, taken={"a pool that was released": {"cpu": cpus}}) for node in nodes]
        return nodes

    def reserve(self, places: Sequence[Place], detached: bool) -> tuple[Any, Sequence[Place]]:
        asked = sum(place.resources.get("cpu", 0.0) for place in [*places, *self._kept])
        if asked > sum(node.resources["cpu"] for node in super().nodes()):
            self._kept += places[: self.fault == "holds what cannot be had"]
            raise PlacementError(f"asked for {asked:g} cpu")
        token = threading.Lock() if self.fault == "token does not pickle" else places
        return token, places[::-1] if self.fault == "mixes up places" else places

    def release(self, token: Any) -> None:
        if self.fault == "keeps what is released":
            self._kept += token

    def rendezvous(self, processes: Sequence[ProcessHandle]) -> str:
        self._rendezvous = self._rendezvous or super().rendezvous(processes)
        return self._rendezvous if self.fault == "one rendezvous for all" else super().rendezvous(processes)

    # -- processes ---------------------------------------------------------------------------------------------------

    def check_options(self, options: Mapping[str, Any]) -> None:
        if self.fault != "takes any option":
            super().check_options(options)

    def start_processes(self, specs: Sequence[ProcessSpec], on_death: OnDeath) -> Sequence[ProcessHandle]:
        if self.fault == "belongs to one thread" and threading.get_ident() != self._thread:
            raise RuntimeError("not my thread")
        specs = [self._spoiled(spec) for spec in specs]
        if specs[0].detached:
            found = _Detached(specs, self._and_wake(on_death)).processes
            return [BrokenProcess(process, self.fault, self.wake) for process in found]
        with self._while_starting():
            processes = super().start_processes(specs, partial(self._died, on_death))
        broken = [BrokenProcess(process, self.fault, late=self._late) for process in processes]
        if self.fault == "one process for two ranks":
            limit.shorten()
            broken = broken[:1] * len(broken)
        return broken

    def attach(self, name: str, on_death: OnDeath) -> Sequence[ProcessHandle]:
        detached = _Detached.found.get(name)
        left = detached.left if detached is not None else []
        if not left and self.fault == "finds what is not there":
            left = [process for other in _Detached.found.values() for process in other.processes]
            limit.shorten()
        if detached is not None and self.fault != "hears no end of what it attached to":
            detached.on_death = self._and_wake(on_death)
        found = [BrokenProcess(process, self.fault, self.wake) for process in left]
        return found[::-1] if self.fault == "attaches in another order" else found

    def _and_wake(self, on_death: OnDeath) -> OnDeath:
        """What another backend reports is heard in a thread of that one."""

        def heard(rank: int, death: Death) -> None:
            on_death(rank, death)
            self.wake()

        return heard

    def let_go(self, processes: Sequence[ProcessHandle]) -> None:
        for detached in _Detached.found.values():
            if {*detached.processes} & {process.real for process in processes if isinstance(process, BrokenProcess)}:
                detached.on_death = self._hear_nothing
        for process in processes if self.fault == "ends what it lets go" else ():
            process.kill()

    def _hear_nothing(self, rank: int, death: Death) -> None:
        if self.fault == "hears no end of what it attached to":
            limit.shorten()

    def _spoiled(self, spec: ProcessSpec) -> ProcessSpec:
        match self.fault:
            case "shows all devices":
                devices = tuple(range(len(self.accelerators)))
                return dataclasses.replace(spec, place=dataclasses.replace(spec.place, devices=devices))
            case "ignores threads":
                return dataclasses.replace(spec, threads=3)
            case "ignores env":
                return dataclasses.replace(spec, env={})
            case "ignores start limits":
                limit.shorten(spec.timeout_s + PATIENCE_S)
                return dataclasses.replace(spec, timeout_s=600.0)
            case "gives output no name":
                return dataclasses.replace(spec, label=f"process-{spec.rank}")
            case _:
                return spec

    @contextlib.contextmanager
    def _while_starting(self) -> Iterator[None]:
        match self.fault:
            case "starts some of a group":
                with mock.patch.object(LocalProcess, "kill", lambda process: None):
                    yield
            case "sets env late":
                with mock.patch("podium.backends.local.process.EARLY", ("nothing is set early",)):
                    yield
            case "stays where it was":
                elsewhere = Surroundings(1, "/", sys.path[1:])
                with mock.patch.object(Surroundings, "here", lambda threads: elsewhere):
                    yield
            case _:
                yield

    def _died(self, on_death: OnDeath, rank: int, death: Death) -> None:
        match self.fault:
            case "reports no end":
                limit.shorten()
                return
            case "loses causes":
                death = death._replace(cause="it ended")
            case "loses last words":
                death = death._replace(last_words=())
            case "reports ends twice":
                on_death(rank, death)
        on_death(rank, death)
        if self.fault == "reports ends before replies":
            self._do_what_is_late()

    def _do_what_is_late(self) -> None:
        while self._late:
            self._late.pop(0)()

    def pack(self, value: Any, readers: int) -> Any:
        try:
            return super().pack(value, readers)
        except SerializationError as error:
            raise TypeError if self.fault == "packs with errors of its own" else error from error

    def unpack(self, payload: Any) -> Any:
        try:
            value = super().unpack(payload)
        except SerializationError as error:
            if self.fault == "unpacks with errors of its own":
                raise ValueError(str(error)) from error
            raise
        if self.fault == "takes back what it unpacked":
            if hasattr(self._unpacked, "zero_"):
                self._unpacked.zero_()
            self._unpacked = value
        return value

    def store(self) -> Any:
        return _Store() if self.fault == "loses what is put" else super().store()

    def wait(self, ended: Callable[[], bool], timeout_s: float | None) -> bool:
        if self.fault == "sends late":
            self._do_what_is_late()
        if self.fault == "waits too long" and timeout_s is not None and not limit.over:
            limit.shorten()
            timeout_s = None
        with self._stand_in_line() if self.fault == "waits in line" else contextlib.nullcontext():
            return super().wait(ended, timeout_s)

    @contextlib.contextmanager
    def _stand_in_line(self) -> Iterator[None]:
        if not self._line.acquire(blocking=False):
            limit.shorten()
            self._line.acquire()
        try:
            yield
        finally:
            self._line.release()

    def wake(self) -> None:
        if self.fault == "does not wake":
            limit.shorten()
        else:
            super().wake()

    def close(self) -> None:
        self._closes += 1
        if self.fault == "ends detached processes at close":
            for process in [process for detached in _Detached.found.values() for process in detached.processes]:
                process.kill()
        if self.fault == "closes once" and self._closes == 2:
            raise RuntimeError("closed already")
        if self.fault != "leaves processes at close" or self._closes > 1 or not self.processes:
            super().close()

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        for process in list(self.processes.values()):
            process.kill()
        raise KeyboardInterrupt


class BrokenProcess(ProcessHandle):
    """A process of ``local``, and a fault. ``wake`` is called after each reply. What comes late goes to ``late``."""

    def __init__(
        self,
        real: ProcessHandle,
        fault: str,
        wake: Callable[[], None] = lambda: None,
        late: list[Callable[[], object]] | None = None,
    ) -> None:
        self._wake = wake
        self._late = [] if late is None else late
        self._held: Callable[[], None] | None = None
        self.pid = 0 if fault == "forgets process ids" else real.pid
        self.real = real
        self._fault = fault
        self._last: Reply | None = None
        self._kills = 0

    def invoke(self, request: Request, done: Callable[[Reply], None]) -> None:
        replied = threading.Event()

        def heard(reply: Reply) -> None:
            self._pass_on(request, reply, done)
            self._wake()
            replied.set()

        match self._fault:
            case "wants every result":
                request = dataclasses.replace(request, wants_result=True)
            case "runs all in order" if request.concurrent and request.target and not limit.over:
                limit.shorten()
                request = dataclasses.replace(request, concurrent=False)
            case "overtakes" if request.method in ("note", "nap") and self._held is None:
                self._held = partial(self.real.invoke, request, heard)
                return
            case "sends late" if request.target:
                self._late.append(partial(self.real.invoke, request, heard))
                return
            case "loses shutdown" if request.method == "shutdown":
                return
        self.real.invoke(request, heard)
        if self._held is not None:
            self._held()
            self._held = None
        if self._fault == "waits in invoke" and request.target:
            limit.shorten()
            replied.wait()

    def _pass_on(self, request: Request, reply: Reply, done: Callable[[Reply], None]) -> None:
        match self._fault:
            case "answers twice":
                done(reply)
            case "mixes up replies":
                reply, self._last = self._last or reply, reply
            case "has no clock":
                reply = reply._replace(started_ns=0, ended_ns=0)
            case "reports ends before replies" if request.method == "double":
                self._late.append(partial(done, reply))
                return
        done(reply)

    def kill(self) -> None:
        self._kills += 1
        if self._fault == "kills once" and self._kills == 2:
            raise RuntimeError("killed already")
        if self._fault != "kills later" or self._kills > 1:
            self.real.kill()

    def stopped(self) -> bool:
        if self._fault == "sees all as stopped":
            return True
        return self._fault != "does not see what is stopped" and self.real.stopped()


# -- in the fork server ------------------------------------------------------------------------------------------------


def _command(fault: str, module: str, *args: Any) -> list[str]:
    return command(__name__, fault, *args)


def main(fault: str, *args: Any) -> None:
    """Run the fork server of ``local`` with a fault."""
    if fault == "leaves children":
        supervisor.children_of = supervisor.descendants_of = lambda pid: []
        os.killpg = lambda group, number: None
    if fault == "outlives its controller":
        _outlive()
    server.main(*args)


def _outlive() -> None:
    """Neither the fork server nor a worker process notices that the controller has ended."""
    wait, read = supervisor.Supervisor.wait, Channel.read

    def wait_or_never(self: supervisor.Supervisor, timeout_s: float = 0.5) -> set[int]:
        return ready if (ready := wait(self, timeout_s)) is not None else _never()

    def read_or_never(self: Channel, *, wait: bool = True) -> list[Frame]:
        return frames if (frames := read(self, wait=wait)) is not None else _never()

    supervisor.Supervisor.wait = wait_or_never
    Channel.read = read_or_never
    os.register_at_fork(after_in_child=_stay)


def _stay() -> None:
    os.killpg = lambda group, number: _never()


def _never() -> NoReturn:
    while True:
        time.sleep(600)
