"""Group-relative advantages: GRPO, and Dr. GRPO without the division by the standard deviation.

- GRPO: Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, section 4.1.2 (outcome supervision).
- Dr. GRPO: Liu et al. 2025, "Understanding R1-Zero-Like Training", arXiv:2503.20783, section 3.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from podium.algorithms.advantages.groups import group_statistics
from podium.algorithms.records import AdvantageInputs, AdvantageOutputs
from podium.algorithms.token_rows import EPSILON

if TYPE_CHECKING:
    from podium.algorithms.config import AlgorithmConfig

__all__ = ["grpo"]


def grpo(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutputs:
    """``(R_i - mean(R)) / std(R)`` over the rows of i's group, the same at all tokens of row i.

    ``config.normalize_advantage = False`` leaves the division out (Dr. GRPO). A group without variance, one of a
    single row among them, gives zeros.
    """
    rewards_B = inputs.row_rewards_B
    stats = group_statistics(rewards_B, inputs.group_B)
    advantages_B = rewards_B - stats.mean_G[stats.index_B]
    if config.normalizes(default=True):
        advantages_B = advantages_B / (stats.std_G[stats.index_B] + EPSILON)
    advantages_B = torch.where(stats.flat_G[stats.index_B], 0.0, advantages_B)
    return AdvantageOutputs(advantages_N=inputs.spread(advantages_B))
