"""DPPO with the total variation: no gradient at tokens whose probability has moved too far."""

import torch
from torch import Tensor

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.kl import bounded_exp
from podium.algorithms.losses import log_ratio
from podium.algorithms.records import LossInputs, TokenLoss
from podium.algorithms.token_rows import wide
from podium.telemetry.metrics import CLIP_FRACTION
from podium_algorithms.declarations import DPPO_TV

__all__ = ["dppo_tv", "masked_surrogate"]


@DPPO_TV
def dppo_tv(inputs: LossInputs, config: AlgorithmConfig) -> TokenLoss:
    """``-r A``, and 0 where the token's probability has already moved too far in the direction of A, ``[N]``.

    Divergence proximal policy optimization, the binary form with the total variation: Qi et al. 2026, "Rethinking the
    Trust Region in LLM Reinforcement Learning", arXiv:2602.04879. With the token's probabilities p under the policy and
    q under the generator, ``r = p / q``. A token with A > 0 is left out if ``p - q > clip_high``, one with A < 0 if
    ``q - p > clip_low``. The bounds are those of a probability, not of a ratio: rare tokens may move by large factors.
    The authors' code also cuts r at 20; this function, as the paper, does not.
    """
    with torch.no_grad():
        moved_N = wide(inputs.logprobs_N).exp() - wide(inputs.old_logprobs_N).exp()
    low, high = config.clip_bounds
    return masked_surrogate(inputs, moved_N > high, moved_N < -low)


def masked_surrogate(inputs: LossInputs, above_N: Tensor, below_N: Tensor) -> TokenLoss:
    """``-r A``, and 0 at tokens of positive advantage that are ``above`` and of negative advantage that are ``below``,
    with the share of these tokens."""
    advantages_N = wide(inputs.advantages_N.detach())
    masked_N = torch.where(advantages_N > 0, above_N, below_N & (advantages_N < 0)).to(advantages_N.dtype)
    loss_N = -bounded_exp(log_ratio(inputs)) * advantages_N * (1 - masked_N)
    return TokenLoss(loss_N, {CLIP_FRACTION: masked_N})
