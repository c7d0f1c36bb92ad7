"""M2PO: the tokens that leave the generator the furthest do not train, until the others stay near it on average."""

import torch
from torch import Tensor

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.records import LossInputs
from podium.algorithms.token_rows import wide
from podium_algorithms.declarations import M2PO, M2poOptions

__all__ = ["m2po"]


def mark_far_tokens(inputs: LossInputs, config: AlgorithmConfig) -> dict[str, Tensor]:
    """Mark the tokens of a whole minibatch that train."""
    log_ratio_N = wide(inputs.logprobs_N) - wide(inputs.rollout_logprobs_N)
    leaves_N = log_ratio_N * inputs.advantages_N > 0
    places_M = leaves_N.nonzero().squeeze(1)
    squares_M = log_ratio_N[places_M].square()
    order_M = squares_M.argsort(stable=True)
    counts_M = torch.arange(1, len(places_M) + 1, device=places_M.device)
    means_M = squares_M[order_M].cumsum(0) / counts_M  # of the nearest tokens; they grow with their number
    kept_N = torch.ones_like(log_ratio_N)
    kept_N[places_M[order_M[means_M > config.read_options(M2poOptions).m2_budget]]] = 0.0
    return {"m2po": kept_N}


@M2PO
def m2po(inputs: LossInputs, config: AlgorithmConfig) -> Tensor:
    """0 at the fewest tokens without which the mean of ``log(r)²`` is at most ``m2_budget``, and else 1, ``[N]``.

    Second-moment trust policy optimization: Zheng et al. 2025, "Prosperity before Collapse", arXiv:2510.01161. The mean
    is over the minibatch's tokens that PPO would clip sooner or later, those with A > 0 and r > 1 or A < 0 and r < 1,
    where ``r = exp(logprobs - rollout_logprobs)``. The tokens of the largest squares are left out first. The authors'
    code looks for one bound of all ratios in place of the mask; AReaL's mask counts all tokens, and the policy before
    the update. The paper's objective has no other clip and r itself: ``correction: [bypass, m2po]`` with ``clip_low:
    1`` and ``clip_high: 1e9``.
    """
    return inputs.figures["m2po"]
