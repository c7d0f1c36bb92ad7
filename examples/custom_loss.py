"""A loss of your own: one function, named by one key.

python examples/custom_loss.py
podium train grpo --algorithm.loss examples/custom_loss.py:cispo --model.path … --data.train …
"""

from __future__ import annotations

import torch

from podium.algorithms import AlgorithmConfig, LossInputs, TokenLoss


def cispo(inputs: LossInputs, config: AlgorithmConfig) -> TokenLoss:
    """The policy gradient under clipped importance weights: MiniMax-M1, arXiv:2506.13585, equations 4 and 5.

    Legend: N tokens that carry loss. No token loses its gradient; weights above the bound count as the bound.
    """
    ratio_N = (inputs.logprobs_N - inputs.old_logprobs_N).exp().detach()
    weight_N = ratio_N.clamp(max=1 + config.clip_bounds[1])
    loss_N = -weight_N * inputs.advantages_N * inputs.logprobs_N
    return TokenLoss(loss_N, {"policy/clip_fraction": (ratio_N > weight_N).float()})


if __name__ == "__main__":
    example = LossInputs(
        offsets_B1=torch.tensor([0, 2, 3]),  # a row of two tokens and a row of one
        columns={
            "logprobs": torch.tensor([-1.0, -2.0, -0.5]),
            "old_logprobs": torch.tensor([-1.0, -2.5, -0.5]),
            "advantages": torch.tensor([1.0, 1.0, -1.0]),
        },
    )
    print([round(loss, 3) for loss in cispo(example, AlgorithmConfig()).loss_N.tolist()])
