"""What an advantage estimator compares between the completions of a prompt, and the groups in which all of it is equal.

Legend: B rows, C numbers of each that are compared, of which NaN means that a row has none.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.declarations import ADVANTAGES
from podium.algorithms.records import AdvantageInputs
from podium.algorithms.token_rows import discounted_sums, group_statistics, wide
from podium.algorithms.turns import find_turns


def list_compared(inputs: AdvantageInputs, config: AlgorithmConfig) -> Tensor:
    """Return what the estimator compares, by its declaration: the whole reward of each row, its parts, or what each of
    its turns still earns, float ``[B, C]``."""
    match ADVANTAGES.declaration(config.advantage).compares:
        case "parts" if inputs.parts_B:
            return stack_parts(inputs.parts_B, config)
        case "turns":
            return stack_turns(inputs, config)
        case _:
            return inputs.row_rewards_B[:, None]


def stack_parts(parts_B: Mapping[str, Tensor], config: AlgorithmConfig) -> Tensor:
    """Return those of the parts of rewards that count by the option ``part_weights``, or else all, ``[B, C]``."""
    weights = config.options.get("part_weights") or dict.fromkeys(parts_B, 1.0)
    counted = [part_B for name, part_B in parts_B.items() if weights.get(name)]
    return torch.stack(counted or [*parts_B.values()], dim=1)


def stack_turns(inputs: AdvantageInputs, config: AlgorithmConfig) -> Tensor:
    """Return what each row still earns from its turns on, in their order, ``[B, C]``."""
    turns = find_turns(inputs)
    left_K = discounted_sums(turns.rewards_K, turns.row_K, config.gamma)
    most = int(turns.place_K.max()) + 1 if len(left_K) else 1
    compared_BC = left_K.new_full((len(inputs.rewards_B), most), torch.nan)
    compared_BC[turns.row_K, turns.place_K] = left_K
    return compared_BC


def find_flat(compared_BC: Tensor, group_B: Tensor) -> Tensor:
    """Return whether all numbers that are compared are equal in the group of each row, bool ``[B]``: such groups teach
    nothing. Rows that lack a number are not compared by it.

    >>> compared_BC = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.5], [1.0, torch.nan]])
    >>> find_flat(compared_BC, torch.tensor([3, 3, 5, 5])).tolist()
    [False, False, True, True]
    """
    flat_B = torch.ones(len(group_B), dtype=torch.bool)
    for column_B in wide(compared_BC).unbind(1):
        has_B = ~column_B.isnan()
        stats = group_statistics(column_B[has_B], group_B[has_B])
        differing = group_B[has_B][~stats.flat_G[stats.index_B]]
        flat_B &= ~torch.isin(group_B, differing)
    return flat_B
