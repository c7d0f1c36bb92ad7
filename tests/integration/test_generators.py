"""What generators draw, and from which weights, while others are lost, restarted or sent new weights.

The workers here draw nothing: a completion is the version of the weights that its generator has.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from podium import Cluster, Worker, concat, connect, endpoint, shard
from podium.data import Batch
from podium.errors import LostTooOften, PodiumError
from podium.rollout.sampling import SamplingParams
from podium.runtime import Handle
from podium.trainer.generators import Generators
from podium.trainer.restart_limit import LostWorkers
from podium.workers import WeightSync
from tests.integration.processes import wait_for

SAMPLING = SamplingParams(max_new_tokens=1)
LIMIT_S = 60.0


class Drawer(Worker):
    """It has version -1 until it is sent another one, as a generator has the weights of its model's file."""

    version = -1
    spoiled = False
    asked = failed = 0

    @endpoint(concurrent=True)
    def weights_version(self) -> int:
        return self.version

    @endpoint(concurrent=True)
    def take(self, version: int) -> None:
        self.version, self.spoiled = version, False

    @endpoint(concurrent=True)
    def spoil(self) -> None:
        self.spoiled = True

    @endpoint(concurrent=True)
    def counts(self) -> tuple[int, int]:
        """How many batches it was asked for, and how many it failed to draw."""
        return self.asked, self.failed

    def drawn(self, prompts: Batch) -> Batch:
        return Batch({"version": torch.full((len(prompts),), self.version)})

    async def wait(self, prompts: Batch) -> None:
        """Wait for the version that the batch asks for, unless the weights are spoiled meanwhile."""
        self.asked += 1
        while self.version < prompts.meta.get("from", -1):
            await asyncio.sleep(0.01)
            if self.spoiled:
                self.failed += 1
                raise RuntimeError("the weights came only in part")

    @endpoint(dispatch=shard(args=("prompts",)), collect=concat())
    async def generate(self, prompts: Batch, sampling: SamplingParams) -> Batch:
        await self.wait(prompts)
        return self.drawn(prompts)

    @endpoint(dispatch=shard(args=("prompts",)), collect=concat(), concurrent=True)
    async def generate_beside(self, prompts: Batch, sampling: SamplingParams) -> Batch:
        await self.wait(prompts)
        return self.drawn(prompts)


class Sending(WeightSync):
    """It sends the number of the version. ``before`` is called first, with the generators."""

    def __init__(self, generators: Sequence[Handle[Any]], before: Callable[[Sequence[Handle[Any]]], None]) -> None:
        super().__init__(generators)
        self.before = before

    def init(self) -> None:
        pass

    def sync(self, version: int, generators: Sequence[Handle[Any]] | None = None) -> None:
        chosen: list[Any] = [*(self._generators if generators is None else generators)]
        self.before(chosen)
        for one in chosen:
            one.take(version)

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with connect("local", preload=["torch"]) as cluster:
        yield cluster


@pytest.fixture
def handles(cluster: Cluster) -> Iterator[list[Any]]:
    found = [cluster.start(Drawer.bind(), name=f"generator-{number}", distributed=False) for number in range(2)]
    yield found
    for one in found:
        one.group.close()


def prompts(count: int, version: int = -1) -> Batch:
    """A batch that is drawn once its generator has ``version``."""
    return Batch({"group": torch.arange(count)}, {"from": version})


def kill(handle: Handle[Any]) -> None:
    os.kill(handle.group.pids[0], signal.SIGKILL)


def wait_until_asked(handles: Sequence[Any], count: int) -> None:
    """Wait until the generators were asked for so many batches together."""
    assert wait_for(lambda: sum(one.counts()[0][0] for one in handles) >= count, LIMIT_S)


