"""What a Ray cluster has, who holds it, and placement groups for what is reserved.

A reservation is one placement group with one bundle a node, pinned to the node that the runtime chose: all or nothing,
all slots of an entry on one node. Slots that hold nothing need none. The actors of worker processes ask Ray for
nothing. They are placed in the bundle of their slot, so that groups which share a pool share its devices, and each
process sees the devices of its slot.
"""

import contextlib
import math
import os
import sys
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from podium.errors import PlacementError
from podium.runtime.messages import Node, Place
from podium_ray.connect import ray

__all__ = ["Inventory", "Reservation", "in_order"]

EPSILON = 1e-9  # sums of fractions miss whole numbers by less
READY_S = 5.0
BUSY_READY_S = 60.0  # for a cluster that is too busy to look at the request before
FREED_S = 2.0
OTHERS = "other Ray tasks and actors"
NOT_FOR_SLOTS = ("node:", "accelerator_type:", "object_store_memory", "bundle_")
OUR_NAMES = {"CPU": "cpu", "GPU": "gpu", "NPU": "gpu"}
Amounts = dict[str, float]


@dataclass(frozen=True)
class Reservation:
    """A placement group and what it holds.

    Attributes:
        group: Ray's placement group, or None where nothing is held.
        bundles: Number of the bundle of each slot, or None where its node holds nothing.
        devices: Ids of the accelerators of each slot.
        held: Node id and amounts of each bundle.
        detached: The reservation outlives its controller.
    """

    group: Any
    bundles: tuple[int | None, ...]
    devices: tuple[tuple[str, ...], ...]
    held: tuple[tuple[str, Amounts], ...] = ()
    detached: bool = False


