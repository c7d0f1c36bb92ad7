"""REINFORCE++. Legend: N tokens, M masked tokens (those of N that the policy chose, in order)."""

import torch

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.declarations import advantage_declaration
from podium.algorithms.records import AdvantageInputs, AdvantageOutputs
from podium.algorithms.token_rows import discounted_sums, whiten

__all__ = ["reinforce_pp"]


@advantage_declaration("reinforce_pp")
def reinforce_pp(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutputs:
    """``sum_k gamma^k r_{t+k}`` over the row's masked tokens, then whitened over the batch's masked tokens.

    REINFORCE++: Hu et al. 2025, arXiv:2501.03262. The rewards are those of ``inputs.rewards_N``: the score at a row's
    last token, a KL penalty at each token. No critic and no groups take part. ``config.normalize_advantage = False``
    leaves the whitening out.
    """
    chosen_M = inputs.mask_N.nonzero().squeeze(1)
    to_go_M = discounted_sums(inputs.rewards_N[chosen_M], inputs.row_N[chosen_M], config.gamma)
    advantages_N = torch.zeros_like(inputs.rewards_N)
    advantages_N[chosen_M] = whiten(to_go_M) if config.normalizes(default=True) else to_go_M
    return AdvantageOutputs(advantages_N=advantages_N)
