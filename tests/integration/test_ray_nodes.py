"""The backend ``ray`` on several nodes of unequal size: order, slots, devices, and nodes that come and go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

import podium
from podium import Cluster, ResourcePool, Worker
from podium.errors import EndpointError, RefLostError, WorkerDied, WorkerStartError
from podium_testing.workers import Stash
from tests.integration.ray_workers import Busy, devices_of, place_of

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster as RayCluster

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def machines() -> Iterator[RayCluster]:
    from tests.integration.ray_nodes import add_node, ray_nodes

    with ray_nodes(num_cpus=2) as nodes:
        add_node(nodes, "small", num_cpus=1, resources={"NPU": 2})
        add_node(nodes, "gpus", num_cpus=3, num_gpus=4, resources={"tape": 2})
        yield nodes


@pytest.fixture(scope="module")
def cluster(machines: RayCluster) -> Iterator[Cluster]:
    with podium.connect("ray", address=machines.address, preload=()) as cluster:
        yield cluster


def places(cluster: Cluster, pool: ResourcePool, **options: Any) -> list[tuple[int, int, int, str]]:
    """Rank, local rank, ranks on the same node and node of each worker of a group on ``pool``, which is ended."""
    worker = cluster.start(Worker.bind(), pool, distributed=False, **options)
    try:
        return worker.group.run(place_of)
    finally:
        worker.group.close()


def test_accelerators_are_in_order_as_ray_does_not_give_them() -> None:
    from podium_ray.placement import in_order

    assert in_order(["6", "7", "10", "3", "1"]) == ["1", "3", "6", "7", "10"]


def test_slots_that_differ_and_labels(cluster: Cluster) -> None:
    """A node whose slots hold nothing has no bundle of the placement group."""
    pool = cluster.pool([2, 1], cpus=[1, 1, 0])
    assert [place[:2] for place in places(cluster, pool)] == [(0, 0), (1, 1), (2, 0)]
    cluster.release(pool)
    head = next(node for node in cluster.nodes if node.name == "head")
    pool = cluster.pool(1, labels={"ray.io/node-id": head.labels["ray.io/node-id"]})
    assert places(cluster, pool) == [(0, 0, 1, "head")]


def test_ranks_go_node_by_node_over_unequal_nodes(cluster: Cluster) -> None:
    pool = cluster.pool([2, 1], cpus=1)
    want = [(0, 0, 2, "head"), (1, 1, 2, "head"), (2, 0, 1, "small")]
    for _ in range(2):
        assert places(cluster, pool) == want, "the same order every time"
    cluster.release(pool)


def test_split_slices_and_sums_keep_their_slots(cluster: Cluster) -> None:
    pool = cluster.pool([2, 1], cpus=1)
    ones, two = pool.split([1, 2])
    assert places(cluster, ones) == [(0, 0, 1, "head")]
    assert places(cluster, two) == [(0, 0, 1, "head"), (1, 0, 1, "small")]
    pair, single = pool.split([2, 1])
    for part, rest in ((pair, single), pair.split([1, 1])):
        groups = [cluster.start(Worker.bind(), half, distributed=False) for half in (part, rest)]
        assert [len(group.group.run(place_of)) for group in groups] == [len(part), len(rest)], "at the same time"
        for group in groups:
            group.group.close()
    other = cluster.pool([2], cpus=1)
    merged = other + pool[1:3]
    assert places(cluster, merged) == [(0, 0, 2, "gpus"), (1, 1, 2, "gpus"), (2, 0, 1, "head"), (3, 0, 1, "small")]
    cluster.release(merged)
    assert places(cluster, cluster.pool([3, 2])) != [], "what a sum held is free again"


def test_every_slot_of_an_entry_is_on_one_node(cluster: Cluster) -> None:
    pools = [cluster.pool([count], cpus=1) for count in (3, 2, 1)]
    assert [{slot.node for slot in pool} for pool in pools] == [{"gpus"}, {"head"}, {"small"}]
    for pool in pools:
        cluster.release(pool)


def test_custom_resources_place(cluster: Cluster) -> None:
    pool = cluster.pool([2], resources={"tape": 1})
    assert {place[3] for place in places(cluster, pool)} == {"gpus"}
    cluster.release(pool)


def test_an_accelerator_is_one_whatever_ray_calls_it(cluster: Cluster) -> None:
    """How its visibility variable is called depends on the machine's devices; that two slots share none does not."""
    pool = cluster.pool([4, 2], gpus=1)
    assert [slot.node for slot in pool] == ["gpus"] * 4 + ["small"] * 2
    assert [slot.devices for slot in pool[4:]] == [(0,), (1,)]
    cluster.release(pool)


# -- accelerators ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noset", ["", "1"])
def test_each_slot_sees_its_own_accelerators(cluster: Cluster, noset: str) -> None:
    """Ray's switch that leaves the variable alone must not make all of them visible."""
    pool = cluster.pool([2], gpus=2)
    env = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": noset} if noset else {}
    worker = cluster.start(Worker.bind(), pool, env=env, distributed=False)
    seen = worker.group.run(devices_of)
    assert [devices for devices, _ in seen] == [(0, 1), (0, 1)]
    ids = [str(visible).split(",") for _, visible in seen]
    assert sorted(ids[0] + ids[1]) == ["0", "1", "2", "3"]
    worker.group.close()
    cluster.release(pool)


