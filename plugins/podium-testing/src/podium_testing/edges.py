"""Contract: what holds also where several things happen at once, or where a size or a number is unusual."""

import contextlib
import gc
import os
import resource
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from podium.errors import EndpointError, WorkerDied, WorkerStartError
from podium.processes import children_of, descendants_of, kill
from podium.runtime import Backend, Cluster, Handle, Worker
from podium_testing.load_workers import (
    Crowd,
    draw,
    end_when_told,
    read_environment,
    read_holdings,
    resist,
    sum_parts,
    weigh_parts,
)
from podium_testing.loads import MIB, numbered
from podium_testing.processes import GONE_S, Started, make_site, read_written
from podium_testing.shipped import ClosesSlowly, FailsUnheard, read_thread
from podium_testing.target import LIMIT_S, Target, all_gone, need, started, wait_for
from podium_testing.workers import Sleeper

__all__ = ["EdgeContract"]

LARGEST_EXPONENT = 21  # sizes up to 2 MiB, around each power of two
MANY_PARTS = 24_000  # whose sizes alone take more than 64 KiB
MANY_REQUESTS = 1500
LONG = 40_000  # characters of a variable, of an error and of a line


class EdgeContract:
    edge_crowd = started(Crowd.bind(), 1, name="edge-crowd", distributed=False)

    @pytest.fixture
    @classmethod
    def backend(cls, cluster: Cluster) -> Backend:
        return cluster._backend  # pyright: ignore[reportPrivateUsage] - the point: what stands below the runtime

    # -- starts ------------------------------------------------------------------------------------------------------

    def test_any_thread_may_connect_and_start_and_then_end(self, target: Target) -> None:
        made: list[tuple[Cluster, Handle[Sleeper]]] = []

        def connect() -> None:
            cluster = target.connect()
            made.append((cluster, cluster.start(Sleeper.bind(), distributed=False)))

        thread = threading.Thread(target=connect)
        thread.start()
        thread.join()
        ((cluster, sleeper),) = made
        with cluster:
            assert sleeper.sleep(0.5) == ["sync"], "what a thread has started stays when the thread has ended"
            other = cluster.start(Sleeper.bind(), distributed=False)
            assert other.double(1) == sleeper.double(1) == [2]

    def test_a_script_may_have_thousands_of_open_files(self, cluster: Cluster, backend: Backend) -> None:
        """As many make descriptors above 1023, which not every call of the system takes."""
        need(cluster, "processes")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4096), hard), hard))
        descriptors: list[int] = []
        try:
            while not descriptors or descriptors[-1] < 1100:
                descriptors.append(os.open(os.devnull, os.O_RDONLY))
            raw = Started(backend, 1)
            assert raw.answer(0, "record", record="here") == "here"
            raw.close()
            assert len(raw.deaths) == 1
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def test_more_than_ten_processes_are_in_the_order_of_their_ranks(self, cluster: Cluster, backend: Backend) -> None:
        need(cluster, "processes")
        raw = Started(backend, 11)
        try:
            for rank in (2, 10, 1):
                raw.handles[rank].kill()
            assert [rank for rank, _ in raw.deaths] == [2, 10, 1]
        finally:
            raw.close()

    def test_an_interrupted_start_leaves_nothing(self, cluster: Cluster, backend: Backend, tmp_path: Path) -> None:
        """The script may catch the Ctrl-C and go on."""
        need(cluster, "processes", "exit_status")  # a runtime that starts processes for others ends them when it likes

        def interrupt() -> None:
            wait_for(lambda: bool(read_written(tmp_path)), LIMIT_S)
            os.kill(os.getpid(), signal.SIGINT)

        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        thread = threading.Thread(target=interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                thread.start()
                Started(backend, 1, env=make_site(tmp_path, 600.0), timeout_s=2 * LIMIT_S)
            assert not all_gone(read_written(tmp_path), GONE_S)
        finally:
            thread.join()
            signal.signal(signal.SIGINT, before)
            for pid in read_written(tmp_path):
                kill(pid)

    def test_groups_that_start_at_once_have_variables_of_their_own(self, cluster: Cluster) -> None:
        need(cluster, "processes")
        names = ["PODIUM_CONTRACT_AT_ONCE", "PODIUM_CONTRACT_LONG"]
        seen: dict[int, list[dict[str, str | None]]] = {}

        def live(at: int) -> None:
            env = dict.fromkeys(names, str(at) * LONG)
            seen[at] = cluster.start(Worker.bind(), env=env, distributed=False).group.run(read_environment, names)

        threads = [threading.Thread(target=live, args=(at,)) for at in range(2)]
        for thread in threads:
            thread.start()
        others = [cluster.start(Worker.bind(), distributed=False).group.run(read_environment, names) for _ in range(3)]
        for thread in threads:
            thread.join()
        assert others == [[dict.fromkeys(names)]] * 3
        assert seen == {at: [dict.fromkeys(names, str(at) * LONG)] for at in range(2)}

    def test_starts_and_their_failures_leave_nothing_anywhere(
        self, cluster: Cluster, backend: Backend, tmp_path: Path
    ) -> None:
        """Neither in this process nor in those that serve the backend."""
        need(cluster, "processes", "exit_status")
        (tmp_path / "first").touch()  # each interpreter ends before it takes a request
        env = make_site(tmp_path, 0.0)

        def live() -> None:
            Started(backend, 2).close()
            with pytest.raises(WorkerStartError):
                Started(backend, 2, env=env)  # it need not wait for its limit of ten minutes

        live()
        ours, servants = read_holdings(), {pid: _count_descriptors(pid) for pid in descendants_of(os.getpid())}
        for _ in range(4):
            live()
        assert wait_for(lambda: all(n <= o + 3 for n, o in zip(read_holdings()[:3], ours[:3], strict=True)), LIMIT_S), (
            f"{ours[:3]} descriptors, threads and children became {read_holdings()[:3]}"
        )
        grown = {pid: (n, _count_descriptors(pid)) for pid, n in servants.items() if _count_descriptors(pid) > n + 3}
        assert not grown, f"descriptors of processes of the backend: {grown}"

    def test_every_process_draws_random_numbers_of_its_own(self, cluster: Cluster) -> None:
        """Where workers are forks of one process, the parent's state would be all theirs: one noise, one dropout."""
        need(cluster, "processes")
        group = cluster.start(Worker.bind(), cluster.pool([2]), distributed=False).group
        numbers = group.run(draw)
        group.restart()
        numbers += group.run(draw)
        for of_library in zip(*numbers, strict=True):
            assert len({*of_library}) == len(numbers), numbers

    # -- requests ----------------------------------------------------------------------------------------------------

    def test_all_requests_run_in_one_thread(self, cluster: Cluster) -> None:
        """What a library keeps for a thread is there at the next call: gradients off, a stream, an event loop."""
        need(cluster, "processes")
        group = cluster.start(Worker.bind(), distributed=False).group
        assert (
            len({*group.run(read_thread), *group.run(read_thread), *group.function(read_thread).submit().result()}) == 1
        )

    def test_a_thousand_requests_can_wait(self, cluster: Cluster, backend: Backend) -> None:
        need(cluster, "processes", "concurrent")
        raw = Started(backend, 1)
        os.kill(raw.handles[0].pid, signal.SIGSTOP)
        try:
            futures = [raw.ask(0, "record", record=[at]) for at in range(MANY_REQUESTS)]
            os.kill(raw.handles[0].pid, signal.SIGCONT)
            for at, future in enumerate(futures):
                backend.wait(future.done, LIMIT_S)
                assert backend.unpack(future.result(LIMIT_S).payload) == [at]
        finally:
            raw.close()

    def test_parts_of_every_size_arrive_whole(self, edge_crowd: Handle[Crowd]) -> None:
        sizes = [(1 << exponent) + more for exponent in range(1, LARGEST_EXPONENT) for more in (-1, 0, 1)]
        sent = [(numbered(size, size), bytes([size % 251]) * size) for size in sizes]
        assert edge_crowd.group.run_on(0, weigh_parts, sent) == weigh_parts(None, sent), (
            "two faults may undo each other"
        )
        ((_, got),) = edge_crowd.answer(0, sent)
        for (values, text), (got_values, got_text) in zip(sent, got, strict=True):
            assert torch.equal(values, got_values)
            assert text == got_text
        edge_crowd.counts()

    def test_a_message_of_very_many_parts_arrives_whole(self, edge_crowd: Handle[Crowd]) -> None:
        parts = [np.full(300, at % 251, dtype=np.uint8) for at in range(MANY_PARTS)]
        count, total, back = edge_crowd.group.run_on(0, sum_parts, parts)
        assert (count, total) == (MANY_PARTS, sum(int(part.sum()) for part in parts))
        assert all(np.array_equal(*both) for both in zip(parts, back, strict=True))

    def test_an_error_is_heard_where_the_result_is_not_wanted(self, cluster: Cluster) -> None:
        fails = cluster.start(FailsUnheard.bind(), cluster.pool([2]), name="unheard", distributed=False)
        for call in (fails.fail, fails.fail_but_on_first):
            with pytest.raises(EndpointError, match="not wanted") as caught:
                call("x" * LONG)
            assert isinstance(caught.value.__cause__, KeyError)
            assert caught.value.__cause__.args == ("not wanted" + "x" * LONG,)

    def test_errors_have_times_and_none_is_answered_for_a_process_that_ended(
        self, cluster: Cluster, backend: Backend
    ) -> None:
        need(cluster, "processes")
        raw = Started(backend, 2)
        try:
            failed = raw.ask(0, "what no process does")
            backend.wait(failed.done, LIMIT_S)
            reply = failed.result(LIMIT_S)
            assert reply.status == "error"
            assert 0 < reply.started_ns <= reply.ended_ns
            os.kill(raw.handles[0].pid, signal.SIGSTOP)
            unheard = raw.ask(0, "record", record=1)
            raw.handles[0].kill()
            assert raw.answer(1, "record", record=2) == 2
            assert not unheard.done(), "a process that was killed does not answer"
            assert raw.answer(1, "shutdown") is None
            raw.handles[1].kill()
            assert sorted(rank for rank, _ in raw.deaths) == [0, 1], "an end that was asked for is reported too"
        finally:
            raw.close()

    # -- ends --------------------------------------------------------------------------------------------------------

    def test_processes_that_end_at_once_have_causes_and_words_of_their_own(
        self, cluster: Cluster, tmp_path: Path
    ) -> None:
        """Words need not be text, and the last one need not end its line."""
        need(cluster, "processes")
        groups = [cluster.start(Worker.bind(), name=f"at-once-{at}", distributed=False).group for at in range(3)]
        calls = [group.function(end_when_told).submit(str(tmp_path), at + 10) for at, group in enumerate(groups)]
        assert wait_for(lambda: len(list(tmp_path.iterdir())) == len(groups), LIMIT_S)
        (tmp_path / "go").touch()
        for at, call in enumerate(calls):
            with pytest.raises(WorkerDied) as caught:
                call.result(LIMIT_S)
            words = [line for line in caught.value.last_words if "word of" in line]
            assert words == [f"word of {at + 10} \N{REPLACEMENT CHARACTER}", f"last word of {at + 10}"]
            assert caught.value.cause == f"exit code {at + 10}" or not cluster.capabilities.exit_status

    def test_the_end_of_what_serves_the_backend_is_the_end_of_its_processes(self, target: Target) -> None:
        """A process between the script and its workers, as a fork server is, may be killed as any other."""
        with target.connect() as cluster:
            need(cluster, "processes", "exit_status")
            sleeper = cluster.start(Sleeper.bind(), cluster.pool([2]), distributed=False)
            call, pids = sleeper.wait_for_event.submit(LIMIT_S), sleeper.group.pids
            servants = [pid for pid in children_of(os.getpid()) if {*descendants_of(pid)} >= {*pids}]
            if not servants:
                pytest.skip("there is none")
            for pid in servants:
                os.kill(pid, signal.SIGKILL)
            with pytest.raises(WorkerDied):
                call.result(LIMIT_S)
            assert not all_gone(pids, GONE_S)

    def test_a_process_that_is_stopped_or_ignores_signals_is_killed(self, cluster: Cluster) -> None:
        need(cluster, "processes")
        group = cluster.start(Worker.bind(), cluster.pool([2]), distributed=False).group
        (family, _), pids = group.run(resist), group.pids
        os.kill(pids[1], signal.SIGSTOP)
        try:
            group.restart()
            assert not all_gone([*pids, *family], GONE_S)
        finally:
            for pid in (*pids, *family):
                kill(pid)

    def test_a_worker_may_take_its_time_to_close(self, cluster: Cluster, tmp_path: Path) -> None:
        group = cluster.start(ClosesSlowly.bind(tmp_path), cluster.pool([2]), distributed=False).group
        group.close()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["closed-0", "closed-1"]

    def test_memory_of_requests_to_what_ended_is_given_back(self, cluster: Cluster) -> None:
        need(cluster, "processes", "concurrent")
        crowd = cluster.start(Crowd.bind(), name="ends-with-requests", distributed=False)

        def lose() -> None:
            os.kill(crowd.group.pids[0], signal.SIGSTOP)
            values = [torch.ones(64 * MIB // 4) for _ in range(4)]  # glibc keeps smaller ones for itself
            calls = [crowd.keep.submit(value) for value in values]
            os.kill(crowd.group.pids[0], signal.SIGKILL)
            for call in calls:
                with pytest.raises(WorkerDied):
                    call.result(LIMIT_S)
            crowd.group.restart()

        def read_bytes() -> int:
            gc.collect()
            holdings = read_holdings()
            return holdings.nbytes + cluster.capabilities.exit_status * holdings.shared_nbytes

        lose()
        before = read_bytes()
        for _ in range(2):
            lose()
        assert wait_for(lambda: read_bytes() - before < 200 * MIB, 20.0), (
            f"{(read_bytes() - before) // MIB} MiB of 512 MiB that nobody took are kept"
        )


def _count_descriptors(pid: int) -> int:
    with contextlib.suppress(OSError):  # it has ended
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 0
