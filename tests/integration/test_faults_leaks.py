"""What a run must not leave or open: descriptors, segments, directories, listening sockets, blocked callers."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest
import torch

import podium
from podium import Cluster, Handle, Worker
from podium.backends.local import LocalBackend
from podium.errors import CallCancelled, EndpointError, WorkerDied
from tests.integration.fault_workers import Faulty, Slow
from tests.integration.processes import all_gone, descriptors, opened_by_others, parent_of, run_script, wait_for

LIMIT_S = 60.0
FOUR_MIB = 1 << 20  # float32 elements
TORCH_THREADS = """
import os, sys, podium
from podium.runtime import Worker, endpoint

class Threads(Worker):
    @endpoint
    def threads(self):
        early = "torch" in sys.modules
        import torch
        return early, torch.get_num_threads(), self.ctx.threads, os.environ["OMP_NUM_THREADS"]

cores = len(os.sched_getaffinity(0))
"""


def backend_of(cluster: Cluster) -> LocalBackend:
    return cast(LocalBackend, cluster._backend)  # pyright: ignore[reportPrivateUsage] - its segments are looked at


@pytest.fixture
def faulty(local: Cluster) -> Iterator[Handle[Faulty]]:
    pool = local.pool([2])
    worker = local.start(Faulty.bind(), pool, name="leaky", distributed=False)
    yield worker
    worker.group.processes.close(timeout_s=0.0)
    worker.group.close()
    local.release(pool)


def test_descriptors_and_segments_do_not_grow_over_hundreds_of_large_calls(
    local: Cluster, faulty: Handle[Faulty]
) -> None:
    """Plain echoes, calls that raise with the tensor in their frames, cancelled calls, and results nobody reads."""
    value = torch.zeros(FOUR_MIB)

    def rounds(count: int) -> None:
        for at in range(count):
            assert faulty.echo(value).shape == value.shape
            with pytest.raises(EndpointError):
                faulty.echo_or_raise(value, True)
            faulty.echo_or_raise.submit(value, False)
            cancelled = faulty.echo_or_raise.submit(value, bool(at % 2))
            cancelled.cancel()
            with contextlib.suppress(CallCancelled, EndpointError):  # it may have ended before
                cancelled.result()
        faulty.rank()
        gc.collect()

    rounds(25)
    before = descriptors(os.getpid())
    rounds(50)
    before = max(before, descriptors(os.getpid()))  # what is opened once is no leak
    rounds(50)
    assert wait_for(lambda: descriptors(os.getpid()) <= before + 4, LIMIT_S), (before, descriptors(os.getpid()))
    in_use = [backend_of(local).segments.usage()[0], *faulty.group.run(_segments_in_use)]
    assert in_use == [0, 0, 0], f"{in_use} bytes of segments are in use although nobody reads them"


def _segments_in_use(worker: Worker) -> int:
    pools = [found for found in gc.get_objects() if type(found).__name__ == "SegmentPool"]
    assert pools
    return sum(pool.usage()[0] for pool in pools)


def test_what_was_queued_for_a_worker_goes_with_it(local: Cluster, faulty: Handle[Faulty]) -> None:
    """More large calls than its socket takes wait in the controller, with descriptors of their own."""
    value = torch.zeros(20_000)  # just above what goes inside a message
    segments = backend_of(local).segments

    def one_life() -> int:
        calls = [faulty.fail_on.submit(99, "-", "sleep")]
        calls += [faulty.echo.submit(value) for _ in range(400)]
        os.kill(faulty.group.pids[0], 9)
        for call in calls:
            with pytest.raises(WorkerDied):
                call.result()
        faulty.group.restart()
        return descriptors(os.getpid())

    first = one_life()
    assert max(one_life() for _ in range(2)) < first + 20, "segments are used again, and no duplicate is left"
    assert faulty.rank() == [0, 1]
    gc.collect()
    assert wait_for(lambda: segments.usage()[0] == 0, LIMIT_S), segments.usage()


def test_a_closed_cluster_leaves_no_descriptor_no_thread_and_no_process() -> None:
    def one_life() -> tuple[int, ...]:
        with podium.connect("local") as cluster:
            faulty = cluster.start(Faulty.bind(), cluster.pool([2]), distributed=False)
            faulty.echo(torch.zeros(FOUR_MIB))
            return *faulty.group.pids, parent_of(faulty.group.pids[0])

    one_life()
    gc.collect()
    before, threads = descriptors(os.getpid()), threading.active_count()
    pids = one_life()
    gc.collect()
    assert not all_gone(pids, LIMIT_S)
    assert wait_for(lambda: descriptors(os.getpid()) <= before, LIMIT_S), (descriptors(os.getpid()), before)
    assert wait_for(lambda: threading.active_count() <= threads, LIMIT_S)


def test_the_interrupt_handler_of_the_script_is_given_back() -> None:
    def own(number: int, frame: FrameType | None) -> None:
        """A user's handler."""

    original = signal.getsignal(signal.SIGINT)
    try:
        for handler in (signal.default_int_handler, own):
            signal.signal(signal.SIGINT, handler)
            with podium.connect("local"):
                assert (signal.getsignal(signal.SIGINT) is handler) is (handler is own), "a user's is left alone"
            assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, original)


