"""On-policy optimization with the optimal baseline. Legend: B rows, G distinct groups, N tokens."""

import torch

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.records import AdvantageInputs, AdvantageOutputs
from podium.algorithms.token_rows import EPSILON, group_statistics, row_sums
from podium_algorithms.declarations import OPO

__all__ = ["opo"]


@OPO
def opo(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutputs:
    """``R_i - sum(l R) / sum(l)`` over the rows of i's group with their lengths l, the same at all tokens of row i.

    On-policy RL with the optimal reward baseline: Hao et al. 2025, "OPO", arXiv:2505.23585. The length, in masked
    tokens, stands for the squared norm of a row's gradient; weighted by it, the mean is the baseline of the least
    variance. ``config.normalize_advantage = True`` divides by the group's standard deviation, which the paper does not.
    """
    rewards_B = inputs.row_rewards_B
    lengths_B = row_sums(inputs.mask_N.to(rewards_B.dtype), inputs.row_N, len(rewards_B))
    stats = group_statistics(rewards_B, inputs.group_B)
    zeros_G = torch.zeros_like(stats.mean_G)
    tokens_G = zeros_G.index_add(0, stats.index_B, lengths_B).clamp(min=1)
    baseline_G = zeros_G.index_add(0, stats.index_B, lengths_B * rewards_B) / tokens_G
    advantages_B = rewards_B - baseline_G[stats.index_B]
    if config.normalizes(default=False):
        advantages_B = advantages_B / (stats.std_G[stats.index_B] + EPSILON)
    return AdvantageOutputs(advantages_N=inputs.spread(torch.where(stats.flat_G[stats.index_B], 0.0, advantages_B)))
