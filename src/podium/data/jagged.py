"""Rows of unequal length without padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from podium.data.refs import RowIndex, RowRanges, TensorRef, concat_values, row_numbers
from podium.data.rows import Rows
from podium.errors import DataError


def _ints(tensor: Tensor) -> list[int]:
    return cast(list[int], tensor.tolist())  # pyright: ignore[reportUnknownMemberType]


class Jagged(Rows):
    """B rows of unequal length: ``values [N, …]`` and ``offsets [B + 1]``.

    Row i is ``values[offsets[i] : offsets[i + 1]]``. The values may be a reference, which ``data`` returns. Rows of a
    reference are cut and joined without reading its bytes, and ``values`` raises an error.

    No method changes it. Slices share memory with the whole.

    Raises:
        DataError: The offsets do not start at 0, decrease, or do not end at N.
    """

    __slots__ = ("data", "offsets")

    data: Tensor | TensorRef
    offsets: Tensor

    def __init__(self, values: Tensor | TensorRef, offsets: Tensor) -> None:
        if offsets.dtype != torch.int64 or offsets.dim() != 1 or len(offsets) == 0:
            raise DataError(f"offsets of a Jagged are int64 [B + 1], not {offsets.dtype} {list(offsets.shape)}")
        if int(offsets[0]) != 0 or int(offsets[-1]) != len(values) or bool((offsets[1:] < offsets[:-1]).any()):
            raise DataError(f"offsets of a Jagged rise from 0 to the {len(values)} values; got {_ints(offsets)[:8]}…")
        self.data = values
        self.offsets = offsets

    @classmethod
    def from_rows(cls, rows: Sequence[Tensor]) -> Jagged:
        """Join rows ``[L_i, …]`` of one dtype. An empty sequence gives zero rows of int64."""
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        values = torch.cat(list(rows)) if rows else torch.empty(0, dtype=torch.int64)
        return cls.from_lengths(values, lengths.to(values.device))

    @classmethod
    def from_lengths(cls, values: Tensor | TensorRef, lengths: Tensor) -> Jagged:
        """Cut ``values [N, …]`` into rows of ``lengths [B]``."""
        return cls(values, _offsets(lengths))

    @classmethod
    def from_nested(cls, nested: Tensor) -> Jagged:
        """Copy the rows ``[L_i, …]`` of a nested tensor of torch, of either layout.

        Raises:
            DataError: The rows differ in more than their length.
        """
        rows = cast("Sequence[Tensor]", nested.unbind())  # pyright: ignore[reportUnknownMemberType]
        if len({row.shape[1:] for row in rows}) > 1 or not all(row.dim() for row in rows):
            raise DataError(f"rows of a nested tensor differ in length only; got {[list(row.shape) for row in rows]}")
        return cls.from_rows(rows)

    @classmethod
    def concat(cls, parts: Sequence[Jagged], names: Sequence[str] = ()) -> Jagged:
        return JoinedRows().of(parts, names)

    @property
    def values(self) -> Tensor:
        """The tensor ``[N, …]``. Raises DataError if it is a reference."""
        if isinstance(self.data, TensorRef):
            raise DataError(
                f"the values of this Jagged are not in this process: {self.data}; pass the Jagged to a worker, which "
                "receives tensors, or fetch them by fetch()"
            )
        return self.data

    @property
    def lengths(self) -> Tensor:
        """int64 ``[B]``."""
        return self.offsets[1:] - self.offsets[:-1]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.offsets.nbytes

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __repr__(self) -> str:
        return f"Jagged(rows={len(self)}, values={list(self.data.shape)}, {self.data.dtype})"

    def __iter__(self) -> Iterator[Tensor]:
        """Give each row as a view ``[L, …]``."""
        return iter(self.unbind())

    def row(self, index: int) -> Tensor:
        """Return row ``index`` as a view ``[L, …]``."""
        return self.values[int(self.offsets[index]) : int(self.offsets[index + 1])]

    def unbind(self) -> list[Tensor]:
        """Return all rows as views."""
        return list(torch.split(self.values, _ints(self.lengths)))

    def map_tensors(self, change: Callable[[Any], Any]) -> Jagged:
        return self.like(change(self.data))

    def token_lengths(self) -> list[int]:
        return _ints(self.lengths)

    def like(self, values: Tensor | TensorRef) -> Jagged:
        """Return other ``values [N, …]`` in rows of the same lengths."""
        return _make_unchecked(values, self.offsets) if len(values) == len(self.data) else Jagged(values, self.offsets)

    def slice(self, start: int, stop: int) -> Jagged:
        """Return the rows ``start:stop``, clipped as Python does. The values are a view."""
        start, stop, _ = slice(start, stop).indices(len(self))
        if start == 0 and stop == len(self):
            return self
        offsets = self.offsets[start : max(start, stop) + 1]
        first, last = int(offsets[0]), int(offsets[-1])
        return Jagged(self.data[first:last], offsets - first)

    def take(self, index: RowIndex) -> Jagged:
        """Return rows in the order of ``index``. Copies the values unless they are a reference."""
        return TakenRows(row_numbers(index, len(self))).of(self)

    def padded(self, value: float, length: int | None = None) -> Tensor:
        """Return ``[B, T, …]``, padded on the right. T is the length of the longest row, or ``length``.

        Raises:
            DataError: ``length`` is less than the length of a row.
        """
        lengths = self.lengths
        longest = int(lengths.max()) if len(self) else 0
        width = longest if length is None else length
        if width < longest:
            raise DataError(f"cannot pad rows of up to {longest} values to {width}: cut them first")
        out = self.values.new_full((len(self), width, *self.values.shape[1:]), value)
        out[torch.arange(width, device=lengths.device)[None, :] < lengths[:, None]] = self.values
        return out

    def to(self, device: torch.device | str) -> Jagged:
        return Jagged(self.values.to(device), self.offsets.to(device))


class JoinedRows:
    """Batches to be joined, column by column.

    Columns of a batch mostly share their offsets. Those of the whole are then computed once, and shared too.
    """

    def __init__(self) -> None:
        self._known: list[tuple[list[Tensor], Tensor]] = []  # the offsets of the parts, and those of the whole

    def of(self, parts: Sequence[Jagged], names: Sequence[str] = ()) -> Jagged:
        """Return all rows of ``parts`` in order. Raises DataError as :meth:`Jagged.concat` does."""
        values = concat_values([part.data for part in parts], names)
        for former_parts, offsets in self._known:
            if all(part.offsets is former_offsets for part, former_offsets in zip(parts, former_parts, strict=True)):
                return _make_unchecked(values, offsets)
        offsets = _offsets(torch.cat([part.lengths for part in parts]))
        self._known.append(([part.offsets for part in parts], offsets))
        return _make_unchecked(values, offsets)


class TakenRows:
    """Rows to be taken of several columns in one order.

    Columns of a batch mostly have rows of the same lengths. What follows from the lengths is computed once for all of
    them.

    Args:
        rows: int64 ``[K]``, all in 0..B-1 of each column.
    """

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows
        self._layouts: list[_Layout] = []

    def of(self, column: Jagged) -> Jagged:
        """Return these rows of ``column``. Copies the values unless they are a reference."""
        layout = next((layout for layout in self._layouts if _same(layout.whole, column.offsets)), None)
        if layout is None:
            layout = _Layout(column.offsets, self._rows)
            self._layouts.append(layout)
        data = column.data
        taken = layout.ranges.of(data) if isinstance(data, TensorRef) else data[layout.places]
        return _make_unchecked(taken, layout.offsets)


class _Layout:
    """Where chosen rows of a Jagged with the offsets ``whole`` are, and their own ``offsets``."""

    def __init__(self, whole: Tensor, rows: Tensor) -> None:
        rows = rows.to(whole.device)
        self.whole = whole
        self._firsts = whole[rows]
        self._lengths = whole[1:][rows] - self._firsts
        self.offsets = _offsets(self._lengths)

    @cached_property
    def ranges(self) -> RowRanges:
        return RowRanges(self._firsts.numpy(), (self._firsts + self._lengths).numpy())  # pyright: ignore[reportUnknownMemberType]

    @cached_property
    def places(self) -> Tensor:
        """The places of the rows' values among all values: int64 ``[N]``."""
        shifts = torch.repeat_interleave(self._firsts - self.offsets[:-1], self._lengths)
        return torch.arange(int(self.offsets[-1]), device=shifts.device) + shifts


def _make_unchecked(values: Tensor | TensorRef, offsets: Tensor) -> Jagged:
    """Return a Jagged whose offsets are known to fit."""
    made = Jagged.__new__(Jagged)
    made.data, made.offsets = values, offsets
    return made


def _same(offsets: Tensor, others: Tensor) -> bool:
    return offsets is others or (offsets.device == others.device and torch.equal(offsets, others))


def _offsets(lengths: Tensor) -> Tensor:
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets
