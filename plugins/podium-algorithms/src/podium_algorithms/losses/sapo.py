"""Soft adaptive policy optimization: a smooth gate in place of clipping."""

import torch

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.kl import bounded_exp
from podium.algorithms.losses import log_ratio
from podium.algorithms.records import LossInputs, TokenLoss
from podium.algorithms.token_rows import wide
from podium_algorithms.declarations import SAPO, SapoOptions

__all__ = ["sapo"]


@SAPO
def sapo(inputs: LossInputs, config: AlgorithmConfig) -> TokenLoss:
    """``-f(r) A`` with ``f(r) = sigmoid(tau (r - 1)) · 4 / tau``, ``[N]``.

    Soft adaptive policy optimization: Gao et al. 2025, "SAPO", arXiv:2511.20347. ``r = exp(logprobs - old_logprobs)``.
    The temperature tau is ``tau_pos`` where A > 0 and ``tau_neg`` elsewhere. The slope of f is 1 at r = 1, so that the
    first update is that of the policy gradient, and falls smoothly on both sides.
    """
    options = config.read_options(SapoOptions)
    advantages_N = wide(inputs.advantages_N.detach())
    tau_N = torch.full_like(advantages_N, options.tau_neg).masked_fill(advantages_N > 0, options.tau_pos)
    gate_N = (tau_N * (bounded_exp(log_ratio(inputs)) - 1)).sigmoid() * 4 / tau_N
    return TokenLoss(-gate_N * advantages_N)
