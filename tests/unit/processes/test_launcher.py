"""Processes with a channel, real ones: they end with it, by force where they must, with all that they started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from podium.processes import (
    Channel,
    ForkServer,
    Launched,
    Supervisor,
    command,
    is_stopped,
    serve_forks,
    supervise,
)
from tests.unit.rewards.deeds import SLEEPER, alive_with, daemonize
from tests.waits import wait_until

ECHO = """
import os, signal, socket, sys
connection = socket.socket(fileno=0)
{first}
connection.sendall(connection.recv(100))
while connection.recv(100):
    pass
{last}
"""


def launch(first: str = "", last: str = "", log_path: Path | None = None) -> Launched:
    return Launched([sys.executable, "-c", ECHO.format(first=first, last=last)], log_path=log_path)


def test_a_process_answers_through_its_channel_and_ends_with_it(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "process.log"
    launched = launch("print(os.getsid(0) == os.getpid(), flush=True)", log_path=log)
    launched.channel.send(5, b"five")
    assert launched.channel.receive() == (5, b"five")
    assert launched.alive()
    launched.end()
    assert launched.process.returncode == 0
    assert not launched.alive()
    assert log.read_text() == "True\n"
    launched.channel.close()


def test_a_process_that_does_not_end_is_killed_with_what_it_started_in_other_sessions() -> None:
    tag = f"tag-{os.getpid()}-launcher"
    start = f"import subprocess; subprocess.Popen({[*SLEEPER, tag]!r}, start_new_session=True)"
    launched = launch(start, "signal.pause()")
    launched.channel.send(1)
    assert launched.channel.receive() == (1, b"")
    assert wait_until(lambda: alive_with(tag))
    launched.end(0.1)
    launched.channel.close()
    assert launched.process.returncode == -signal.SIGKILL
    assert wait_until(lambda: [pid for pid in alive_with(tag) if pid != launched.process.pid] == [])


def test_a_process_that_a_signal_has_stopped_goes_on() -> None:
    launched = launch("os.kill(os.getpid(), signal.SIGSTOP)")
    assert wait_until(lambda: is_stopped(launched.process.pid))
    launched.resume()
    launched.channel.send(1)
    assert launched.channel.receive() == (1, b"")
    launched.end()
    launched.channel.close()


def test_a_command_that_does_not_exist_leaves_nothing_open() -> None:
    """In a process of its own: in this one, threads of other tests open and close files."""
    code = """
import os
from podium.processes import Launched
before = os.listdir("/proc/self/fd")
try:
    Launched(["/no/such/command"])
except FileNotFoundError:
    print(os.listdir("/proc/self/fd") == before)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.stdout == "True\n", ended.stderr


def main(tag: str) -> None:
    """A fork server whose children tell what they have, and wait."""

    def live(descriptors: Sequence[int], word: str) -> int:
        if word == "code":
            return 7
        daemonize(f"{tag}-{word}")
        with socket.socket(fileno=descriptors[0]) as connection:
            others = [fd for fd in map(int, os.listdir("/proc/self/fd")) if fd > 2 and _is_socket(fd)]
            Channel(connection).send(1, f"{word} {others == descriptors}".encode())
            signal.pause()
        return 0

    def work(supervisor: Supervisor, channel: Channel) -> None:
        supervisor.settle()
        serve_forks(supervisor, channel, live)

    supervise(work)


def _is_socket(fd: int) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    except OSError:  # that of the listing itself
        return False


def test_a_fork_server_starts_and_kills_by_number_and_reports_ends() -> None:
    tag = f"tag-{os.getpid()}-forks"
    server = ForkServer(command("tests.unit.processes.test_launcher", tag))
    channels, ends = list[Channel](), dict[int, int | None]()
    try:
        for number, word in enumerate(("first", "second"), start=1):
            near, far = socket.socketpair()
            channels.append(Channel(near))
            with far:
                server.fork(number, (word,), far.fileno(), on_end=partial(ends.__setitem__, number))
        words = [frame[1] for frame in (channel.receive() for channel in channels) if frame is not None]
        assert words == [b"first True", b"second True"], "a child has its own descriptors and no other's"
        near, far = socket.socketpair()
        with near, far:
            server.fork(3, ("code",), far.fileno(), on_end=partial(ends.__setitem__, 3))
        assert server.read_ends()
        assert ends == {3: 7 << 8}
        server.kill(1)
        assert server.read_ends()
        assert ends == {3: 7 << 8, 1: signal.SIGKILL}
        assert channels[0].receive() is None
        assert wait_until(lambda: not alive_with(f"{tag}-first"))
        assert alive_with(f"{tag}-second")
        server.kill(1)  # it has ended: nothing
        server.kill(99)
        os.kill(server.process.pid, signal.SIGKILL)
        assert not server.read_ends()
        assert ends == {3: 7 << 8, 1: signal.SIGKILL, 2: None}
        server.end()
        assert wait_until(lambda: alive_with(f"{tag}-second") == []), "nobody but the launcher ends this daemon"
    finally:
        server.end()
        for channel in (server.channel, *channels):
            channel.close()


def test_an_error_of_a_supervisor_is_printed(tmp_path: Path) -> None:
    code = """
from podium.processes import supervise
def work(supervisor, channel):
    raise ValueError("a fault of the supervisor's own")
supervise(work)
"""
    launched = Launched([sys.executable, "-c", code], log_path=tmp_path / "log")
    assert launched.channel.receive() is None
    launched.reap(60)
    launched.channel.close()
    assert "ValueError: a fault of the supervisor's own" in (tmp_path / "log").read_text()
    assert launched.process.returncode == 1
