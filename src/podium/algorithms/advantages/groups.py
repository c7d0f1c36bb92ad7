"""Moments of groups of rows. Legend: B rows, G distinct groups."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from podium.algorithms.token_rows import wide

__all__ = ["GroupStatistics", "group_statistics"]


@dataclass(frozen=True)
class GroupStatistics:
    """Moments of groups of rows.

    Attributes:
        index_B: int64 ``[B]``, the group of each row, 0 to G - 1; ``stats.mean_G[stats.index_B]`` is ``[B]``.
        size_G: int64 ``[G]``.
        mean_G: float ``[G]``.
        std_G: float ``[G]``, the standard deviation of a sample (divided by size - 1); 0 in groups of one row.
        flat_G: bool ``[G]``, whether all values of the group are equal.
    """

    index_B: Tensor
    size_G: Tensor
    mean_G: Tensor
    std_G: Tensor
    flat_G: Tensor


def group_statistics(values_B: Tensor, group_B: Tensor) -> GroupStatistics:
    """Compute the moments of ``values_B`` in each group. Groups may have any size, and their rows may come in any
    order.

    >>> stats = group_statistics(torch.tensor([1.0, 5.0, 3.0]), torch.tensor([4, 0, 4]))
    >>> stats.mean_G[stats.index_B].tolist(), stats.flat_G.tolist()
    ([2.0, 5.0, 2.0], [True, False])
    """
    values_B = wide(values_B)
    # torch.unique carries no annotations
    unique = torch.unique(group_B, return_inverse=True)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    names_G, index_B = cast("tuple[Tensor, Tensor]", unique)
    zeros_G = values_B.new_zeros(len(names_G))
    size_G = torch.zeros_like(names_G).index_add(0, index_B, torch.ones_like(index_B))
    mean_G = zeros_G.index_add(0, index_B, values_B) / size_G
    squares_G = zeros_G.index_add(0, index_B, (values_B - mean_G[index_B]).square())
    std_G = (squares_G / (size_G - 1).clamp(min=1)).sqrt()
    # Extremes tell whether a group is flat: the mean of equal numbers may differ from them by a rounding error.
    highest_G = zeros_G.scatter_reduce(0, index_B, values_B, "amax", include_self=False)
    lowest_G = zeros_G.scatter_reduce(0, index_B, values_B, "amin", include_self=False)
    return GroupStatistics(index_B, size_G, mean_G, std_G, highest_G == lowest_G)
