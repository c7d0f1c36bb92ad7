"""Contract: start, close, restart, and what a failed constructor leaves behind. Processes where there are any."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from podium.errors import CallCancelled, ConfigError, EndpointError, SerializationError, WorkerDied, WorkerStartError
from podium.runtime import Cluster, Worker, colocate, endpoint
from podium.runtime.calls import process_calls
from podium.runtime.calls.siblings import find_waiting_siblings
from podium_testing.shipped import exit_on
from podium_testing.target import Target, need, refuses
from podium_testing.values import LARGE
from podium_testing.workers import Counter, Holder, Keeper, Probe, RaisesOn

__all__ = ["LifetimeContract"]


class LifetimeContract:
    def test_a_constructor_that_raises_names_its_rank_and_leaves_nothing(self, cluster: Cluster) -> None:
        pool = cluster.pool([3])
        for _ in range(2):
            with pytest.raises(WorkerStartError, match=r"bad_start.*ValueError.*rank 1") as caught:
                cluster.start(RaisesOn.bind(1), pool, name="bad_start", distributed=False)
            assert caught.value.rank == 1
            assert isinstance(caught.value.__cause__, ValueError)
            assert "RaisesOn" in caught.value.remote_traceback or "rank 1" in caught.value.remote_traceback
        cluster.release(pool)

    def test_an_unpicklable_constructor_argument_is_named(self, cluster: Cluster) -> None:
        with pytest.raises(SerializationError, match=r"Counter\.__init__.*does not pickle(.|\n)*lock"):
            cluster.start(Counter.bind(threading.Lock()))  # pyright: ignore[reportArgumentType] - the point

    def test_closing_a_group_calls_its_workers_close_and_refuses_calls(self, cluster: Cluster, tmp_path: Path) -> None:
        keeper = cluster.start(Keeper.bind(closed_into=tmp_path), cluster.pool([2]), distributed=False)
        keeper.group.close()
        keeper.group.close()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["closed-0", "closed-1"]
        refuses(CallCancelled, "is closed", keeper.neighbors)
        with pytest.raises(ConfigError):
            keeper.group.restart()

    def test_close_ends_everything_and_is_idempotent(self, target: Target, tmp_path: Path) -> None:
        cluster = target.connect()
        keeper = cluster.start(Keeper.bind(closed_into=tmp_path), cluster.pool([2]), distributed=False)
        cluster.close()
        cluster.close()
        assert len(list(tmp_path.iterdir())) == 2
        with pytest.raises(CallCancelled):
            keeper.neighbors()
        refuses(ConfigError, "closed", cluster.pool, [1])

    def test_a_with_block_closes_after_an_error_too(self, target: Target, tmp_path: Path) -> None:
        with pytest.raises(KeyError, match="mine"), target.connect() as cluster:
            cluster.start(Keeper.bind(closed_into=tmp_path), distributed=False)
            raise KeyError("mine")
        assert len(list(tmp_path.iterdir())) == 1

    def test_two_clusters_at_once(self, target: Target, cluster: Cluster) -> None:
        with target.connect() as other:
            counters = [where.start(Counter.bind(at), distributed=False) for at, where in enumerate((cluster, other))]
            assert [counter.add(0) for counter in counters] == [[0], [1]]

    def test_what_cannot_be_killed_says_so(self, cluster: Cluster) -> None:
        if cluster.capabilities.processes:
            pytest.skip("its workers have processes of their own")
        counter = cluster.start(Counter.bind(), distributed=False)
        refuses(ConfigError, "'local'", counter.group.restart)
        assert counter.add(1) == [1], "and the group goes on"
        refuses(ConfigError, "'local'", cluster.start, Counter.bind(), env={"X": "1"})

    def test_restart_makes_all_colocated_workers_anew(self, cluster: Cluster) -> None:
        need(cluster, "processes")
        both = cluster.start(colocate(bank=Counter.bind(10), keeper=Keeper.bind()), cluster.pool([2]))
        both.bank.add(5)
        before = both.bank.group.pids
        both.keeper.group.restart()
        assert not set(before) & set(both.bank.group.pids)
        assert both.bank.add(0) == [10, 10], "no call is repeated"
        assert both.keeper.add_to_neighbor("bank", 1) == [11, 11]

    @pytest.mark.parametrize("size", [4, LARGE])
    def test_restart_makes_workers_of_the_arguments_of_the_first_start(self, cluster: Cluster, size: int) -> None:
        """Whatever the script, or the only worker that reads them, has changed in them since."""
        need(cluster, "processes")
        names, weights, weight = ["a"], torch.zeros(size), torch.zeros(size)
        probe = cluster.start(Probe.bind(), distributed=False)
        for pool, into in ((cluster.pool([1]), None), (None, probe)):
            holder = cluster.start(Holder.bind(names, {"w": weights}, weight), pool, into=into, distributed=False)
            for _ in range(2):
                assert holder.change() == [(["a", "changed"], float(size), float(size))]
                names.append("by the script")
                weights += 5
                weight += 5
                holder.group.restart()
            assert holder.change() == [(["a", "changed"], float(size), float(size))]
            holder.group.close()
            names[1:] = []
            weights.zero_()
            weight.zero_()

    def test_a_death_is_named_now_and_later_until_restart(self, cluster: Cluster) -> None:
        need(cluster, "processes")
        counter = cluster.start(Counter.bind(), cluster.pool([2]), name="mortal", distributed=False)
        with pytest.raises(WorkerDied, match=r"rank 1 of mortal on .* ended while this call waited for it") as caught:
            counter.group.run(exit_on, 1)
        assert (caught.value.rank, caught.value.role) == (1, "mortal")
        assert caught.value.last_words == ("these are my last words",)
        if cluster.capabilities.exit_status:
            assert caught.value.cause == "exit code 7"
        with pytest.raises(WorkerDied, match=r"mortal\.add: rank 1.*restart") as later:
            counter.add(1)
        assert later.value.cause == caught.value.cause
        counter.group.restart()
        assert counter.add(1) == [1, 1]

    def test_workers_get_their_environment(self, cluster: Cluster) -> None:
        need(cluster, "processes")
        env = {"PODIUM_CONTRACT": "yes", "OMP_NUM_THREADS": "3"}
        group = cluster.start(Counter.bind(), env=env, distributed=False).group
        assert group.run(lambda worker: {name: os.environ.get(name) for name in env}) == [env]

    def test_collectives_work_in_constructors_and_endpoints(self, cluster: Cluster) -> None:
        need(cluster, "collectives")
        gatherer = cluster.start(Gatherer.bind(), cluster.pool([3]), distributed=True)
        assert gatherer.at_start() == [[0.0, 1.0, 2.0]] * 3
        for value in (1.0, 2.0):
            assert gatherer.gather_all(value) == [[value, value + 1, value + 2]] * 3

    def test_collectives_of_one_rank_work_everywhere(self, cluster: Cluster) -> None:
        gatherer = cluster.start(Gatherer.bind(), distributed=True)
        assert gatherer.gather_all(4.0) == [[4.0]]

    def test_without_collectives_the_error_names_where_there_are_some(self, cluster: Cluster) -> None:
        if cluster.capabilities.collectives:
            pytest.skip("it has collectives")
        refuses(ConfigError, "'local'", cluster.start, Counter.bind(), cluster.pool([2]), distributed=True)
        refuses(WorkerStartError, r"use podium\.connect\('local'\)", cluster.start, Gatherer.bind(), cluster.pool([2]))

    def test_colocated_workers_share_the_process_group_and_make_subgroups(self, cluster: Cluster) -> None:
        need(cluster, "collectives")
        both = cluster.start(colocate(one=Gatherer.bind(), two=Gatherer.bind(subgroup=True)), cluster.pool([2]))
        assert both.one.gather_all(0.0) == [[0.0, 1.0]] * 2
        assert both.two.gather_all(5.0) == [[5.0, 6.0]] * 2
        both.one.group.restart()
        assert both.two.gather_all(5.0) == [[5.0, 6.0]] * 2

    def test_a_rank_that_fails_frees_its_siblings_from_a_collective(self, cluster: Cluster) -> None:
        need(cluster, "collectives", "processes")
        gatherer = cluster.start(Gatherer.bind(), cluster.pool([3]))
        with pytest.raises(EndpointError, match="ValueError: I am the cause") as caught:
            gatherer.gather_unless(rank=1)
        assert caught.value.rank == 1
        gatherer.group.restart()
        assert gatherer.gather_all(1.0) == [[1.0, 2.0, 3.0]] * 3

    def test_what_a_failure_broke_does_not_reach_the_workers_of_a_restart(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        need(cluster, "collectives", "processes")
        freed, restarted = threading.Event(), threading.Event()

        def find_late(*args: Any) -> list[int]:
            ranks = find_waiting_siblings(*args)
            restarted.wait()  # siblings are freed while the new workers are at work
            freed.set()
            return ranks

        monkeypatch.setattr(process_calls, "find_waiting_siblings", find_late)
        gatherer = cluster.start(Gatherer.bind(), cluster.pool([2]))
        with pytest.raises(EndpointError, match="ValueError: I am the cause"):
            gatherer.gather_unless(rank=1)
        gatherer.group.restart()
        restarted.set()
        while not freed.is_set():
            assert gatherer.gather_all(1.0) == [[1.0, 2.0]] * 2
        for _ in range(20):
            assert gatherer.gather_all(1.0) == [[1.0, 2.0]] * 2


class Gatherer(Worker):
    """Collectives in the constructor and in endpoints."""

    def __init__(self, subgroup: bool = False) -> None:
        self.ranks = dist.new_group() if subgroup else None
        self.first = self._gather(float(self.ctx.rank))

    def _gather(self, value: float) -> list[float]:
        out = [torch.zeros(1) for _ in range(self.ctx.world_size)]
        dist.all_gather(out, torch.tensor([value]), group=self.ranks)
        return [float(entry) for entry in out]

    @endpoint
    def at_start(self) -> list[float]:
        return self.first

    @endpoint
    def gather_all(self, value: float) -> list[float]:
        return self._gather(value + self.ctx.rank)

    @endpoint
    def gather_unless(self, rank: int) -> list[float]:
        if self.ctx.rank == rank:
            raise ValueError("I am the cause")
        return self._gather(0.0)
