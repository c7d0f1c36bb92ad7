"""Sums, scans and moments over the flat token layout, vectorized over its rows, and moments of groups of rows.

Legend: B rows, G distinct groups, N tokens over all rows, M chosen tokens (a subset of N in order), ``row_N`` the row
of each token.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

EPSILON = 1e-6  # added to standard deviations before dividing by them


def wide(values: Tensor) -> Tensor:
    """Return ``values`` in float32 at least: half precision and integers become float32, float64 stays."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def rows_of_tokens(offsets_B1: Tensor) -> Tensor:
    """Return the row of each token, int64 ``[N]``.

    >>> rows_of_tokens(torch.tensor([0, 2, 2, 5])).tolist()
    [0, 0, 2, 2, 2]
    """
    lengths_B = offsets_B1[1:] - offsets_B1[:-1]
    return torch.repeat_interleave(torch.arange(len(lengths_B), device=offsets_B1.device), lengths_B)


def row_sums(values_N: Tensor, row_N: Tensor, rows: int) -> Tensor:
    """Return the sum of each row's values, ``[B]``, in float32 at least; an empty row gives 0."""
    values_N = wide(values_N)
    return values_N.new_zeros(rows).index_add(0, row_N, values_N)


def ends_of_rows(row_M: Tensor) -> Tensor:
    """True at the last chosen token of each row, bool ``[M]``; ``row_M`` must not decrease.

    >>> ends_of_rows(torch.tensor([0, 0, 2])).tolist()
    [False, True, True]
    """
    ends_M = torch.ones_like(row_M, dtype=torch.bool)
    ends_M[:-1] = row_M[1:] != row_M[:-1]
    return ends_M


def discounted_sums(values_M: Tensor, row_M: Tensor, decay: float) -> Tensor:
    """``sum_k decay^k * values[t + k]`` to the end of t's row, ``[M]``; ``row_M`` must not decrease.

    This is a scan by doubling: once every entry holds the sum over the next s tokens, adding the entry s further on,
    times ``decay^s``, gives the sum over the next 2 s. It takes log2 of the longest row's length in vector operations.

    >>> discounted_sums(torch.tensor([1.0, 1.0, 1.0, 5.0]), torch.tensor([0, 0, 0, 1]), 0.5).tolist()
    [1.75, 1.5, 1.0, 5.0]
    """
    sums_M = wide(values_M)
    longest = int(torch.bincount(row_M).max()) if len(row_M) else 0
    span = 1
    while span < longest:
        same_row = row_M[span:] == row_M[:-span]
        further_M = torch.zeros_like(sums_M)
        further_M[:-span] = torch.where(same_row, sums_M[span:], 0.0)
        sums_M = sums_M + decay**span * further_M
        span *= 2
    return sums_M


def whiten(values_M: Tensor) -> Tensor:
    """``(values - mean) / std`` with the sample standard deviation, ``[M]``.

    Values that are all equal (or a single one) give exact zeros rather than magnified rounding errors.
    """
    values_M = wide(values_M)
    if len(values_M) < 2:
        return torch.zeros_like(values_M)
    flat = values_M.amax() == values_M.amin()
    whitened_M = (values_M - values_M.mean()) / (values_M.std() + EPSILON)
    return torch.where(flat, 0.0, whitened_M)


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
