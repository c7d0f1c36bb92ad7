"""Chains of calls by reference: stages overlap, and what is under way is bounded."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from podium import Batch, Call, Cluster, Handle, TensorRef, Worker, concat, endpoint, first, shard, telemetry
from podium.errors import ConfigError, EndpointError
from tests.integration.processes import wait_for

BATCHES = 100
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


def overlap(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> int:
    """Nanoseconds during which both ran."""
    return sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in one for b in other)


def test_a_chain_of_three_groups_overlaps_and_the_controller_holds_no_bytes(stages: list[Handle[Stage]]) -> None:
    spans: dict[str, list[tuple[int, int]]] = {f"stage-{at}": [] for at in range(3)}

    def note(event: telemetry.Event) -> None:
        if isinstance(event, telemetry.CallFinished) and event.method == "work":
            spans[event.role].append((event.started_ns, event.ended_ns))

    one, two, three = stages
    last = three.work.at_most(8)
    unsubscribe = telemetry.subscribe(note)
    try:
        calls: list[Call[Batch]] = []
        for number in range(BATCHES):
            batch = Batch({"x": torch.full((4, 20_000), float(number))})
            calls.append(last.submit(two.work.submit(one.work.submit(batch).arg()).arg()))
        results = [call.result() for call in calls]
        assert wait_for(lambda: all(len(span) == BATCHES for span in spans.values()), 20.0), "told just after the reply"
    finally:
        unsubscribe()
    assert all(type(result["x"]) is TensorRef for result in results)
    assert [float(result.fetch().dense("x")[0, 0]) for result in results] == [number + 3.0 for number in range(BATCHES)]
    busy = sum(end - start for start, end in spans["stage-1"])
    for other in ("stage-0", "stage-2"):
        assert overlap(spans["stage-1"], spans[other]) > busy / 4, "the stages took turns"


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
