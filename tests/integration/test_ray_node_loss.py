"""A whole run that loses nodes of its Ray cluster goes on where there is room, and says so where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from podium.errors import PlacementError
from podium.runs.ledger import read_ledger
from podium.telemetry import Event, Recovered, StepFinished, subscribe
from podium.trainer import GRPOConfig, PPOTrainer
from tests.integration.training import losses, tiny
from tests.waits import wait_until

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster as RayCluster

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 5


@pytest.fixture
def machines() -> Iterator[RayCluster]:
    from tests.integration.ray_nodes import ray_nodes

    with ray_nodes(num_cpus=0) as nodes:
        yield nodes


def test_a_run_that_loses_nodes_goes_on_elsewhere_or_says_that_there_is_no_room(
    tmp_path: Path, machines: RayCluster
) -> None:
    from tests.integration.ray_nodes import add_node

    sections: dict[str, Any] = {"eval": {"items": 0}, "save": {"every": 1, "model": False}}
    alone = tmp_path / "alone"
    alone.mkdir()
    PPOTrainer(tiny(GRPOConfig, alone, run={"steps": STEPS}, **sections), cluster="inline", show=False).fit()
    undisturbed = losses(alone / "runs" / "run")

    nodes = {name: add_node(machines, name, num_cpus=1) for name in ("first", "second", "third")}
    sections |= {"placement": {"layout": "split", "cpus": 1}}
    config = tiny(GRPOConfig, tmp_path, run={"steps": STEPS, "resume": "auto"}, **sections)
    options = {"address": machines.address, "preload": ()}
    said, lost = list[str](), set[int]()
    victims = {2: "generator", 4: "policy"}

    def see(event: Event) -> None:
        if isinstance(event, Recovered):
            said.append(event.text)
        if isinstance(event, StepFinished) and event.step in victims and event.step not in lost:
            trainer.run.saver.wait()  # the checkpoint of the step before
            group = trainer.run.roles.workers[victims[event.step]].group
            (slot,) = group.processes.pool
            machines.remove_node(nodes[slot.node], allow_graceful=False)
            lost.add(event.step)
            assert wait_until(lambda: group.lost), "the process outlives its node for a moment"

    trainer = PPOTrainer(config, cluster="ray", backend_options=options, show=False)
    unsubscribe = subscribe(see)
    try:
        with pytest.raises(PlacementError, match=r"2 ranks .*placement"):
            trainer.fit()
    finally:
        unsubscribe()
    assert lost == {*victims}
    assert len(said) == 1
    assert "generator" in said[0]
    kept = losses(tmp_path / "runs" / "run")
    assert kept == undisturbed[: len(kept)]
    assert len(kept) in (3, 4), "the policy may have copied its state after step 4 before it was lost"

    add_node(machines, "fourth", num_cpus=1)
    PPOTrainer(config, cluster="ray", backend_options=options, show=False).fit()
    run = tmp_path / "runs" / "run"
    assert losses(run) == undisturbed
    assert read_ledger(run / "ledger.jsonl").counts() == {"trained": 4 * STEPS}
