"""Pools of slots: how they are placed on a cluster's nodes, reserved together, and cut into parts."""

from __future__ import annotations

import itertools
import math
import operator
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal, cast, overload

from podium.errors import ConfigError, PlacementError
from podium.runtime.backend import Backend
from podium.runtime.messages import Node, Place, Resources
from podium.spelling import write_count

Strategy = Literal["pack", "spread"]
Shares = dict[int, float]  # by device, what is left of it
EPSILON = 1e-9  # sums of fractions miss whole numbers by less


class Reservation:
    """The slots of one ``cluster.pool(...)``, and the names of the groups that run on them."""

    def __init__(self, token: Any, places: Sequence[Place], *, detached: bool = False) -> None:
        self.token = token
        self.slots = [
            Slot(location.node, location.resources, location.devices, self, number)
            for number, location in enumerate(places)
        ]
        self.detached = detached
        self.holders: list[str] = []
        self.released = False


@dataclass(frozen=True)
class Slot:
    """A place for one worker process: its node, what it holds there, and which of the node's accelerators."""

    node: str
    resources: Mapping[str, float]
    devices: tuple[int, ...]
    reservation: Reservation = field(repr=False, compare=False)
    number: int = field(repr=False)

    @property
    def place(self) -> Place:
        return Place(self.node, self.resources, self.devices)


