"""A worker process of this machine as the controller sees it."""

from __future__ import annotations

import pickle
import select
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from podium.backends.local.outbox import Outbox
from podium.backends.local.shared_memory import Lease
from podium.backends.local.wire import Parcel, Receiver, Releases, receive_parcel
from podium.backends.logs import Log
from podium.errors import StoreFullError
from podium.runtime.backend import ProcessHandle
from podium.runtime.messages import Death, OnDeath, ProcessSpec, Reply, Request

if TYPE_CHECKING:
    from podium.backends.local.backend import LocalBackend

__all__ = ["START_TIMEOUT_S", "LocalProcess"]

START_TIMEOUT_S = 120.0
KILL_S = 10.0

_NO_FDS: list[int] = []


class LocalProcess(ProcessHandle):
    """Args:
    token: Its name between the controller and the fork server.
    calls, control: Sockets to its main thread and to its control thread.
    """

    def __init__(
        self,
        backend: LocalBackend,
        token: int,
        spec: ProcessSpec,
        calls: socket.socket,
        control: socket.socket,
        log: Log,
        on_death: OnDeath,
        flush_later: Callable[[int], None],
    ) -> None:
        self.token = token
        self.rank = spec.rank
        self.label = spec.label
        self.log = log
        self.started = threading.Event()
        self.ended = threading.Event()
        self._backend = backend
        self._segments = backend.segments
        self._calls = calls
        self._control = control
        self._on_death = on_death
        self._pending: dict[int, Callable[[Reply], None]] = {}
        self._releases = Releases(control)
        self._receiver = Receiver()
        self.calls_out = Outbox(calls, flush_later)
        self.control_out = Outbox(control, flush_later)
        self._reading = threading.Lock()

    def invoke(self, request: Request, done: Callable[[Reply], None]) -> None:
        if self.ended.is_set():
            return
        if request.wire is None:
            request.wire = _encode(request)
        message, leases = request.wire
        fds = _NO_FDS
        if leases:
            for lease in leases:
                self._segments.hold(lease.segment, self.token)
            if self.ended.is_set():  # just now: it was forgotten before it held these
                self._segments.forget(self.token)
                return
            fds = [lease.segment.fd for lease in leases]
        self._pending[request.number] = done
        try:
            (self.control_out if request.concurrent else self.calls_out).send(message, fds)
        except StoreFullError:
            self._pending.pop(request.number, None)
            for lease in leases:
                self._segments.release(lease.segment.number, self.token)
            raise

    def kill(self) -> None:
        if not self.ended.is_set() and self.started.wait(START_TIMEOUT_S):
            self._backend.order_kill(self.pid)
            self.ended.wait(KILL_S)

    def end(self, death: Death) -> None:
        """The process is gone."""
        if self.ended.is_set():
            return
        self._backend.unwatch(self._calls, self._control)
        self.calls_out.close()
        self.control_out.close()
        self._pending.clear()
        self._receiver.close()
        self.started.set()
        self.ended.set()
        self._backend.forget(self)
        self._on_death(self.rank, death)

    def on_readable(self) -> bool:
        """Take one message in; the poll reports what is left. Returns False once the other end is closed."""
        with self._reading:
            try:
                message, fds = self._receiver.receive(self._calls, wait=False)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not message:
                return False
            if message[0] == "release":
                for number in message[1]:
                    self._segments.release(number, self.token)
                return True
            _, number, status, started, ended, wire = message
            self._releases.flush()
            payload = None if wire is None else receive_parcel(wire, fds, self._releases, self._segments)
        done = self._pending.pop(number, None)
        if done is not None:
            done(Reply(status, payload, started, ended))
        return True

    def drain(self) -> None:
        """Take in all that the process sent before it ended."""
        incoming = select.poll()  # select() cannot take a descriptor above 1023
        incoming.register(self._calls, select.POLLIN)
        while incoming.poll(0) and self.on_readable():
            pass


def _encode(request: Request) -> tuple[bytes, list[Lease]]:
    """The message for a request, the same for every process that it goes to; see wire.py."""
    parcels: list[Parcel] = [request.shared] if request.own is None else [request.shared, request.own]
    wires = [parcel.wire for parcel in parcels]
    head = ("call", request.number, request.target, request.method, request.wants_result)
    return pickle.dumps((*head, *wires), 5), [lease for parcel in parcels for lease in parcel.leases]
