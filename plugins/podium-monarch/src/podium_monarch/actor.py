# Monarch is not installed where types are checked, so all its names are unknown.
# pyright: basic, reportMissingImports=false
"""What runs inside a Monarch proc: a WorkerProcess behind one generic endpoint.

Monarch runs an actor's endpoints in one event loop. ``invoke`` only puts a message into a queue, so the loop, and with
it the proc's mailbox, is always free; outcomes leave through a port of the controller's.

    invoke ──▶ calls   ──▶ thread: one request at a time, in order
           └─▶ control ──▶ thread: concurrent requests, through ``WorkerProcess.execute_concurrently``
"""

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

from monarch.actor import Actor, Port, endpoint

from podium.backends.process import Surroundings, run_to_the_end
from podium.runtime.codec import decode, encode
from podium.runtime.worker_process import Outcome, WorkerProcess, pack_outcome

__all__ = ["Message", "Parcel", "ProcessActor", "pack"]


class SentBuffer:
    """Bytes that the reader receives as a bytearray, in memory of its own that it may change.

    Monarch refers to bytes that it sends, and makes a copy of a bytearray for each process that it is sent to.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __reduce__(self) -> tuple[type[bytearray], tuple[bytes]]:
        return bytearray, (self.data,)


Parcel = tuple[bytes, Sequence[SentBuffer | bytearray]]
"""A value as pickle bytes and buffers, which are a SentBuffer until they have traveled."""


class Message(NamedTuple):
    """A request as it travels; the same for every process it goes to."""

    number: int
    target: str
    method: str
    wants_result: bool
    concurrent: bool
    shared: Parcel
    own: Parcel | None

    def values(self) -> dict[str, Any]:
        """The arguments, the reader's own to change. Raises SerializationError."""
        what = f"an argument of {self.target}.{self.method}"
        own = {} if self.own is None else decode(*self.own, what)
        return {**decode(*self.shared, what), **own}


class ProcessActor(Actor):
    """One worker process. Answers are ``(key, number, status, started_ns, ended_ns, parcel)`` on ``answers``."""

    def __init__(self, answers: Port[Any], key: int) -> None:
        self._answers = answers
        self._key = key
        self._process = WorkerProcess()
        self._calls: SimpleQueue[Message] = SimpleQueue()
        self._control: SimpleQueue[Message] = SimpleQueue()
        for queue, run in ((self._calls, self._call), (self._control, self._call_concurrently)):
            threading.Thread(target=run_to_the_end, args=(partial(_serve, queue, run),), daemon=True).start()

    @endpoint
    async def settle_in(self, controller: int, surroundings: Surroundings) -> int:
        """Work as the process ``controller`` does, and end with it. Returns this process's id."""
        threading.Thread(target=_end_with, args=(controller,), daemon=True).start()
        surroundings.settle_in("lo")
        return os.getpid()

    @endpoint
    async def invoke(self, message: Message) -> None:
        """Take a request in."""
        (self._control if message.concurrent else self._calls).put(message)

    def _call(self, message: Message) -> None:
        self._answer(message, self._process.execute(*message[:3], message.values))

    def _call_concurrently(self, message: Message) -> None:
        self._process.execute_concurrently(*message[:3], message.values, partial(self._answer, message))

    def _answer(self, message: Message, outcome: Outcome) -> None:
        outcome, parcel = pack_outcome(outcome, message.wants_result, lambda value: pack(value, "the result"))
        self._answers.send((self._key, message.number, outcome.status, outcome.started_ns, outcome.ended_ns, parcel))


def pack(value: Any, what: str) -> Parcel:
    """``value`` as it travels. Raises SerializationError."""
    data, buffers = encode(value, what)
    return data, [SentBuffer(bytes(buffer.raw())) for buffer in buffers]


def _serve(queue: SimpleQueue[Message], run: Callable[[Message], None]) -> None:
    while True:
        run(queue.get())


def _end_with(controller: int) -> None:
    """End this process and what it started when the controller has ended. Monarch gives every proc a process group."""
    with contextlib.suppress(ProcessLookupError):
        watch = select.poll()
        watch.register(os.pidfd_open(controller), select.POLLIN)
        watch.poll()
    os.killpg(0, signal.SIGKILL)