class Inventory:
    """The cluster's nodes by stable names, and this controller's reservations."""

    def __init__(self) -> None:
        self._own: dict[str, Reservation] = {}  # by the id of its group
        self._names: dict[str, str] = {}  # by id; a node keeps its name
        self._ids: dict[str, str] = {}  # by name, of those that are alive
        self._npu: set[str] = set()  # nodes whose accelerators Ray calls "NPU"

    def nodes(self) -> list[Node]:
        """Nodes that are alive, by address: all they have, and what others hold."""
        alive = _alive()
        count = Counter(node["NodeName"] for node in alive.values())
        for node_id, node in alive.items():
            self._names.setdefault(node_id, node["NodeName"] + f"-{node_id[:6]}" * (count[node["NodeName"]] > 1))
        self._ids = {self._names[node_id]: node_id for node_id in alive}
        self._npu = {self._names[node_id] for node_id, node in alive.items() if "NPU" in node["Resources"]}
        taken = self._read_taken_amounts(alive)
        return [
            Node(
                name,
                _amounts(alive[at]["Resources"]),
                taken[at],
                alive[at].get("Labels") or {},
                kinds=_kinds(alive[at]),
            )
            for name, at in self._ids.items()
        ]

    def reserve(self, places: Sequence[Place], *, detached: bool) -> tuple[Reservation, list[Place]]:
        """A placement group for ``places``, and the places with the devices that Ray gave. Raises PlacementError."""
        node_of_place = {
            location.node: self._rays(location.node, [p.resources for p in places if p.node == location.node])
            for location in places
        }
        wants = [want for want in node_of_place.values() if want]
        nodes = [node for node, want in node_of_place.items() if want]
        bundles = tuple(nodes.index(location.node) if node_of_place[location.node] else None for location in places)
        if not wants:
            return Reservation(None, bundles, ((),) * len(places)), list(places)
        ids = [self.node_id(node) for node in nodes]
        group = ray.util.placement_group(
            wants,
            strategy="SPREAD",
            name=f"podium:{os.path.basename(sys.argv[0]) or 'python'}:{os.getpid()}#{uuid.uuid4().hex}",
            lifetime="detached" if detached else None,
            bundle_label_selector=[{"ray.io/node-id": node_id} for node_id in ids],
        )
        if not (group.wait(READY_S) or (not _is_refused(group) and group.wait(BUSY_READY_S))):
            state = "other work took the resources first" if _is_refused(group) else "Ray has not come to it yet"
            ray.util.remove_placement_group(group)
            raise PlacementError(f"Ray did not reserve {wants} on {nodes}: {state}")
        devices = tuple(self._deal(self._devices(group, nodes, wants), places))
        amounts = tuple(zip(ids, map(_amounts, wants), strict=True))
        reservation = self._own[group.id.hex()] = Reservation(group, bundles, devices, amounts, detached)
        return reservation, [
            Place(
                location.node,
                location.resources,
                tuple(int(device_name) if device_name.isdigit() else at for at, device_name in enumerate(device_names)),
            )
            for location, device_names in zip(places, devices, strict=True)
        ]

    def release(self, reservation: Reservation) -> None:
        """Remove the placement group. Returns when Ray's books show it, or after FREED_S."""
        if reservation.group is None:
            return
        self._own.pop(reservation.group.id.hex(), None)
        ray.util.remove_placement_group(reservation.group)
        until = time.monotonic() + FREED_S
        while time.monotonic() < until:
            taken = self._read_taken_amounts(_alive())
            if not any(taken.get(at, {}).get(OTHERS, {}).get(kind) for at, want in reservation.held for kind in want):
                return
            time.sleep(0.02)

    def close(self) -> None:
        """Release all reservations that are not detached."""
        for reservation in [
            reservation_left for reservation_left in self._own.values() if not reservation_left.detached
        ]:
            with contextlib.suppress(RayError):
                self.release(reservation)

    def strategy(self, node: str, reservation: Reservation, slot: int) -> Any:
        """Where Ray shall put the process of a slot."""
        bundle = reservation.bundles[slot]
        if reservation.group is None or bundle is None:
            return NodeAffinitySchedulingStrategy(self.node_id(node), soft=False)
        return PlacementGroupSchedulingStrategy(reservation.group, bundle)

    def node_id(self, name: str) -> str:
        """Ray's id of a node."""
        if name not in self._ids:
            raise PlacementError(f"node {name} has left the cluster; its nodes are {sorted(self._ids)}")
        return self._ids[name]

    def _read_taken_amounts(self, alive: Mapping[str, Any]) -> dict[str, dict[str, Amounts]]:
        """By node and holder, what is not this controller's: other placement groups, and what they do not explain."""
        free = {at: _amounts(amounts) for at, amounts in _available().items()}
        left = {
            at: {kind: amount - free.get(at, {}).get(kind, 0.0) for kind, amount in _amounts(node["Resources"]).items()}
            for at, node in alive.items()
        }
        taken: dict[str, dict[str, Amounts]] = {at: defaultdict(Amounts) for at in alive}
        held = [(None, at, want) for reservation in self._own.values() for at, want in reservation.held]
        for group in ray.util.placement_group_table().values():
            if group["placement_group_id"] not in self._own and group["state"] in ("CREATED", "RESCHEDULING"):
                name = group["name"].partition("#")[0] or "a placement group without a name"
                bundles = group["bundles_to_node_id"].items()
                held += [(name, at, _amounts(group["bundles"][number])) for number, at in bundles]
        for name, at, want in held:
            for kind, amount in want.items():
                if kind in left.get(at, {}):
                    left[at][kind] -= amount
                    if name is not None:
                        taken[at][name][kind] = taken[at][name].get(kind, 0.0) + amount
        for at, kinds in left.items():
            if others := {kind: amount for kind, amount in kinds.items() if amount > 1e-6}:
                taken[at][OTHERS] = others
        return taken

    def _rays(self, node: str, wants: Sequence[Mapping[str, float]]) -> Amounts:
        """The sum of ``wants`` under Ray's names; Ray has whole accelerators above one."""
        gpu = self._gpu(node)
        names, total = {"cpu": "CPU", "gpu": gpu}, defaultdict[str, float](float)
        for name, amount in (item for want in wants for item in want.items()):
            total[names.get(name, name)] += amount
        return {k: float(math.ceil(v - EPSILON)) if k == gpu and v > 1 else float(v) for k, v in total.items() if v}

    def _gpu(self, node: str) -> str:
        """Ray's name for the accelerators of a node."""
        return "NPU" if node in self._npu else "GPU"

    def _devices(self, group: Any, nodes: Sequence[str], wants: Sequence[Amounts]) -> dict[str, Iterator[str]]:
        """The ids of the accelerators that Ray gave to the bundle of each node."""
        requests: dict[str, Any] = {}
        for at, (node, want) in enumerate(zip(nodes, wants, strict=True)):
            if want.get(kind := self._gpu(node)):
                strategy = PlacementGroupSchedulingStrategy(group, at)
                amount: Any = {"num_gpus": want[kind]} if kind == "GPU" else {"resources": {kind: want[kind]}}
                ask: Any = ray.remote(num_cpus=0, scheduling_strategy=strategy, **amount)(_accelerator_ids)
                requests[node] = ask.remote(kind)
        return {node: iter(in_order(ids)) for node, ids in zip(requests, ray.get(list(requests.values())), strict=True)}

    def _deal(self, given: Mapping[str, Iterator[str]], places: Sequence[Place]) -> Iterator[tuple[str, ...]]:
        """The ids of each place: whole accelerators of its own, or one shared by fractions that fit on it."""
        shared: dict[str, tuple[str, float]] = {}
        for location in places:
            share = location.resources.get("gpu", 0.0)
            if share >= 1 or not share:
                yield tuple(next(given[location.node]) for _ in range(int(share)))
                continue
            node_id, load = shared.get(location.node, ("", 1.0))
            if load + share > 1 + EPSILON:
                node_id, load = next(given[location.node]), 0.0
            shared[location.node] = node_id, load + share
            yield (node_id,)


