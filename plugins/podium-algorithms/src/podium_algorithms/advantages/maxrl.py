"""Maximum-likelihood reinforcement learning. Legend: B rows, G distinct groups, N tokens."""

import torch

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.records import AdvantageInputs, AdvantageOutputs
from podium.algorithms.token_rows import EPSILON, group_statistics
from podium.errors import DataError
from podium_algorithms.declarations import MAXRL

__all__ = ["maxrl"]


@MAXRL
def maxrl(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutputs:
    """``(R_i - mean(R)) / mean(R)`` over the rows of i's group, the same at all tokens of row i.

    Maximum-likelihood reinforcement learning: Tajwar et al. 2026, arXiv:2602.02710. For rewards of 0 and 1 the mean is
    the share of solved attempts, and the gradient that of the likelihood of solving the prompt, up to the order of the
    group's size. A group whose mean is 0 gives 0. ``config.normalize_advantage = False`` leaves the division out.

    Raises:
        DataError: A reward is negative, so that the mean is no share of anything.
    """
    rewards_B = inputs.row_rewards_B
    if len(rewards_B) and (least := float(rewards_B.min())) < -EPSILON:
        raise DataError(
            f"advantage 'maxrl' divides by the mean of rewards, and got the reward {least:g}: rewards must not be "
            "below 0. Leave penalties such as overlong, length and repetition out, let the reward return at least 0, "
            "or set algorithm.advantage to grpo"
        )
    rewards_B = rewards_B.clamp(min=0.0)  # of the rounding of a sum
    stats = group_statistics(rewards_B, inputs.group_B)
    mean_B, teaches_G = stats.mean_G[stats.index_B], ~stats.flat_G & (stats.mean_G > 0)
    advantages_B = rewards_B - mean_B
    if config.normalizes(default=True):
        advantages_B = advantages_B / mean_B
    return AdvantageOutputs(advantages_N=inputs.spread(torch.where(teaches_G[stats.index_B], advantages_B, 0.0)))
