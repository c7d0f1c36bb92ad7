"""A host process: it receives requests, runs them on its Host, and sends outcomes.

main thread     ◀── calls ──── requests, one at a time, in order       calls ──▶ outcomes, releases
control thread  ◀── control ── concurrent requests, releases; its end means that the controller is gone
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import socket
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from podium.backends.local.segments import SegmentPool
from podium.backends.local.wire import (
    ANSWER,
    CALL,
    EMPTY,
    RELEASE,
    STATUSES,
    Inbound,
    Parcel,
    Receiver,
    Releases,
    pack,
    read_parcel,
    released,
    send_message,
    split_message,
)
from podium.backends.process import settle_in
from podium.runtime.host import Host, Outcome, Values, pack_outcome

if TYPE_CHECKING:
    from podium.data import TensorStore

__all__ = ["main"]

_Header = tuple[str, str, bool, bool]


def main(
    calls_fd: int, control_fd: int, threads: int, cwd: str, sys_path: list[str], store: tuple[int | None, str]
) -> NoReturn:
    """Run until told to shut down or until the controller is gone; never returns."""
    _prepare(threads, cwd, sys_path)
    process = _HostProcess(socket.socket(fileno=calls_fd), socket.socket(fileno=control_fd), store)
    threading.Thread(target=process.serve_control, name="podium-control", daemon=True).start()
    code = 1
    try:
        process.serve_calls()
        code = 0
    except BaseException as error:  # noqa: BLE001 - the end of the process: say why, then go
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _prepare(threads: int, cwd: str, sys_path: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller decides what Ctrl-C means
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # pyright: ignore[reportUnknownMemberType, reportAttributeAccessIssue]
    faulthandler.enable(sys.stderr, all_threads=False)  # short, so that it fits into the last words
    settle_in(threads, cwd, sys_path, "lo")


class _HostProcess:
    def __init__(self, calls: socket.socket, control: socket.socket, store: tuple[int | None, str]) -> None:
        self._calls = calls
        self._control = control
        self._store = store
        self._host = Host(make_store=self._make_store)
        self._segments = SegmentPool()
        self._sending = threading.Lock()
        self._releases = Releases(calls)
        self._none = pack(None, self._segments)
        self._headers: dict[bytes, _Header] = {}

    def serve_calls(self) -> None:
        receiver = Receiver()
        while True:
            message, fds = receiver.receive(self._calls, wait=True)
            if not message:
                os.killpg(0, signal.SIGKILL)
            call_id, target, method, wants, values = self._read(message, fds)
            outcome = self._host.execute(call_id, target, method, values)
            del values  # its tensors may be the last readers of a segment
            self._answer(call_id, outcome, wants)
            if method == "shutdown" and not target:
                return
            del outcome

    def serve_control(self) -> None:
        try:
            self._serve_control()
        except BaseException as error:  # noqa: BLE001 - without this thread no call ends: say why, then go
            sys.excepthook(type(error), error, error.__traceback__)
            sys.stderr.flush()
            os._exit(1)

    def _serve_control(self) -> NoReturn:
        receiver = Receiver()
        while True:
            message, fds = receiver.receive(self._control, wait=True)
            if not message:
                os.killpg(0, signal.SIGKILL)  # the controller is gone: so are we, and what we started
            if message[0] == RELEASE:
                for number in released(message):
                    self._segments.release(number, "controller")
                continue
            call_id, target, method, wants, values = self._read(message, fds)
            self._host.execute_concurrently(
                call_id, target, method, values, lambda outcome, c=call_id, w=wants: self._answer(c, outcome, w)
            )

    def _read(self, message: memoryview, fds: list[int]) -> tuple[int, str, str, bool, Values]:
        _, call_id, length = CALL.unpack_from(message)
        at = CALL.size + length
        header = bytes(message[CALL.size : at])
        known = self._headers.get(header)
        if known is None:
            known = self._headers[header] = pickle.loads(header)
        target, method, wants, has_own = known
        if not has_own and len(message) == at + len(EMPTY) and bytes(message[at:]) == EMPTY:
            return call_id, target, method, wants, {}
        shared, at = read_parcel(message, at, fds, self._releases, self._segments)
        parcels = [shared]
        if has_own:
            parcels.append(read_parcel(message, at, fds, self._releases, self._segments)[0])
        return call_id, target, method, wants, partial(_read_all, parcels, f"an argument of {target}.{method}")

    def _make_store(self) -> TensorStore:
        from podium.backends.local.store import LocalStore

        return LocalStore(self._segments, *self._store)

    def _answer(self, call_id: int, outcome: Outcome, wants: bool) -> None:
        if outcome.status == "ok" and (outcome.value is None or not wants):
            parcel = self._none
        else:
            outcome, parcel = pack_outcome(outcome, wants, self._packed)
        status, _, started, ended, _ = outcome
        wire = parcel.wire
        message = ANSWER.pack(b"A", call_id, STATUSES.index(status), started, ended) + wire
        for lease in parcel.leases:
            self._segments.hold(lease.segment, "controller")
        fds = [lease.segment.fd for lease in parcel.leases]
        try:
            with self._sending:  # nothing comes between the parts of one message
                for part, some in split_message(message, fds) if fds else [(message, fds)]:
                    send_message(self._calls, part, some, wait=True)
            self._releases.flush()
        except OSError:
            os.killpg(0, signal.SIGKILL)  # nobody left to answer

    def _packed(self, value: Any) -> Parcel:
        parcel = pack(value, self._segments, "the result")
        parcel.store()
        return parcel


def _read_all(parcels: list[Inbound], what: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    while parcels:  # none of them outlives the call's own hold on the values
        values |= parcels.pop(0).read(what)
    return values
