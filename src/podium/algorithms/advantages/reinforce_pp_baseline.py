"""REINFORCE++ with the group's mean as baseline. Legend: B rows, G distinct groups, N tokens."""

import torch

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.declarations import advantage_declaration
from podium.algorithms.records import AdvantageInputs, AdvantageOutputs
from podium.algorithms.token_rows import group_statistics, whiten

__all__ = ["reinforce_pp_baseline"]


@advantage_declaration("reinforce_pp_baseline")
def reinforce_pp_baseline(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutputs:
    """``R_i - mean(R)`` over the rows of i's group, then whitened over the batch's masked tokens.

    The form of REINFORCE++ with a baseline: Hu et al. 2025, arXiv:2501.03262. The deviation is that of the whole batch,
    not of the group, so that easy and hard prompts keep their proportions. ``config.normalize_advantage = False``
    leaves the whitening out. A group of a single row, whose baseline is its own reward, gives 0 before the whitening;
    verl takes 0 as its baseline. The paper adds the KL to the loss, as ``kl_estimator = k2`` with ``kl_in = loss``.
    """
    rewards_B = inputs.row_rewards_B
    stats = group_statistics(rewards_B, inputs.group_B)
    centered_B = torch.where(stats.flat_G[stats.index_B], 0.0, rewards_B - stats.mean_G[stats.index_B])
    advantages_N = inputs.spread(centered_B)
    if config.normalizes(default=True):
        advantages_N[inputs.mask_N] = whiten(advantages_N[inputs.mask_N])
    return AdvantageOutputs(advantages_N=advantages_N)
