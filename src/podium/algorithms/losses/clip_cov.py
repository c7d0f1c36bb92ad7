"""Clip-Cov: no gradient at a few tokens of high covariance, drawn from the whole minibatch."""

from typing import Final

import torch
from pydantic import Field
from torch import Tensor

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.declarations import Declaration
from podium.algorithms.kl import bounded_exp
from podium.algorithms.losses.ppo_clip import log_ratio
from podium.algorithms.records import LossInputs, TokenLoss
from podium.algorithms.token_rows import wide
from podium.config import section

__all__ = ["ClipCovOptions", "clip_cov"]

COV_FRACTION: Final = "policy/cov_fraction"  # share of tokens that Clip-Cov left out of the gradient


@section("algorithm.options")
class ClipCovOptions:
    """The tokens that Clip-Cov leaves out of the gradient."""

    cov_share: float = Field(default=2e-4, gt=0, le=1)
    """This share of a minibatch's tokens is left out of the gradient."""
    cov_low: float = Field(default=1.0, ge=-1e9, le=1e9)
    """Tokens are left out only where their covariance is at least this."""
    cov_high: float = Field(default=5.0, ge=-1e9, le=1e9)
    """Tokens are left out only where their covariance is at most this."""


def high_covariance(inputs: LossInputs, config: AlgorithmConfig) -> dict[str, Tensor]:
    """Draw the tokens of a whole minibatch that are left out: ``floor(r N)`` of those in range, uniformly.

    ``Cov_i = (logp_i - mean logp) (A_i - mean A)``. The draw is made among places in the order of covariance, so that
    it does not depend on how the minibatch is spread over ranks.
    """
    options = config.read_options(ClipCovOptions)
    logprobs_N, advantages_N = wide(inputs.logprobs_N), wide(inputs.advantages_N)
    cov_N = (logprobs_N - logprobs_N.mean()) * (advantages_N - advantages_N.mean())
    places_M = cov_N.argsort(stable=True)
    cov_M = cov_N[places_M]
    places_M = places_M[(cov_M >= options.cov_low) & (cov_M <= options.cov_high)]
    permutation = torch.randperm(len(places_M), generator=torch.Generator().manual_seed(inputs.step))
    chosen_N = torch.zeros_like(cov_N)
    chosen_N[places_M[permutation[: int(options.cov_share * len(cov_N))].to(places_M.device)]] = 1.0
    return {"chosen": chosen_N}


@Declaration(options=ClipCovOptions, minibatch=high_covariance)
def clip_cov(inputs: LossInputs, config: AlgorithmConfig) -> TokenLoss:
    """``-r A`` with ``r = exp(logprobs - old_logprobs)``, and 0 at the tokens that were left out, ``[N]``.

    Clip-Cov: Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models",
    arXiv:2505.22617, section 4.2. Entropy falls with the covariance of log-probabilities and advantages. A small random
    share of the tokens of high covariance is therefore left out of the gradient.
    """
    chosen_N = inputs.figures["chosen"]
    loss_N = -bounded_exp(log_ratio(inputs)) * wide(inputs.advantages_N.detach()) * (1 - chosen_N)
    return TokenLoss(loss_N, {COV_FRACTION: chosen_N})
