"""Supervisors with real processes: who is killed when, and who is spared."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from podium.processes import Supervisor, children_of, describe_exit, kill, kill_marked
from tests.unit.rewards.deeds import SLEEPER, alive_with, daemonize
from tests.waits import LONG_S, wait_until


def test_children_are_seen() -> None:
    with subprocess.Popen(SLEEPER, start_new_session=True) as child:
        try:
            assert child.pid in children_of(os.getpid())
            assert children_of(child.pid) == []
        finally:
            child.kill()
    assert child.pid not in children_of(os.getpid())
    assert children_of(child.pid) == []


def test_an_end_is_described() -> None:
    codes = [0, 3, -signal.SIGKILL, -(signal.SIGRTMIN + 1)]
    assert [describe_exit(code) for code in codes] == ["exit code 0", "exit code 3", "signal SIGKILL", "signal 35"]


def test_processes_are_killed_by_a_mark_in_their_environment() -> None:
    mark = f"MARK_OF_A_TEST={os.getpid()}"
    name, _, value = mark.partition("=")
    with (
        subprocess.Popen(SLEEPER, env={**os.environ, name: value}, start_new_session=True) as marked,
        subprocess.Popen(SLEEPER, env={**os.environ, name: value + "0"}) as other,
    ):
        try:
            assert wait_until(lambda: Path(f"/proc/{marked.pid}/environ").read_bytes().count(value.encode()))
            kill_marked(mark)
            assert marked.wait(timeout=LONG_S) == -signal.SIGKILL
            assert other.poll() is None
        finally:
            marked.kill()
            other.kill()
    kill(marked.pid)  # of a process that has ended: nothing


def supervise(fd: int, tag: str) -> None:
    """Life of a supervisor: it forks the two children that each line asks for, and tells what it sees."""
    connection = socket.socket(fileno=fd)
    supervisor = Supervisor(connection)
    subprocess.Popen([*SLEEPER, f"{tag}-spared"])
    supervisor.settle()

    def live(name: str) -> int:
        daemonize(f"{tag}-{name}")
        signal.pause()
        return 0

    children = {name: supervisor.fork(lambda name=name: live(name)) for name in ("first", "second")}
    try:
        while (ready := supervisor.wait()) is not None:
            if connection.fileno() in ready:
                word = connection.recv(100).decode()
                if not word:
                    return
                supervisor.kill(children[word])
            for pid, status in supervisor.reap():
                name = next(name for name in children if children[name] == pid)
                connection.send(f"{name} {os.waitstatus_to_exitcode(status)}".encode())
    finally:
        supervisor.end()


@pytest.mark.parametrize("ending", ["close", "parent"])
def test_a_supervisor_kills_what_ended_children_started_and_at_its_end_everything(ending: str) -> None:
    tag = f"tag-{os.getpid()}-{ending}"
    near, far = socket.socketpair()
    near.settimeout(LONG_S)
    code = f"from tests.unit.processes.test_supervisor import supervise; supervise({far.fileno()}, {tag!r})"
    command = [sys.executable, "-c", code]
    if ending == "parent":  # a parent between us and the supervisor, which is killed while we hold the socket
        command = ["/bin/sh", "-c", '"$0" "$@"; :', *command]
    with near, subprocess.Popen(command, pass_fds=[far.fileno()]) as process:
        far.close()
        try:
            assert wait_until(lambda: alive_with(f"{tag}-first") and alive_with(f"{tag}-second"))
            near.send(b"first")
            assert near.recv(100) == b"first -9"
            assert wait_until(lambda: not alive_with(f"{tag}-first"))
            assert alive_with(f"{tag}-second"), "the daemon of a living child lives"
            assert alive_with(f"{tag}-spared"), "what the imports started lives"
            if ending == "close":
                near.shutdown(socket.SHUT_RDWR)
                assert process.wait(timeout=LONG_S) == 0
            else:
                process.kill()
            assert wait_until(lambda: not [pid for pid in alive_with(tag) if pid != os.getpid()])
        finally:
            process.kill()
            for pid in alive_with(tag):
                kill(pid)
