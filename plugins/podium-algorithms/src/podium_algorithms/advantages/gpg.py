"""Group policy gradient. Legend: B rows, G distinct groups, N tokens."""

import torch

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.records import AdvantageInputs, AdvantageOutputs
from podium.algorithms.token_rows import EPSILON, group_statistics
from podium_algorithms.declarations import GPG

__all__ = ["gpg"]


@GPG
def gpg(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutputs:
    """``B / (B - M) (R_i - mean(R))`` over the rows of i's group, the same at all tokens of row i.

    Group policy gradient: Chu et al. 2025, "GPG", arXiv:2504.02546. M of the batch's B rows are in groups whose rewards
    are all equal; they have no gradient, and the factor gives the others the weight of the whole batch. The loss of the
    paper is ``reinforce``. ``config.normalize_advantage = True`` divides by the group's standard deviation (F_norm of
    the paper, 1 by default). verl's code divides B by the number of rewards that are not 0 instead; this function
    follows the paper.
    """
    rewards_B = inputs.row_rewards_B
    stats = group_statistics(rewards_B, inputs.group_B)
    flat_B = stats.flat_G[stats.index_B]
    advantages_B = (rewards_B - stats.mean_G[stats.index_B]) * (len(flat_B) / (~flat_B).sum().clamp(min=1))
    if config.normalizes(default=False):
        advantages_B = advantages_B / (stats.std_G[stats.index_B] + EPSILON)
    return AdvantageOutputs(advantages_N=inputs.spread(torch.where(flat_B, 0.0, advantages_B)))
