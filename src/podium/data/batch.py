"""A table of named columns: what flows between the rooms of Podium."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from podium.data.jagged import Jagged, RowIndex
from podium.data.refs import TensorRef, row_numbers
from podium.data.values import concat_values
from podium.errors import DataError

__all__ = ["Batch", "Column"]

Column = Tensor | TensorRef | Jagged | list[Any]


class Batch:
    """Rows with named columns and a little metadata.

    A column is a dense tensor ``[B, …]``, a :class:`Jagged` of B rows, or a list of B Python objects. Dense tensors and
    the values of a Jagged may be references, whose bytes stay with the worker that made them until :meth:`fetch`.
    Operations return new batches and never change this one; slices share memory with it.

    Raises:
        DataError: columns of unequal length, or a column of another kind.

    >>> batch = Batch({"rewards": torch.tensor([0.0, 1.0]), "finish_reason": ["stop", "length"]})
    >>> len(batch), batch.slice(1, 2).python("finish_reason")
    (2, ['length'])
    """

    __slots__ = ("_columns", "_rows", "meta")

    def __init__(self, columns: Mapping[str, Column], meta: Mapping[str, Any] | None = None) -> None:
        self._columns: dict[str, Column] = dict(columns)
        self.meta: dict[str, Any] = dict(meta or {})
        lengths = {name: _rows_of(name, column) for name, column in self._columns.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"columns of one batch have the same number of rows; got {lengths}")
        self._rows = next(iter(lengths.values()), 0)

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
            near = difflib.get_close_matches(name, self._columns, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise DataError(f"no column {name!r} in this batch; it has {sorted(self._columns)}{hint}") from None

    def __repr__(self) -> str:
        return f"Batch(rows={len(self)}, columns={{{', '.join(f'{k}: {_kind(v)}' for k, v in self._columns.items())}}})"

    def keys(self) -> tuple[str, ...]:
        """Names of the columns, in the order they were added."""
        return tuple(self._columns)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor columns; Python columns are not counted."""
        return sum(0 if isinstance(column, list) else column.nbytes for column in self._columns.values())

    def dense(self, name: str) -> Tensor:
        """The column ``name`` as a tensor ``[B, …]``; DataError if it is of another kind."""
        column = self[name]
        if not isinstance(column, Tensor):
            what = f"bring it here by batch.fetch({name!r})" if isinstance(column, TensorRef) else "a tensor is needed"
            raise DataError(f"column {name!r} is {_kind(column)}; {what}")
        return column

    def jagged(self, name: str) -> Jagged:
        """The column ``name`` as a Jagged; DataError if it is of another kind."""
        column = self[name]
        if not isinstance(column, Jagged):
            raise DataError(f"column {name!r} is {_kind(column)}; a Jagged is needed here")
        return column

    def python(self, name: str) -> list[Any]:
        """The column ``name`` as a list of Python objects; DataError if it is of another kind."""
        column = self[name]
        if not isinstance(column, list):
            raise DataError(f"column {name!r} is {_kind(column)}; a Python column is needed here")
        return column

    def fetch(self, *names: str) -> Batch:
        """This batch with the columns named, or all of them, here: tensors in place of references.

        Raises:
            RefLostError: the process that owned the bytes has ended.
        """
        return Batch({**self._columns, **{name: _fetch(self[name]) for name in names or self}}, self.meta)

    def prefetch(self, *names: str) -> Batch:
        """Begin to bring the columns named, or all of them, here; returns itself."""
        for name in names or self:
            column = self[name]
            data = column.data if isinstance(column, Jagged) else column
            if isinstance(data, TensorRef):
                data.prefetch()
        return self

    def slice(self, start: int, stop: int) -> Batch:
        """Rows ``start:stop``, clipped to the batch as Python does; tensors are views."""
        start, stop, _ = slice(start, stop).indices(len(self))
        stop = max(start, stop)
        return Batch({name: _slice(column, start, stop) for name, column in self._columns.items()}, self.meta)

    def take(self, index: RowIndex) -> Batch:
        """Rows in the order of ``index`` (int64 ``[K]`` or a sequence of ints); copies what is no reference."""
        rows = row_numbers(index)
        if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= len(self)):
            raise DataError(f"row index outside 0..{len(self) - 1}: {int(rows.min())}..{int(rows.max())}")
        return Batch({name: _take(column, rows) for name, column in self._columns.items()}, self.meta)

    def with_columns(self, columns: Mapping[str, Column] | None = None, /, **named: Column) -> Batch:
        """This batch with columns added or replaced."""
        return Batch({**self._columns, **(columns or {}), **named}, self.meta)

    def with_meta(self, **meta: Any) -> Batch:
        """This batch with metadata added or replaced."""
        return Batch(self._columns, {**self.meta, **meta})

    def select(self, *names: str) -> Batch:
        """Only the columns named, in that order."""
        return Batch({name: self[name] for name in names}, self.meta)

    def drop(self, *names: str) -> Batch:
        """All columns but those named; a name that is not there is an error."""
        for name in names:
            self[name]
        return Batch({name: column for name, column in self._columns.items() if name not in names}, self.meta)

    def merge(self, other: Batch) -> Batch:
        """Columns and metadata of both; where both have a name, ``other`` wins."""
        return Batch({**self._columns, **other._columns}, {**self.meta, **other.meta})

    def to(self, device: torch.device | str) -> Batch:
        """Tensor columns on ``device``; Python columns unchanged."""
        moved = {name: c if isinstance(c, list) else _fetch(c).to(device) for name, c in self._columns.items()}
        return Batch(moved, self.meta)

    @classmethod
    def concat(cls, parts: Sequence[Batch]) -> Batch:
        """All rows in order. The parts need the same columns; metadata is the first part's.

        Raises:
            DataError: no parts, or parts whose columns differ (named).
        """
        if not parts:
            raise DataError("cannot join zero batches: their columns are unknown")
        first = parts[0]
        for place, part in enumerate(parts):
            if set(part.keys()) != set(first.keys()):
                odd = sorted(set(part.keys()) ^ set(first.keys()))
                raise DataError(
                    f"cannot join batches with different columns: part {place} differs from part 0 in {odd}"
                )
        if len(parts) == 1:
            return first
        joined = {name: concat_columns(name, [part[name] for part in parts]) for name in first}
        return cls(joined, first.meta)


