"""KL-Cov: a penalty on the movement of a few tokens of the highest covariance in the whole minibatch."""

import torch
from torch import Tensor

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.kl import bounded_exp
from podium.algorithms.losses import log_ratio
from podium.algorithms.records import LossInputs, TokenLoss
from podium.algorithms.token_rows import wide
from podium_algorithms.declarations import KL_COV, KlCovOptions
from podium_algorithms.losses.clip_cov import COV_FRACTION, covariances

__all__ = ["kl_cov"]


def highest_covariance(inputs: LossInputs, config: AlgorithmConfig) -> dict[str, Tensor]:
    """Mark the ``max(floor(k N), 1)`` tokens of the highest covariance in a whole minibatch."""
    cov_N = covariances(inputs)
    count = min(max(int(config.read_options(KlCovOptions).kl_cov_share * len(cov_N)), 1), len(cov_N))
    chosen_N = torch.zeros_like(cov_N)
    chosen_N[cov_N.argsort(descending=True, stable=True)[:count]] = 1.0
    return {"chosen": chosen_N}


@KL_COV
def kl_cov(inputs: LossInputs, config: AlgorithmConfig) -> TokenLoss:
    """``-r A``, and ``-r A + kl_cov_coef · |log r|`` at the tokens of the highest covariance, ``[N]``.

    KL-Cov: Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models",
    arXiv:2505.22617, section 4.2. ``r = exp(logprobs - old_logprobs)``. The paper penalizes KL(old ‖ new) and does not
    say how it is estimated; this function follows the authors' code, which takes ``|log r|``. Nothing is clipped.
    ``|log r|`` has no gradient where r is 1, so the penalty counts from the second update of a step on.
    """
    chosen_N, difference_N = inputs.figures["chosen"], log_ratio(inputs)
    penalty_N = config.read_options(KlCovOptions).kl_cov_coef * chosen_N * difference_N.abs()
    loss_N = penalty_N - bounded_exp(difference_N) * wide(inputs.advantages_N.detach())
    return TokenLoss(loss_N, {COV_FRACTION: chosen_N})
