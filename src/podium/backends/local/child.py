"""A worker process: it receives requests, runs them, and sends outcomes.

    main thread     ◀── calls ──── requests, one at a time, in order       calls ──▶ "ready", answers, releases
    control thread  ◀── control ── concurrent requests, releases
    end thread      sleeps

The end of the control socket means that the controller is gone.
"""

import contextlib
import errno
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

from podium.backends.local.shared_memory import Key, Lease, SegmentPool
from podium.backends.local.store import LocalStore
from podium.backends.local.wire import (
    NOTHING,
    SEND,
    Inbound,
    Message,
    Parcel,
    Receiver,
    Releases,
    pack,
    receive_parcel,
    send_message,
    short_answer,
    split_message,
)
from podium.backends.process import Surroundings, run_to_the_end
from podium.runtime.worker_process import Outcome, Values, WorkerProcess, pack_outcome

_CLOSED = (
    "podium: process {} cannot answer and ends: code in it has closed the descriptor of its socket to the script ({}), "
    "as os.closerange() does; close the descriptors that it has opened, and no others"
)


def main(fds: Sequence[int], surroundings: tuple[Any, ...], store: tuple[int | None, str]) -> NoReturn:
    """Run until told to shut down or until the controller is gone; never returns.

    Args:
        fds: Descriptors of the two sockets, calls and control.
        store: Limit in bytes and spill directory of this process's store.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller decides what Ctrl-C means
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # pyright: ignore[reportUnknownMemberType, reportAttributeAccessIssue]
    Surroundings(*surroundings).settle_in("lo")
    child = _Child(fds, store)
    control = threading.Thread(target=run_to_the_end, args=(child.serve_control,), name="podium-control", daemon=True)
    sleeper = threading.Thread(target=_sleep, name="podium-end", daemon=True)
    for thread in (control, sleeper):
        thread.start()
    run_to_the_end(partial(child.serve_calls, [control.native_id, sleeper.native_id]))


def _sleep() -> None:
    """Sleep until the process ends.

    The thread that ends last frees the process's memory, which takes long. So the controller watches this thread and
    the control thread: the first one that ends tells it of the process's end.
    """
    threading.Event().wait()


class _Child:
    def __init__(self, fds: Sequence[int], store: tuple[int | None, str]) -> None:
        self._calls, self._control = (socket.socket(fileno=fd) for fd in fds)
        self._segments = SegmentPool()
        self._process = WorkerProcess(make_store=partial(LocalStore, self._segments, *store))
        self._sending = threading.Lock()
        self._releases = Releases(self._calls)

    def serve_calls(self, threads: Sequence[int | None]) -> None:
        receiver = Receiver(self._release)
        self._send(pickle.dumps(("ready", os.getpid(), threads), 5), ())
        target = method = ""
        while target or method != "shutdown":
            message, fds = receiver.receive(self._calls, wait=True)
            number, target, method, wants, values = self._read(message, fds)
            outcome = [self._process.execute(number, target, method, values)]
            self._releases.held = True  # the answer carries what ends with the arguments and the result
            del values  # its tensors may be the last readers of a segment
            self._answer(number, wants, outcome.pop())

    def serve_control(self) -> None:
        receiver = Receiver(self._release)
        while True:
            message, fds = receiver.receive(self._control, wait=True)
            if message and message[0] == "release":
                for key in message[1]:
                    self._release(key)
                continue
            number, target, method, wants, values = self._read(message, fds)
            self._process.execute_concurrently(number, target, method, values, partial(self._answer, number, wants))

    def _release(self, key: Key) -> None:
        self._segments.release(key, "controller")

    def _read(self, message: Message, fds: list[int]) -> tuple[int, str, str, bool, Values]:
        if not message:
            os.killpg(0, signal.SIGKILL)  # the controller is gone: so are we, and what we started
            raise SystemExit
        if len(message) == 6 and message[5] is None:
            return message[1], message[2], message[3], message[4], {}
        _, number, target, method, wants, *wires = message
        parcels = [receive_parcel(wire, fds, self._releases, self._segments) for wire in wires if wire is not None]
        return number, target, method, wants, partial(_read_all, parcels, f"an argument of {target}.{method}")

    def _answer(self, number: int, wants: bool, outcome: Outcome) -> None:
        if outcome.status == "ok" and (not wants or outcome.value is None):
            self._send(short_answer(number, outcome.started_ns, outcome.ended_ns), ())
            return
        parcel = NOTHING
        if outcome.status != "cancelled":
            outcome, parcel = pack_outcome(outcome, wants, self._pack)
        answer = ("answer", number, outcome.status, outcome.started_ns, outcome.ended_ns, parcel.wire)
        del outcome  # its tensors may be the last readers of a segment, too
        message = pickle.dumps(answer, 5)
        for lease in parcel.leases:
            self._segments.hold(lease.segment, "controller")
        self._send(message, parcel.leases)

    def _send(self, message: bytes, leases: Sequence[Lease]) -> None:
        try:
            with self._sending:  # nothing comes between the parts of one message
                if self._releases.late:
                    message = self._releases.carried(message)
                if leases:
                    for part, some in split_message(message, leases):
                        send_message(self._calls, part, some, wait=True)
                else:
                    self._calls.send(message, SEND)
            self._releases.held = False
            if self._releases.late:
                self._releases.flush()
        except OSError as error:
            if error.errno in (errno.EBADF, errno.ENOTSOCK):
                with contextlib.suppress(OSError):
                    os.write(2, f"{_CLOSED.format(os.getpid(), error)}\n".encode())
            os.killpg(0, signal.SIGKILL)  # nobody left to answer

    def _pack(self, value: Any) -> Parcel:
        parcel = pack(value, self._segments, "the result")
        _ = parcel.wire  # a result for which there is no memory is an error of the call
        return parcel


def _read_all(parcels: list[Inbound], what: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    while parcels:  # none of them outlives the call's own hold on the values
        values |= parcels.pop(0).read(what)
    return values
