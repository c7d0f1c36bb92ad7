"""A worker process as the controller sees it: requests become actor calls, the actor's end a death.

The thread that waits for a call hears the replies, or else Ray's own threads do. A future for each reply makes a
broadcast slower than one ``ray.get`` on all replies, so a reply is first left to whoever waits, who gets all replies of
a short call at once. What nobody has waited for after a few milliseconds gets a future.
"""

from __future__ import annotations

import pickle
import re
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from ray.exceptions import ActorUnavailableError, RayActorError

from podium.backends.files import Log
from podium.backends.interrupts import Interrupts
from podium.exceptions import read_text
from podium.processes import is_stopped
from podium.runtime.backend import ProcessHandle
from podium.runtime.messages import Death, Failure, OnDeath, Reply, Request
from podium_ray.connect import ray
from podium_ray.wire import FULL, NO_VALUES, Parcel, bare_name, no_room, wire_to_outcome

__all__ = ["RayProcess", "Replies"]

KILL_S = 10.0
TOGETHER_S = 0.005  # the replies of a short call are taken in all at once, if they come within this
LOOK_S = 0.05  # a waiting thread looks this often whether its call was ended by somebody else
TICK_S = 0.004
LINGER = 50  # ticks without a call after which the listener sleeps; to wake it takes time from a call

Heard = Callable[[Any, BaseException | None], None]
"""Called once with the answer, or None and the error."""
Answer = tuple[Any, BaseException | None]
Done = Callable[[Reply], None]


class RayProcess(ProcessHandle):
    """One actor. ``Backend.start_processes`` has it settle in before it carries requests."""

    def __init__(
        self, rank: int, actor: Any, log: Log, replies: Replies, on_death: OnDeath, *, label: str, node: str = ""
    ) -> None:
        self.rank = rank
        self.label = label
        self.node = node
        self.actor = actor
        self.log = log
        self.ended = threading.Event()
        self._call, self._call_stored = actor.call.remote, actor.call_stored.remote
        self._bare = partial(actor.bare._remote, args=())  # takes the task's name without a new object for each call
        self._replies = replies
        self._on_death = on_death
        self._lock = threading.Lock()
        self._in_flight = 1  # the watch
        self._lost: BaseException | None = None
        self._killed = False

    def settled(self, pid: int) -> None:
        """The actor is ready. From now on its end is seen."""
        self.pid = pid
        self.actor.watch.remote().future().add_done_callback(self._on_watch)

    def invoke(self, request: Request, done: Done) -> None:
        if request.wire is None:
            request.wire = _encode(request)
        message, *stored = request.wire
        if request.concurrent:
            send = partial((self.actor.aside if request.target else self.actor.control).remote, message, *stored)
        elif isinstance(message, str):
            send = partial(self._bare, name=message)
        else:
            send = partial(self._call if not stored else self._call_stored, message, *stored)
        with self._lock:
            if self._lost is not None:
                return
            self._in_flight += 1
        self._replies.expect(send(), partial(self._on_answer, done))

    def kill(self) -> None:
        self._killed = True
        if not self.ended.is_set():
            ray.kill(self.actor, no_restart=True)
            self.ended.wait(KILL_S)

    def stopped(self) -> bool:
        return self.log.path.exists() and is_stopped(self.pid)  # the log is on the machine of the process

    def forget(self) -> None:
        """The actor goes on without this controller, which is not told of its end any more."""
        self._on_death = _unheard

    def _on_answer(self, done: Done, answer: Any, error: BaseException | None) -> None:
        if error is None:
            status, started, ended, payload = wire_to_outcome(answer)
            done(Reply(status, payload, started, ended))
        elif not isinstance(error, RayActorError):  # an argument that was lost on its way, say: the actor lives
            cause = no_room("the result") if isinstance(getattr(error, "cause", None), FULL) else error
            failure = Failure(type(cause).__name__, str(cause), "", cause if cause is not error else None, False)
            done(Reply("error", Parcel(pickle.dumps(failure, 5))))
        self._handle_reply(error if isinstance(error, RayActorError) else None)

    def _on_watch(self, future: Any) -> None:
        self._handle_reply(future.exception() or RuntimeError("its watch ended"))

    def _handle_reply(self, lost: BaseException | None) -> None:
        """One call came back. The end is told when none is in flight: replies sent before it are in by then."""
        with self._lock:
            self._in_flight -= 1
            if isinstance(lost, ActorUnavailableError) and self._lost is None:  # it may live on: it must not
                threading.Thread(target=ray.kill, args=(self.actor,), daemon=True).start()
            self._lost = self._lost or lost
            if self._lost is None or self._in_flight or self.ended.is_set():
                return
        words = () if self._killed else self.log.last_lines()
        self.ended.set()
        self._on_death(self.rank, Death(_cause(self._lost, self._killed), words))


def _unheard(rank: int, death: Death) -> None:
    """Nobody is to be told."""


