"""The logs of worker processes, and the fork server's own rules."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
import torch

import podium
from podium import Cluster
from podium.backends.files import LAST_LINES, Files, Log
from podium.backends.local import LocalBackend, process
from podium.backends.local.backend import WorkerServer
from podium.backends.local.shared_memory import Lease, SegmentPool
from podium.errors import CallCancelled, ConfigError, WorkerDied
from podium_testing.workers import Counter, Stash
from tests.waits import LONG_S, wait_until


def watches_threads() -> bool:
    """Whether the kernel tells of the end of one thread (PIDFD_THREAD)."""
    try:
        os.close(os.pidfd_open(threading.get_native_id(), os.O_EXCL))
    except OSError:
        return False
    return True


def test_last_words_are_the_last_lines_of_this_life(tmp_path: Path) -> None:
    path = tmp_path / "process.log"
    path.write_text("of a former life\n")
    start = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"".join(b"line %d\n" % at for at in range(100)) + b"\xff no utf-8\nunfinished")
    words = Log(path, start).last_lines()
    assert len(words) == LAST_LINES
    assert words[-1] == "unfinished"
    assert words[-3] == "line 99"
    assert Log(path, path.stat().st_size).last_lines() == ()
    assert Log(tmp_path / "none").last_lines() == ()


def test_last_words_of_a_crash_are_its_cause_however_deep_its_stack_is(tmp_path: Path) -> None:
    (path := tmp_path / "log").write_text(
        "".join(f"line {number}\n" for number in range(30))
        + "Fatal Python error: Segmentation fault\n\nCurrent thread (most recent call first):\n"
        + "".join(f"  File {number}\n" for number in range(40))
    )
    words = Log(path).last_lines()
    assert len(words) == 20
    assert words[:6] == (*(f"line {number}" for number in range(25, 30)), "Fatal Python error: Segmentation fault")
    assert words[8] == "  File 0"


def test_the_echo_labels_whole_lines_and_prints_the_rest_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "worker-0.log"
    path.write_text("before\n")
    files = Files(tmp_path, echo=True)
    files.begin_log("worker-0")
    with path.open("a") as file:
        file.write("one\ntwo\nthr")
        file.flush()
        file.write("ee")
    files.close()
    assert capsys.readouterr().out == "[worker-0] one\n[worker-0] two\n[worker-0] three\n"


@pytest.mark.parametrize("out", ["ascii", "closed", "absent"])
def test_the_echo_goes_on_whatever_stdout_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str) -> None:
    """Characters that it does not have are escaped. The thread of a stream that is closed does not end by an error."""
    stream = TextIOWrapper(BytesIO(), encoding="ascii", write_through=True)
    if out == "closed":
        stream.close()
    monkeypatch.setattr(sys, "stdout", None if out == "absent" else stream)
    files = Files(tmp_path, echo=True)
    files.begin_log("worker-0")
    (tmp_path / "worker-0.log").write_text("caf\u00e9\n")
    assert wait_until(lambda: all(at == 6 for _, at in files._printed.values()))
    with (tmp_path / "worker-0.log").open("a") as file:
        file.write("later\n")
    files.close()
    if out == "ascii":
        assert stream.buffer.getvalue() == b"[worker-0] caf\\xe9\n[worker-0] later\n"  # type: ignore[attr-defined]


def test_the_fork_server_imports_and_never_computes() -> None:
    """A forked child of a process that ran a multi-threaded operation may hang for ever."""
    script = """
import os, podium

def product(worker):
    import torch
    torch.set_num_threads(2)
    return float(torch.ones(500, 500).matmul(torch.ones(500, 500)).sum())

with podium.connect("local", preload=["torch", "no_such_module"]) as cluster:
    from podium.runtime import Worker
    worker = cluster.start(Worker.bind(), distributed=False)
    server = int(open(f"/proc/{worker.group.pids[0]}/stat").read().rpartition(")")[2].split()[1])
    print(len(os.listdir(f"/proc/{server}/task")))
    print(worker.group.run(product))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=200)
    assert done.stdout == "1\n[125000000.0]\n", done.stderr
    assert "preload of no_such_module failed: ModuleNotFoundError" in done.stderr


def test_what_is_put_is_stored_once_for_all_groups_and_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    take = SegmentPool._take

    def counted(self: SegmentPool, nbytes: int, label: str) -> Lease:
        taken.append(nbytes)
        return take(self, nbytes, label)

    monkeypatch.setattr(SegmentPool, "_take", counted)
    backend = LocalBackend()
    with Cluster(backend) as cluster:
        groups = [cluster.start(Stash.bind(), name=name, distributed=False) for name in ("one", "two", "three")]
        taken.clear()
        put = cluster.put(torch.ones(100_000))
        assert [group.total(put) for group in groups] == [[100_000.0]] * 3
        assert taken == [400_000]
        assert [*backend.segments.kept()] == ["the controller"]
        del put
        assert groups[0].seen() == [0]
        assert not backend.segments.kept()


