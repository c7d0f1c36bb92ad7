"""Turns of trajectories: what the policy does at once before its environment answers.

Legend: N tokens over all rows, M masked tokens (those of N that the policy chose, in order), K turns over all rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from podium.algorithms.token_rows import ends_of_rows, wide

if TYPE_CHECKING:
    from podium.algorithms.records import AdvantageInputs


@dataclass(frozen=True)
class Turns:
    """The turns of a batch. The turns of a row are side by side, in the order of time.

    Attributes:
        index_M: int64 ``[M]``, the turn of each masked token, 0 to K - 1; ``values_K[turns.index_M]`` is ``[M]``.
        row_K: int64 ``[K]``, the row of each turn.
        place_K: int64 ``[K]``, the place of each turn in its row, from 0.
        first_K: int64 ``[K]``, the place among M of the first token of each turn.
        rewards_K: float ``[K]``, the reward of each turn; the reward of the row counts at its last turn.
    """

    index_M: Tensor
    row_K: Tensor
    place_K: Tensor
    first_K: Tensor
    rewards_K: Tensor


def find_turns(inputs: AdvantageInputs) -> Turns:
    """Find the turns of all rows. A row is a single turn where ``inputs.turn_N`` is None.

    >>> from podium.algorithms import AdvantageInputs
    >>> turns = find_turns(
    ...     AdvantageInputs(
    ...         rewards_B=torch.tensor([1.0, 0.0]),
    ...         group_B=torch.tensor([0, 0]),
    ...         mask_N=torch.tensor([False, True, True, False, True, True]),
    ...         offsets_B1=torch.tensor([0, 5, 6]),
    ...         turn_N=torch.tensor([-1, 0, 0, -1, 1, 0]),
    ...     )
    ... )
    >>> turns.row_K.tolist(), turns.place_K.tolist(), turns.rewards_K.tolist()
    ([0, 0, 1], [0, 1, 0], [0.0, 1.0, 0.0])
    """
    chosen_M = inputs.mask_N.nonzero().squeeze(1)
    row_M = inputs.row_N[chosen_M]
    number_M = torch.zeros_like(row_M) if inputs.turn_N is None else inputs.turn_N[chosen_M]
    most = int(number_M.max()) + 1 if len(number_M) else 1
    # torch.unique carries no annotations
    unique = torch.unique(row_M * most + number_M, return_inverse=True)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    code_K, index_M = cast("tuple[Tensor, Tensor]", unique)
    row_K = code_K.div(most, rounding_mode="floor")
    begins_K = torch.ones_like(row_K, dtype=torch.bool)
    begins_K[1:] = row_K[1:] != row_K[:-1]
    places_K = torch.arange(len(row_K), device=row_K.device)
    place_K = places_K - torch.where(begins_K, places_K, 0).cummax(0).values if len(row_K) else places_K
    first_K = torch.full_like(row_K, len(index_M)).scatter_reduce(
        0, index_M, torch.arange(len(index_M), device=row_K.device), "amin"
    )
    rewards_K = torch.where(ends_of_rows(row_K), wide(inputs.rewards_B)[row_K], 0.0)
    if inputs.token_rewards_N is not None:
        rewards_K = rewards_K.index_add(0, index_M, wide(inputs.token_rewards_N)[chosen_M].to(rewards_K))
    return Turns(index_M, row_K, place_K, first_K, rewards_K)