def in_thread(do: Callable[[], Any]) -> Callable[[], Any]:
    """Run ``do`` in a thread. The function that is returned waits for its result."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(do()))
    thread.start()

    def result() -> Any:
        thread.join(LIMIT_S)
        assert found, f"it has no result after {LIMIT_S:g} s"
        return found[0]

    return result


def test_nobody_asks_a_generator_that_has_no_weights_yet_after_its_restart(handles: list[Any]) -> None:
    restarted, go_on = threading.Event(), threading.Event()

    def before(to: Sequence[Handle[Any]]) -> None:
        if len(to) == 1:  # the one that was restarted
            restarted.set()
            assert go_on.wait(LIMIT_S)

    with Generators(handles, Sending(handles, before), LostWorkers(3), apart=True) as generators:
        generators.sync_weights(5)
        kill(handles[0])
        first = in_thread(lambda: generators.generate(prompts(4), SAMPLING))
        assert restarted.wait(LIMIT_S)
        second = in_thread(lambda: generators.generate(prompts(4), SAMPLING))
        # The other generator has its share of both batches, so whoever would ask this one has done so.
        wait_until_asked(handles[1:], 2)
        drawn = [part.result(LIMIT_S) for part in generators.draw(1, [prompts(1) for _ in range(4)], SAMPLING)]
        go_on.set()
        for batch in (first(), second(), *drawn):
            assert set(batch.dense("version").tolist()) == {5}


@pytest.mark.parametrize("whole", [True, False])
def test_what_a_sync_interrupts_that_lost_another_generator_is_drawn_again(handles: list[Any], whole: bool) -> None:
    seen: list[int] = []
    asked: list[int] = []  # the number of calls to the first generator

    def before(to: Sequence[Handle[Any]]) -> None:
        if len(seen) == 0:
            seen.append(len(to))
            handles[0].spoil()  # as the end of a sync that failed does
            kill(handles[1])
            # Before the sync fails. Parts of the lost generator may have been given to this one, and failed, too.
            assert wait_for(lambda: handles[0].counts()[0][1] >= asked[0], LIMIT_S)
            with contextlib.suppress(PodiumError):  # it is known to be lost, or already back without its weights
                assert handles[1].weights_version() == [-1]
            raise PodiumError("on purpose")

    def draw() -> list[Batch]:
        if whole:
            return [generators.generate(prompts(4, version=7), SAMPLING)]
        return [part.result(LIMIT_S) for part in generators.draw(1, [prompts(1, version=7)] * 4, SAMPLING)]

    with Generators(handles, Sending(handles, before), LostWorkers(3), apart=True, capacity=4) as generators:
        drawn = in_thread(draw)
        wait_until_asked(handles, 2 if whole else 4)
        asked.append(handles[0].counts()[0][0])
        generators.sync_weights(7)
        assert {version for batch in drawn() for version in batch.dense("version").tolist()} == {7}


@pytest.mark.parametrize("whole", [True, False])
def test_an_error_of_a_generator_during_a_sync_that_succeeds_is_raised(handles: list[Any], whole: bool) -> None:
    def before(to: Sequence[Handle[Any]]) -> None:
        handles[0].spoil()  # as an error of its own, while the weights come
        assert wait_for(lambda: handles[0].counts()[0][1] > 0, LIMIT_S)

    def draw() -> Exception | None:
        try:
            if whole:
                generators.generate(prompts(4, version=7), SAMPLING)
            else:
                for part in generators.draw(1, [prompts(1, version=7)] * 4, SAMPLING):
                    part.result(LIMIT_S)
        except PodiumError as error:
            return error
        return None

    with Generators(handles, Sending(handles, before), LostWorkers(3), apart=True, capacity=4) as generators:
        drawn = in_thread(draw)
        wait_until_asked(handles, 2 if whole else 4)
        generators.sync_weights(7)
        assert "the weights came only in part" in str(drawn())


@pytest.mark.parametrize("most", [3, 1])
def test_a_generator_that_is_lost_before_it_has_its_weights_is_restarted_again(handles: list[Any], most: int) -> None:
    times: list[int] = []

    def before(to: Sequence[Handle[Any]]) -> None:
        if len(to) == 1 and not times:
            times.append(1)
            kill(to[0])

    with Generators(handles, Sending(handles, before), LostWorkers(most), apart=True) as generators:
        generators.sync_weights(2)
        kill(handles[0])
        if most == 1:
            with pytest.raises(LostTooOften, match="lost workers 2 times"):
                generators.generate(prompts(4), SAMPLING)
        else:
            assert generators.generate(prompts(4), SAMPLING).dense("version").tolist() == [2] * 4


def test_a_worker_without_the_endpoint_for_parts_draws_whole_batches(cluster: Cluster) -> None:
    class Plain(Worker):
        @endpoint(dispatch=shard(args=("prompts",)), collect=concat())
        def generate(self, prompts: Batch, sampling: SamplingParams) -> Batch:
            return prompts

    handle: Any = cluster.start(Plain.bind(), name="generator", distributed=False)
    with Generators([handle], Sending([], lambda to: None), LostWorkers(3), apart=True) as generators:
        assert len(generators.generate(prompts(3), SAMPLING)) == 3
    handle.group.close()
