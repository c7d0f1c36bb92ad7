"""Reservations over several nodes and accelerators, with an inventory that no machine here has."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from podium.backends.inline import InlineBackend
from podium.backends.process import machine
from podium.errors import ConfigError, PlacementError
from podium.runtime import Node
from podium.runtime.pool import Inventory


class Machines(InlineBackend):
    """Inline, with the nodes given."""

    def __init__(self, *nodes: Node) -> None:
        super().__init__()
        self.machines = nodes

    def nodes(self) -> Sequence[Node]:
        return self.machines


@pytest.fixture
def inventory() -> Inventory:
    return Inventory(
        Machines(
            Node("node-1", {"cpu": 16, "gpu": 4, "memory": 64e9}),
            Node("node-2", {"cpu": 16, "gpu": 8, "memory": 64e9}),
        )
    )


def devices(pool: Any) -> list[tuple[str, tuple[int, ...]]]:
    return [(slot.node, slot.devices) for slot in pool]


def test_a_pool_takes_the_fullest_node_with_room_and_whole_accelerators_apart(inventory: Inventory) -> None:
    assert devices(inventory.reserve([2], {"gpu": 1})) == [("node-1", (0,)), ("node-1", (1,))]
    assert devices(inventory.reserve([1], {"gpu": 2})) == [("node-1", (2, 3))]
    assert devices(inventory.reserve([2], {"gpu": 4})) == [("node-2", (0, 1, 2, 3)), ("node-2", (4, 5, 6, 7))]


def test_fractions_share_an_accelerator_up_to_one(inventory: Inventory) -> None:
    slots = devices(inventory.reserve([4], {"gpu": 0.5}))
    assert slots == [("node-1", (0,)), ("node-1", (0,)), ("node-1", (1,)), ("node-1", (1,))]
    with pytest.raises(ConfigError, match=r"gpus=1\.5"):
        inventory.reserve([1], {"gpu": 1.5})


def test_each_entry_gets_a_node_of_its_own(inventory: Inventory) -> None:
    assert [slot.node for slot in inventory.reserve([4, 6], {"gpu": 1})] == ["node-1"] * 4 + ["node-2"] * 6
    with pytest.raises(PlacementError, match="on 3 nodes"):
        inventory.reserve([1, 1, 1], {"gpu": 1})


def test_the_refusal_says_what_is_asked_free_and_held(inventory: Inventory) -> None:
    actor = inventory.reserve([2], {"gpu": 1})
    actor[0].reservation.holders.append("actor")
    inventory.reserve([1], {"cpu": 2})
    with pytest.raises(PlacementError) as caught:
        inventory.reserve([10], {"gpu": 1})
    assert str(caught.value) == (
        "asked for 10 gpu on 1 node; 2 gpu free on node-1, 8 gpu free on node-2; held by: actor (2)"
    )


def test_all_or_nothing(inventory: Inventory) -> None:
    with pytest.raises(PlacementError):
        inventory.reserve([8, 8], {"gpu": 1})
    assert len(inventory.reserve([8, 4], {"gpu": 1})) == 12


def test_what_is_released_is_free_and_slices_end_with_the_whole(inventory: Inventory) -> None:
    pool = inventory.reserve([8], {"gpu": 1})
    part = pool[2:4]
    inventory.release(part)
    inventory.release(pool)
    assert all(slot.reservation.released for slot in part)
    assert devices(inventory.reserve([8], {"gpu": 1}))[0] == ("node-2", (0,))


def test_several_resources_must_fit_together(inventory: Inventory) -> None:
    inventory.reserve([1], {"cpu": 15, "gpu": 1})
    assert [slot.node for slot in inventory.reserve([2], {"cpu": 2, "gpu": 1})] == ["node-2"] * 2
    with pytest.raises(PlacementError, match=r"asked for 30 cpu, 2 gpu"):
        inventory.reserve([2], {"cpu": 15, "gpu": 1})


@pytest.mark.parametrize("amount", [-1, float("nan"), float("inf")])
def test_amounts_are_numbers(inventory: Inventory, amount: float) -> None:
    with pytest.raises(ConfigError, match="from 0 up"):
        inventory.reserve([1], {"cpu": amount})


def test_a_fraction_goes_where_one_accelerator_has_room_for_it() -> None:
    inventory = Inventory(Machines(Node("a", {"gpu": 2}), Node("b", {"gpu": 2})))
    assert devices(inventory.reserve([2], {"gpu": 0.6})) == [("a", (0,)), ("a", (1,))]  # 0.8 left, none of it in one
    assert devices(inventory.reserve([1], {"gpu": 0.6})) == [("b", (0,))]
    assert devices(inventory.reserve([3], {"gpu": 0.3})) == [("b", (0,)), ("b", (1,)), ("b", (1,))]
    with pytest.raises(PlacementError, match=r"0\.8 gpu free on a.*a fraction of an accelerator is a part of one"):
        inventory.reserve([1], {"gpu": 0.6})


GPUS = {"a": 8, "b": 8, "c": 3}


def spread(machines: dict[str, int], slots: int, want: dict[str, float]) -> list[int]:
    pool = Inventory(Machines(*(Node(name, {"gpu": gpus, "cpu": 4}) for name, gpus in machines.items()))).reserve(
        slots, want
    )
    return [len(list(run)) for _, run in itertools.groupby(slot.node for slot in pool)]


@pytest.mark.parametrize(
    ("slots", "counts"), [(1, [1]), (8, [8]), (9, [5, 4]), (16, [8, 8]), (17, [7, 7, 3]), (19, [8, 8, 3])]
)
def test_spread_slots_take_as_few_nodes_as_hold_them_and_evenly(slots: int, counts: list[int]) -> None:
    assert spread(GPUS, slots, {"gpu": 1}) == counts


def test_spread_slots_that_hold_nothing_share_a_node() -> None:
    assert spread(GPUS, 50, {}) == [50]
    assert spread(GPUS, 6, {"cpu": 2, "gpu": 0}) == [2, 2, 2]


def test_what_cannot_be_spread_is_refused_and_nothing_is_held() -> None:
    inventory = Inventory(Machines(*(Node(name, {"gpu": gpus}) for name, gpus in GPUS.items())))
    with pytest.raises(PlacementError) as caught:
        inventory.reserve(20, {"gpu": 1})
    assert str(caught.value) == (
        "asked for 20 slots of 1 gpu each, on any nodes; 8 gpu free on a, 8 gpu free on b, 3 gpu free on c; held by: "
        "nobody"
    )
    assert len(inventory.reserve(19, {"gpu": 1})) == 19


def test_spread_counts_this_scripts_pools_and_what_others_hold() -> None:
    """Three nodes with a pool of one core on each have room for two more slots, one on a node."""
    inventory = Inventory(Machines(*(Node(name, {"cpu": 2}) for name in "abc")))
    inventory.reserve([1, 1, 1], {"cpu": 1})
    assert sorted(slot.node for slot in inventory.reserve(2, {"cpu": 1})) == ["a", "b"]
    others = Inventory(Machines(Node("a", {"gpu": 8}, {"else": {"gpu": 6}}), Node("b", {"gpu": 8}, {"x": {"gpu": 2}})))
    assert [slot.node for slot in others.reserve(8, {"gpu": 1})] == ["b"] * 6 + ["a"] * 2


def test_spread_slots_of_half_an_accelerator_are_counted_by_accelerator() -> None:
    inventory = Inventory(Machines(Node("a", {"gpu": 2}), Node("b", {"gpu": 2})))
    assert devices(inventory.reserve(3, {"gpu": 0.6})) == [("a", (0,)), ("a", (1,)), ("b", (0,))]


@pytest.mark.parametrize("wrong", [0, -1, [], [0], [1.5]], ids=str)
def test_numbers_of_slots_are_whole_and_positive(inventory: Inventory, wrong: Any) -> None:
    with pytest.raises(ConfigError, match="from 1 up"):
        inventory.reserve(wrong, {})


def test_slots_without_resources_are_never_short(inventory: Inventory) -> None:
    assert len(inventory.reserve([100], {})) == 100
    assert inventory.slots_on("node-1") + inventory.slots_on("node-2") == 100


def test_the_strategy_says_whether_full_or_empty_nodes_are_taken() -> None:
    inventory = Inventory(Machines(*(Node(name, {"cpu": 4}) for name in "abc")))
    inventory.reserve([1], {"cpu": 1})
    assert [slot.node for slot in inventory.reserve([1], {"cpu": 1})] == ["a"]
    assert [slot.node for slot in inventory.reserve([1], {"cpu": 1}, strategy="spread")] == ["b"]
    assert [slot.node for slot in inventory.reserve(2, {"cpu": 1})] == ["a", "a"]
    assert sorted(slot.node for slot in inventory.reserve(4, {"cpu": 1}, strategy="spread")) == ["b", "b", "c", "c"]
    with pytest.raises(ConfigError, match=r"strategy='wide'.*'pack' or 'spread'"):
        inventory.reserve([1], {}, strategy="wide")  # pyright: ignore[reportArgumentType] - the point


def test_labels_choose_nodes_and_their_absence_is_named() -> None:
    nodes = [Node("a", {"cpu": 4}), Node("b", {"cpu": 4}, labels={"zone": "east", "disk": "ssd"})]
    inventory = Inventory(Machines(*nodes))
    assert [slot.node for slot in inventory.reserve(2, {"cpu": 1}, labels={"zone": "east"})] == ["b", "b"]
    with pytest.raises(PlacementError, match=r"4 cpu on 1 node with the labels \{'disk': 'ssd'\}; 2 cpu free on b"):
        inventory.reserve([1], {"cpu": 4}, labels={"disk": "ssd"})
    with pytest.raises(PlacementError, match=r"\{'zone': 'west'\}; no node has them: the nodes' labels are \[\{\}"):
        inventory.reserve([1], {}, labels={"zone": "west"})


def test_slots_may_differ_and_are_all_or_nothing(inventory: Inventory) -> None:
    pool = inventory.reserve([2, 1], [{"gpu": 1, "cpu": 2}, {"cpu": 1}, {"gpu": 6}])
    assert devices(pool) == [("node-1", (0,)), ("node-1", ()), ("node-2", (0, 1, 2, 3, 4, 5))]
    assert [dict(slot.resources) for slot in pool] == [{"gpu": 1, "cpu": 2}, {"cpu": 1}, {"gpu": 6}]
    with pytest.raises(PlacementError, match=r"asked for 3 gpu \+ 3 gpu, 1 cpu on 2 nodes; 3 gpu and 13 cpu"):
        inventory.reserve([2, 1], [{"gpu": 1}, {"gpu": 2}, {"gpu": 3, "cpu": 1}])
    assert devices(inventory.reserve([2], [{"gpu": 1}, {"gpu": 2}])) == [("node-1", (1,)), ("node-1", (2, 3))]


def test_nodes_that_a_machine_pretends_to_be_share_its_accelerators() -> None:
    """No accelerator is handed out twice."""
    inventory = Inventory(Machines(*machine(["4", "5", "6", "7", "8"], 2)))
    pools = [inventory.reserve([1, 1], {"gpu": 1}) for _ in range(2)]
    assert [devices(pool) for pool in pools] == [
        [("node-0", (0,)), ("node-1", (2,))],
        [("node-0", (1,)), ("node-1", (3,))],
    ]
    with pytest.raises(PlacementError, match="0 gpu free on node-0, 1 gpu free on node-1"):
        inventory.reserve([1, 1], {"gpu": 1})
    assert devices(inventory.reserve([1], {"gpu": 1})) == [("node-1", (4,))]


def test_a_kind_of_accelerators_is_taken_wherever_it_is() -> None:
    kinds = ("NVIDIA H100 80GB HBM3", "NVIDIA L40S", "NVIDIA L40S")
    machines = Machines(
        Node("a", {"gpu": 3}, devices=(4, 5, 6), kinds=kinds), Node("b", {"gpu": 2}, kinds=kinds[:1] * 2)
    )
    inventory = Inventory(machines)
    assert devices(inventory.reserve([2], {"gpu": 1}, accelerator="l40s")) == [("a", (5,)), ("a", (6,))]
    assert devices(inventory.reserve(3, {"gpu": 1}, accelerator="H100")) == [("b", (0,)), ("b", (1,)), ("a", (4,))]
    with pytest.raises(PlacementError, match=r"of the kind 'H100'; 0 gpu free on a, 0 gpu free on b"):
        inventory.reserve(1, {"gpu": 1}, accelerator="H100")
    with pytest.raises(PlacementError, match="no node has any: the kinds are"):
        inventory.reserve(1, {"gpu": 1}, accelerator="H200")
    for node, says in (
        (Node("c", {"cpu": 2.0, "gpu": 0.0}), "no node has an accelerator"),
        (Node("c", {"gpu": 1.0}), "the kinds are not known here; leave accelerator= out, or choose nodes by labels="),
    ):
        with pytest.raises(PlacementError, match=says):
            Inventory(Machines(node)).reserve(1, {"gpu": 1}, accelerator="H100")
