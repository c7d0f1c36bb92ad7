"""Where a run's ranks go."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import podium
from podium.errors import CheckpointError, PlacementError
from podium.runtime import Node, endpoint, nothing
from podium.telemetry import WorkerStarted, subscribe
from podium.trainer import GRPOConfig, PPOTrainer
from podium.trainer.roles import spread
from podium.workers import Policy
from tests.integration.training import tiny

GPU = {"gpu": 1.0, "cpu": 0.0}
NODES = [Node("a", {"gpu": 8, "cpu": 4}), Node("b", {"gpu": 8, "cpu": 4}), Node("c", {"gpu": 3, "cpu": 4})]


@pytest.mark.parametrize(
    ("slots", "counts"),
    [(1, [1]), (8, [8]), (9, [5, 4]), (16, [8, 8]), (17, [7, 7, 3]), (19, [8, 8, 3]), (20, [20])],
)
def test_ranks_go_to_as_few_nodes_as_hold_them_and_evenly(slots: int, counts: list[int]) -> None:
    assert spread(slots, GPU, NODES) == counts


def test_slots_that_hold_nothing_share_a_node() -> None:
    assert spread(50, {"gpu": 0, "cpu": 0}, NODES) == [50]
    assert spread(6, {"gpu": 0, "cpu": 2}, NODES) == [2, 2, 2]


def test_what_others_hold_is_left_alone_unless_nothing_else_would_do() -> None:
    half = [Node("a", {"gpu": 8}, {"else": {"gpu": 6}}), Node("b", {"gpu": 8}, {"else": {"gpu": 2}})]
    assert spread(8, GPU, half) == [6, 2]
    full = [Node("a", {"gpu": 8}, {"else": {"gpu": 6}}), Node("b", {"gpu": 8}, {"else": {"gpu": 7}})]
    assert spread(8, GPU, full) == [8]  # which is refused with their names, or waited for


def test_a_run_is_spread_over_nodes(tmp_path: Path) -> None:
    """Policy and generator take all cores of a node each, in a debugger's pretended cluster."""
    events: list[object] = []
    with podium.connect("inline", nodes=2) as cluster:
        cores = int(cluster.nodes[0].resources["cpu"])
        config = tiny(GRPOConfig, tmp_path, placement={"layout": "split", "cpus": cores}, run={"steps": 1})
        unsubscribe = subscribe(events.append)
        try:
            PPOTrainer(config, cluster=cluster, show=False).fit()
        finally:
            unsubscribe()
        assert len(cluster.pool([1, 1], cpus=cores)) == 2  # all of it was given back
    started = {event.role: event.node for event in events if isinstance(event, WorkerStarted)}
    assert started.keys() == {"policy+estimator", "generator"}
    assert set(started.values()) == {"node-0", "node-1"}


def test_a_run_waits_for_cores_that_others_hold(tmp_path: Path) -> None:
    with podium.connect("inline") as cluster:
        cores = int(cluster.nodes[0].resources["cpu"])
        held = cluster.pool([1], cpus=cores)
        placement = {"cpus": cores, "wait_s": 0.0}
        with pytest.raises(PlacementError, match=f"asked for {cores} cpu on 1 node; 0 cpu free"):
            PPOTrainer(tiny(GRPOConfig, tmp_path, placement=placement), cluster=cluster, show=False).fit()
        given_back = threading.Timer(0.5, cluster.release, [held])
        given_back.start()
        config = tiny(GRPOConfig, tmp_path, placement={**placement, "wait_s": 60}, run={"steps": 1})
        assert PPOTrainer(config, cluster=cluster, show=False).fit().steps == 1
        given_back.join()


class Elsewhere(Policy):
    """Writes as a worker on another machine does, whose disk is not the controller's."""

    @endpoint(collect=nothing())
    def save(self, path: str) -> None:
        super().save(path.replace("checkpoints", "elsewhere"))


def test_a_checkpoint_on_a_disk_that_is_not_shared_is_no_checkpoint(tmp_path: Path) -> None:
    config = tiny(GRPOConfig, tmp_path, run={"steps": 1}, eval={"items": 0})
    with pytest.raises(CheckpointError, match=r"policy was written on another machine.* set run\.dir to one"):
        PPOTrainer(config, cluster="inline", workers={"policy": Elsewhere}, show=False).fit()
    assert not list((tmp_path / "runs" / "run" / "checkpoints").glob("step-*"))
