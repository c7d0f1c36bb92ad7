"""Joining the values of a column, wherever they are."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from podium.data.memory import concat_tensors
from podium.data.refs import TensorRef

__all__ = ["concat_values"]


def concat_values(parts: Sequence[Tensor | TensorRef]) -> Tensor | TensorRef:
    """Rows of all parts in order: a tensor, or a reference if any of them is one."""
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if len(tensors) == len(parts):
        return concat_tensors(tensors)
    return TensorRef.concat(parts)
