"""Meshes of ranks, and how a call's arguments reach the ranks. A user's own way is a subclass of :class:`Dispatch`."""

import copy
import heapq
import itertools
import math
import operator
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NoReturn, TypeVar, cast

from podium.errors import ConfigError, DataError
from podium.runtime.rows import count_rows, open_rows, row_groups, slice_rows, take_rows, token_lengths
from podium.spelling import write_count

T = TypeVar("T")
_HEAVIEST: Final = 1.05  # times the mean of all parts
Ranks = int | slice | Sequence[int]
"""Ranks as a script chooses them: one, a slice of them, or several in the order given."""


class Mesh:
    """World ranks as a grid of named axes, the last axis varying fastest.

    ``output`` gives the coordinate of an axis at which results are taken; the default is 0. Results of a pipeline are
    taken at its last stage:

    >>> mesh = Mesh(pp=2, dp=2, tp=2, output={"pp": -1})
    >>> mesh.coordinate(5)
    {'pp': 1, 'dp': 0, 'tp': 1}
    >>> mesh.collectors("dp")
    (4, 6)

    Raises:
        ConfigError: There are no axes, a size is below 1, or an ``output`` is outside its axis.
    """

    def __init__(
        self, axes: Mapping[str, int] | None = None, /, *, output: Mapping[str, int] | None = None, **sizes: int
    ) -> None:
        if not isinstance(axes or {}, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"Mesh({axes!r}): expected axes and their sizes, as in Mesh(dp=4)")
        self.axes: dict[str, int] = {
            name: check_count(size, f"mesh axis {name!r} has size {size!r}")
            for name, size in {**(axes or {}), **sizes}.items()
        }
        if not self.axes:
            raise ConfigError("a mesh needs at least one axis, as in Mesh(dp=4)")
        self.output: dict[str, int] = {}
        if not isinstance(output or {}, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"a mesh's output={output!r}: expected an axis and its coordinate, as in {{'pp': -1}}")
        for axis, at in (output or {}).items():
            if type(at) is not int:
                raise ConfigError(f"output of axis {axis!r} is {at!r}; expected a coordinate, or -1 for the last one")
            if not -self.axis_size(axis) <= at < self.axis_size(axis):
                raise ConfigError(
                    f"output of axis {axis!r} is at {at}, but the axis has {write_count(self.axes[axis], 'coordinate')}"
                )
            self.output[axis] = at % self.axes[axis]
        self.size = math.prod(self.axes.values())
        grid = itertools.product(*(range(size) for size in self.axes.values()))
        self._places = [dict(zip(self.axes, coordinate, strict=True)) for coordinate in grid]
        self._collectors: dict[str, tuple[int, ...]] = {}  # by axis: every call that shards asks

    @classmethod
    def from_coordinates(
        cls, coordinates: Sequence[Mapping[str, int]], *, output: Mapping[str, int] | None = None
    ) -> "Mesh":
        """Return the mesh in which rank r stands at ``coordinates[r]``, as a framework has numbered its ranks.

        >>> mesh = Mesh.from_coordinates([{"dp": 0, "tp": 0}, {"dp": 1, "tp": 0}])
        >>> mesh.collectors("dp")
        (0, 1)

        Raises:
            ConfigError: The coordinates are not those of a whole grid, each with one rank.
        """
        axes = list(coordinates[0]) if coordinates else []
        for rank, coordinate in enumerate(coordinates):
            if not isinstance(coordinate, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigError(
                    f"rank {rank} is at {coordinate!r}; expected axes and numbers, as in {{'dp': 0, 'tp': 1}}"
                )
            if {*coordinate} != {*axes}:
                raise ConfigError(f"rank {rank} has the axes {sorted(coordinate)}, and rank 0 has {sorted(axes)}")
            if wrong := {axis: at for axis, at in coordinate.items() if not (type(at) is int and at >= 0)}:
                raise ConfigError(f"rank {rank} is at {wrong}; coordinates are whole numbers from 0 up")
        sizes = {axis: 1 + max(coordinate[axis] for coordinate in coordinates) for axis in axes}
        ranks_at: dict[tuple[int, ...], int] = {}
        for rank, coordinate in enumerate(coordinates):
            other = ranks_at.setdefault(tuple(coordinate[axis] for axis in axes), rank)
            if other != rank:
                raise ConfigError(f"ranks {other} and {rank} are both at {dict(coordinate)}")
        if math.prod(sizes.values()) != len(coordinates):
            every = (_coordinate_of(number, sizes) for number in range(len(coordinates) + 1))
            empty = next(place for place in every if tuple(place.values()) not in ranks_at)
            grid = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
            raise ConfigError(f"no rank is at {empty} of Mesh({grid})")
        mesh = cls(sizes, output=output)
        mesh._places = [{axis: coordinate[axis] for axis in axes} for coordinate in coordinates]
        return mesh

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{axis}={size}' for axis, size in self.axes.items())})"

    def __eq__(self, other: object) -> bool:
        mine = repr(self), self.output, self._places
        return isinstance(other, Mesh) and mine == (repr(other), other.output, other._places)

    def __hash__(self) -> int:
        return hash(repr(self))

    def axis_size(self, axis: str) -> int:
        """Number of coordinates along ``axis``; ConfigError names the axes there are."""
        try:
            return self.axes[axis]
        except KeyError:
            raise ConfigError(f"no axis {axis!r} in {self}; its axes are {list(self.axes)}") from None

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the coordinate of ``rank`` on each axis. Raises ConfigError if the mesh has no such rank."""
        if not 0 <= rank < self.size:
            raise ConfigError(f"rank {rank} is outside {self} of {write_count(self.size, 'rank')}")
        return dict(self._places[rank])

    def along(self, axis: str) -> tuple[int, ...]:
        """For each rank in order, its coordinate on ``axis``."""
        self.axis_size(axis)
        return tuple(coordinate[axis] for coordinate in self._places)

    def collectors(self, axis: str) -> tuple[int, ...]:
        """One rank for each coordinate of ``axis``, in that order: the ranks whose results are taken."""
        if axis not in self._collectors:
            self.axis_size(axis)
            others = {name: self.output.get(name, 0) for name in self.axes if name != axis}
            chosen = (rank for rank, coordinate in enumerate(self._places) if others.items() <= coordinate.items())
            self._collectors[axis] = tuple(sorted(chosen, key=lambda rank: self._places[rank][axis]))
        return self._collectors[axis]


@dataclass(frozen=True)
class World:
    """The ranks a call can go to, and their meshes by name."""

    size: int
    meshes: Mapping[str, Mesh]


@dataclass(frozen=True)
class Arguments:
    """The arguments of one call by parameter name, in the order of the signature."""

    method: str  # what errors call the endpoint
    values: Mapping[str, Any]

    def refuse_per_rank(self) -> None:
        """Raises a ConfigError if an argument is ``per_rank([...])``."""
        for name, value in self.values.items():
            if isinstance(value, PerRank):
                raise ConfigError(
                    f"{self.method}: argument {name!r} is per_rank([...]), but the endpoint does not scatter; "
                    "declare it with @endpoint(dispatch=scatter())"
                )


@dataclass(frozen=True)
class RowPlan:
    """Which rows went where."""

    rows: tuple[Sequence[int], ...]  # for each part, the rows sent, in the order sent, padding rows at the end
    padding: tuple[int, ...]  # for each part, how many rows at its end are repetitions
    contiguous: bool  # the parts in order are the caller's rows in order
    tokens: tuple[int, ...] = ()  # for each part, its tokens without padding; empty where nothing counts tokens

    @property
    def sizes(self) -> list[int]:
        """For each part, how many rows it has without padding."""
        return [len(rows) - short for rows, short in zip(self.rows, self.padding, strict=True)]

    def fault(self) -> str:
        """What is wrong in a plan that a user wrote, by which rows would change places; empty if nothing is."""
        if len(self.padding) != len(self.rows):
            return f"has padding for {len(self.padding)} of {write_count(len(self.rows), 'part')}"
        sent = [row for rows, size in zip(self.rows, self.sizes, strict=True) for row in rows[:size]]
        if self.contiguous and sent != sorted(sent):
            return f"is contiguous=True, and sends rows in another order: {reprlib.repr(sent)}"
        return ""

    def back(self) -> list[int]:
        """Where each of the caller's rows is, once the parts are joined without their padding."""
        sent = [row for rows, size in zip(self.rows, self.sizes, strict=True) for row in rows[:size]]
        return sorted(range(len(sent)), key=sent.__getitem__)


@dataclass(frozen=True)
class Split:
    """One call's arguments, split."""

    ranks: Sequence[int]  # the ranks that are called
    shared: Mapping[str, Any]  # arguments by name that all of them receive; they are packed once
    own: Sequence[Mapping[str, Any]] | None  # for each of ``ranks``, its own arguments by name; None if there are none
    collectors: Sequence[int]  # the ranks whose results count, in the order in which they are joined
    plan: RowPlan | None = None  # which rows went to each of ``collectors``; None if no rows were split


class PerRank:
    """An argument that is an explicit value for each rank, in rank order."""

    __slots__ = ("values",)

    def __init__(self, values: Sequence[Any]) -> None:
        if isinstance(values, Mapping | Set | str | bytes):  # whose parts are keys, have no order, or are letters
            what = f"per_rank({type(cast(Any, values)).__name__}): expected a list with one value for each rank"
            raise ConfigError(f"{what}, in the order of ranks")
        self.values = list(values)

    def __reduce__(self) -> NoReturn:
        raise TypeError("per_rank([...]) must be a whole argument, not a part of one")


def per_rank(values: Sequence[T]) -> T:
    """One value for each rank, for an endpoint with ``dispatch=scatter()``. Typed as the value that a rank receives."""
    return cast(T, PerRank(values))


class Dispatch(ABC):
    """Splits the arguments of one call over the ranks of a group."""

    pad: bool | None = None
    """Whether rows are repeated so that all parts have as many; None where no rows are split."""

    def with_pad(self, pad: bool) -> "Dispatch":
        """Return this dispatch with another ``pad``. Raises ConfigError where no rows are split."""
        raise ConfigError(f"{type(self).__name__} splits no rows; only endpoints that shard can be padded")

    @abstractmethod
    def split(self, arguments: Arguments, world: World) -> Split:
        """Split ``arguments``. Raises a ConfigError that names the method and the argument."""


class broadcast(Dispatch):
    """Every rank receives every argument."""

    def split(self, arguments: Arguments, world: World) -> Split:
        arguments.refuse_per_rank()
        ranks = range(world.size)
        return Split(ranks, arguments.values, None, ranks)


class only(Dispatch):
    """One rank is called, with every argument."""

    def __init__(self, rank: int = 0) -> None:
        if not hasattr(rank, "__index__"):
            raise ConfigError(f"only(rank={rank!r}): a rank is a whole number")
        self.rank = operator.index(rank)

    def split(self, arguments: Arguments, world: World) -> Split:
        arguments.refuse_per_rank()
        if not -world.size <= self.rank < world.size:
            raise ConfigError(
                f"{arguments.method}: only(rank={self.rank}) in a group of {write_count(world.size, 'rank')}"
            )
        ranks = (self.rank % world.size,)
        return Split(ranks, arguments.values, None, ranks)


class scatter(Dispatch):
    """Arguments given as ``per_rank([...])`` go one to each rank, and the others go to every rank."""

    def split(self, arguments: Arguments, world: World) -> Split:
        apart = {name: value.values for name, value in arguments.values.items() if isinstance(value, PerRank)}
        if not apart:
            raise ConfigError(f"{arguments.method} scatters: wrap at least one argument in per_rank([...])")
        for name, values in apart.items():
            if len(values) != world.size:
                raise ConfigError(
                    f"{arguments.method}: argument {name!r} has {write_count(len(values), 'value')} for "
                    f"{write_count(world.size, 'rank')}"
                )
        ranks = range(world.size)
        shared = {name: value for name, value in arguments.values.items() if name not in apart}
        return Split(ranks, shared, [{name: values[rank] for name, values in apart.items()} for rank in ranks], ranks)


class shard(Dispatch):
    """Rows are split over the coordinates of a mesh axis, and ranks along the other axes receive the same rows.

    Args:
        mesh: Name of the group's mesh.
        axis: Axis over which rows are split.
        balance: "rows" gives contiguous parts whose sizes differ by at most one. "tokens" gives parts of about equal
            numbers of tokens (longest row first to the lightest part), each in the caller's order. Rows of one group,
            such as completions of a prompt, then stay together where that keeps each part near the mean: see
            :meth:`~podium.data.Rows.row_groups`.
        pad: Repeat rows so that every part has the same number, at least one. ``concat`` takes them off again.
        args: Names of the arguments to split; the others go to every rank. None splits all arguments.
        group_size: Number of consecutive rows that stay together, such as the completions of one prompt.

    Single values beside rows in a dict go to every rank. Rows that do not divide are split unevenly, and a part may be
    empty unless ``pad``.
    """

    def __init__(
        self,
        mesh: str = "default",
        *,
        axis: str = "dp",
        balance: Literal["rows", "tokens"] = "rows",
        pad: bool = False,
        args: Sequence[str] | None = None,
        group_size: int = 1,
    ) -> None:
        if balance not in ("rows", "tokens"):
            raise ConfigError(f"shard(balance={balance!r}): expected 'rows' or 'tokens'")
        if isinstance(args, str):
            raise ConfigError(f"shard(args={args!r}): expected a tuple of names, as in shard(args=({args!r},))")
        self.mesh, self.axis, self.balance, self.pad, self.args = mesh, axis, balance, _check_pad(pad), args
        self.group_size = check_count(group_size, f"shard(group_size={group_size!r})")

    def with_pad(self, pad: bool) -> "Dispatch":
        _check_pad(pad)
        changed = copy.copy(self)
        changed.pad = pad
        return changed

    def split(self, arguments: Arguments, world: World) -> Split:
        mesh = world.meshes.get(self.mesh)
        if mesh is None:
            raise ConfigError(f"{arguments.method}: no mesh {self.mesh!r} in this group; it has {sorted(world.meshes)}")
        sharded = self._shard(arguments)
        if self.axis not in mesh.axes:
            axis = f"axis {self.axis!r} of mesh {self.mesh!r}, whose axes are {[*mesh.axes]}"
            raise ConfigError(f"{arguments.method} shards over {axis}; name one of these, as in shard(name, axis='tp')")
        plan = self._plan(arguments.method, sharded, mesh.axis_size(self.axis))
        if len(plan.rows) == 1 and plan.contiguous and not plan.padding[0]:
            parts = [sharded]  # one part has all rows as they are
        else:
            parts = [{name: _part(value, rows) for name, value in sharded.items()} for rows in plan.rows]
        shared = {name: value for name, value in arguments.values.items() if name not in sharded}
        parts_by_rank = [parts[at] for at in mesh.along(self.axis)]
        return Split(range(mesh.size), shared, parts_by_rank, mesh.collectors(self.axis), plan)

    def _shard(self, arguments: Arguments) -> dict[str, Any]:
        arguments.refuse_per_rank()
        names = tuple(arguments.values) if self.args is None else tuple(self.args)
        values = {name: arguments.values[name] for name in names if arguments.values.get(name) is not None}
        if not values:
            raise ConfigError(f"{arguments.method} shards its arguments, but none of {list(names)} was given")
        try:
            return {name: open_rows(value, f"argument {name!r}") for name, value in values.items()}
        except DataError as error:
            raise ConfigError(
                f"{arguments.method} cannot shard: {error}. shard(args=(...,)) names the arguments to split, and the "
                "others go to every rank"
            ) from error

    def _plan(self, method: str, sharded: Mapping[str, Any], parts: int) -> RowPlan:
        counts = {name: count_rows(value) for name, value in sharded.items()}
        if len(set(counts.values())) > 1:
            raise ConfigError(f"{method}: arguments to shard have unequal numbers of rows: {counts}")
        total = next(iter(counts.values()))
        size, groups = self.group_size, total // self.group_size
        if groups * size != total:
            raise ConfigError(
                f"{method}: {write_count(total, 'row is', 'rows are')} no whole number of groups of "
                f"{write_count(size, 'row')}, which shard(group_size={size}) keeps together"
            )
        tokens: tuple[int, ...] = ()
        if self.balance == "rows":
            rows = [range(at * groups // parts * size, (at + 1) * groups // parts * size) for at in range(parts)]
        else:
            name, value = next(iter(sharded.items()))
            lengths = token_lengths(value)
            if lengths is None:
                raise ConfigError(
                    f"{method}: argument {name!r} has no jagged column whose tokens balance='tokens' could count; use "
                    "balance='rows'"
                )
            together = row_groups(value) if size == 1 else None
            rows = _balance(lengths, parts, size) if together is None else _group_rows(lengths, together, parts)
            tokens = tuple(sum(lengths[row] for row in part) for part in rows)
        if self.pad and not total:
            raise ConfigError(f"{method}: cannot pad an empty batch: there is no row to repeat")
        width = max(len(part) for part in rows) if self.pad else 0
        padding = tuple(max(0, width - len(part)) for part in rows)
        padded = tuple(
            [*part, *[*(part[-size:] or range(size))] * (short // size)] if short else part
            for part, short in zip(rows, padding, strict=True)
        )
        return RowPlan(padded, padding, self.balance == "rows" or parts == 1, tokens)


class DispatchWrapper(Dispatch):
    """A dispatch around another one, whose rows it leaves as they are."""

    def __init__(self, inner: Dispatch) -> None:
        self._inner = inner
        self.pad = inner.pad

    def with_pad(self, pad: bool) -> Dispatch:
        changed = copy.copy(self)
        changed._inner, changed.pad = self._inner.with_pad(pad), pad
        return changed


class OnRanks(DispatchWrapper):
    """Another dispatch over some ranks of a group, as if the group had no others.

    Raises:
        ConfigError: A rank is outside the group or given twice, or there is none.
    """

    def __init__(self, inner: Dispatch, ranks: Ranks, size: int, group: str) -> None:
        every = range(size)
        chosen: Any = every[ranks] if isinstance(ranks, slice) else ranks
        is_single = hasattr(chosen, "__index__") and not getattr(chosen, "shape", ())  # an array has __index__ too
        try:
            if any(isinstance(rank, bool) for rank in ([chosen] if is_single else chosen)):
                raise TypeError
            self.ranks: list[int] = [every[rank] for rank in ([chosen] if is_single else chosen)]
        except (IndexError, TypeError):
            raise ConfigError(
                f"on({ranks!r}) in {group}, which has {write_count(size, 'rank')}: a rank, a slice or a list"
            ) from None
        if not self.ranks or len({*self.ranks}) < len(self.ranks):
            raise ConfigError(
                f"on({ranks!r}) in {group} of {write_count(size, 'rank')}: at least one rank, and none of them twice"
            )
        super().__init__(inner)
        self._world = World(len(self.ranks), {"default": Mesh(dp=len(self.ranks))})

    def split(self, arguments: Arguments, world: World) -> Split:
        if isinstance(self._inner, shard) and self._inner.mesh != "default":
            raise ConfigError(
                f"{arguments.method} shards over mesh {self._inner.mesh!r}, which needs all ranks of the group; "
                f"it cannot run on({self.ranks})"
            )
        split = self._inner.split(arguments, self._world)
        ranks, collectors = ([self.ranks[at] for at in places] for places in (split.ranks, split.collectors))
        return replace(split, ranks=ranks, collectors=collectors)


class CheckedDispatch(DispatchWrapper):
    """A user's own dispatch, whose splits are checked."""

    def split(self, arguments: Arguments, world: World) -> Split:
        split: Any = self._inner.split(arguments, world)
        if not isinstance(split, Split):
            wrong = f"returned {type(split).__name__}, not a Split"
        elif not split.ranks or any(rank not in range(world.size) for rank in split.ranks):
            wrong = f"has ranks={[*split.ranks]}; they are some of 0..{world.size - 1}"
        elif len({*split.ranks}) < len(split.ranks):
            wrong = f"has ranks={[*split.ranks]}, some of them twice"
        elif split.own is not None and len(split.own) != len(split.ranks):
            entries, ranks = write_count(len(split.own), "entry", "entries"), write_count(len(split.ranks), "rank")
            wrong = f"has {entries} in own= for {ranks}; it needs one for each"
        elif odd := {*split.collectors} - {*split.ranks}:
            wrong = f"collects from ranks {sorted(odd)}, which it does not call"
        elif split.plan is not None and len(split.plan.rows) != len(split.collectors):
            parts, collectors = write_count(len(split.plan.rows), "part"), write_count(len(split.collectors), "rank")
            wrong = f"plans rows for {parts} and collects from {collectors}"
        elif split.plan is not None and (fault := split.plan.fault()):
            wrong = f"has a RowPlan that {fault}"
        else:
            return split
        raise ConfigError(f"{arguments.method}: the Split of {type(self._inner).__name__} {wrong}")


class ShippedDispatch(DispatchWrapper):
    """Another dispatch, for the arguments of ``function``, which travels with them and runs on the worker ``name``."""

    def __init__(self, inner: Dispatch, name: str, function: Callable[..., Any]) -> None:
        super().__init__(inner)
        self._name, self._function = name, function

    def split(self, arguments: Arguments, world: World) -> Split:
        split = self._inner.split(arguments, world)
        shared = {"worker": self._name, "function": self._function, "values": split.shared}
        if split.own is None:
            return replace(split, shared=shared)
        wrapped = {id(part): {"own": part} for part in split.own}  # ranks with the very same part keep sharing it
        return replace(split, shared=shared, own=[wrapped[id(part)] for part in split.own])


def check_count(number: Any, what: str) -> int:
    """Return ``number`` as an int. Raises a ConfigError, which begins with ``what``, unless it is a whole number from 1
    up."""
    if isinstance(number, bool) or not hasattr(number, "__index__") or number < 1:
        raise ConfigError(f"{what}: expected a whole number from 1 up")
    return operator.index(number)


def _check_pad(pad: object) -> bool:
    """Return ``pad``. Raises ConfigError where it is something else, such as a number of rows."""
    if not isinstance(pad, bool):
        raise ConfigError(f"pad={pad!r}: expected True, which gives every rank the same number of rows, or False")
    return pad


def _coordinate_of(number: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """The coordinate of place ``number`` of a grid, whose last axis varies fastest."""
    coordinate: dict[str, int] = {}
    for axis, size in reversed([*sizes.items()]):
        number, coordinate[axis] = divmod(number, size)
    return {axis: coordinate[axis] for axis in sizes}


def join_meshes(
    name: str, meshes: Mapping[str, Mesh], declared: Sequence[Mapping[str, tuple[Mapping[str, int], Mapping[str, int]]]]
) -> dict[str, Mesh]:
    """Return the meshes that the ranks of worker ``name`` have declared, each rank its coordinates and the ``output``.

    Raises:
        ConfigError: A mesh was given by ``start(meshes=...)`` already, or the ranks do not agree on one.
    """
    joined: dict[str, Mesh] = {}
    for mesh in dict.fromkeys(mesh for of_rank in declared for mesh in of_rank):
        what = f"{name}: mesh {mesh!r}, which its workers declare"
        if mesh != "default" and mesh in meshes:
            raise ConfigError(f"{what}, was given by start(meshes=...) too; leave it out of one of the two")
        if lacking := [rank for rank, of_rank in enumerate(declared) if mesh not in of_rank]:
            raise ConfigError(f"{what}: ranks {lacking} do not; every rank calls ctx.declare_mesh in its constructor")
        outputs = [of_rank[mesh][1] for of_rank in declared]
        if odd := [rank for rank, output in enumerate(outputs) if output != outputs[0]]:
            raise ConfigError(f"{what}: rank {odd[0]} has output={outputs[odd[0]]}, and rank 0 has {outputs[0]}")
        try:
            joined[mesh] = Mesh.from_coordinates([of_rank[mesh][0] for of_rank in declared], output=outputs[0])
        except ConfigError as error:
            raise ConfigError(f"{what}: {error}") from None
    return joined


def _part(value: Any, rows: Sequence[int]) -> Any:
    return slice_rows(value, rows.start, rows.stop) if isinstance(rows, range) else take_rows(value, rows)


def _group_rows(lengths: Sequence[int], groups: Sequence[int], parts: int) -> Sequence[Sequence[int]]:
    """As :func:`_balance`, where rows of a group stay together: all, or halves, quarters and so on of them, until no
    part has more than ``_HEAVIEST`` times the mean."""
    rows = dict[int, list[int]]()
    for row, group in enumerate(groups):
        rows.setdefault(group, []).append(row)
    size = max(map(len, rows.values()), default=1)
    while size > 1 and parts > 1:
        units = [members[at : at + size] for members in rows.values() for at in range(0, len(members), size)]
        sums = [sum(lengths[row] for row in unit) for unit in units]
        chosen = _balance(sums, parts, 1)
        if max(sum(sums[unit] for unit in part) for part in chosen) * parts <= _HEAVIEST * sum(sums):
            return [sorted(row for unit in part for row in units[unit]) for part in chosen]
        size = -(-size // 2)
    return _balance(lengths, parts, 1)


def _balance(lengths: Sequence[int], parts: int, size: int) -> Sequence[Sequence[int]]:
    """The rows of each part: groups of ``size`` rows, those with most tokens first to the lightest part."""
    if parts == 1:
        return [range(len(lengths))]
    if size > 1:
        sums = [sum(lengths[at : at + size]) for at in range(0, len(lengths), size)]
        return [[group * size + at for group in part for at in range(size)] for part in _balance(sums, parts, 1)]
    loads = [(0, 0, part) for part in range(parts)]  # tokens, rows, part
    chosen: list[list[int]] = [[] for _ in range(parts)]
    for row in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):  # equals keep their order
        load, count, part = loads[0]
        chosen[part].append(row)
        heapq.heapreplace(loads, (load + lengths[row], count + 1, part))
    return [sorted(rows) for rows in chosen]
