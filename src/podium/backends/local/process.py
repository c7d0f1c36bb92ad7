"""A worker process of this machine as the controller sees it, and the sockets to it."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from podium.backends.local.io import INTERRUPTED
from podium.backends.local.shared_memory import Lease
from podium.backends.local.wire import (
    MOST_FDS,
    NOTHING,
    SEND_NOW,
    Message,
    Parcel,
    Receiver,
    Releases,
    receive_parcel,
    send_message,
    short_call,
    split_message,
)
from podium.backends.process import Surroundings, environment_of
from podium.errors import ConfigError, WorkerStartError
from podium.processes import describe_exit, end_of, is_ending, is_stopped
from podium.runtime.backend import ProcessHandle
from podium.runtime.messages import Death, OnDeath, ProcessSpec, Reply, Request

if TYPE_CHECKING:
    from podium.backends.local.backend import LocalBackend, WorkerServer

KILL_S = 10.0
REPORT_S = 60.0
_PIDFD_THREAD = os.O_EXCL  # of linux/pidfd.h

EARLY = ("OMP_", "MKL_", "OPENBLAS_", "KMP_", "CUDA_", "HIP_", "ROCR_", "ROCM_", "ASCEND_", "LD_", "MALLOC_", "PYTHON")
"""Names of variables that libraries read when they are loaded. A worker with one starts in a new interpreter."""


class LocalProcess(ProcessHandle):
    """One worker process, which a fork server starts.

    Args:
        token: Name of the process between the controller and the fork server.

    Attributes:
        started: Set when the process takes requests, or its start has failed.
        ended: Set when the process is gone.
        death: How the process ended, if it did.
        is_cut_off: Whether a socket to the process has closed although it ran, so that it was killed.
        takes_calls: Whether calls may still be sent.

    Raises:
        WorkerStartError: The fork server is gone.
    """

    def __init__(
        self, backend: LocalBackend, server: WorkerServer, token: int, spec: ProcessSpec, on_death: OnDeath
    ) -> None:
        self.server = server
        self.rank = spec.rank
        self.label = spec.label
        self.log = backend.files.begin_log(spec.label)
        self.started = threading.Event()
        self.ended = threading.Event()
        self.death: Death | None = None
        self.is_cut_off = False
        self.takes_calls = True
        self._reported = threading.Event()
        self._ending_fds: list[int] = []
        self._backend = backend
        self._segments = backend.segments
        self._token = token
        self._on_death = on_death
        self._shut_down = False
        self._pending: dict[int, Callable[[Reply], None]] = {}
        self._calls, calls = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._calls_out = Outbox(self._calls, backend.io.flush_later, self._cut_off)
        self._control_out = Outbox(self._control, backend.io.flush_later, self._cut_off)
        self._releases = Releases(self._control, partial(backend.io.soon, self._flush_releases))
        self._receiver = Receiver(partial(backend.segments.release, holder=token))
        backend.processes[token] = self
        backend.io.watch(self._calls.fileno(), self._on_readable, self._calls_out.flush)
        backend.io.watch(self._control.fileno(), self._cut_off, self._flush_control)  # nothing else comes there
        env = environment_of(spec, backend.accelerators)
        self._prefix = spec.options.get("prefix", {}).get(spec.rank, ())
        fresh = self._prefix or any(name.startswith(EARLY) for name in spec.env)
        settings = (tuple(Surroundings.here(spec.threads)), backend.store_options)
        arguments = (env, self._prefix if fresh else None, str(self.log.path), *settings)
        with calls, control:
            try:
                server.fork(token, arguments, calls.fileno(), control.fileno(), on_end=self._on_end)
            except OSError as error:
                self.end(None)
                why = "the fork server has ended"
                lost = f"{spec.label} ({why})"
                raise WorkerStartError(f"{spec.label}: {why}: {error}", rank=spec.rank, lost=lost) from error

    def invoke(self, request: Request, done: Callable[[Reply], None]) -> None:
        if not self.takes_calls:
            return
        if request.wire is None:
            request.wire = _encode(request)
        message, leases = request.wire
        if leases:
            for lease in leases:
                self._segments.hold(lease.segment, self._token)
            if not self.takes_calls:  # since just now: it was forgotten before it held these
                self._segments.forget(self._token)
                return
        if not request.target and request.method == "shutdown":
            self._shut_down = True
        self._pending[request.number] = done
        self._backend.io.sent_at = time.monotonic()
        if self._releases.late:
            message = self._releases.carried(message)
        (self._control_out if request.concurrent else self._calls_out).send(message, leases)

    def kill(self) -> None:
        if self._prefix and self._shut_down:  # a profiler writes its report after the process that it ran has ended
            self._reported.wait(REPORT_S)
        if self.ended.is_set():
            return
        with contextlib.suppress(OSError):  # the server is gone, and its children with it
            # Only the parent of a process can know that its number does not mean another process by now.
            self.server.kill(self._token)
        if self.started.is_set():
            self._reported.wait(KILL_S)
        else:
            self.end(None)  # where the server still forks it, it finds its sockets closed

    def stopped(self) -> bool:
        return is_stopped(self.pid)

    def died(self, status: int) -> Death:
        """How the process ended, from its wait status."""
        cause = describe_exit(os.waitstatus_to_exitcode(status))
        if self.is_cut_off:
            cause += ", because its socket to the controller had closed"
        return Death(cause, self.log.last_lines())

    def end(self, death: Death | None) -> None:
        """The process is gone, or will not start if ``death`` is None."""
        if self.ended.is_set():
            return
        self._backend.io.unwatch(self._calls.fileno(), self._control.fileno(), *self._ending_fds)
        for fd in self._ending_fds:
            os.close(fd)
        self._ending_fds.clear()
        self._calls_out.close()
        self._control_out.close()
        self._pending.clear()
        self._receiver.close()
        had_started, has_been_told = self.started.is_set(), not self.takes_calls
        self.death = self.death or death
        self.takes_calls = False
        self.ended.set()
        self.started.set()
        self._backend.processes.pop(self._token, None)
        self._segments.forget(self._token)
        if death is not None and had_started and not has_been_told:
            self._on_death(self.rank, death)
        self._reported.set()

    def _on_end(self, status: int | None) -> None:
        """The fork server has told of the process's end, or has ended."""
        if self.ended.is_set():  # its start was given up
            return
        if status is None:
            self.end(Death("the fork server ended, and the worker processes with it"))
        else:
            self.drain()
            self.end(self.died(status))

    def drain(self) -> None:
        """Take in all that the process sent before it ended."""
        incoming = select.poll()  # select() cannot take a descriptor above 1023
        incoming.register(self._calls, select.POLLIN)
        while incoming.poll(0) and self._on_readable():
            pass

    def _on_readable(self) -> bool:
        """Take one message in; the poll reports what is left. Returns False once the other end is closed."""
        try:
            message, fds = self._receiver.receive(self._calls, wait=False)
        except BlockingIOError:
            return True
        except OSError:
            return self._cut_off()
        if not message:
            return self._cut_off()
        if message[0] != "answer":
            self._take_in(message)
            return True
        _, number, status, started, ended, wire = message
        payload = None if wire is None else receive_parcel(wire, fds, self._releases, self._segments)
        done = self._pending.pop(number, None)
        if done is not None:
            done(Reply(status, payload, started, ended))
        return True

    def _flush_releases(self) -> None:
        self._releases.flush()
        if self._releases.late:
            self._backend.io.flush_later(self._control.fileno())

    def _flush_control(self) -> bool:
        self._releases.flush()
        return self._control_out.flush() and not self._releases.late

    def _take_in(self, message: Message) -> None:
        if message[0] == "ready":
            _, self.pid, threads = message
            self._watch_end(threads)
            self.started.set()
        else:
            for key in message[1]:
                self._segments.release(key, self._token)

    def _watch_end(self, threads: Sequence[int]) -> None:
        """Hear of the process's end when the first of these threads of it ends, which only end with it.

        The kernel closes the sockets of a process, and tells its parent, when it has freed the process's memory. Among
        processes that compute this takes tens of milliseconds, and a thread that sleeps ends in a few, unless it is
        the last of all.
        """
        if self._prefix:  # its end is that of the command around it
            return
        with contextlib.suppress(OSError):  # Linux before 6.9 watches processes alone
            for thread in threads:
                self._ending_fds.append(os.pidfd_open(thread, _PIDFD_THREAD))
                self._backend.io.watch(self._ending_fds[-1], self._on_ending)

    def _on_ending(self) -> bool:
        """Report the end, and leave it to :meth:`end` to clean up: until then the process may still hold memory of a
        device, for which a restart waits. Returns False, since nothing more comes."""
        status = end_of(self.pid)
        if status and self.takes_calls:  # 0 may also mean that the kernel does not tell
            self.drain()
            self.takes_calls = False
            self._pending.clear()
            self.death = self.died(status)
            self._on_death(self.rank, self.death)
        return False

    def _cut_off(self) -> bool:
        """A socket has closed. Kill the process, unless that is because it ends: no call reaches it any more. Returns
        False, since nothing more comes."""
        if self.started.is_set() and not self.ended.is_set() and not self._shut_down and not is_ending(self.pid):
            self.is_cut_off = True
            with contextlib.suppress(OSError):
                self.server.kill(self._token)
        return False


