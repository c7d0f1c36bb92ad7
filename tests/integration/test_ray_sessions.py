"""Sessions whose generators are on several nodes of a Ray cluster, each with an address of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from podium.telemetry import metrics
from podium.trainer import PPOTrainer
from tests.integration.processes import wait_for
from tests.integration.test_environments import config_of, told
from tests.integration.training import metrics_rows

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster as RayCluster

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

ADDRESSES = {"first": "127.0.0.2", "second": "127.0.0.3", "third": "127.0.0.4"}


@pytest.fixture
def machines() -> Iterator[tuple[RayCluster, dict[str, Any]]]:
    """A cluster of four nodes, and those of them that a test may remove, by name."""
    from tests.integration.ray_nodes import add_node, ray_nodes

    with ray_nodes(num_cpus=1) as nodes:
        yield nodes, {name: add_node(nodes, name, num_cpus=1, node_ip_address=at) for name, at in ADDRESSES.items()}


class Struck(PPOTrainer):
    """The node of its first generator goes while sessions ask it, in the second step."""

    nodes: RayCluster
    others: dict[str, Any]

    def fit(self) -> Any:
        self.asked: list[list[str]] = []
        return super().fit()

    def collect_sessions(self, sessions: Any, prompts: Any, step: int) -> Any:
        def urls() -> list[str]:
            return [url for urls in sessions._urls.values() for url in urls]

        if step == 3:
            assert wait_for(lambda: len(urls()) == 1, 120.0), "the address of the lost generator is still asked"
        self.asked.append(urls())
        if step != 2:
            return super().collect_sessions(sessions, prompts, step)
        (slot,) = self.run.roles.generators[0].group.processes.pool
        node = self.others[slot.node]
        strike = threading.Thread(target=self.nodes.remove_node, args=(node,), kwargs={"allow_graceful": False})
        strike.start()
        try:
            return super().collect_sessions(sessions, prompts, step)
        finally:
            strike.join()


def test_sessions_ask_generators_of_other_nodes_and_go_on_without_one(
    machines: tuple[RayCluster, dict[str, Any]], tmp_path: Path
) -> None:
    """Its place is gone with the node, so the generator is left out."""
    placement = {"layout": "split", "generator_ranks": 2, "cpus": 1}
    options: dict[str, Any] = {"options": {"pause_s": 0.3}, "placement": placement, "eval": {"items": 0}}
    config = config_of("patient", tmp_path, run={"steps": 3}, **options)
    backend = {"address": machines[0].address, "preload": ()}
    trainer = Struck(config, cluster="ray", backend_options=backend, show=False)
    trainer.nodes, trainer.others = machines
    with told() as notes:
        trainer.fit()
    assert len({urlsplit(url).hostname for url in trainer.asked[0]} & {*ADDRESSES.values()}) == 2
    assert trainer.asked == [trainer.asked[0], trainer.asked[0], trainer.asked[0][1:]]
    assert sum("generator-0 could not be restarted; the run goes on with 1 of 2" in note for note in notes) == 1
    for row in metrics_rows(tmp_path / "runs" / "run"):
        assert (row[metrics.SESSIONS_TRAINED], row[metrics.SESSIONS_FAILED]) == (16, 0)
        assert row[metrics.MISMATCH_MAX] < 1e-5  # ids and log-probabilities are those of one policy