def in_order(ids: Sequence[str]) -> list[str]:
    """The ids of accelerators from the lowest up: Ray gives them in any order."""
    return sorted(ids, key=lambda one: (len(one), one))


def _accelerator_ids(kind: str) -> list[str]:
    return ray.get_runtime_context().get_accelerator_ids()[kind]


def _available() -> dict[str, Amounts]:
    if ray.util.client.ray.is_connected():
        return ray.get(ray.remote(num_cpus=0)(_available_here).remote())
    return _available_here()


def _available_here() -> dict[str, Amounts]:
    from ray._private import state  # Ray says it by node nowhere else without a dashboard

    resources: Any = state
    return resources.available_resources_per_node()


def _is_refused(group: Any) -> bool:
    """Whether Ray has looked for the resources of a placement group, and has not found them."""
    table: Any = ray.util.placement_group_table(group)
    return table["stats"]["scheduling_state"] in ("NO_RESOURCES", "INFEASIBLE")


def _alive() -> dict[str, Any]:
    """What Ray says of each node that is alive, by id, in order of address."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    return {node["NodeID"]: node for node in sorted(alive, key=lambda n: (n["NodeManagerAddress"], n["NodeID"]))}


def _kinds(node: Mapping[str, Any]) -> tuple[str, ...]:
    """The model of each accelerator of a node. Ray has one word for all of them."""
    names = [key.partition(":")[2] for key in node["Resources"] if key.startswith("accelerator_type:")]
    labels: Mapping[str, str] = node.get("Labels") or {}
    kind = labels.get("ray.io/accelerator-type") or next(iter(names), "")
    return (kind,) * int(_amounts(node["Resources"]).get("gpu", 0.0)) if kind else ()


def _amounts(resources: Mapping[str, float]) -> Amounts:
    """Ray's resources that slots can hold, by Podium's names."""
    return {
        OUR_NAMES.get(name, name): amount
        for name, amount in resources.items()
        if not name.startswith(NOT_FOR_SLOTS) and "_group_" not in name
    }
