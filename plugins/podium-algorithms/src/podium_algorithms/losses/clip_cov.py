"""Clip-Cov: no gradient at a few tokens of high covariance, drawn from the whole minibatch."""

from typing import Final

import torch
from torch import Tensor

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.kl import bounded_exp
from podium.algorithms.losses import clip_ratios, log_ratio
from podium.algorithms.records import LossInputs, TokenLoss
from podium.algorithms.token_rows import wide
from podium.telemetry.metrics import CLIP_FRACTION
from podium_algorithms.declarations import CLIP_COV, ClipCovOptions

__all__ = ["COV_FRACTION", "clip_cov", "covariances"]

COV_FRACTION: Final = "policy/cov_fraction"  # share of tokens that Clip-Cov leaves out, or that KL-Cov penalizes


def covariances(inputs: LossInputs) -> Tensor:
    """``(logp_i - mean logp) (A_i - mean A)`` of the tokens of a whole minibatch, ``[N]``."""
    logprobs_N, advantages_N = wide(inputs.logprobs_N), wide(inputs.advantages_N)
    return (logprobs_N - logprobs_N.mean()) * (advantages_N - advantages_N.mean())


def high_covariance(inputs: LossInputs, config: AlgorithmConfig) -> dict[str, Tensor]:
    """Draw the tokens of a whole minibatch that are left out: ``max(floor(r N), 1)`` of those in range, uniformly.

    Tokens that the clip already leaves without gradient are not in range. The draw is made among places in the order of
    covariance, so that it does not depend on how the minibatch is spread over ranks.
    """
    options = config.read_options(ClipCovOptions)
    cov_N = covariances(inputs)
    free_N, bounded_N = clip_ratios(bounded_exp(log_ratio(inputs)), inputs, config)
    in_range_N = (cov_N >= options.cov_low) & (cov_N <= options.cov_high) & (bounded_N <= free_N)
    places_M = cov_N.argsort(stable=True)
    places_M = places_M[in_range_N[places_M]]
    permutation = torch.randperm(len(places_M), generator=torch.Generator().manual_seed(inputs.step))
    count = max(int(options.cov_share * len(cov_N)), 1)
    chosen_N = torch.zeros_like(cov_N)
    chosen_N[places_M[permutation[:count].to(places_M.device)]] = 1.0
    return {"chosen": chosen_N}


@CLIP_COV
def clip_cov(inputs: LossInputs, config: AlgorithmConfig) -> TokenLoss:
    """As ``ppo_clip``, and 0 at a few tokens of high covariance, ``[N]``.

    Clip-Cov: Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models",
    arXiv:2505.22617, section 4.2. Entropy falls with the covariance of log-probabilities and advantages. A small random
    share of the tokens of high covariance is therefore left out of the gradient. The paper's equation has ``-r A`` for
    the other tokens and leaves out ``floor(r N)``, which is none in a small minibatch. This function follows the
    authors' code: it clips the ratio of the other tokens, and leaves out at least one token if there is one in range.
    """
    chosen_N = inputs.figures["chosen"]
    free_N, bounded_N = clip_ratios(bounded_exp(log_ratio(inputs)), inputs, config)
    clipped_N = (bounded_N > free_N).to(free_N.dtype)
    loss_N = torch.maximum(free_N, bounded_N) * (1 - chosen_N)
    return TokenLoss(loss_N, {COV_FRACTION: chosen_N, CLIP_FRACTION: clipped_N})
