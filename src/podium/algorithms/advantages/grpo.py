"""Group-relative advantages. Legend: B rows, G distinct groups, N tokens."""

import torch

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.declarations import advantage_declaration
from podium.algorithms.records import AdvantageInputs, AdvantageOutputs
from podium.algorithms.token_rows import EPSILON, group_statistics

__all__ = ["grpo"]


@advantage_declaration("grpo")
def grpo(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutputs:
    """``(R_i - mean(R)) / std(R)`` over the rows of i's group, the same at all tokens of row i.

    Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, section 4.1.2 (outcome supervision).
    ``config.normalize_advantage = False`` leaves the division out: Dr. GRPO, Liu et al. 2025, "Understanding
    R1-Zero-Like Training", arXiv:2503.20783, section 3.2. A group without variance, and so a group of a single row,
    gives zeros.
    """
    rewards_B = inputs.row_rewards_B
    stats = group_statistics(rewards_B, inputs.group_B)
    advantages_B = rewards_B - stats.mean_G[stats.index_B]
    if config.normalizes(default=True):
        advantages_B = advantages_B / (stats.std_G[stats.index_B] + EPSILON)
    advantages_B = torch.where(stats.flat_G[stats.index_B], 0.0, advantages_B)
    return AdvantageOutputs(advantages_N=inputs.spread(advantages_B))
