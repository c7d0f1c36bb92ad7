"""A worker whose socket to the controller closes on one side is lost at once, and costs no processor time."""

from __future__ import annotations

import itertools
import os
import socket
import time
from typing import cast

import pytest

from podium import Cluster, Worker, endpoint
from podium.backends.local import LocalBackend
from podium.errors import WorkerDied
from tests.integration.processes import all_gone, wait_for

CALLS, CONTROL = 0, 1
LIMIT_S = 60.0


class Closing(Worker):
    @endpoint
    def close_later(self, which: int, how: int) -> None:
        """Close one direction of a socket from outside of the call, as its answer must still arrive."""
        import threading

        fds = [int(fd) for fd in os.listdir("/proc/self/fd") if _is_packets(int(fd))]

        def close() -> None:
            socket.socket(fileno=sorted(fds)[which]).shutdown(how)
            time.sleep(1e6)  # the socket's object must live on

        threading.Timer(0.1, close).start()

    @endpoint
    def work(self, seconds: float) -> None:
        time.sleep(seconds)


def _is_packets(fd: int) -> bool:
    try:
        with socket.socket(fileno=os.dup(fd)) as found:
            return found.type == socket.SOCK_SEQPACKET
    except OSError:
        return False


@pytest.mark.each_value
@pytest.mark.parametrize("busy", [True, False], ids=["busy", "idle"])
@pytest.mark.parametrize("how", [socket.SHUT_RD, socket.SHUT_WR, socket.SHUT_RDWR], ids=["reads", "writes", "both"])
@pytest.mark.parametrize("which", [CALLS, CONTROL], ids=["calls", "control"])
def test_a_worker_that_is_cut_off_is_lost_at_once(
    local: Cluster, which: int, how: int, busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = local.start(Closing.bind(), distributed=False)
    (pid,) = worker.group.pids
    polls = itertools.count()
    io = cast(LocalBackend, local._backend).io  # pyright: ignore[reportPrivateUsage] - its polls are counted
    with monkeypatch.context() as patch:
        take_in = io._take_in
        patch.setattr(io, "_take_in", lambda events: (next(polls), take_in(events))[1])
        worker.close_later(which, how)
        with pytest.raises(WorkerDied, match="SIGKILL"):
            if busy:
                worker.work(600.0)
            else:
                assert wait_for(lambda: bool(worker.group.lost), LIMIT_S)
                worker.work(0.0)
    assert next(polls) < 1000, "nothing polls a socket that has ended"
    assert not all_gone([pid], LIMIT_S)
    worker.group.restart()
    worker.work(0.0)
    worker.group.close()


def test_the_error_of_a_worker_that_is_cut_off_says_so(local: Cluster) -> None:
    worker = local.start(Closing.bind(), distributed=False)
    worker.close_later(CONTROL, socket.SHUT_WR)
    with pytest.raises(WorkerDied, match="because its socket to the controller had closed"):
        worker.work(600.0)
    worker.group.close()


def test_a_worker_that_is_killed_was_not_cut_off(local: Cluster) -> None:
    for _ in range(10):
        worker = local.start(Closing.bind(), distributed=False)
        call = worker.work.submit(600.0)
        os.kill(worker.group.pids[0], 9)
        with pytest.raises(WorkerDied) as caught:
            call.result()
        assert caught.value.cause == "signal SIGKILL"
        worker.group.close()
