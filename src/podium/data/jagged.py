"""Rows of unequal length without padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from podium.data.memory import concat_tensors
from podium.errors import DataError

__all__ = ["Jagged", "RowIndex"]

RowIndex = Sequence[int] | Tensor


def _ints(tensor: Tensor) -> list[int]:
    return cast(list[int], tensor.tolist())  # pyright: ignore[reportUnknownMemberType]


class Jagged:
    """B rows of unequal length: ``values [N, …]`` and ``offsets [B + 1]``.

    Row i is ``values[offsets[i] : offsets[i + 1]]``.

    Immutable by convention: every method returns a new object, and slices of rows share memory with it.

    Raises:
        DataError: offsets that do not start at 0, decrease, or do not end at N.
    """

    __slots__ = ("offsets", "values")

    def __init__(self, values: Tensor, offsets: Tensor) -> None:
        if offsets.dtype != torch.int64 or offsets.dim() != 1 or len(offsets) == 0:
            raise DataError(f"offsets of a Jagged are int64 [B + 1], not {offsets.dtype} {list(offsets.shape)}")
        if int(offsets[0]) != 0 or int(offsets[-1]) != len(values) or bool((offsets[1:] < offsets[:-1]).any()):
            raise DataError(f"offsets of a Jagged rise from 0 to the {len(values)} values; got {_ints(offsets)[:8]}…")
        self.values = values
        self.offsets = offsets

    @classmethod
    def from_rows(cls, rows: Sequence[Tensor]) -> Jagged:
        """Join rows ``[L_i, …]`` of one dtype. An empty sequence gives zero rows of int64."""
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        values = torch.cat(list(rows)) if rows else torch.empty(0, dtype=torch.int64)
        return cls.from_lengths(values, lengths.to(values.device))

    @classmethod
    def from_lengths(cls, values: Tensor, lengths: Tensor) -> Jagged:
        """``values [N, …]`` cut into rows of ``lengths [B]``."""
        offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=lengths.device)
        torch.cumsum(lengths, 0, out=offsets[1:])
        return cls(values, offsets)

    @classmethod
    def concat(cls, parts: Sequence[Jagged]) -> Jagged:
        """All rows of ``parts`` in order."""
        lengths = torch.cat([part.lengths for part in parts])
        return cls.from_lengths(concat_tensors([part.values for part in parts]), lengths)

    @property
    def lengths(self) -> Tensor:
        """int64 ``[B]``."""
        return self.offsets[1:] - self.offsets[:-1]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.offsets.nbytes

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __repr__(self) -> str:
        return f"Jagged(rows={len(self)}, values={list(self.values.shape)}, {self.values.dtype})"

    def row(self, index: int) -> Tensor:
        """Row ``index`` as a view ``[L, …]``."""
        return self.values[int(self.offsets[index]) : int(self.offsets[index + 1])]

    def unbind(self) -> list[Tensor]:
        """All rows as views."""
        return list(torch.split(self.values, _ints(self.lengths)))

    def like(self, values: Tensor) -> Jagged:
        """Other ``values [N, …]`` over the same rows."""
        return Jagged(values, self.offsets)

    def slice(self, start: int, stop: int) -> Jagged:
        """Rows ``start:stop``; the values are a view."""
        first, last = int(self.offsets[start]), int(self.offsets[stop])
        return Jagged(self.values[first:last], self.offsets[start : stop + 1] - first)

    def take(self, index: RowIndex) -> Jagged:
        """Rows in the order of ``index``; copies."""
        rows = torch.as_tensor(index, dtype=torch.int64, device=self.offsets.device)
        lengths = self.lengths[rows]
        starts = torch.repeat_interleave(self.offsets[rows], lengths)
        offsets = torch.zeros(len(rows) + 1, dtype=torch.int64, device=lengths.device)
        torch.cumsum(lengths, 0, out=offsets[1:])
        within = torch.arange(int(offsets[-1]), device=lengths.device) - torch.repeat_interleave(offsets[:-1], lengths)
        return Jagged(self.values[starts + within], offsets)

    def padded(self, value: float, length: int | None = None) -> Tensor:
        """Right-padded ``[B, T, …]``; T is the longest row or ``length``, which must not cut a row."""
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
