"""Slots of a cluster's resources: reserved together, ordered, and sliceable."""

from __future__ import annotations

import itertools
import math
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from podium.errors import ConfigError, PlacementError
from podium.runtime.backend import Backend
from podium.runtime.messages import Node, Place

__all__ = ["Inventory", "Reservation", "ResourcePool", "Slot"]


class Reservation:
    """What one ``cluster.pool(...)`` holds, and the groups that run on it."""

    def __init__(self, token: Any, places: Sequence[Place], *, detached: bool = False) -> None:
        self.token = token
        self.slots = [Slot(place, self, number) for number, place in enumerate(places)]
        self.detached = detached
        self.holders: list[str] = []
        self.released = False


@dataclass(frozen=True)
class Slot:
    """A place for one host: its node, what it holds there, and which of the node's accelerators."""

    place: Place
    reservation: Reservation = field(repr=False, compare=False)
    number: int = field(repr=False)

    @property
    def node(self) -> str:
        return self.place.node

    @property
    def resources(self) -> Mapping[str, float]:
        return self.place.resources

    @property
    def devices(self) -> tuple[int, ...]:
        return self.place.devices


class ResourcePool:
    """An ordered sequence of slots, node by node. ``pool[0:2]``, ``pool.split([1, 3])`` and ``a + b`` make others of
    the same slots; they hold nothing of their own."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = tuple(slots)

    def __len__(self) -> int:
        return len(self.slots)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.slots)

    @overload
    def __getitem__(self, at: int) -> Slot: ...
    @overload
    def __getitem__(self, at: slice) -> ResourcePool: ...
    def __getitem__(self, at: int | slice) -> Slot | ResourcePool:
        return ResourcePool(self.slots[at]) if isinstance(at, slice) else self.slots[at]

    def __add__(self, other: ResourcePool) -> ResourcePool:
        return ResourcePool(self.slots + other.slots)

    def __repr__(self) -> str:
        nodes = Counter(slot.node for slot in self.slots)
        return f"<ResourcePool {', '.join(f'{node}: {count}' for node, count in nodes.items())}>"

    def split(self, sizes: Sequence[int]) -> list[ResourcePool]:
        """Consecutive parts of the sizes given, which must add up to the whole.

        Raises:
            ConfigError: they do not add up, or one is below 1.
        """
        if sum(sizes) != len(self) or any(size < 1 for size in sizes):
            raise ConfigError(f"split({list(sizes)}): sizes from 1 up that add to the pool's {len(self)} slots")
        bounds = [sum(sizes[:at]) for at in range(len(sizes) + 1)]
        return [self[start:stop] for start, stop in itertools.pairwise(bounds)]


class Inventory:
    """What is free on each node, and who holds the rest. All or nothing, decided before anything waits."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self._reservations: list[Reservation] = []

    def reserve(self, counts: Sequence[int], want: Mapping[str, float], *, detached: bool = False) -> ResourcePool:
        """Reserve ``counts[i]`` slots of ``want`` each, every entry on a node of its own.

        Raises:
            PlacementError: it cannot be had now; says what was asked, what is free where and who holds the rest.
            ConfigError: a count below 1 or a negative amount.
        """
        if not counts or any(count < 1 for count in counts):
            raise ConfigError(f"pool({list(counts)}): one number of slots, from 1 up, for each node")
        if any(amount < 0 or not math.isfinite(amount) for amount in want.values()):
            raise ConfigError(f"pool(): amounts of resources are numbers from 0 up; got {dict(want)}")
        if want.get("gpu", 0) % 1 and want["gpu"] > 1:
            raise ConfigError(f"pool(gpus={want['gpu']}): a slot has whole accelerators, or a fraction of one")
        with self._lock:
            nodes = self._backend.nodes()
            free = self._free(nodes)
            chosen = self._place(counts, want, nodes, free)
            devices = self._devices(counts, chosen, want.get("gpu", 0), nodes)
            flat = [node for node, count in zip(chosen, counts, strict=True) for _ in range(count)]
            places = [Place(node, dict(want), own) for node, own in zip(flat, devices, strict=True)]
            token, places = self._backend.reserve(places, detached)
            reservation = Reservation(token, places, detached=detached)
            self._reservations.append(reservation)
            return ResourcePool(reservation.slots)

    def release(self, pool: ResourcePool) -> None:
        """Give back the reservations that ``pool`` is made of; slices of them end with it.

        Raises:
            PlacementError: a group still runs on one of them.
        """
        with self._lock:
            for reservation in {id(slot.reservation): slot.reservation for slot in pool}.values():
                if reservation.holders:
                    raise PlacementError(f"cannot release {pool}: groups still run on it: {reservation.holders}")
                if not reservation.released:
                    reservation.released = True
                    self._reservations.remove(reservation)
                    self._backend.release(reservation.token)

    def stopped(self, token: Any) -> None:
        """A detached group was stopped: give its reservation back, whoever reserved it."""
        with self._lock:
            for reservation in [held for held in self._reservations if held.detached and held.token == token]:
                reservation.released = True
                self._reservations.remove(reservation)
            self._backend.release(token)

    def slots_on(self, node: str) -> int:
        """Slots reserved on ``node``, by all pools."""
        with self._lock:
            return sum(slot.node == node for held in self._reservations for slot in held.slots)

    def _free(self, nodes: Sequence[Node]) -> dict[str, dict[str, float]]:
        free = {node.name: dict(node.resources) for node in nodes}
        for node in nodes:
            for held in node.taken.values():
                for name, amount in held.items():
                    free[node.name][name] = free[node.name].get(name, 0.0) - amount
        for reservation in self._reservations:
            for slot in reservation.slots:
                for name, amount in slot.resources.items():
                    if slot.node in free:
                        free[slot.node][name] = free[slot.node].get(name, 0.0) - amount
        return free

    def _place(
        self,
        counts: Sequence[int],
        want: Mapping[str, float],
        nodes: Sequence[Node],
        free: Mapping[str, Mapping[str, float]],
    ) -> list[str]:
        """A node for each entry: the largest entries choose first, each the fullest node that still has room."""
        chosen: dict[int, str] = {}
        for at in sorted(range(len(counts)), key=lambda at: -counts[at]):
            fits = [
                node
                for node, has in free.items()
                if node not in chosen.values()
                and all(amount * counts[at] <= has.get(name, 0.0) + 1e-9 for name, amount in want.items() if amount)
            ]
            if not fits:
                raise PlacementError(self._refusal(counts, want, nodes, free))
            chosen[at] = min(fits, key=lambda node: sum(free[node].get(name, 0.0) for name in want))
        return [chosen[at] for at in range(len(counts))]

    def _devices(
        self, counts: Sequence[int], chosen: Sequence[str], gpus: float, nodes: Sequence[Node]
    ) -> list[tuple[int, ...]]:
        """Accelerator indices for each slot: whole ones apart, fractions packed onto shared ones."""
        total = {node.name: int(node.resources.get("gpu", 0)) for node in nodes}
        load: dict[tuple[str, int], float] = {}
        for reservation in self._reservations:
            for slot in reservation.slots:
                for device in slot.devices:
                    load[slot.node, device] = load.get((slot.node, device), 0.0) + min(
                        1.0, slot.resources.get("gpu", 0)
                    )
        result: list[tuple[int, ...]] = []
        for node, count in zip(chosen, counts, strict=True):
            for _ in range(count):
                share = min(1.0, gpus)
                room = [d for d in range(total[node]) if load.get((node, d), 0.0) + share <= 1 + 1e-9]
                mine = tuple(room[: math.ceil(gpus)])
                if len(mine) < math.ceil(gpus):
                    raise PlacementError(f"no accelerator of {node} has {gpus} free: fractions on it do not add up")
                for device in mine:
                    load[node, device] = load.get((node, device), 0.0) + share
                result.append(mine)
        return result

    def _refusal(
        self,
        counts: Sequence[int],
        want: Mapping[str, float],
        nodes: Sequence[Node],
        free: Mapping[str, Mapping[str, float]],
    ) -> str:
        wanted = {name: amount for name, amount in want.items() if amount}
        asked = " + ".join(
            ", ".join([f"{amount * count:g} {name}" for name, amount in wanted.items()] or [f"{count} slots"])
            for count in counts
        )
        where = f"{len(counts)} node{'s' * (len(counts) > 1)}"
        has = ", ".join(
            f"{' and '.join(f'{has.get(name, 0):g} {name}' for name in wanted) or 'room'} free on {node}"
            for node, has in free.items()
        )
        held: dict[str, float] = {}
        for reservation in self._reservations:
            amount = sum(
                max((slot.resources.get(kind, 0.0) for kind in wanted), default=0.0) for slot in reservation.slots
            )
            if amount:
                name = "+".join(reservation.holders) or "a pool without a group"
                held[name] = held.get(name, 0.0) + amount
        for node in nodes:
            for name, resources in node.taken.items():
                amount = max((resources.get(kind, 0.0) for kind in wanted), default=0.0)
                if amount:
                    held[name] = held.get(name, 0.0) + amount
        holders = ", ".join(f"{name} ({count:g})" for name, count in held.items()) or "nobody"
        return f"asked for {asked} on {where}; {has}; held by: {holders}"