def test_groups_that_share_a_pool_see_the_same_accelerators(cluster: Cluster) -> None:
    held = cluster.pool([1], gpus=1)
    pool = cluster.pool([2], gpus=1)
    groups = [cluster.start(Worker.bind(), pool, distributed=False) for _ in range(2)]
    first, second = (group.group.run(devices_of) for group in groups)
    assert first == second
    assert len({visible for _, visible in first}) == 2
    groups[0].group.restart()
    assert groups[0].group.run(devices_of) == first, "after a restart too"
    part = cluster.start(Worker.bind(), pool[1:], distributed=False)
    assert part.group.run(devices_of) == first[1:]
    for group in (*groups, part):
        group.group.close()
    for own in (held, pool):
        cluster.release(own)


def test_fractions_share_one_accelerator(cluster: Cluster) -> None:
    pool = cluster.pool([4], gpus=0.5, resources={"tape": 0.25})
    worker = cluster.start(Worker.bind(), pool, distributed=False)
    seen = [visible for _, visible in worker.group.run(devices_of)]
    assert sorted(Counter(seen).values()) == [2, 2], "Ray chooses which two share one"
    rest = cluster.pool([1], gpus=2, resources={"tape": 1})
    others = cluster.start(Worker.bind(), rest, distributed=False)
    ((_, visible),) = others.group.run(devices_of)
    assert not set(seen) & set(str(visible).split(","))
    for group, held in ((worker, pool), (others, rest)):
        group.group.close()
        cluster.release(held)


# -- collectives -----------------------------------------------------------------------------------------------------


def test_collectives_across_nodes(cluster: Cluster) -> None:
    pool = cluster.pool([2, 1], cpus=1)
    from tests.integration.fault_workers import Faulty

    faulty = cluster.start(Faulty.bind(), pool, distributed=True)
    assert faulty.gather_ranks() == [[0.0, 1.0, 2.0]] * 3
    faulty.group.restart()
    assert faulty.gather_ranks() == [[0.0, 1.0, 2.0]] * 3
    faulty.group.close()
    cluster.release(pool)


# -- references ------------------------------------------------------------------------------------------------------


def test_what_a_worker_keeps_is_read_on_another_node_until_it_ends(cluster: Cluster) -> None:
    """Pieces of odd sizes, which Ray lays end to end on either node."""
    import torch

    owners, readers = cluster.pool([1], resources={"tape": 1}), cluster.pool([1], cpus=2)
    owner = cluster.start(Stash.bind(), owners, name="owner", distributed=False)
    reader = cluster.start(Stash.bind(), readers, name="reader", distributed=False)
    sent = [torch.ones(rows, dtype=torch.int8) for rows in (1 << 20, 1001, 3, 64)]
    refs: Any = owner.put(sent)
    assert {"gpus", "head"} == {slot.node for slot in (*owners, *readers)}
    assert refs[0].places == ("owner.put of rank 0 on gpus",)
    for ref, tensor in zip(refs, sent, strict=True):
        assert reader.total(ref) == [len(tensor)]
        assert torch.equal(ref.prefetch().get(), tensor)
    assert reader.overwrite(refs[0]) == [2 << 20]
    assert reader.total(refs[0]) == [1 << 20]
    again: Any = owner.make(100, 1000)
    owner.group.close()
    with pytest.raises(RefLostError, match=r"owner\.make of rank 0 on gpus"):
        again[0].get()
    with pytest.raises(EndpointError, match=r"RefLostError.*owner\.make of rank 0 on gpus"):
        reader.total(again[0])
    reader.group.close()
    for pool in (owners, readers):
        cluster.release(pool)


# -- nodes that come and go ------------------------------------------------------------------------------------------


def test_a_node_that_joins_is_seen_and_used_and_one_that_goes_is_named(cluster: Cluster, machines: RayCluster) -> None:
    from tests.integration.ray_nodes import add_node

    late = add_node(machines, "late", num_cpus=2)
    assert "late" in [node.name for node in cluster.nodes]
    pool = cluster.pool([2, 2], cpus=1)
    assert "late" in {slot.node for slot in pool}
    slow = cluster.start(Busy.bind(), pool, name="slow", distributed=False)
    stays = cluster.pool([1], resources={"tape": 1})  # which only the node "gpus" has
    elsewhere = cluster.start(Busy.bind(), stays, name="elsewhere", distributed=False)
    calls = [slow.wait.submit(), elsewhere.wait.submit()]
    machines.remove_node(late, allow_graceful=False)
    with pytest.raises(WorkerDied, match="late") as caught:
        calls[0].result(60.0)
    assert caught.value.node == "late"
    assert elsewhere.ping(1) == [1]
    elsewhere.let_go()
    assert calls[1].result(60.0) == [True]
    with pytest.raises(WorkerStartError, match="node late has left the cluster"):
        slow.group.restart()
    assert "late" not in [node.name for node in cluster.nodes]
    slow.group.close()
    elsewhere.group.close()
    for held in (pool, stays):
        cluster.release(held)
    assert places(cluster, cluster.pool([2, 1], cpus=1))
