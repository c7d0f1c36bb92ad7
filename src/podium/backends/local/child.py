"""A host process: it receives requests, runs them on its Host, and sends outcomes.

main thread     ◀── calls ──── requests, one at a time, in order       calls ──▶ outcomes, releases
control thread  ◀── control ── concurrent requests, releases; its end means that the controller is gone
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import random
import signal
import socket
import struct
import sys
import threading
from typing import Any, NoReturn

from podium.backends.local.segments import SegmentPool
from podium.backends.local.wire import Parcel, Receiver, Releases, pack, read_parcel, released, send_message
from podium.errors import SerializationError
from podium.runtime.host import Failure, Host, Outcome

__all__ = ["ANSWER", "STATUSES", "main"]

ANSWER = struct.Struct("<cQBQQ")  # "A", call, status, started, ended
STATUSES = ("ok", "error", "cancelled")


def main(calls_fd: int, control_fd: int, threads: int, cwd: str, sys_path: list[str]) -> NoReturn:
    """Run until told to shut down or until the controller is gone; never returns."""
    _settle_in(threads, cwd, sys_path)
    process = _HostProcess(socket.socket(fileno=calls_fd), socket.socket(fileno=control_fd))
    threading.Thread(target=process.serve_control, name="podium-control", daemon=True).start()
    code = 1
    try:
        process.serve_calls()
        code = 0
    except BaseException:  # noqa: BLE001 - the end of the process: say why, then go
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _settle_in(threads: int, cwd: str, sys_path: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller decides what Ctrl-C means
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.path[:] = sys_path
    with contextlib.suppress(OSError):
        os.chdir(cwd)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # pyright: ignore[reportUnknownMemberType, reportAttributeAccessIssue]
    faulthandler.enable(sys.stderr)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo otherwise listens on every interface
    random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)


class _HostProcess:
    def __init__(self, calls: socket.socket, control: socket.socket) -> None:
        self._calls = calls
        self._control = control
        self._host = Host()
        self._segments = SegmentPool()
        self._releases = Releases(calls)
        self._none = pack(None, self._segments)

    def serve_calls(self) -> None:
        receiver = Receiver()
        while True:
            message, fds = receiver.receive(self._calls, wait=True)
            if not message:
                os.killpg(0, signal.SIGKILL)
            call_id, target, method, wants, values = self._read(message, fds)
            if isinstance(values, SerializationError):
                self._answer(call_id, Outcome("error", _unreadable(values), 0, 0), wants)
                continue
            outcome = self._host.execute(call_id, target, method, values)
            del values  # its tensors may be the last readers of a segment
            self._answer(call_id, outcome, wants)
            if method == "shutdown" and not target:
                return
            del outcome

    def serve_control(self) -> None:
        receiver = Receiver()
        while True:
            message, fds = receiver.receive(self._control, wait=True)
            if not message:
                os.killpg(0, signal.SIGKILL)  # the controller is gone: so are we, and what we started
            if message[0] == 82:  # "R"
                for number in released(message):
                    self._segments.release(number, "controller")
                continue
            call_id, target, method, wants, values = self._read(message, fds)
            if isinstance(values, SerializationError):
                self._answer(call_id, Outcome("error", _unreadable(values), 0, 0), wants)
                continue
            self._host.execute_concurrently(
                call_id, target, method, values, lambda outcome, c=call_id, w=wants: self._answer(c, outcome, w)
            )

    def _read(self, message: memoryview, fds: list[int]) -> tuple[int, str, str, bool, Any]:
        header = message[1 : 3 + int.from_bytes(message[1:3], "little")]
        call_id, target, method, wants, has_own = pickle.loads(header[2:])
        at = 1 + len(header)
        shared, at = read_parcel(message, at, fds, self._releases)
        own = read_parcel(message, at, fds, self._releases)[0] if has_own else None
        where = f"the arguments of {target}.{method}"
        try:
            values = shared.read(where)
            return call_id, target, method, wants, {**values, **own.read(where)} if own is not None else values
        except SerializationError as error:
            return call_id, target, method, wants, error

    def _answer(self, call_id: int, outcome: Outcome, wants: bool) -> None:
        status, value, started, ended = outcome
        try:
            if status == "ok" and (not wants or value is None):
                parcel = self._none
            else:
                parcel = pack(value, self._segments, "the result")
        except SerializationError as error:
            status, parcel = "error", pack(Failure("SerializationError", str(error), "", error, False), self._segments)
        self._send(ANSWER.pack(b"A", call_id, STATUSES.index(status), started, ended), parcel)

    def _send(self, head: bytes, parcel: Parcel) -> None:
        fds: list[int] = []
        if parcel.lease is not None:
            self._segments.hold(parcel.lease.segment, "controller")
            fds.append(parcel.lease.segment.fd)
        try:
            send_message(self._calls, (head, parcel.wire), fds, wait=True)
        except OSError:
            os.killpg(0, signal.SIGKILL)  # nobody left to answer


def _unreadable(error: SerializationError) -> Failure:
    return Failure("SerializationError", str(error), str(error.__cause__ or ""), error, False)
