"""The gap between the generator and the trainer: importance weights that mend it, and figures that show it.

Both hold the same weights, and yet other kernels, another precision or an older version give other log-probabilities.
Truncated importance sampling: Ionides 2008; for token policies Espeholt et al. 2018, "IMPALA", arXiv:1802.01561,
section 4.1; between a rollout engine and its trainer Yao et al. 2025, "On the Rollout-Training Mismatch in Modern RL
Systems".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from podium.algorithms.kl import bounded_exp, kl_estimate
from podium.algorithms.token_rows import wide

__all__ = ["Mismatch", "mismatch", "truncated_weights"]


def truncated_weights(old_logprobs_N: Tensor, rollout_logprobs_N: Tensor, cap: float) -> Tensor:
    """``min(exp(old - rollout), cap)``, float ``[N]``, without gradient.

    Multiplied into the loss of each token they make samples of the generator stand for samples of the old policy; the
    cap bounds their variance at the price of a small bias.

    >>> truncated_weights(torch.tensor([-1.0, 0.0]), torch.tensor([-1.0, -3.0]), cap=2.0).tolist()
    [1.0, 2.0]
    """
    return bounded_exp((wide(old_logprobs_N) - wide(rollout_logprobs_N)).detach()).clamp(max=cap)


@dataclass(frozen=True)
class Mismatch:
    """How far trainer and generator disagree at each token, all ``[N]`` and without gradient.

    Attributes:
        difference_N: ``|old - rollout|`` of the log-probabilities, nats.
        kl_N: KL(rollout || old) by k3, nats.
    """

    difference_N: Tensor
    kl_N: Tensor


@torch.no_grad()
def mismatch(old_logprobs_N: Tensor, rollout_logprobs_N: Tensor) -> Mismatch:
    """Compare the trainer's log-probabilities with those recorded at sampling. Zero when the engine is right."""
    return Mismatch(
        difference_N=(wide(old_logprobs_N) - wide(rollout_logprobs_N)).abs(),
        kl_N=kl_estimate(rollout_logprobs_N, old_logprobs_N, "k3"),
    )
