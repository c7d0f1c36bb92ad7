"""An advantage estimator of your own: tensors in, tensors out, one value a token.

python examples/custom_advantage.py
podium train grpo --algorithm.advantage examples/custom_advantage.py:best_of_group --model.path … --data.train …
"""

from __future__ import annotations

import torch

from podium.algorithms import AdvantageInputs, AdvantageOutputs, AlgorithmConfig, group_statistics


def best_of_group(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutputs:
    """Only completions that beat their group's mean teach; the others are left alone.

    Legend: B rows (completions), N tokens of all rows. ``spread`` puts a row's value on each of its sampled tokens.
    """
    rewards_B = inputs.row_rewards_B
    stats = group_statistics(rewards_B, inputs.group_B)
    above_B = (rewards_B - stats.mean_G[stats.index_B]).clamp(min=0)
    return AdvantageOutputs(advantages_N=inputs.spread(above_B))


if __name__ == "__main__":
    example = AdvantageInputs(
        rewards_B=torch.tensor([1.0, 0.0, 0.5, 0.5]),
        group_B=torch.tensor([0, 0, 1, 1]),
        mask_N=torch.tensor([False, True, False, True, False, True, False, True]),
        offsets_B1=torch.tensor([0, 2, 4, 6, 8]),
    )
    print(best_of_group(example, AlgorithmConfig()).advantages_N.tolist())
