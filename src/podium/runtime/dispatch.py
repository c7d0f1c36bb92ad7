"""How a call's arguments reach the ranks: small objects; a user's own is a subclass of :class:`Dispatch`."""

from __future__ import annotations

import heapq
import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from podium.errors import ConfigError
from podium.runtime.markers import PerRank
from podium.runtime.mesh import Mesh
from podium.runtime.rows import count_rows, slice_rows, take_rows, token_lengths

__all__ = ["Arguments", "Broadcast", "Dispatch", "Only", "RowPlan", "Scatter", "Shard", "Split", "World"]
__all__ += ["broadcast", "only", "scatter", "shard"]


@dataclass(frozen=True)
class World:
    """The ranks a call can go to, and their meshes by name."""

    size: int
    meshes: Mapping[str, Mesh]


@dataclass(frozen=True)
class Arguments:
    """The arguments of one call by parameter name, in the order of the signature; ``method`` serves the errors."""

    method: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class RowPlan:
    """Which rows went where.

    Attributes:
        rows: for each part, the rows sent, in the order sent, padding rows at the end.
        padding: for each part, how many rows at its end are repetitions.
        contiguous: the parts in order are the caller's rows in order.
        tokens: for each part, its tokens without padding; empty where nothing counts tokens.
    """

    rows: tuple[Sequence[int], ...]
    padding: tuple[int, ...]
    contiguous: bool
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class Split:
    """One call's arguments, split.

    Attributes:
        ranks: the ranks that are called.
        shared: arguments by name that all of them receive; they are packed once.
        own: for each of ``ranks``, its own arguments by name; None if there are none.
        collectors: the ranks whose results count, in the order in which to join them.
        plan: which rows went to each of ``collectors``; None if no rows were split.
    """

    ranks: Sequence[int]
    shared: Mapping[str, Any]
    own: Sequence[Mapping[str, Any]] | None
    collectors: Sequence[int]
    plan: RowPlan | None = field(default=None)


class Dispatch(ABC):
    """Splits the arguments of one call over the ranks of a group."""

    @abstractmethod
    def split(self, arguments: Arguments, world: World) -> Split:
        """Split ``arguments``; raises ConfigError that names the method and the argument."""


class Broadcast(Dispatch):
    """Every rank receives every argument."""

    def split(self, arguments: Arguments, world: World) -> Split:
        _refuse_per_rank(arguments)
        ranks = range(world.size)
        return Split(ranks, arguments.values, None, ranks)


