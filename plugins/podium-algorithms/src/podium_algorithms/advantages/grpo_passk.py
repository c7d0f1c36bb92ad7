"""The best completion of a group against the second best. Legend: B rows, G distinct groups, N tokens."""

import torch

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.records import AdvantageInputs, AdvantageOutputs
from podium.algorithms.token_rows import EPSILON, group_statistics
from podium_algorithms.declarations import GRPO_PASSK

__all__ = ["grpo_passk"]


@GRPO_PASSK
def grpo_passk(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutputs:
    """``max(R) - max(R without R_i)`` over the rows of i's group, the same at all tokens of row i.

    The best of a group's n completions is what counts, as in pass@n: Tang et al. 2025, "Optimizing Language Models for
    Inference Time Objectives using Reinforcement Learning", arXiv:2503.19595. The row of the highest reward gets its
    distance to the second highest, and the others get 0; so do all if two rows have the highest.
    ``config.normalize_advantage = True`` divides by the group's standard deviation, as verl's code does by default and
    the paper does not. A group of a single row gives 0.
    """
    rewards_B = inputs.row_rewards_B
    stats = group_statistics(rewards_B, inputs.group_B)
    order_B = rewards_B.argsort(descending=True, stable=True)
    order_B = order_B[stats.index_B[order_B].argsort(stable=True)]  # group by group, the highest reward first
    first_G = stats.size_G.cumsum(0) - stats.size_G
    best_G = order_B[first_G] if len(order_B) else order_B
    second_G = order_B[(first_G + 1).minimum(first_G + stats.size_G - 1)] if len(order_B) else order_B
    gap_G = rewards_B[best_G] - rewards_B[second_G]
    if config.normalizes(default=False):
        gap_G = gap_G / (stats.std_G + EPSILON)
    return AdvantageOutputs(advantages_N=inputs.spread(torch.zeros_like(rewards_B).index_copy(0, best_G, gap_G)))
