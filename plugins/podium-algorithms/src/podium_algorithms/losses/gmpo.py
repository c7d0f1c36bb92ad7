"""Geometric-mean policy optimization: one ratio for each row, of tokens that are clipped first."""

import torch

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.kl import bounded_exp
from podium.algorithms.losses import log_ratio
from podium.algorithms.records import LossInputs, TokenLoss
from podium.algorithms.token_rows import wide
from podium.telemetry.metrics import CLIP_FRACTION
from podium_algorithms.declarations import GMPO

__all__ = ["gmpo"]


@GMPO
def gmpo(inputs: LossInputs, config: AlgorithmConfig) -> TokenLoss:
    """``-s A`` at every token of a row, with the geometric mean s of its clipped ratios, ``[N]``.

    ``log s`` is the mean over the row's tokens of ``d = logprobs - old_logprobs``, where d is at most ``clip_high`` if
    A > 0, and at least ``-clip_low`` if A < 0. The bounds are those of the *logarithm* of a ratio, as in the paper,
    whose ratios stay between exp(-0.4) and exp(0.4). Geometric-mean policy optimization: Zhao et al. 2025, "GMPO",
    arXiv:2507.20673. The paper bounds a ratio's reciprocal where A < 0, by the upper bound; with bounds that differ,
    ``-clip_low`` is the bound there in the authors' code, which this function follows. ``sequence-mean`` makes the sum
    the paper's. Where the tokens of a row differ in their advantage, A is its mean, and each token is clipped by its
    own sign.
    """
    low, high = config.clip_bounds
    advantages_N, difference_N = wide(inputs.advantages_N.detach()), log_ratio(inputs)
    sign_N = advantages_N.sign()
    free_N, bounded_N = sign_N * difference_N, sign_N * difference_N.clamp(-low, high)
    ratio_B = bounded_exp(inputs.row_means(sign_N * torch.minimum(free_N, bounded_N)))
    loss_B = -ratio_B * inputs.row_means(advantages_N)
    return TokenLoss(loss_B[inputs.row_N], {CLIP_FRACTION: (bounded_N < free_N).to(loss_B.dtype)})