def test_results_may_outlive_their_cluster() -> None:
    with podium.connect("local") as cluster:
        faulty = cluster.start(Faulty.bind(), distributed=False)
        got = faulty.echo(torch.arange(float(FOUR_MIB)))
    got += 1
    assert float(got[-1]) == FOUR_MIB


def test_the_private_directory_is_private_and_goes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with podium.connect("local") as cluster:
        cluster.start(Slow.bind()).note(1)
        (private,) = tmp_path.iterdir()
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
        assert private.stat().st_uid == os.getuid()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can try this as another user")
def test_another_user_opens_nothing_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="podium-test-") as directory:  # pytest's own is private itself
        public = Path(directory) / "public"
        public.parent.chmod(0o755)
        public.touch(0o644)
        monkeypatch.setattr("tempfile.tempdir", directory)
        with podium.connect("local") as cluster:
            group = cluster.start(Faulty.bind(), cluster.pool([2])).group
            group.run(_say)
            (private,) = [path for path in public.parent.iterdir() if path != public]
            processes = [Path(f"/proc/{pid}") for pid in (*group.pids, parent_of(group.pids[0]))]
            within = [*private.rglob("*"), *(path / name for path in processes for name in ("fd/0", "environ", "mem"))]
            assert len(within) > len(processes) * 3
            assert opened_by_others(public, private, *within) == [str(public)]


def test_nothing_has_a_name_in_shared_memory(faulty: Handle[Faulty]) -> None:
    before = set(os.listdir("/dev/shm"))
    got = faulty.echo(torch.zeros(FOUR_MIB))
    new = {name for name in set(os.listdir("/dev/shm")) - before if "podium" in name or "torch" in name}
    assert not new
    del got


def listening(pid: int) -> list[str]:
    """Addresses on which a process listens, as /proc writes them (hexadecimal)."""
    inodes: set[str] = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        if Path(f"/proc/{pid}/net/{table}").exists()
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes]