class ResourcePool:
    """An ordered sequence of slots, node by node.

    ``pool[0:2]``, ``pool.split([1, 3])`` and ``a + b`` make other pools of the same slots, and reserve no further
    slots.
    """

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

    @property
    def reservations(self) -> list[Reservation]:
        """The reservations that the slots belong to, each once."""
        return list(dict.fromkeys(slot.reservation for slot in self.slots))

    def split(self, sizes: Sequence[int] | int) -> list[ResourcePool]:
        """Cut the pool into consecutive parts of these sizes. A single number is the size of every part.

        Raises:
            ConfigError: The sizes do not add up to the pool's slots, or one of them is below 1.
        """
        sizes = whole_numbers(sizes, "split")
        if isinstance(sizes, int):
            if sizes < 1 or len(self) % sizes:
                raise ConfigError(
                    f"split({sizes}): a size from 1 up that divides the pool's {write_count(len(self), 'slot')}"
                )
            sizes = [sizes] * (len(self) // sizes)
        if sum(sizes) != len(self) or any(size < 1 for size in sizes):
            raise ConfigError(
                f"split({sizes}): sizes from 1 up that add to the pool's {write_count(len(self), 'slot')}"
            )
        bounds = [sum(sizes[:at]) for at in range(len(sizes) + 1)]
        return [self[start:stop] for start, stop in itertools.pairwise(bounds)]


def whole_numbers(numbers: object, what: str) -> int | list[int]:
    """``numbers`` as an int or a list of them, of whichever kind of whole numbers. Raises ConfigError for others."""
    try:
        if hasattr(numbers, "__index__") and not getattr(numbers, "shape", ()):
            return operator.index(cast(int, numbers))
        return [operator.index(number) for number in cast("Sequence[int]", numbers)]
    except TypeError:
        raise ConfigError(f"{what}({numbers!r}): expected whole numbers, as in {what}(4) or {what}([4, 2])") from None


class Inventory:
    """Counts what is free on each node and who holds the rest, for every pool of this controller."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self._reservations: list[Reservation] = []

    def reserve(
        self,
        slots: Sequence[int] | int,
        want: Resources | Sequence[Resources],
        *,
        strategy: Strategy = "pack",
        labels: Mapping[str, str] | None = None,
        accelerator: str = "",
        detached: bool = False,
    ) -> ResourcePool:
        """Reserve slots that hold ``want``, each or one by one. ``slots`` are numbers for each node, or a total that
        goes to whichever nodes have room.

        Raises what ``Cluster.pool`` raises, and does not wait.
        """
        numbers = [slots] if isinstance(slots, int) else slots
        if not numbers or any(number < 1 or number % 1 for number in numbers):
            raise ConfigError(f"pool({slots}): numbers of slots are whole, from 1 up, and one for each node")
        if strategy not in ("pack", "spread"):
            raise ConfigError(f"pool(strategy={strategy!r}): expected 'pack' or 'spread'")
        wants = (
            [_check_amounts(want)] * sum(numbers)
            if isinstance(want, Mapping)
            else [_check_amounts(amounts) for amounts in want]
        )
        if accelerator and not all(amounts.get("gpu") for amounts in wants):
            raise ConfigError(f"pool(accelerator={accelerator!r}): say how many each slot has, as in gpus=1")
        with self._lock:
            wanted = (labels or {}).items()
            nodes = [node for node in self._backend.nodes() if wanted <= node.labels.items()]
            free, shares = self._free(nodes), self._shares(nodes, accelerator)
            for name, amounts in free.items() if accelerator else ():
                amounts["gpu"] = min(amounts.get("gpu", 0.0), sum(shares[name].values()))
            counts = slots
            if isinstance(counts, int):
                rooms = [_room(has, shares[node], wants[0], counts) for node, has in free.items()]
                counts = _counts(counts, rooms, strategy)
            parts = [wants[sum(counts[:at]) : sum(counts[: at + 1])] for at in range(len(counts))]
            chosen = _choose(parts, free, shares, strategy)
            if not chosen:
                raise PlacementError(self._refusal(slots, wants, labels or {}, accelerator, nodes, free))
            places = [
                Place(node, amounts, _deal(shares[node], amounts.get("gpu", 0.0)))
                for node, part in zip(chosen, parts, strict=True)
                for amounts in part
            ]
            token, places = self._backend.reserve(places, detached)
            reservation = Reservation(token, places, detached=detached)
            self._reservations.append(reservation)
            return ResourcePool(reservation.slots)

    def release(self, pool: ResourcePool) -> None:
        """Give back the reservations that ``pool`` is made of, and with them all slices. Raises PlacementError while a
        group runs on one of them."""
        self.refuse_others(pool)
        with self._lock:
            if holders := [name for reservation in pool.reservations for name in reservation.holders]:
                raise PlacementError(f"cannot release {pool}: groups still run on it: {holders}")
            for reservation in pool.reservations:
                if not reservation.released:
                    reservation.released = True
                    self._reservations.remove(reservation)
                    self._backend.release(reservation.token)

    def refuse_others(self, pool: ResourcePool) -> None:
        """Raise a ConfigError if ``pool`` is of another cluster."""
        if any(reservation not in self._reservations for reservation in pool.reservations if not reservation.released):
            raise ConfigError(f"{pool} belongs to another cluster; only that cluster can use and release it")

    def stopped(self, token: Any) -> None:
        """Give back the reservation of a detached group that was stopped, whoever reserved it."""
        with self._lock:
            for reservation in [
                candidate for candidate in self._reservations if candidate.detached and candidate.token == token
            ]:
                reservation.released = True
                self._reservations.remove(reservation)
            self._backend.release(token)

    def slots_on(self, node: str) -> int:
        """Number of slots that all pools have on ``node``."""
        with self._lock:
            return sum(slot.node == node for slot in self._slots())

    def _slots(self) -> Iterator[Slot]:
        return (slot for reservation in self._reservations for slot in reservation.slots)

    def _free(self, nodes: Sequence[Node]) -> dict[str, dict[str, float]]:
        """Amounts on each node that neither others nor this controller's pools hold."""
        free = {node.name: dict(node.resources) for node in nodes}
        reserved = [(node.name, amounts) for node in nodes for amounts in node.taken.values()]
        for where, amounts in [
            *reserved,
            *((slot.node, slot.resources) for slot in self._slots() if slot.node in free),
        ]:
            for name, amount in amounts.items():
                free[where][name] = free[where].get(name, 0.0) - amount
        return free

    def _shares(self, nodes: Sequence[Node], accelerator: str) -> dict[str, Shares]:
        """How much of each accelerator of each node this controller's pools leave, of those of one kind if given."""
        shares: dict[str, Shares] = {}
        for node in nodes:
            has = range(int(node.resources.get("gpu", 0))) if node.devices is None else node.devices
            kinds = dict(zip(has, node.kinds, strict=False))
            shares[node.name] = {device: 1.0 for device in has if _is_of_kind(kinds.get(device, ""), accelerator)}
        for slot in self._slots():
            for device in slot.devices:
                if device in shares.get(slot.node, ()):
                    shares[slot.node][device] -= min(1.0, slot.resources.get("gpu", 0.0))
        return shares

    def _refusal(
        self,
        slots: Sequence[int] | int,
        wants: Sequence[Resources],
        labels: Mapping[str, str],
        accelerator: str,
        nodes: Sequence[Node],
        free: Mapping[str, Resources],
    ) -> str:
        """The error message: what was asked, what is free where, and who holds the rest."""
        want = _total(wants)
        if isinstance(slots, int):
            one_slot = ", ".join(f"{amount:g} {name}" for name, amount in wants[0].items())
            request = f"{write_count(slots, 'slot')} of {one_slot or 'nothing'} each, on any nodes"
        else:
            left = iter(wants)
            totals = [_total(list(itertools.islice(left, count))) for count in slots]
            parts = [", ".join(f"{amount:g} {name}" for name, amount in total.items()) for total in totals]
            sizes = [part or write_count(count, "slot") for part, count in zip(parts, slots, strict=True)]
            request = f"{' + '.join(sizes)} on {write_count(len(slots), 'node')}"
        if labels:
            request += f" with the labels {dict(labels)}"
            if not nodes:
                known_labels = [dict(node.labels) for node in self._backend.nodes()]
                return f"asked for {request}; no node has them: the nodes' labels are {known_labels}"
        if accelerator:
            request += f" of the kind {accelerator!r}"
            if lacking := _explain_kinds(accelerator, nodes):
                return f"asked for {request}; {lacking}"
        has = ", ".join(
            f"{' and '.join(f'{amounts.get(name, 0):g} {name}' for name in want) or 'room'} free on {node}"
            for node, amounts in free.items()
        )
        if any(amounts.get("gpu", 1) < 1 for amounts in wants):
            has += " (a fraction of an accelerator is a part of one)"
        amounts_by_name: defaultdict[str, float] = defaultdict(float)
        for reservation in self._reservations:
            name = "+".join(reservation.holders) or "a pool without a group"
            amounts_by_name[name] += sum(_most(slot.resources, want) for slot in reservation.slots)
        for node in nodes:
            for name, amounts in node.taken.items():
                amounts_by_name[name] += _most(amounts, want)
        holders = ", ".join(f"{name} ({amount:g})" for name, amount in amounts_by_name.items() if amount) or "nobody"
        return f"asked for {request}; {has}; held by: {holders}"


def _explain_kinds(accelerator: str, nodes: Sequence[Node]) -> str:
    """Why no node has an ``accelerator`` of this kind; "" where one has."""
    kinds = {kind for node in nodes for kind in node.kinds}
    if any(_is_of_kind(kind, accelerator) for kind in kinds):
        return ""
    if not any(node.resources.get("gpu", 0) for node in nodes):
        return "no node has an accelerator"
    hint = "; CUDA_DEVICE_ORDER=PCI_BUS_ID lets unlike ones be told apart" if "" in kinds else ""
    models = sorted(kinds - {""}) or "not known here; leave accelerator= out, or choose nodes by labels="
    return f"no node has any: the kinds are {models}{hint}"


def _is_of_kind(kind: str, accelerator: str) -> bool:
    """Whether all words of ``accelerator``, such as "H100" or "A100 80GB", are words of the accelerator's model."""
    return {*re.findall(r"[a-z0-9]+", accelerator.lower())} <= {*re.findall(r"[a-z0-9]+", kind.lower())}


def _most(amounts: Mapping[str, float], want: Resources) -> float:
    """The largest of the amounts that are wanted."""
    return max((amounts.get(name, 0.0) for name in want), default=0.0)


def _check_amounts(want: Resources) -> Resources:
    """The amounts of one slot that are not 0. Raises ConfigError for those that a slot cannot hold."""
    numbers = [amount for amount in want.values() if isinstance(amount, Real)]
    if len(numbers) < len(want) or any(amount < 0 or not math.isfinite(amount) for amount in numbers):
        raise ConfigError(f"pool(): amounts of resources are numbers from 0 up; got {dict(want)}")
    gpus = want.get("gpu", 0.0)
    if gpus % 1 and gpus > 1:
        raise ConfigError(f"pool(gpus={gpus}): a slot has whole accelerators, or a fraction of one")
    return {name: amount for name, amount in want.items() if amount}


def _total(wants: Sequence[Resources]) -> dict[str, float]:
    """The sums of the amounts by name."""
    names = dict.fromkeys(name for want in wants for name in want)
    return {name: math.fsum(want.get(name, 0.0) for want in wants) for name in names}


def _room(free: Mapping[str, float], shares: Shares, want: Resources, limit: int) -> int:
    """How many slots of ``want`` fit on a node, up to ``limit``."""
    fits = [free.get(name, 0.0) / amount for name, amount in want.items()]
    if gpus := want.get("gpu", 0.0):
        fits.append(sum(int(share / min(1.0, gpus) + EPSILON) for share in shares.values()) / max(1.0, gpus))
    return max(0, min([limit, *(int(min(limit, fit + EPSILON)) for fit in fits)]))


def _counts(slots: int, rooms: Sequence[int], strategy: Strategy) -> list[int]:
    """Slots on each of as few nodes as have room for all of them, or of as many; none if all nodes together have too
    little."""
    largest = sorted((room for room in rooms if room), reverse=True)
    few = next((count for count in range(1, len(largest) + 1) if sum(largest[:count]) >= slots), 0)
    used = few if strategy == "pack" or not few else min(slots, len(largest))
    counts: list[int] = []
    for left in range(used, 0, -1):  # the node with the least room first: what it cannot take goes to the others
        counts.insert(0, min(largest[left - 1], (slots - sum(counts)) // left))
    return counts


def _choose(
    parts: Sequence[Sequence[Resources]],
    free: Mapping[str, Resources],
    shares: Mapping[str, Shares],
    strategy: Strategy,
) -> list[str]:
    """A node for each part; none if they do not fit. The largest parts choose first. Each takes the node with the least
    left that has room for it, or with the most."""
    wanted = _total([want for part in parts for want in part])
    left = {node: sum(has.get(name, 0.0) for name in wanted) for node, has in free.items()}
    chosen: dict[int, str] = {}
    for at in sorted(range(len(parts)), key=lambda at: -len(parts[at])):
        others = [node for node in free if node not in chosen.values()]
        fits = [node for node in others if _fits(parts[at], free[node], shares[node])]
        if not fits:
            return []
        chosen[at] = min(fits, key=lambda node: left[node] if strategy == "pack" else -left[node])
    return [chosen[at] for at in range(len(parts))]


def _fits(wants: Sequence[Resources], free: Resources, shares: Shares) -> bool:
    """Whether a node has room for all of these slots."""
    if any(amount > free.get(name, 0.0) + EPSILON * max(1.0, amount) for name, amount in _total(wants).items()):
        return False
    trial = dict(shares)
    return all(len(_deal(trial, want.get("gpu", 0.0))) == math.ceil(want.get("gpu", 0.0)) for want in wants)


def _deal(shares: Shares, gpus: float) -> tuple[int, ...]:
    """The accelerators of one slot, taken off ``shares``: whole ones apart, fractions together on one."""
    share = min(1.0, gpus)
    mine = [device for device, left in shares.items() if left + EPSILON >= share][: math.ceil(gpus)]
    for device in mine:
        shares[device] -= share
    return tuple(mine)