class Only(Dispatch):
    """One rank is called, with every argument."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank

    def split(self, arguments: Arguments, world: World) -> Split:
        _refuse_per_rank(arguments)
        if not -world.size <= self.rank < world.size:
            raise ConfigError(f"{arguments.method}: only(rank={self.rank}) in a group of {world.size} ranks")
        ranks = (self.rank % world.size,)
        return Split(ranks, arguments.values, None, ranks)


class Scatter(Dispatch):
    """Arguments given as ``per_rank([...])`` go one to a rank; the others to every rank."""

    def split(self, arguments: Arguments, world: World) -> Split:
        own: list[dict[str, Any]] = [{} for _ in range(world.size)]
        shared: dict[str, Any] = {}
        for name, value in arguments.values.items():
            if not isinstance(value, PerRank):
                shared[name] = value
                continue
            if len(value.values) != world.size:
                raise ConfigError(
                    f"{arguments.method}: argument {name!r} has {len(value.values)} values for {world.size} ranks"
                )
            for mine, item in zip(own, value.values, strict=True):
                mine[name] = item
        ranks = range(world.size)
        if len(shared) == len(arguments.values):
            raise ConfigError(f"{arguments.method} scatters: wrap at least one argument in per_rank([...])")
        return Split(ranks, shared, own, ranks)


class Shard(Dispatch):
    """Rows are split over the coordinates of a mesh axis; ranks along the other axes receive the same rows.

    Args:
        mesh: name of the group's mesh.
        axis: the axis over which rows are split.
        balance: "rows" gives contiguous parts whose sizes differ by at most one; "tokens" gives parts of about equal
            numbers of tokens (longest row first to the lightest part), each in the caller's order.
        pad: repeat rows so that every part has the same number, at least one; ``concat`` takes them off again.
        args: names of the arguments to split; the others are broadcast. None: all of them are split.

    Rows that do not divide are split unevenly, and a part may be empty unless ``pad``.
    """

    def __init__(
        self,
        mesh: str = "default",
        *,
        axis: str = "dp",
        balance: Literal["rows", "tokens"] = "rows",
        pad: bool = False,
        args: Sequence[str] | None = None,
    ) -> None:
        if balance not in ("rows", "tokens"):
            raise ConfigError(f"shard(balance={balance!r}): expected 'rows' or 'tokens'")
        if isinstance(args, str):
            raise ConfigError(f"shard(args={args!r}): expected a tuple of names, as in shard(args=({args!r},))")
        self.mesh, self.axis, self.balance, self.pad, self.args = mesh, axis, balance, pad, args

    def split(self, arguments: Arguments, world: World) -> Split:
        mesh = world.meshes.get(self.mesh)
        if mesh is None:
            raise ConfigError(f"{arguments.method}: no mesh {self.mesh!r} in this group; it has {sorted(world.meshes)}")
        sharded = self._sharded(arguments)
        plan = self._plan(arguments.method, sharded, mesh.axis_size(self.axis))
        parts = [{name: _part(value, plan, at) for name, value in sharded.items()} for at in range(len(plan.rows))]
        shared = {name: value for name, value in arguments.values.items() if name not in sharded}
        own = [parts[at] for at in _along(mesh, self.axis)]
        return Split(range(mesh.size), shared, own, _collectors(mesh, self.axis), plan)

    def _sharded(self, arguments: Arguments) -> dict[str, Any]:
        _refuse_per_rank(arguments)
        names = tuple(arguments.values) if self.args is None else tuple(self.args)
        sharded = {name: arguments.values[name] for name in names if arguments.values.get(name) is not None}
        if not sharded:
            raise ConfigError(f"{arguments.method} shards its arguments, but none of {list(names)} was given")
        return sharded

    def _plan(self, method: str, sharded: Mapping[str, Any], parts: int) -> RowPlan:
        counts = {name: count_rows(value, f"{method}: argument {name!r}") for name, value in sharded.items()}
        if len(set(counts.values())) > 1:
            raise ConfigError(f"{method}: arguments to shard have unequal numbers of rows: {counts}")
        total = next(iter(counts.values()))
        tokens: tuple[int, ...] = ()
        if self.balance == "rows":
            rows = _even(total, parts)
        else:
            name, value = next(iter(sharded.items()))
            lengths = token_lengths(value, f"{method}: argument {name!r}")
            rows = _balanced(lengths, parts)
            tokens = tuple(sum(lengths[row] for row in part) for part in rows)
        contiguous = self.balance == "rows" or parts == 1
        if not self.pad:
            return RowPlan(tuple(rows), (0,) * parts, contiguous, tokens)
        if total == 0:
            raise ConfigError(f"{method}: cannot pad an empty batch: there is no row to repeat")
        width = max(len(part) for part in rows)
        padding = tuple(width - len(part) for part in rows)
        padded = tuple(
            [*part, *((part[-1] if len(part) else 0,) * short)] for part, short in zip(rows, padding, strict=True)
        )
        return RowPlan(padded, padding, contiguous, tokens)


def _refuse_per_rank(arguments: Arguments) -> None:
    for name, value in arguments.values.items():
        if isinstance(value, PerRank):
            raise ConfigError(
                f"{arguments.method}: argument {name!r} is per_rank([...]), but the endpoint does not scatter; "
                "declare it with @endpoint(dispatch=scatter())"
            )


def _part(value: Any, plan: RowPlan, at: int) -> Any:
    rows = plan.rows[at]
    if isinstance(rows, range):
        return slice_rows(value, rows.start, rows.stop)
    return take_rows(value, rows)


def _even(total: int, parts: int) -> list[range]:
    bounds = [at * total // parts for at in range(parts + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(bounds)]


def _balanced(lengths: Sequence[int], parts: int) -> Sequence[Sequence[int]]:
    if parts == 1:
        return [range(len(lengths))]
    loads = [(0, 0, part) for part in range(parts)]  # tokens, rows, part
    chosen: list[list[int]] = [[] for _ in range(parts)]
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        load, count, part = heapq.heappop(loads)
        chosen[part].append(row)
        heapq.heappush(loads, (load + lengths[row], count + 1, part))
    return [sorted(rows) for rows in chosen]


@lru_cache(maxsize=256)
def _along(mesh: Mesh, axis: str) -> tuple[int, ...]:
    return mesh.along(axis)


@lru_cache(maxsize=256)
def _collectors(mesh: Mesh, axis: str) -> tuple[int, ...]:
    return mesh.collectors(axis)


broadcast = Broadcast
scatter = Scatter
shard = Shard
only = Only
