"""The clipped surrogate of PPO: Schulman et al. 2017, arXiv:1707.06347, equation 7.

Two bounds instead of one: Yu et al. 2025, "DAPO", arXiv:2503.14476, section 3.1. Dual clip: Ye et al. 2020, "Mastering
Complex Control in MOBA Games", arXiv:1912.09729.
"""

from __future__ import annotations

import torch
from torch import Tensor

from podium.algorithms.kl import bounded_exp, kl_estimate
from podium.algorithms.metrics import APPROX_KL
from podium.algorithms.records import TokenLoss
from podium.algorithms.segments import wide
from podium.telemetry.metrics import CLIP_FRACTION, RATIO_MAX, RATIO_MEAN

__all__ = ["ppo_clip"]


def ppo_clip(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> TokenLoss:
    """``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`` with ``r = exp(logprobs - old_logprobs)``, ``[N]``.

    With ``dual_clip = c`` the loss of a token of negative advantage is at most ``-c A``: a ratio that ran away is no
    longer pushed down with a force that grows with it. Gradients go to ``logprobs_N`` alone. Reported: the share of
    tokens at which a bound took the gradient away, the ratio's mean and maximum, KL(old || new).

    >>> logprobs, old, advantages = torch.tensor([0.5, -0.1]), torch.zeros(2), torch.tensor([1.0, 1.0])
    >>> loss = ppo_clip(logprobs, old, advantages, clip_low=0.2, clip_high=0.28)
    >>> [round(x, 4) for x in loss.loss_N.tolist()], loss.metrics["policy/clip_fraction"].tolist()
    ([-1.28, -0.9048], [1.0, 0.0])
    """
    logprobs_N, old_logprobs_N = wide(logprobs_N), wide(old_logprobs_N.detach())
    advantages_N = wide(advantages_N.detach())
    ratio_N = bounded_exp(logprobs_N - old_logprobs_N)
    free_N = -ratio_N * advantages_N
    bounded_N = -ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N
    loss_N = torch.maximum(free_N, bounded_N)
    clipped_N = bounded_N > free_N
    if dual_clip is not None:
        ceiling_N = -dual_clip * advantages_N
        runaway_N = (advantages_N < 0) & (loss_N > ceiling_N)
        loss_N = torch.where(runaway_N, ceiling_N, loss_N)
        clipped_N = clipped_N | runaway_N
    ratio_N = ratio_N.detach()
    metrics = {
        CLIP_FRACTION: clipped_N.to(ratio_N.dtype),
        RATIO_MEAN: ratio_N,
        APPROX_KL: kl_estimate(old_logprobs_N, logprobs_N.detach(), "k3"),
    }
    return TokenLoss(loss_N, metrics, {RATIO_MAX: ratio_N})
