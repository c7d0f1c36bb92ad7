"""Contract: what only many, large or long calls show: mixed replies, lost order, second deliveries, kept memory."""

import gc
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from podium.errors import WorkerDied
from podium.runtime import Cluster, Handle, per_rank
from podium_testing.load_workers import Crowd, read_holdings
from podium_testing.target import LIMIT_S, need, started, wait_for
from podium_testing.workers import Sleeper, Stash

__all__ = ["MOST_BYTES", "LoadContract", "available_bytes"]

MIB = 1 << 20
AT_ONCE = 16  # calls of concurrent endpoints, fewer than a worker process runs at a time
HUGE = (1 << 31) + 64  # bytes: more than one call of the kernel, and many protocols, take
MOST_BYTES = 6 * HUGE  # that copies of such a value take on its way


def numbered(nbytes: int, number: int) -> Tensor:
    """Return uint8 ``[nbytes]`` that begins, ends and goes on in its own way."""
    value = torch.zeros(nbytes, dtype=torch.uint8)
    value[:: max(1, nbytes // 64)] = number % 251 + 1
    value[-1] = number % 241 + 7
    return value


class LoadContract:
    crowd = started(Crowd.bind(), 2, name="crowd", distributed=False)

    @pytest.fixture
    @classmethod
    def stopped(cls, cluster: Cluster) -> Iterator[Handle[Crowd]]:
        """A group whose processes a signal has stopped. They go on after the test."""
        need(cluster, "processes", "concurrent")
        crowd = cluster.start(Crowd.bind(), cluster.pool([3]), name="stopped", distributed=False)
        for pid in crowd.group.pids:
            os.kill(pid, signal.SIGSTOP)
        yield crowd
        for pid in crowd.group.pids:
            os.kill(pid, signal.SIGCONT)

    def test_calls_at_once_run_once_and_have_replies_of_their_own(self, crowd: Handle[Crowd]) -> None:
        """A thousand replies for each kind of endpoint: a fault of one in fifty is met twenty times."""
        for answer in (crowd.answer, crowd.answer_async):
            for begin in range(0, 512, AT_ONCE):
                load = torch.full((20_000 if begin % 64 == 0 else 4,), begin)
                calls = [(token, answer.submit(token, load)) for token in range(begin, begin + AT_ONCE)]
                for token, call in calls:
                    for rank_token, rank_load in call.result(LIMIT_S):
                        assert rank_token == token
                        assert torch.equal(rank_load, load)
            assert crowd.counts() == [dict.fromkeys(range(512), 1)] * 2, "each call runs once on each rank"

    def test_calls_of_one_concurrent_endpoint_overlap(self, cluster: Cluster, crowd: Handle[Crowd]) -> None:
        need(cluster, "concurrent")
        for _ in range(2):
            calls = [crowd.meet.submit("once", AT_ONCE) for _ in range(AT_ONCE)]
            assert [call.result() for call in calls] == [[True, True]] * AT_ONCE
        calls = [crowd.meet_async.submit(AT_ONCE) for _ in range(AT_ONCE)]
        assert [call.result() for call in calls] == [[True, True]] * AT_ONCE

    def test_large_and_small_calls_keep_their_order_and_run_once(self, crowd: Handle[Crowd]) -> None:
        large = torch.zeros(MIB // 2)
        calls: list[Any] = []
        for token in range(600):
            if token % 7 == 5:  # each rank has an argument of its own
                calls.append(crowd.note_own.submit(per_rank([token, token])))  # pyright: ignore[reportArgumentType]
                continue
            note: Any = crowd.note_first if token % 7 == 3 else crowd.note
            calls.append(note.submit(token, large if token % 20 == 5 else None))
        assert [call.result(LIMIT_S) for call in calls] == [at if at % 7 == 3 else [at] * 2 for at in range(600)]
        assert crowd.notes() == [list(range(600))] * 2

    def test_a_call_that_takes_long_runs_once(self, cluster: Cluster) -> None:
        need(cluster, "concurrent")
        sleeper = cluster.start(Sleeper.bind(), distributed=False)
        call = sleeper.wait_for_event.submit(LIMIT_S, "long")
        time.sleep(2.5)
        sleeper.set_event()
        assert call.result() == [True]
        assert sleeper.history() == [["long"]]

    def test_a_restart_repeats_no_call(self, cluster: Cluster) -> None:
        need(cluster, "processes")
        sleeper = cluster.start(Sleeper.bind(), name="restarted", distributed=False)
        calls: list[Any] = [sleeper.wait_for_event.submit(LIMIT_S, "running")]
        calls += [sleeper.note.submit(f"queued {at}") for at in range(5)]
        assert wait_for(lambda: all(sleeper.count_entered()), LIMIT_S)
        os.kill(sleeper.group.pids[0], signal.SIGKILL)
        for call in calls:
            with pytest.raises(WorkerDied):
                call.result(LIMIT_S)
        sleeper.group.restart()
        for _ in range(3):
            assert sleeper.double(1) == [2]
        assert (sleeper.history(), sleeper.count_entered()) == ([[]], [0])

    @pytest.mark.parametrize("mib", [5, 20, 260])
    def test_large_messages_arrive_whole_and_can_be_written(self, crowd: Handle[Crowd], mib: int) -> None:
        for number in range(2 if mib < 100 else 1):
            sent = numbered(mib * MIB, number)
            (_, (got, array)), *_ = crowd.group.on(number).answer(mib, (sent, sent.numpy()))
            assert torch.equal(got, sent)
            assert torch.equal(torch.from_numpy(array), sent)
            assert array.flags.writeable
            got += 1
            assert torch.equal(crowd.group.run_on(number, _add_one, sent), got), "a worker may write to it too"
        crowd.counts()

    def test_a_message_of_more_than_2_gib_arrives_whole(self, crowd: Handle[Crowd]) -> None:
        if available_bytes() < MOST_BYTES:
            pytest.skip("this machine has less than 12 GiB to spare")
        sent = numbered(HUGE, 5)
        assert crowd.group.run_on(0, _read_ends, sent) == _read_ends(None, sent)
        got: Tensor = crowd.group.run_on(1, _make_numbered, HUGE)
        assert _read_ends(None, got) == _read_ends(None, sent)

    def test_messages_of_many_parts_arrive_whole(self, crowd: Handle[Crowd]) -> None:
        small = [torch.full((200,), at) for at in range(3000)]
        large = [numbered(MIB // 4, at) for at in range(300)]
        for sent in (small, large):
            (_, got), (_, other) = crowd.answer(0, sent)
            assert len(got) == len(other) == len(sent)
            assert all(torch.equal(*both) for both in zip(sent + sent, got + other, strict=True))
        crowd.counts()

    @pytest.mark.parametrize("size", [100, 300_000])
    def test_what_a_worker_or_the_caller_keeps_stays_as_it_was(self, crowd: Handle[Crowd], size: int) -> None:
        kept: list[Tensor] = []
        for at in range(40):
            crowd.keep(torch.full((size,), at, dtype=torch.int16))
            kept += [got for _, got in crowd.answer(at, torch.full((size,), -at, dtype=torch.int16))]
        for values in crowd.take_values():
            assert [(int(value[0]), int(value[-1])) for value in values] == [(at, at) for at in range(40)]
        assert [(int(value[0]), int(value[-1])) for value in kept] == [(-at, -at) for at in range(40) for _ in range(2)]
        crowd.counts()

    def test_a_stopped_process_holds_up_nobody(self, crowd: Handle[Crowd], stopped: Handle[Crowd]) -> None:
        """Submitting does not wait, whatever the connection has taken, and what the caller changes then is not seen."""
        values = [torch.full((MIB if at % 10 == 3 else MIB // 8,), at) for at in range(60)]  # of 8 and of 1 MiB
        calls = [stopped.keep.submit(value) for value in values]
        for value in values:
            value.fill_(-1)
        assert crowd.note_first(7) == 7, "another group answers meanwhile"
        assert crowd.notes() == [[7]] * 2
        assert not any(call.done() for call in calls)
        for pid in stopped.group.pids:
            os.kill(pid, signal.SIGCONT)
        for call in calls:
            call.result(LIMIT_S)
        for values in stopped.take_values():
            assert [(int(value[0]), int(value[-1])) for value in values] == [(at, at) for at in range(60)]

    def test_an_argument_for_many_processes_is_stored_once(self, stopped: Handle[Crowd]) -> None:
        value = torch.ones(64 * MIB // 4)
        before = sum(read_holdings()[3:])
        call = stopped.keep.submit(value)
        time.sleep(0.1)  # what is copied later is seen by the other test of memory
        assert sum(read_holdings()[3:]) - before < 2.5 * 64 * MIB, "more than two copies for three processes"
        for pid in stopped.group.pids:
            os.kill(pid, signal.SIGCONT)
        call.result(LIMIT_S)

    def test_memory_of_values_is_given_back(self, cluster: Cluster, crowd: Handle[Crowd]) -> None:
        value = torch.ones(2 * MIB)

        def exchange(times: int) -> list[int]:
            for token in range(times):
                crowd.answer(token, value)
                crowd.note(token, value)
            crowd.counts()
            crowd.notes()
            gc.collect()
            shares = cluster.capabilities.exit_status  # else the shared memory is the other runtime's store
            return [
                holdings.nbytes + shares * holdings.shared_nbytes
                for holdings in (read_holdings(), *crowd.group.run(read_holdings))
            ]

        before = exchange(15)
        growth = [after - first for first, after in zip(before, exchange(60), strict=True)]
        assert max(growth) < 320 * MIB, f"{max(growth) // MIB} MiB of 480 to 960 MiB that were exchanged are kept"

    def test_restarts_leave_nothing_behind(self, cluster: Cluster) -> None:
        need(cluster, "processes")
        crowd = cluster.start(Crowd.bind(), cluster.pool([2]), name="again", distributed=False)

        def live() -> None:
            assert crowd.note(1) == [1, 1]
            crowd.group.restart()
            other = cluster.start(Crowd.bind(), name="for-a-while", distributed=False)
            other.note(2)
            other.group.close()

        live()
        here, there = read_holdings(), crowd.group.run(read_holdings)
        for _ in range(6):
            live()
        assert wait_for(lambda: all(n <= o + 3 for n, o in zip(read_holdings()[:3], here[:3], strict=True)), 20.0), (
            f"{here[:3]} descriptors, threads and children became {read_holdings()[:3]} by six restarts"
        )
        for before, after in zip(there, crowd.group.run(read_holdings), strict=True):
            assert after.descriptors <= before.descriptors + 3
        others = [cluster.start(Crowd.bind(), distributed=False).group.run(read_holdings)[0] for _ in range(4)]
        assert others[-1].descriptors <= others[0].descriptors + 3, (
            "a worker process has none of the others' descriptors"
        )

    def test_references_stay_while_somebody_has_them(self, stash: Handle[Stash]) -> None:
        """Five hundred references, each held by a worker alone, by the caller alone, or in flight."""
        for _ in range(10):
            held: list[Any] = []
            for _ in range(25):
                of_workers, of_caller = stash.make(5000, 1)[1], stash.make(5000, 1)[1]
                stash.hold(of_workers)
                held.append(of_caller)
                assert stash.total.submit(of_workers).result(LIMIT_S) == [5000.0] * 2
                del of_workers, of_caller
            assert [float(ref.get().sum()) for ref in held] == [5000.0] * 25
            held.clear()
            gc.collect()
            stash.make(5000, 1)
            assert stash.held_total() == 25 * 5000.0
            stash.drop()


def _add_one(worker: Crowd, value: Tensor) -> Tensor:
    value += 1
    return value


def _read_ends(worker: Crowd | None, value: Tensor) -> tuple[int, int, int, int]:
    return value.numel(), int(value[0]), int(value[-1]), int(value.count_nonzero())


def _make_numbered(worker: Crowd, nbytes: int) -> Tensor:
    return numbered(nbytes, 5)


def available_bytes() -> int:
    """Return the bytes of memory that this machine has to spare."""
    with open("/proc/meminfo") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
