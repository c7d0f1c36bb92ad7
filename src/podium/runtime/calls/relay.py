"""Calls of workers: a worker that holds a group's handle calls its endpoints through the script that owns the group.

    worker     endpoint.submit ──▶ Outbox ◀──"take_call"──┐                 a request that waits until there is a call
    script                     poll again ◀── Relay ◀─────┘  ──▶ the group's own endpoint, as if the script called it
    worker     its Call ends ◀──"deliver"── Relay ◀── result or error

A backend knows nothing of this: the script asks each process, by a request to the process itself, for the next call of
its workers. It begins to ask when the first handle has left it. A process hands out one call at a time, so the calls of
a process are submitted in order. Each is handed out once and never repeated. The deadline is the script's. Tensors of
arguments stay with the caller, and the script passes on references.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, cast
from weakref import WeakValueDictionary

from podium.errors import ConfigError, DeadlineExceeded, EndpointError, PodiumError, SerializationError
from podium.exceptions import describe_error, format_error
from podium.runtime.calls.call import Call, CurrentProcess
from podium.runtime.calls.deadlines import DeadlineWatch
from podium.runtime.calls.in_flight import Ask
from podium.runtime.codec import decode, encode
from podium.runtime.exception_pickling import pack_exception
from podium.runtime.messages import Failure, Reply

UNANSWERED_S = 10.0  # after a call's deadline, by which the script has ended the call if it is there


class Wanted(NamedTuple):
    """A call that a worker makes, or the end of one that it gives up (without a key)."""

    number: int
    key: str = ""
    label: str = ""
    method: str = ""
    ranks: Sequence[int] | None = None  # the ranks that were chosen by on()
    values: Mapping[str, Any] = {}
    apart: Sequence[str] = ()  # the arguments that are per_rank([...])
    timeout_s: float = 0.0
    pad: bool | None = None  # what pad() has chosen, or the declaration


class Reachable(Protocol):
    """A group of this process, as the calls of workers reach it."""

    def submit_for(self, caller: object, wanted: Wanted) -> Call[Any]:
        """Submit a call for a worker in the processes ``caller``. Raises what submitting raises."""
        ...


reachable: WeakValueDictionary[str, Reachable] = WeakValueDictionary()
"""The groups of this process by the key under which their handles travel."""

travelled = threading.Event()
"""Set once a handle has left this process."""


class _Elsewhere:
    """In place of a backend: results come in by themselves."""

    def wait(self, ended: Callable[[], bool], timeout_s: float | None) -> None: ...

    def wake(self) -> None: ...


class Outbox:
    """The calls of the workers of this process, on their way to the script.

    Args:
        keep: Replaces the tensors of a value by references to copies, which this process keeps.
    """

    here: Outbox | None = None  # that of this process; None in a script

    def __init__(self, keep: Callable[[str, Any], Any]) -> None:
        self._keep = keep
        self.process = CurrentProcess.pid  # a fork has no connection to the script
        self._waiting: deque[Wanted | None] = deque()
        self._some = threading.Condition()
        self._calls: dict[int, Call[Any]] = {}
        self._number = self._taken = 0
        self._watch: DeadlineWatch | None = None

    def submit(self, wanted: Wanted, by_reference: bool) -> Call[Any]:
        """Send a call on its way. Raises SerializationError."""
        what = f"an argument of {wanted.label}"
        values = wanted.values
        if by_reference and "torch" in sys.modules:
            values = self._keep(what, values)
        blocks: list[Any] = []
        try:  # what the caller changes from here on is not seen
            data, buffers = encode(values, what, blocks)
        except SerializationError as error:
            raise SerializationError(f"{wanted.label}: {error}") from error.__cause__
        values = decode(data, [bytearray(b.raw()) for b in buffers], what, [partial(_itself, b) for b in blocks])
        call: Call[Any] = Call(wanted.label, wanted.timeout_s, cast(Any, _Elsewhere()))
        call.deadline += UNANSWERED_S  # the script's clock counts
        with self._some:
            if self._watch is None:
                self._watch = DeadlineWatch()
                self._watch.register(self)
            self._number += 1
            number = self._number
            self._calls[number] = call
            call.on_cancel = partial(self._put, Wanted(number))
            self._waiting.append(wanted._replace(number=number, values=values))
            self._some.notify()
        return call

    def take(self) -> Wanted | None:
        """Wait for the next call, and hand it out. None at the end."""
        with self._some:
            self._some.wait_for(lambda: self._waiting)
            wanted = self._waiting.popleft()
            self._taken = wanted.number if wanted is not None else 0
            return wanted

    def deliver(self, number: int | None, value: Any, error: BaseException | None) -> None:
        """End a call. Without a number it is the one that was handed out last, which the script could not read."""
        call = self._calls.pop(self._taken if number is None else number, None)
        if call is not None and error is not None:
            call.fail(error)
        elif call is not None:
            call.succeed(lambda: value)

    def tick(self, now: float) -> None:
        """End calls that the script has not ended although their deadline has passed."""
        for number, call in list(self._calls.items()):
            if now > call.deadline:
                self._calls.pop(number, None)
                what = (
                    f"{call.label} passed its deadline of {call.timeout_s:g} s, and the script that started the group "
                    "has not answered: it has ended, or it only attached to the group of this worker"
                )
                call.fail(DeadlineExceeded(what))

    def close(self) -> None:
        """Let whoever waits in :meth:`take` go."""
        self._put(None)

    def _put(self, wanted: Wanted | None) -> None:
        with self._some:
            self._waiting.append(wanted)
            self._some.notify()


class Relay:
    """Makes the calls of the workers in one set of processes, for as long as the set runs.

    Args:
        caller: What ``Reachable.submit_for`` knows the processes by.
        ask: Sends a request to the processes.
        unpack: Reads the payload of a reply.
    """

    def __init__(
        self,
        caller: object,
        ask: Ask,
        unpack: Callable[[Any], Any],
    ) -> None:
        self._caller, self._ask, self._unpack = caller, ask, unpack
        self._calls: dict[tuple[int, int], Call[Any]] = {}
        self._gone: set[int | None] = set()  # the ranks whose calls nobody waits for; None stands for all

    def poll(self, ranks: Sequence[int]) -> None:
        """Ask the processes of ``ranks`` for their next calls."""
        self._ask(ranks, "take_call", {}, partial(_in_thread, self._take))

    def drop(self, rank: int | None = None) -> None:
        """Cancel the calls that nobody waits for any more, and those that are yet to be submitted: of the process of
        ``rank``, or of all."""
        self._gone.add(rank)
        for key, call in list(self._calls.items()):
            if rank in (None, key[0]):
                self._calls.pop(key, None)
                call.cancel()

    def _take(self, rank: int, reply: Reply) -> None:
        try:
            wanted = self._read(reply)
        except PodiumError as error:  # the class of an argument is not known here, say
            self._ask([rank], "deliver", {"number": None, "error": error}, _note_unheard)
        else:
            if wanted is None:  # the process shuts down
                return
            self._make(rank, wanted)
        self.poll([rank])

    def _make(self, rank: int, wanted: Wanted) -> None:
        key = rank, wanted.number
        if not wanted.key:
            if (call := self._calls.pop(key, None)) is not None:
                call.cancel()
            return
        try:
            group = reachable.get(wanted.key)
            if group is None:
                raise ConfigError(f"{wanted.label}: the script has closed this group")
            call = group.submit_for(self._caller, wanted)
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to the call
            self._fail(key, error)
            return
        self._calls[key] = call
        if not self._gone.isdisjoint((rank, None)):  # it ended while this call was submitted
            self.drop(rank)
        call.when_done(partial(_in_thread, self._give_back, key, call.result))

    def _give_back(self, key: tuple[int, int], result: Callable[[], Any]) -> None:
        rank, number = key
        self._calls.pop(key, None)
        try:
            self._ask([rank], "deliver", {"number": number, "value": result()}, partial(self._hear_delivery, number))
        except Exception as error:  # noqa: BLE001 - the worker raises it
            self._fail(key, error)

    def _hear_delivery(self, number: int, rank: int, reply: Reply) -> None:
        if reply.status == "error":  # the worker cannot read the result
            _in_thread(self._give_back, (rank, number), partial(self._read, reply))

    def _fail(self, key: tuple[int, int], error: Exception) -> None:
        rank, number = key
        answer = {"number": number, "error": error, "cause": pack_exception(error.__cause__)}
        if not isinstance(error, PodiumError):
            endpoint_error = EndpointError(
                describe_error(error), method="", rank=-1, remote_traceback=format_error(error)
            )
            answer |= {"error": endpoint_error, "cause": pack_exception(error)}
        self._ask([rank], "deliver", answer, _note_unheard)

    def _read(self, reply: Reply) -> Any:
        """The value of a reply. Raises PodiumError where there is none."""
        value = self._unpack(reply.payload)
        if isinstance(value, Failure):
            raise SerializationError(value.message)
        return value


def _itself(block: Any, info: Any) -> Any:
    return block


def _note_unheard(rank: int, reply: Reply) -> None:
    if reply.status == "error":
        logging.getLogger("podium").warning("a result did not reach the worker that called")


def _in_thread(action: Callable[..., object], *args: Any) -> None:
    """Replies are heard in a thread that must not wait."""
    threading.Thread(target=action, args=args, name="podium-relay", daemon=True).start()