def _encode(request: Request) -> tuple[bytes, list[Lease]]:
    """The message for a request, the same for every process that it goes to; see wire.py."""
    if request.own is None and request.shared is NOTHING:
        short = short_call(request.number, request.target, request.method, request.wants_result)
        if short is not None:
            return short, []
    parcels: list[Parcel] = [request.shared] if request.own is None else [request.shared, request.own]
    wires = [parcel.wire for parcel in parcels]
    head = ("call", request.number, request.target, request.method, request.wants_result)
    return pickle.dumps((*head, *wires), 5), [lease for parcel in parcels for lease in parcel.leases]


class Outbox:
    """Sends on one socket without ever waiting.

    What the socket does not take at once is kept in order, with the leases of its segments, until :meth:`flush`.
    ``flush_later`` is called with the socket's number when there is something to flush, and ``on_end`` when the other
    end is closed.
    """

    def __init__(
        self, connection: socket.socket, flush_later: Callable[[int], None], on_end: Callable[[], object]
    ) -> None:
        self._connection = connection
        self._flush_later = flush_later
        self._on_end = on_end
        self._late: deque[tuple[bytes, Sequence[Lease]]] = deque()
        self._lock = threading.RLock()
        self._inside = self._closed = False

    def send(self, message: bytes, leases: Sequence[Lease]) -> None:
        """Send now if the socket takes it, else later; drop it if the other end is gone. Any thread may call this:
        nothing comes between the parts of one message.

        Raises:
            ConfigError: A handler of a signal runs inside another message of this thread.
        """
        with self._lock:
            if self._closed:
                return
            if self._inside:
                raise ConfigError(INTERRUPTED)
            self._inside = True
            try:
                if not self._late and len(leases) <= MOST_FDS and self._is_taken(message, leases):
                    return
                self._late.extend(split_message(message, leases))
            finally:
                self._inside = False
        if not self.flush():
            self._flush_later(self._connection.fileno())

    def _is_taken(self, message: bytes, leases: Sequence[Lease]) -> bool:
        """Return whether the socket has taken the message now, or nobody takes it any more."""
        try:
            if leases:
                send_message(self._connection, message, leases, wait=False)
            else:
                self._connection.send(message, SEND_NOW)
        except BlockingIOError:
            return False
        except OSError:
            self._on_end()
        return True

    def flush(self) -> bool:
        """Send what is kept. Returns True when nothing is left."""
        with self._lock:
            if self._inside:  # of a handler's wait: the message below comes first
                return False
            self._inside = True
            try:
                while self._late:
                    if not self._is_taken(*self._late[0]):
                        return False
                    self._late.popleft()
            finally:
                self._inside = False
        return True

    def close(self) -> None:
        """Close the socket and drop what is kept."""
        with self._lock:
            self._closed = True
            self._connection.close()
            self._late.clear()
