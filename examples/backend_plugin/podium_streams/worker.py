"""A worker process: requests come in on its connection, outcomes go out."""

import os
import queue
import signal
import socket
import sys
import threading
from functools import partial
from typing import Any

from podium.backends.process import Surroundings
from podium.runtime.codec import decode
from podium.runtime.worker_process import Outcome, WorkerProcess, pack_outcome
from podium_streams.wire import Parcel, pack, receive, send

CONNECTION = 3  # file descriptor


def main(*surroundings: Any) -> None:
    """Run requests in order in this thread, and concurrent ones in threads of its own, until told to shut down."""
    os.set_inheritable(CONNECTION, False)
    Surroundings(*surroundings).settle_in("lo")
    connection, process, sending = socket.socket(fileno=CONNECTION), WorkerProcess(), threading.Lock()
    send(connection, os.getpid())  # it takes requests
    requests: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()

    def read(parcels: list[Parcel], where: str) -> dict[str, Any]:
        values = [decode(memoryview(parcel[0]), parcel[1:], where) for parcel in parcels]
        return values[0] | values[-1]

    def answer(number: int, wants: bool, outcome: Outcome) -> None:
        outcome, parcel = pack_outcome(outcome, wants, lambda value: pack(value, "the result"))
        with sending:
            send(connection, (number, outcome.status, outcome.started_ns, outcome.ended_ns), parcel)

    def listen() -> None:
        try:
            while True:
                (number, target, method, wants, concurrent), parcels = receive(connection)
                values = partial(read, parcels, f"an argument of {target}.{method}")
                request = number, target, method, values, partial(answer, number, wants)
                process.execute_concurrently(*request) if concurrent else requests.put(request)
        finally:
            os.killpg(0, signal.SIGKILL)

    threading.Thread(target=listen, name="podium-listen", daemon=True).start()
    target = method = ""
    while target or method != "shutdown":
        number, target, method, values, done = requests.get()
        done(process.execute(number, target, method, values))
        del values, done  # what was large does not wait for the next request
    sys.stdout.flush()
    os._exit(0)