def test_nothing_listens_beyond_loopback(local: Cluster) -> None:
    before = listening(os.getpid())  # those of other tests in this process
    with socket.create_server(("127.0.0.1", 0)):
        now = listening(os.getpid())
        assert sorted(now) == sorted([*before, "0100007F"]), "the test sees a listener where there is one"
    group = local.start(Faulty.bind(), local.pool([3]))
    assert group.gather_ranks() == [[0.0, 1.0, 2.0]] * 3
    pids = [os.getpid(), parent_of(group.group.pids[0]), *group.group.pids]
    beyond = {pid: [address for address in listening(pid) if not address.endswith("7F")] for pid in pids}
    loopback_6 = {"00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
    assert not [address for addresses in beyond.values() for address in addresses if address not in loopback_6]
    group.group.close()


# -- load ------------------------------------------------------------------------------------------------------------


def test_thousands_of_queued_calls_neither_block_the_controller_nor_lose_their_order(local: Cluster) -> None:
    slow = local.start(Slow.bind(), distributed=False)
    busy = slow.wait.submit()
    calls = [slow.note.submit(number) for number in range(20_000)]
    assert not busy.done()
    assert slow.ping(7) == [7], "the control connection is free"
    slow.let_go()
    assert busy.result(LIMIT_S) == [True]
    calls[-1].result(LIMIT_S)
    assert slow.noted() == list(range(20_000))
    assert all(call.done() for call in calls)
    slow.group.close()


def test_thousands_of_concurrent_calls_behind_a_full_connection(local: Cluster) -> None:
    """The interpreter is held, so neither connection is read; both fill up, and both empty again."""
    faulty = local.start(Faulty.bind(), name="held", distributed=False)
    slow = local.start(Slow.bind(), into=faulty, name="beside")
    held = faulty.hold_the_interpreter.submit(1)
    notes = [slow.note.submit(number) for number in range(3000)]
    pings = [slow.ping.submit(number) for number in range(3000)]
    assert [ping.result(LIMIT_S) for ping in pings] == [[number] for number in range(3000)]
    held.result(LIMIT_S)
    notes[-1].result(LIMIT_S)
    assert slow.noted() == list(range(3000))
    faulty.group.close()
    slow.group.close()


def test_large_arguments_queue_behind_a_busy_worker(local: Cluster) -> None:
    faulty = local.start(Faulty.bind(), name="large_queue", distributed=False)
    slow = local.start(Slow.bind(), into=faulty, name="large_queue_slow")
    busy = slow.wait.submit()
    calls = [faulty.echo.submit(torch.full((20_000,), at)) for at in range(400)]
    slow.let_go()
    assert [int(call.result(LIMIT_S)[-1]) for call in calls] == list(range(400))
    busy.result()
    faulty.group.close()
    slow.group.close()


def test_many_threads_submit_and_each_gets_its_own(faulty: Handle[Faulty]) -> None:
    wrong: list[Any] = []

    def work(name: int) -> None:
        for at in range(100):
            value = (name, at) if at % 10 else torch.full((20_000,), name * 1000 + at)
            got = faulty.echo(value)
            if not (got == value if isinstance(value, tuple) else torch.equal(got, value)):
                wrong.append((value, got))

    threads = [threading.Thread(target=work, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


# -- threads and environment -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("preload", ["['torch']", pytest.param("[]", marks=pytest.mark.exhaustive)])
def test_threads_follow_the_share_of_the_cores(tmp_path: Path, preload: str) -> None:
    """Whether torch was there before the worker or comes later."""
    out = run_script(
        tmp_path,
        TORCH_THREADS
        + f"""
with podium.connect("local", preload={preload}) as cluster:
    pool = cluster.pool([1], cpus=cores)
    alone = cluster.start(Threads.bind(), pool)
    print(alone.threads() == [({preload != "[]"}, cores, cores, str(cores))])
    alone.group.close()
    cluster.release(pool)
    shared = cluster.start(Threads.bind(), cluster.pool([cores]))
    print(set(shared.threads()) == {{({preload != "[]"}, 1, 1, "1")}})
""",
        warm=preload != "[]",  # a warm fork server has torch
    )
    assert out == "True\nTrue\n"


def test_the_environment_is_there_before_anything_is_imported(tmp_path: Path) -> None:
    out = run_script(
        tmp_path,
        TORCH_THREADS
        + """
with podium.connect("local") as cluster:
    fresh = cluster.start(Threads.bind(), env={"OMP_NUM_THREADS": "1", "MINE": "x"})
    print(fresh.threads()[0][1:2], fresh.threads()[0][3], fresh.group.run(lambda worker: os.environ["MINE"]))
    warm = cluster.start(Threads.bind(), env={"MINE": "y"})
    print(warm.threads()[0][0], warm.group.run(lambda worker: os.environ["MINE"]))
    plain = cluster.start(Threads.bind())
    print(plain.group.run(lambda worker: os.environ.get("MINE")))
""",
    )
    assert out == "(1,) 1 ['x']\nTrue ['y']\n[None]\n"


def test_worker_output_goes_to_its_log(local: Cluster, tmp_path: Path) -> None:
    with podium.connect("local", log_dir=tmp_path / "logs") as cluster:
        worker = cluster.start(Slow.bind(), cluster.pool([2]), name="talker")
        worker.group.run(_say)
        logs = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert logs == {f"talker-{rank}.log": f"stdout of {rank}\nstderr of {rank}\n" for rank in range(2)}


def test_logs_and_last_words_are_found_wherever_the_script_goes(tmp_path: Path) -> None:
    out = run_script(
        tmp_path,
        f"""
import os, sys, podium
from podium.errors import WorkerDied
from podium.runtime import Worker

def leave(worker):
    print("farewell", file=sys.stderr, flush=True)
    os._exit(1)

os.chdir({str(tmp_path)!r})
with podium.connect("local", preload=[], log_dir="logs") as cluster:
    os.chdir("/")
    try:
        cluster.start(Worker.bind(), name="gone").group.run(leave)
    except WorkerDied as death:
        print(death.last_words)
""",
    )
    assert out == "('farewell',)\n"
    assert (tmp_path / "logs" / "gone-0.log").read_text() == "farewell\n"


def _say(worker: Worker) -> None:
    import sys

    sys.stdout.write(f"stdout of {worker.ctx.rank}\n")
    sys.stderr.write(f"stderr of {worker.ctx.rank}\n")
    time.sleep(0.01)


def test_worker_output_is_echoed_with_its_label_on_request(tmp_path: Path) -> None:
    out = run_script(
        tmp_path,
        """
import podium
from podium.runtime import Worker
with podium.connect("local", preload=[], echo=True) as cluster:
    talker = cluster.start(Worker.bind(), cluster.pool([2]), name="talker")
    talker.group.run(lambda worker: print("hello from", worker.ctx.rank))
""",
    )
    assert sorted(out.splitlines()) == ["[talker-0] hello from 0", "[talker-1] hello from 1"]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="only Linux shows the threads of a process")
def test_calls_beside_others_leave_the_cores_to_them(tmp_path: Path) -> None:
    """A thread keeps those that computed with it. Once there are more of all than cores, each sleeps as it waits."""
    out = run_script(
        tmp_path,
        """
import os, time, torch, podium
from podium.runtime import Worker, endpoint

class Computes(Worker):
    @endpoint(concurrent=True)
    def beside(self):
        return self.compute()

    @endpoint
    async def in_the_loop(self):
        return self.compute()

    def compute(self):
        torch.set_num_threads(4)
        before = len(os.listdir("/proc/self/task"))
        torch.ones(1 << 20).exp()
        return len(os.listdir("/proc/self/task")) - before

    @endpoint(concurrent=True)
    def threads(self):
        return len(os.listdir("/proc/self/task"))

with podium.connect("local") as cluster:
    worker = cluster.start(Computes.bind())

    def settled():  # a thread that was told to end is among those of the process for a moment more
        found = None
        while found != (found := worker.threads()[0]):
            time.sleep(0.5)
        return found

    worker.beside(), worker.in_the_loop()  # the pool's and the loop's own threads are there
    before = settled()
    for computes in (worker.beside, worker.in_the_loop):
        print(computes(), settled() - before < 3)
""",
    )
    assert out == "[3] True\n[3] True\n"