def concat_columns(name: str, columns: Sequence[Column]) -> Column:
    """Join columns of one kind row-wise; ``name`` only serves the error."""
    if all(isinstance(column, Tensor | TensorRef) for column in columns):
        return concat_values([column for column in columns if isinstance(column, Tensor | TensorRef)])
    if all(isinstance(column, Jagged) for column in columns):
        return Jagged.concat([column for column in columns if isinstance(column, Jagged)])
    if all(isinstance(column, list) for column in columns):
        return [row for column in columns if isinstance(column, list) for row in column]
    raise DataError(f"column {name!r} is of different kinds in the parts to join: {[_kind(c) for c in columns]}")


def _rows_of(name: str, column: object) -> int:
    if isinstance(column, Tensor | TensorRef):
        if column.dim() == 0:
            raise DataError(f"column {name!r} is a tensor without dimensions; a dense column is [B, …]")
        return len(column)
    if isinstance(column, Jagged):
        return len(column)
    if isinstance(column, list):
        return len(cast(list[Any], column))
    raise DataError(f"column {name!r} is {type(column).__name__}; a column is a Tensor, a Jagged or a list")


def _kind(column: Column) -> str:
    if isinstance(column, Tensor):
        return f"{str(column.dtype).removeprefix('torch.')}{list(column.shape)}"
    return f"list[{len(column)}]" if isinstance(column, list) else repr(column)


def _slice(column: Column, start: int, stop: int) -> Column:
    return column.slice(start, stop) if isinstance(column, Jagged) else column[start:stop]


def _fetch(column: Any) -> Any:
    """``column`` itself, unless it is elsewhere."""
    if isinstance(column, Jagged):
        return column.fetch()
    return column.get() if isinstance(column, TensorRef) else column


def _take(column: Column, rows: Tensor) -> Column:
    if isinstance(column, list):
        return [column[row] for row in cast(list[int], rows.tolist())]  # pyright: ignore[reportUnknownMemberType]
    return column[rows.to(column.device)] if isinstance(column, Tensor) else column.take(rows)
