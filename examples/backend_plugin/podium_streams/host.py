"""The hosts' nursery, a process that imports once, forks and reaps; and what runs in a host.

controller ──(env, fresh, log, settings) + the host's end of its connection + the nursery's end of its leash──▶ nursery
nursery ──on the leash: pid, later exit code──▶ controller, whose end of the leash closes for a kill or with it"""

import contextlib
import ctypes
import faulthandler
import os
import pickle
import queue
import select
import shutil
import signal
import socket
import sys
import threading
from functools import partial
from typing import Any

from podium.backends.process import settle_in
from podium.runtime.codec import decode
from podium.runtime.host import Host, Outcome, pack_outcome
from podium_streams.wire import Parcel, pack, receive, send

CONNECTION, PR_SET_PDEATHSIG = 3, 1  # a host's file descriptor; of prctl


def nurse(private: str) -> None:
    """Serve the controller, whose socket is our standard input, as long as it lives."""
    controller, orders = os.getppid(), socket.socket(fileno=os.dup(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller decides what Ctrl-C means
    hosts: dict[int, tuple[int, socket.socket, socket.socket]] = {}  # pidfd: pid, connection, leash
    try:
        while os.getppid() == controller:  # a fork of it may keep its sockets open
            ready = select.select([orders, *hosts, *(leash for _, _, leash in hosts.values())], [], [], 0.5)[0]
            if orders in ready:
                message, fds, _, _ = socket.recv_fds(orders, 1 << 18, 2)
                if not message:
                    break
                connection, leash = (socket.socket(fileno=fd) for fd in fds)
                pid = _fork(connection, *pickle.loads(message))
                hosts[os.pidfd_open(pid)] = pid, connection, leash
                leash.send(str(pid).encode())
            for pidfd, (pid, connection, leash) in list(hosts.items()):
                if pidfd in ready or leash in ready:
                    os.killpg(pid, signal.SIGKILL)  # or what it started; until waitpid the number is its own
                if pidfd in ready:
                    del hosts[pidfd]
                    os.close(pidfd)
                    connection.shutdown(socket.SHUT_RDWR)  # the controller reads to the end, whoever holds it too
                    leash.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
    finally:
        for pid, _, _ in hosts.values():
            os.killpg(pid, signal.SIGKILL)
        shutil.rmtree(private, ignore_errors=True)


def _fork(connection: socket.socket, env: dict[str, str], fresh: bool, log: str, settings: tuple[Any, ...]) -> int:
    pid = os.fork()
    with contextlib.suppress(OSError):  # both do, so that no kill comes too early
        os.setpgid(pid, pid)
    if pid:
        return pid
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # should the nursery end out of order
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for number, fd in enumerate((os.open(os.devnull, os.O_RDONLY), out, out, os.dup(connection.fileno()))):
            os.dup2(fd, number)
        os.closerange(CONNECTION + 1, 1 << 16)
        os.environ.update(env)
        if fresh:
            code = f"import sys; sys.path[:] = {settings[2]!r}; from podium_streams.host import main; main(*{settings})"
            os.execv(sys.executable, [sys.executable, "-c", code])
        main(*settings)
    except BaseException as error:  # noqa: BLE001 - the end of the process: say why, then go
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(1)


def main(threads: int, cwd: str, sys_path: list[str]) -> None:
    """Run requests in order in this thread, and concurrent ones in the Host's own, until told to shut down."""
    faulthandler.enable(all_threads=False)
    os.set_inheritable(CONNECTION, False)
    settle_in(threads, cwd, sys_path, "lo")
    connection, host, sending = socket.socket(fileno=CONNECTION), Host(), threading.Lock()
    requests: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()

    def read(parcels: list[Parcel], where: str) -> dict[str, Any]:
        values = [decode(memoryview(parcel[0]), parcel[1:], where) for parcel in parcels]
        return values[0] | values[-1]

    def answer(call_id: int, wants: bool, outcome: Outcome) -> None:
        outcome, parcel = pack_outcome(outcome, wants, lambda value: pack(value, "the result"))
        with sending:
            send(connection, (call_id, outcome.status, outcome.started_ns, outcome.ended_ns), parcel)

    def listen() -> None:
        try:
            while True:
                (call_id, target, method, wants, concurrent), parcels = receive(connection)
                values = partial(read, parcels, f"an argument of {target}.{method}")
                request = call_id, target, method, values, partial(answer, call_id, wants)
                host.execute_concurrently(*request) if concurrent else requests.put(request)
        finally:
            os.killpg(0, signal.SIGKILL)

    threading.Thread(target=listen, name="podium-listen", daemon=True).start()
    target = method = ""
    while target or method != "shutdown":
        call_id, target, method, values, done = requests.get()
        done(host.execute(call_id, target, method, values))
        del values, done  # what was large does not wait for the next request
    sys.stdout.flush()
    os._exit(0)
