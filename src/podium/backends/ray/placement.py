# pyright: basic
"""What a Ray cluster has, who holds it, and placement groups for what is reserved.

A reservation is one placement group with one bundle a node, pinned to the node that the runtime chose: all or nothing,
and all slots of an entry on one node. Slots that hold nothing need none. Hosts themselves ask Ray for nothing: they are
placed in their bundle, so that groups which share a pool share its devices, and each sees the devices of its slot.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.client import ray as client
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from podium.errors import PlacementError
from podium.runtime.backend import Node, Place

__all__ = ["Inventory", "Reservation"]

READY_S = 5.0
FREED_S = 2.0
TO_RAY = {"cpu": "CPU", "gpu": "GPU"}
OURS = {"CPU": "cpu", "GPU": "gpu", "memory": "memory"}
NOT_FOR_SLOTS = ("node:", "accelerator_type:", "object_store_memory", "bundle_", "anyscale")
ACCELERATORS = ("GPU", "NPU")


@dataclass(frozen=True)
class Reservation:
    """A placement group (None where nothing is held), the bundle of each slot, and the ids of the slot's devices."""

    group: PlacementGroup | None
    bundles: tuple[int, ...]
    devices: tuple[tuple[str, ...], ...]


class Inventory:
    """The cluster's nodes, by stable names."""

    def __init__(self) -> None:
        self._own: dict[str, list[tuple[str, dict[str, float]]]] = {}  # by group: node id and resources of each bundle
        self._ids: dict[str, str] = {}
        self._accelerators: dict[str, str] = {}

    def nodes(self) -> list[Node]:
        """Nodes that are alive, by address; their total, and what others hold."""
        alive = sorted(
            (node for node in ray.nodes() if node["Alive"]), key=lambda n: (n["NodeManagerAddress"], n["NodeID"])
        )
        names = Counter(node["NodeName"] for node in alive)
        self._ids = {
            node["NodeName"] + ("" if names[node["NodeName"]] == 1 else f"-{node['NodeID'][:6]}"): node["NodeID"]
            for node in alive
        }
        total = {node["NodeID"]: _slots_part(node["Resources"]) for node in alive}
        taken = self._taken(total)
        found: list[Node] = []
        for name, node_id in self._ids.items():
            kind = next((kind for kind in ACCELERATORS if total[node_id].get(kind)), "GPU")
            self._accelerators[name] = kind
            ours = {**OURS, kind: "gpu"}
            found.append(
                Node(name, _renamed(total[node_id], ours), {h: _renamed(r, ours) for h, r in taken[node_id].items()})
            )
        return found

    def node_id(self, name: str) -> str:
        """Ray's id of a node."""
        if name not in self._ids:
            self.nodes()
        if name not in self._ids:
            raise PlacementError(f"node {name} has left the cluster; there are {sorted(self._ids)}")
        return self._ids[name]

    def reserve(self, places: Sequence[Place], *, detached: bool) -> tuple[Reservation, list[Place]]:
        """A placement group for ``places``, and the devices that Ray gave each. Raises PlacementError."""
        nodes = list(dict.fromkeys(place.node for place in places))
        bundles = tuple(nodes.index(place.node) for place in places)
        wants = [self._ray_amounts(node, [place.resources for place in places if place.node == node]) for node in nodes]
        if not any(wants):
            return Reservation(None, bundles, ((),) * len(places)), list(places)
        pins = [{"ray.io/node-id": self.node_id(node)} for node in nodes]
        group = placement_group(
            [want or {f"node:{self._address(node)}": 0.001} for node, want in zip(nodes, wants, strict=True)],
            strategy="SPREAD",
            name=f"podium:{os.path.basename(sys.argv[0]) or 'python'}:{os.getpid()}",
            lifetime="detached" if detached else None,
            bundle_label_selector=pins,
        )
        if not group.wait(READY_S):
            remove_placement_group(group)
            raise PlacementError(
                f"Ray did not reserve {wants} on {nodes} within {READY_S:g} s, although it was free when asked: "
                "somebody else took it"
            )
        self._own[group.id.hex()] = [(pin["ray.io/node-id"], want) for pin, want in zip(pins, wants, strict=True)]
        devices = self._devices(group, nodes, wants, places)
        given = [
            Place(place.node, place.resources, tuple(int(d) if d.isdigit() else at for at, d in enumerate(own)))
            for place, own in zip(places, devices, strict=True)
        ]
        return Reservation(group, bundles, devices), given

    def release(self, reservation: Reservation) -> None:
        """Remove the placement group; returns when Ray's books say so."""
        if reservation.group is None:
            return
        own = self._own.pop(reservation.group.id.hex(), [])
        remove_placement_group(reservation.group)
        until = time.monotonic() + FREED_S
        while time.monotonic() < until:
            free = _available()
            total = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
            held = {
                (node_id, kind): amount
                for node_id, want in own
                for kind, amount in want.items()
                if node_id in total and total[node_id].get(kind, 0) - free.get(node_id, {}).get(kind, 0) >= amount
            }
            if not held or not self._counts_alone(held, total, free):
                return
            time.sleep(0.02)

    def strategy(self, node: str, reservation: Reservation, slot: int) -> Any:
        """Where Ray shall put the host of a slot."""
        if reservation.group is None:
            return NodeAffinitySchedulingStrategy(self.node_id(node), soft=False)
        return PlacementGroupSchedulingStrategy(reservation.group, reservation.bundles[slot])

    def close(self) -> None:
        """Forget everything."""
        self._own.clear()

    def _counts_alone(self, held: Mapping[tuple[str, str], float], total: Any, free: Any) -> bool:
        """Whether what is held on the nodes is more than our other reservations and others' groups explain."""
        taken = self._taken({node_id: _slots_part(has) for node_id, has in total.items()})
        return any(taken[node_id].get(OTHERS, {}).get(kind, 0) >= amount for (node_id, kind), amount in held.items())

    def _taken(self, total: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, dict[str, float]]]:
        """By node and holder, what is not this controller's."""
        free = _available()
        taken: dict[str, dict[str, dict[str, float]]] = {node_id: {} for node_id in total}
        left = {
            node_id: {kind: amount - free.get(node_id, {}).get(kind, 0.0) for kind, amount in has.items()}
            for node_id, has in total.items()
        }
        for bundles in self._own.values():
            for node_id, want in bundles:
                _subtract(left, node_id, want)
        for group in placement_group_table().values():
            if group["placement_group_id"] in self._own or group["state"] not in ("CREATED", "RESCHEDULING"):
                continue
            for at, node_id in group["bundles_to_node_id"].items():
                want = _slots_part(group["bundles"][at])
                if node_id in taken and want:
                    holder = taken[node_id].setdefault(group["name"] or "a placement group without a name", {})
                    for kind, amount in want.items():
                        holder[kind] = holder.get(kind, 0.0) + amount
                    _subtract(left, node_id, want)
        for node_id, kinds in left.items():
            others = {kind: amount for kind, amount in kinds.items() if amount > 1e-6}
            if others:
                taken[node_id][OTHERS] = others
        return taken

    def _ray_amounts(self, node: str, wants: Sequence[Mapping[str, float]]) -> dict[str, float]:
        names = {**TO_RAY, "gpu": self._accelerators.get(node, "GPU")}
        amounts: dict[str, float] = {}
        for want in wants:
            for name, amount in want.items():
                if amount:
                    kind = names.get(name, name)
                    amounts[kind] = amounts.get(kind, 0.0) + amount
        return {
            kind: math.ceil(amount) if amount > 1 and kind in ACCELERATORS else amount
            for kind, amount in amounts.items()
        }

    def _address(self, node: str) -> str:
        node_id = self.node_id(node)
        return next(found["NodeManagerAddress"] for found in ray.nodes() if found["NodeID"] == node_id)

    def _devices(
        self,
        group: PlacementGroup,
        nodes: Sequence[str],
        wants: Sequence[Mapping[str, float]],
        places: Sequence[Place],
    ) -> tuple[tuple[str, ...], ...]:
        """The ids of the accelerators that Ray gave to each bundle, dealt out to its slots in order."""
        asked: dict[str, Any] = {}
        for at, (node, want) in enumerate(zip(nodes, wants, strict=True)):
            kind = self._accelerators.get(node, "GPU")
            if want.get(kind):
                strategy = PlacementGroupSchedulingStrategy(group, at)
                amount: Any = {"num_gpus": want[kind]} if kind == "GPU" else {"resources": {kind: want[kind]}}
                ask: Any = ray.remote(num_cpus=0, scheduling_strategy=strategy, **amount)(_accelerator_ids)
                asked[node] = ask.remote(kind)
        given = {node: iter(ids) for node, ids in zip(asked, ray.get(list(asked.values())), strict=True)}
        load: dict[tuple[str, str], float] = {}
        current: dict[str, str] = {}
        dealt: list[tuple[str, ...]] = []
        for place in places:
            share = place.resources.get("gpu", 0.0)
            if not share:
                dealt.append(())
            elif share < 1:
                shared = current.get(place.node)
                if shared is None or load[place.node, shared] + share > 1 + 1e-9:
                    shared = current[place.node] = next(given[place.node])
                load[place.node, shared] = load.get((place.node, shared), 0.0) + share
                dealt.append((shared,))
            else:
                dealt.append(tuple(next(given[place.node]) for _ in range(int(share))))
        return tuple(dealt)


OTHERS = "other Ray tasks and actors"


def _accelerator_ids(kind: str) -> list[str]:
    return ray.get_runtime_context().get_accelerator_ids()[kind]


def _available() -> dict[str, dict[str, float]]:
    if client.is_connected():
        return ray.get(ray.remote(num_cpus=0)(_available_here).remote())
    return _available_here()


def _available_here() -> dict[str, dict[str, float]]:
    from ray._private.state import available_resources_per_node  # Ray says it by node nowhere else without a dashboard

    return available_resources_per_node()


def _slots_part(resources: Mapping[str, float]) -> dict[str, float]:
    return {
        kind: amount
        for kind, amount in resources.items()
        if not kind.startswith(NOT_FOR_SLOTS) and "_group_" not in kind
    }


def _renamed(resources: Mapping[str, float], names: Mapping[str, str]) -> dict[str, float]:
    return {names.get(kind, kind): amount for kind, amount in resources.items()}


def _subtract(left: dict[str, dict[str, float]], node_id: str, want: Mapping[str, float]) -> None:
    for kind, amount in want.items():
        if kind in left.get(node_id, {}):
            left[node_id][kind] -= amount
