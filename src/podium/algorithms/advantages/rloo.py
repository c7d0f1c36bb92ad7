"""REINFORCE with a leave-one-out baseline. Legend: B rows, G distinct groups, N tokens."""

import torch

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.declarations import advantage_declaration
from podium.algorithms.records import AdvantageInputs, AdvantageOutputs
from podium.algorithms.token_rows import group_statistics, whiten

__all__ = ["rloo"]


@advantage_declaration("rloo")
def rloo(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutputs:
    """``R_i - mean of the group's other rows``, the same at all tokens of row i: REINFORCE with leave-one-out baseline.

    Ahmadian et al. 2024, "Back to Basics", arXiv:2402.14740; the baseline is from Kool et al. 2019, "Buy 4 REINFORCE
    Samples, Get a Baseline for Free!". The papers do not normalize; ``config.normalize_advantage = True`` whitens the
    result over the batch's masked tokens. A group of a single row has no baseline and gives 0.
    """
    rewards_B = inputs.row_rewards_B
    stats = group_statistics(rewards_B, inputs.group_B)
    # R_i - (sum - R_i) / (n - 1) = (R_i - mean) * n / (n - 1)
    scale_G = stats.size_G / (stats.size_G - 1).clamp(min=1)
    advantages_B = (rewards_B - stats.mean_G[stats.index_B]) * scale_G[stats.index_B]
    advantages_N = inputs.spread(torch.where(stats.flat_G[stats.index_B], 0.0, advantages_B))
    if config.normalizes(default=False):
        advantages_N[inputs.mask_N] = whiten(advantages_N[inputs.mask_N])
    return AdvantageOutputs(advantages_N=advantages_N)