@pytest.mark.timeout(2 * LONG_S)
@pytest.mark.parametrize("what", ["cluster", pytest.param("group", marks=pytest.mark.exhaustive)])
def test_a_handler_of_a_signal_may_close_while_the_script_waits(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """The script's thread has the turn to take in how the processes end."""
    monkeypatch.setattr(process, "KILL_S", 10 * LONG_S)
    cluster = podium.connect("local", preload=())
    group = cluster.start(Counter.bind(), cluster.pool(2), distributed=False).group
    gone: list[bool] = []

    def close(number: int, frame: object) -> None:
        (cluster if what == "cluster" else group).close()
        gone.append(not any(Path(f"/proc/{pid}").exists() for pid in pids))

    pids = group.pids
    before = signal.signal(signal.SIGUSR1, close)
    sender = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1))
    sender.start()
    try:
        with pytest.raises(CallCancelled, match="was closed while this call was in flight"):
            group.run(lambda worker: time.sleep(2 * LONG_S))
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)
        cluster.close()
    assert gone == [True]


def test_the_command_of_chosen_ranks_begins_with_a_prefix_which_may_report_at_the_end(tmp_path: Path) -> None:
    prefix = ["sh", "-c", f'"$@"; sleep 0.3; echo $? > {tmp_path}/report', "profiler", "env", "PROFILED=yes"]
    with podium.connect("local", preload=()) as cluster:
        group = cluster.start(Counter.bind(), cluster.pool(2), options={"prefix": {1: prefix}}, distributed=False).group
        assert group.run(_profiled) == [None, "yes"]
        group.close()
        assert (tmp_path / "report").read_text() == "0\n"
        for wrong in (["nsys"], {0: "nsys profile"}):
            with pytest.raises(ConfigError, match=r"expected the beginning of a command by rank"):
                cluster.start(Counter.bind(), options={"prefix": wrong})
        with pytest.raises(ConfigError, match="there is no command 'no-such-profiler' on this machine"):
            cluster.start(Counter.bind(), options={"prefix": {0: ["no-such-profiler"]}})


def test_a_worker_that_closes_its_sockets_ends_with_the_reason() -> None:
    """The script may hear of the closed sockets first, or of the end of the process."""
    with podium.connect("local", preload=(), echo=False) as cluster:
        group = cluster.start(Counter.bind(), distributed=False).group
        why = r"closed the descriptor of its socket|because its socket to the controller had closed"
        with pytest.raises(WorkerDied, match=why):
            group.run(lambda worker: os.closerange(3, 1000))
        group.restart()
        assert group.run(lambda worker: worker.ctx.rank) == [0]


def _profiled(worker: Counter) -> str | None:
    return os.environ.get("PROFILED")


@pytest.mark.skipif(not watches_threads(), reason="needs Linux 6.9 or newer")
def test_an_end_is_known_before_the_parent_hears_of_it() -> None:
    """The kernel tells a parent when a process's memory is freed. Here the parent, the fork server, hears nothing."""
    with podium.connect("local", echo=False, preload=[]) as cluster:
        counter = cluster.start(Counter.bind(), cluster.pool([1]), timeout_s=LONG_S)
        backend = counter.group.processes.backend
        assert isinstance(backend, LocalBackend)
        server, (pid,) = backend._server.process, counter.group.pids
        os.kill(server.pid, signal.SIGSTOP)
        try:
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(WorkerDied) as died:
                counter.add()
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert (died.value.rank, died.value.cause) == (0, "signal SIGKILL")
        counter.group.restart()
        assert counter.add() == [1]


def test_a_fork_server_whose_socket_is_closed_starts_nothing(tmp_path: Path) -> None:
    server = WorkerServer([], tmp_path)
    try:
        assert server.alive()
        server.channel.close()  # as the I/O does at its end of file, which may come before the process has ended
        assert not server.alive()
    finally:
        server.close()


def test_a_backend_takes_the_server_that_was_prepared_for_it() -> None:
    LocalBackend.prepare(["json"])
    private, server = LocalBackend._prepared[("json",)]
    LocalBackend.prepare(["json"])  # one is enough
    with podium.connect("local", preload=["json"], echo=False) as cluster:
        assert ("json",) not in LocalBackend._prepared
        assert private.is_dir()
        assert cluster.start(Counter.bind()).add(2) == [2]
        assert server.alive()
    assert not server.alive()
    assert not private.exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, BlockingIOError])
def test_a_server_that_does_not_begin_leaves_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Ctrl-C while it is begun, or a limit on the number of processes."""

    def begin(*arguments: object, **settings: object) -> None:
        raise error

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", begin)
    threads = threading.active_count()
    for begun in (partial(LocalBackend.prepare, ["json"]), partial(LocalBackend, preload=["json"])):
        with pytest.raises(error):
            begun()
        assert [*tmp_path.iterdir()] == []
    assert threading.active_count() == threads


def test_a_prepared_server_that_nobody_takes_ends_with_the_process(tmp_path: Path) -> None:
    script = """
from podium.backends.local import LocalBackend, process
LocalBackend.prepare(["json"])
((private, server),) = LocalBackend._prepared.values()
print(server.process.pid, private)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    pid, private = done.stdout.split()
    assert wait_until(lambda: not Path(f"/proc/{pid}").exists() and not Path(private).exists())
    assert done.stderr == ""
