"""The nursery: a process that imports once, forks worker processes and reaps them.

controller ──(env, fresh, log, surroundings) + a worker process's connection + the nursery's end of its leash──▶ nursery
nursery ──on the leash: exit code──▶ controller, whose end of the leash closes for a kill or with it"""

import importlib
import os
import pickle
import select
import shutil
import socket
import sys
from functools import partial

from podium.backends.process import Surroundings
from podium.processes import Supervisor, command
from podium_streams import worker


def main(private: str, preload: list[str]) -> None:
    """Serve the controller, whose socket is our standard input, as long as it lives."""
    orders = socket.socket(fileno=os.dup(0))
    supervisor = Supervisor(orders)
    for module in preload:
        importlib.import_module(module)
    supervisor.settle()
    processes: dict[int, tuple[socket.socket, socket.socket]] = {}  # pid: connection, leash
    try:
        while (ready := supervisor.wait()) is not None:
            for pid, (_, leash) in processes.items():
                if leash.fileno() in ready:
                    supervisor.kill(pid)
            for pid, status in supervisor.reap():
                connection, leash = processes.pop(pid)
                supervisor.poller.unregister(leash)
                connection.shutdown(socket.SHUT_RDWR)  # the controller reads to the end, whoever holds it too
                leash.send(str(os.waitstatus_to_exitcode(status)).encode())
            if orders.fileno() in ready:
                message, fds, _, _ = socket.recv_fds(orders, 1 << 18, 2)
                if not message:
                    break
                connection, leash = (socket.socket(fileno=fd) for fd in fds)
                pid = supervisor.fork(partial(_become_worker, connection, *pickle.loads(message)))
                processes[pid] = connection, leash
                supervisor.poller.register(leash, select.POLLIN)
    finally:
        supervisor.end()
        shutil.rmtree(private, ignore_errors=True)


def _become_worker(
    connection: socket.socket, env: dict[str, str], fresh: bool, log: str, surroundings: Surroundings
) -> int:
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number, fd in enumerate((os.open(os.devnull, os.O_RDONLY), out, out, os.dup(connection.fileno()))):
        os.dup2(fd, number)
    os.closerange(worker.CONNECTION + 1, 1 << 16)
    os.environ.update(env)
    if fresh:
        os.execv(sys.executable, command("podium_streams.worker", *surroundings))
    worker.main(*surroundings)
    return 0
