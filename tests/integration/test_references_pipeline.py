"""Chains of calls by reference: stages overlap, and what is under way is bounded."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from podium import Batch, Call, Cluster, Handle, TensorRef, Worker, concat, endpoint, first, shard
from podium.errors import ConfigError, EndpointError
from tests.waits import wait_until

BATCHES = 20
WORK_S = 0.02


class Stage(Worker):
    """Takes some time for a batch, without a core, and hands it on."""

    @endpoint(dispatch=shard(), collect=concat(), returns="ref")
    def work(self, batch: Batch) -> Batch:
        time.sleep(WORK_S)
        return batch.with_columns(x=batch.dense("x") + 1)

    @endpoint(collect=first())
    def refuse(self, batch: Batch) -> None:
        raise ValueError("not this one")


@pytest.fixture(scope="module")
def stages(local: Cluster) -> Iterator[list[Handle[Stage]]]:
    stages = [local.start(Stage.bind(), name=f"stage-{at}", distributed=False) for at in range(3)]
    yield stages
    for stage in stages:
        stage.group.close()


class Meeting(Stage):
    """A stage that ends its work on a batch only when the stage before it has begun the next batch."""

    def __init__(self, folder: str, at: int) -> None:
        self.folder, self.at = Path(folder), at

    @endpoint(dispatch=shard(), collect=concat(), returns="ref")
    def work(self, batch: Batch) -> Batch:
        number = int(batch.dense("x")[0, 0]) - self.at
        (self.folder / f"{self.at}-{number}").touch()
        following = self.folder / f"{self.at - 1}-{number + 1}"
        assert self.at == 0 or number == BATCHES - 1 or wait_until(following.exists), "the stages take turns"
        return batch.with_columns(x=batch.dense("x") + 1)


def test_a_chain_of_three_groups_overlaps_and_the_controller_holds_no_bytes(local: Cluster, tmp_path: Path) -> None:
    stages = [local.start(Meeting.bind(str(tmp_path), at), name=f"at-{at}", distributed=False) for at in range(3)]
    one, two, three = stages
    last = three.work.at_most(8)
    calls: list[Call[Batch]] = []
    for number in range(BATCHES):
        batch = Batch({"x": torch.full((4, 20_000), float(number))})
        calls.append(last.submit(two.work.submit(one.work.submit(batch).arg()).arg()))
    results = [call.result() for call in calls]
    assert all(type(result["x"]) is TensorRef for result in results)
    assert [float(result.fetch().dense("x")[0, 0]) for result in results] == [number + 3.0 for number in range(BATCHES)]
    for stage in stages:
        stage.group.close()


def test_at_most_so_many_calls_are_under_way(stages: list[Handle[Stage]]) -> None:
    one, two, _ = stages
    seen, most = threading.Lock(), [0, 0]
    work = two.work.at_most(3)

    def ended() -> None:
        with seen:
            most[0] -= 1

    calls: list[Call[Batch]] = []
    for _ in range(30):
        call = work.submit(one.work.submit(Batch({"x": torch.zeros(2, 10)})).arg())
        with seen:
            most[0] += 1
            most[1] = max(most)
        call.when_done(ended)
        calls.append(call)
    assert 2 <= most[1] <= 4  # the last one is counted a moment before the oldest is taken off
    calls[-1].result()


def test_a_stage_that_fails_fails_what_hangs_on_it_and_no_more(stages: list[Handle[Stage]]) -> None:
    one, two, _ = stages
    batch = Batch({"x": torch.zeros(2, 10)})
    work = two.work.at_most(2)
    failed = work.submit(one.refuse.submit(batch).arg())  # pyright: ignore[reportArgumentType]
    good = [work.submit(one.work.submit(batch).arg()) for _ in range(5)]
    with pytest.raises(EndpointError, match="not this one"):
        failed.result()
    assert all(float(call.result().fetch().dense("x").sum()) == 40.0 for call in good)
    with pytest.raises(ConfigError, match="at_most"):
        work.at_most(0)