def _encode(request: Request) -> tuple[Any, ...]:
    """The message, the same for every rank it goes to, and what Ray keeps of it. A call without arguments is a string,
    the name of its task: Ray takes longer for a call with any argument."""
    if request.shared is NO_VALUES and request.own is None and not request.concurrent:
        return (bare_name(request.number, request.target, request.method, request.wants_result),)
    parcels: list[Parcel] = [request.shared] if request.own is None else [request.shared, request.own]
    inside = [(p.data, None if p.stored is not None else p.buffers, p.alone, len(p.blocks)) for p in parcels]
    message = pickle.dumps((request.number, request.target, request.method, request.wants_result, inside), 5)
    blocks = [block for parcel in parcels for block in parcel.blocks]
    stored = [parcel.stored for parcel in parcels if parcel.stored is not None]
    return (message, blocks, *stored) if blocks or stored else (message,)


def _cause(error: BaseException | None, killed: bool) -> str:
    """Ray's own words, without its advice."""
    if killed:
        return "killed by its controller"
    if isinstance(error, ActorUnavailableError):
        return "Ray lost the connection to it, as when its node goes down"
    text = "" if error is None else read_text(error).strip()
    why = re.search(r"because ([^\n]*?)\.(?:\s|$)", text)
    exit_text = re.search(r"Worker exit type: (\w+) Worker exit detail: (.*?)\.(?:\s|$)", text)
    return (why[1] if why else text.partition("\n")[0]) + (f" ({exit_text[1]}: {exit_text[2]})" if exit_text else "")


class Replies:
    """References of answers that are due, and what to call with each."""

    def __init__(self) -> None:
        self._due: dict[Any, Heard] = {}
        self._awaited: frozenset[Any] = frozenset()  # those that the thread which drives waits for
        self._turn = threading.Lock()
        self._some = threading.Event()
        self._closed = False
        self._interrupts = Interrupts()
        threading.Thread(target=self._listen, name="podium-ray", daemon=True).start()

    def expect(self, reference: Any, heard: Heard) -> None:
        """Call ``heard`` when the answer is there, from whichever thread."""
        self._due[reference] = heard
        if not self._some.is_set():
            self._some.set()

    def drive(self, ended: Callable[[], bool], timeout_s: float | None) -> bool | None:
        """``Backend.wait``: hear answers in this thread."""
        if not self._turn.acquire(blocking=False):
            return False
        try:
            until = float("inf") if timeout_s is None else time.monotonic() + timeout_s
            if not ended():
                self._hear(self._await(), min(TOGETHER_S, max(0.0, until - time.monotonic())))
            while not ended() and (left := until - time.monotonic()) > 0:
                if not self._due:
                    return None
                due = self._await()
                ray.wait(due, timeout=min(LOOK_S, left))
                self._hear(ray.wait(due, num_returns=len(due), timeout=0)[0])
        finally:
            self._awaited = frozenset()
            self._turn.release()
        return True

    def close(self) -> None:
        """Hear no more."""
        self._closed = True
        self._some.set()
        self._interrupts.restore()

    def _await(self) -> list[Any]:
        due = list(self._due)
        self._awaited = frozenset(due)
        return due

    def _hear(self, references: list[Any], timeout_s: float | None = None) -> None:
        """Pass on the answers; with ``timeout_s`` only if all come in time and none is an error."""
        try:
            answers = [(answer, None) for answer in ray.get(references, timeout=timeout_s)]
        except Exception:  # noqa: BLE001 - one of them is an error: each by itself then
            if timeout_s is not None:
                return
            answers = [_answer(reference) for reference in references]
        self._interrupts.hold(self._tell, zip(references, answers, strict=True))

    def _tell(self, answers: Iterable[tuple[Any, Answer]]) -> None:
        for reference, answer in answers:
            if (heard := self._due.pop(reference, None)) is not None:
                heard(*answer)

    def _listen(self) -> None:
        while not self._closed:
            self._some.wait()
            idle = 0
            while idle < LINGER and not self._closed:
                self._pass_on()
                idle = 0 if self._due else idle + 1
            self._some.clear()
            if self._due:
                self._some.set()

    def _pass_on(self) -> None:
        """Give what nobody waits for a future. No reference outlives this: it would keep a result in Ray's store."""
        before = list(self._due)
        time.sleep(TICK_S)
        for reference in before:
            if reference not in self._awaited and (heard := self._due.pop(reference, None)) is not None:
                _by_future(reference, heard)


def _answer(reference: Any) -> Answer:
    try:
        return ray.get(reference), None
    except Exception as error:  # noqa: BLE001 - whatever Ray raises is what came of the call
        return None, error.with_traceback(None)  # which leads to frames that hold the arguments


def _by_future(reference: Any, heard: Heard) -> None:
    def note_done(future: Any) -> None:
        error = future.exception()
        heard(future.result() if error is None else None, error)

    reference.future().add_done_callback(note_done)
