"""Reservations over several nodes and accelerators, with an inventory that no machine here has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from podium.backends.inline import InlineBackend
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


def test_slots_without_resources_are_never_short(inventory: Inventory) -> None:
    assert len(inventory.reserve([100], {})) == 100
    assert inventory.slots_on("node-1") + inventory.slots_on("node-2") == 100
