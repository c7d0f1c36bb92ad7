"""A table of named columns: what flows between Podium's packages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from podium.data import fields
from podium.data.jagged import Jagged, JoinedRows, TakenRows
from podium.data.refs import RowIndex, TensorRef, concat_values, row_numbers
from podium.data.rows import Rows, part_name
from podium.errors import DataError
from podium.spelling import suggest_nearest

Column = Tensor | TensorRef | Jagged | list[Any]
ColumnSource = Column | np.ndarray[Any, Any]
"""What a batch can be made of: its kinds of columns, and arrays, which become tensors."""

K = TypeVar("K")


class Batch(Rows):
    """Rows with named columns and a little metadata.

    A column is a dense tensor ``[B, …]``, a :class:`Jagged` of B rows, or a list of B Python objects. Dense tensors and
    the values of a Jagged may be references, whose bytes stay with the worker that made them until :meth:`fetch`. A
    numpy array of numbers becomes a dense tensor: over its own memory where this is writable, else a copy. One of
    objects or texts becomes a list. A nested tensor of torch becomes a Jagged copy of its rows.

    Operations return new batches and never change this one. Slices share memory with it.

    Raises:
        DataError: Columns have unequal numbers of rows, or one is of another kind.

    >>> batch = Batch({"rewards": torch.tensor([0.0, 1.0]), "finish_reason": ["stop", "length"]})
    >>> len(batch), batch.slice(1, 2).python("finish_reason")
    (2, ['length'])
    """

    __slots__ = ("_columns", "_rows", "meta")

    def __init__(self, columns: Mapping[str, ColumnSource], meta: Mapping[str, Any] | None = None) -> None:
        self._columns = {name: _column(name, column) for name, column in columns.items()}
        self.meta: dict[str, Any] = dict(meta or {})
        lengths = {name: len(column) for name, column in self._columns.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"columns of one batch have the same number of rows; got {lengths}")
        self._rows = next(iter(lengths.values()), 0)

    def _map(self, change: Callable[[Any], Any], rows: int) -> Batch:
        """Return a batch of changed columns, which have ``rows`` rows each, with the same metadata."""
        batch = Batch.__new__(Batch)
        batch._columns = {name: change(column) for name, column in self._columns.items()}
        batch._rows, batch.meta = rows, dict(self.meta)
        return batch

    def __len__(self) -> int:
        return self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __getitem__(self, name: str) -> Column:
        try:
            return self._columns[name]
        except KeyError:
            hint = suggest_nearest(name, self._columns)
            raise DataError(f"no column {name!r} in this batch; it has {sorted(self._columns)}{hint}") from None

    def __repr__(self) -> str:
        return f"Batch(rows={len(self)}, columns={{{', '.join(f'{k}: {_kind(v)}' for k, v in self._columns.items())}}})"

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns, in the order in which they were added. Iteration over the batch gives them too."""
        return tuple(self._columns)

    def keys(self) -> tuple[str, ...]:
        """Return :attr:`columns`, under the name that mappings use."""
        return self.columns

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor columns. Python columns do not count."""
        return sum(0 if isinstance(column, list) else column.nbytes for column in self._columns.values())

    def dense(self, name: str) -> Tensor:
        """Return the column ``name``, a tensor ``[B, …]``. Raises DataError if it is of another kind."""
        return self._read(name, Tensor, "a tensor")

    def jagged(self, name: str) -> Jagged:
        """Return the column ``name``, a Jagged. Raises DataError if it is of another kind."""
        return self._read(name, Jagged, "a Jagged")

    def python(self, name: str) -> list[Any]:
        """Return the column ``name``, a list of Python objects. Raises DataError if it is of another kind."""
        return self._read(name, cast("type[list[Any]]", list), "a Python column")

    def _read(self, name: str, kind: type[K], what: str) -> K:
        column = self[name]
        if isinstance(column, kind):
            return column
        hint = f"bring it here by batch.fetch({name!r})" if isinstance(column, TensorRef) else f"{what} is needed here"
        raise DataError(f"column {name!r} is {_kind(column)}; {hint}")

    def map_tensors(self, change: Callable[[Any], Any]) -> Batch:
        def change_column(column: Column) -> Column:
            if isinstance(column, list):
                return column
            return column.map_tensors(change) if isinstance(column, Rows) else change(column)

        return self._map(change_column, self._rows)

    def fetch(self, *names: str) -> Batch:
        """Return this batch with tensors in place of references, in the columns named or in all.

        Raises:
            RefLostError: The process that owned the bytes has ended.
        """
        return self.with_columns(Rows.fetch(self.select(*names) if names else self)._columns)

    def prefetch(self, *names: str) -> Batch:
        """Begin to fetch the named columns, or all, into this process. Returns the batch itself."""
        part = self.select(*names) if names else self
        part.map_tensors(lambda tensor: tensor.prefetch() if isinstance(tensor, TensorRef) else tensor)
        return self

    def slice(self, start: int, stop: int) -> Batch:
        """Return the rows ``start:stop``, clipped to the batch as Python does. Tensors are views."""
        start, stop, _ = slice(start, stop).indices(len(self))
        stop = max(start, stop)

        def cut(column: Column) -> Column:
            return column.slice(start, stop) if isinstance(column, Rows) else column[start:stop]

        return self._map(cut, stop - start)

    def take(self, index: RowIndex) -> Batch:
        """Return rows in the order of ``index`` (int64 ``[K]`` or a sequence of ints). Copies all but references."""
        rows = row_numbers(index, len(self))
        ragged = TakenRows(rows)
        return self._map(lambda column: _take(column, rows, ragged), len(rows))

    def with_columns(self, columns: Mapping[str, ColumnSource] | None = None, /, **named: ColumnSource) -> Batch:
        """Return this batch with columns added or replaced."""
        return Batch({**self._columns, **(columns or {}), **named}, self.meta)

    def with_meta(self, **meta: Any) -> Batch:
        """Return this batch with metadata added or replaced."""
        return Batch(self._columns, {**self.meta, **meta})

    def select(self, *names: str | Iterable[str]) -> Batch:
        """Return only the columns named, in that order: ``select("a", "b")``, or ``select(["a", "b"])``."""
        flat = chain.from_iterable([name] if isinstance(name, str) else name for name in names)
        return Batch({name: self[name] for name in flat}, self.meta)

    def drop(self, *names: str) -> Batch:
        """Return all columns but those named. Raises DataError if the batch lacks one of them."""
        for name in names:
            self[name]
        return Batch({name: column for name, column in self._columns.items() if name not in names}, self.meta)

    def merge(self, other: Batch, *, keep: Literal["self", "other"] | None = None) -> Batch:
        """Return the columns and metadata of both.

        Args:
            other: A batch with as many rows.
            keep: The batch whose columns and metadata are kept where both have the same name and differ.

        Raises:
            DataError: Columns or metadata of the same name differ and ``keep`` is not given, or a column in both is a
                reference to other bytes, which are not compared. The message names them.
        """
        first, second = (other, self) if keep == "self" else (self, other)
        if keep is None:
            columns = [name for name in self if name in other and not _is_same(self[name], other[name])]
            meta = [
                name for name in self.meta if name in other.meta and not _is_same(self.meta[name], other.meta[name])
            ]
            if columns or meta:
                what = [f"{word} {names}" for word, names in (("columns", columns), ("metadata", meta)) if names]
                raise DataError(
                    f"merge: the batches differ in {' and '.join(what)}: drop them in one batch, or give "
                    "keep='self' or keep='other'"
                )
        return Batch({**first._columns, **second._columns}, {**first.meta, **second.meta})

    def to(self, device: torch.device | str) -> Batch:
        """Return this batch with its tensor columns on ``device``."""

        def move_column(column: Column) -> Column:
            return column if isinstance(column, list) else column.to(device)

        return self.fetch()._map(move_column, self._rows)

    def token_lengths(self) -> list[int] | None:
        """Return the lengths of the column ``tokens``, or of the first Jagged column."""
        columns = sorted(self._columns.items(), key=lambda column: column[0] != fields.TOKENS)
        return next((column.token_lengths() for _, column in columns if isinstance(column, Jagged)), None)

    def row_groups(self) -> list[int] | None:
        """Return the column ``group``, or None if there is none in this process."""
        column = self._columns.get(fields.GROUP)
        return cast(Any, column).tolist() if isinstance(column, Tensor) and column.dim() == 1 else None

    @classmethod
    def concat(cls, parts: Sequence[Batch], names: Sequence[str] = ()) -> Batch:
        """Return all rows in order, with the metadata of the first part.

        Raises:
            DataError: There are no parts, or their columns differ; the message names the column and the parts.
        """
        if not parts:
            raise DataError("cannot join zero batches: their columns are unknown")
        first = parts[0]
        for at, part in enumerate(parts):
            if odd := sorted(first._columns.keys() ^ part._columns.keys()):
                has, lacks = (0, at) if odd[0] in first else (at, 0)
                raise DataError(
                    f"only batches with the same columns can be joined: {part_name(names, has)} has the column "
                    f"{odd[0]!r} and {part_name(names, lacks)} has not; columns that differ are {odd}"
                )
        if len(parts) == 1:
            return first
        ragged = JoinedRows()
        joined = {name: _concat(name, [part[name] for part in parts], names, ragged) for name in first}
        return Batch(joined, first.meta)


def _column(name: str, column: Any) -> Column:
    """Return ``column`` as one of the kinds that a batch has."""
    if isinstance(column, Jagged | list):
        return cast("Jagged | list[Any]", column)
    try:
        if isinstance(column, np.ndarray) and cast(Any, column).dtype.kind in "OUS" and cast(Any, column).ndim:
            return cast("list[Any]", column.tolist())  # objects and texts
        if isinstance(column, np.ma.MaskedArray):
            raise DataError("a tensor has no mask; pass column.filled(value), and np.ma.getmaskarray(column) beside it")
        if isinstance(column, np.ndarray):
            column = torch.from_numpy(np.require(cast(Any, column), requirements=["C", "W"]))  # pyright: ignore[reportUnknownMemberType]
        if isinstance(column, Tensor | TensorRef):
            if not column.dim():
                raise DataError("a single number, without dimensions, has no rows")
            if isinstance(column, Tensor) and column.layout not in (torch.strided, torch.jagged):
                raise DataError(f"rows of a tensor of layout {column.layout} cannot be cut; pass tensor.to_dense()")
            return Jagged.from_nested(cast(Tensor, column)) if column.is_nested else column
    except (DataError, TypeError, ValueError) as error:  # torch names the types of arrays that it can hold
        raise DataError(f"column {name!r}: {error}") from None
    raise DataError(f"column {name!r} is {type(column).__name__}; a column is a tensor, an array, a Jagged or a list")


def _concat(name: str, columns: Sequence[Any], names: Sequence[str], ragged: JoinedRows) -> Column:
    try:
        if all(isinstance(column, Tensor | TensorRef) for column in columns):
            return concat_values(columns, names)
        if all(isinstance(column, Jagged) for column in columns):
            return ragged.of(columns, names)
    except DataError as error:
        raise DataError(f"column {name!r}: {error}") from None
    if all(isinstance(column, list) for column in columns):
        return [row for column in columns for row in column]
    kinds = ", ".join(f"{_kind(column)} in {part_name(names, at)}" for at, column in enumerate(columns))
    raise DataError(f"column {name!r} is of different kinds: {kinds}")


def _is_same(value: Any, other: Any) -> bool:
    """Whether two columns, or two values of metadata, are equal; NaN equals NaN. References are equal to themselves."""
    if value is other:
        return True
    if type(value) is not type(other) or isinstance(value, TensorRef):
        return False
    if isinstance(value, Jagged):
        return _is_same(value.offsets, other.offsets) and _is_same(value.data, other.data)
    if isinstance(value, Tensor):
        if value.dtype != other.dtype or value.shape != other.shape or value.device != other.device:
            return False
        same = value.eq(other)
        return bool((same | (value.isnan() & other.isnan()) if value.dtype.is_floating_point else same).all())
    if isinstance(value, Mapping) and value.keys() == other.keys():
        return all(_is_same(item, other[key]) for key, item in cast("Mapping[Any, Any]", value).items())
    if isinstance(value, list | tuple) and len(cast("list[Any]", value)) == len(other):
        return all(map(_is_same, cast("list[Any]", value), other))
    if isinstance(value, np.ndarray):
        return np.array_equal(cast(Any, value), other)
    try:
        return bool(value == other or (value != value and other != other))
    except Exception:  # noqa: BLE001 - an object of the user's, whose comparison is no truth value
        return False


def _kind(column: Column) -> str:
    if isinstance(column, Tensor):
        return f"{str(column.dtype).removeprefix('torch.')}{list(column.shape)}"
    return f"list[{len(column)}]" if isinstance(column, list) else repr(column)


def _take(column: Column, rows: Tensor, ragged: TakenRows) -> Column:
    if isinstance(column, list):
        return [column[row] for row in cast(list[int], rows.tolist())]  # pyright: ignore[reportUnknownMemberType]
    if isinstance(column, Jagged):
        return ragged.of(column)
    return column[rows.to(column.device)] if isinstance(column, Tensor) else column.take(rows)
