"""DPPO with the Kullback-Leibler divergence: no gradient at tokens whose distribution has moved too far."""

import torch
from torch import Tensor

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.records import LossInputs, TokenLoss
from podium.algorithms.token_rows import wide
from podium_algorithms.declarations import DPPO_KL
from podium_algorithms.losses.dppo_tv import masked_surrogate

__all__ = ["binary_kl", "dppo_kl"]


@DPPO_KL
def dppo_kl(inputs: LossInputs, config: AlgorithmConfig) -> TokenLoss:
    """As ``dppo_tv`` with ``q log(q / p) + (1 - q) log((1 - q) / (1 - p))`` in place of the distance of p and q,
    ``[N]``.

    Divergence proximal policy optimization, the binary form with the Kullback-Leibler divergence from the generator to
    the policy, in nats: Qi et al. 2026, arXiv:2602.04879. Tokens with A > 0 and p > q are left out above ``clip_high``,
    those with A < 0 and p < q above ``clip_low``.
    """
    with torch.no_grad():
        log_p_N, log_q_N = wide(inputs.logprobs_N), wide(inputs.old_logprobs_N)
        divergence_N = binary_kl(log_q_N, log_p_N)
    low, high = config.clip_bounds
    up_N, down_N = log_p_N > log_q_N, log_p_N < log_q_N
    return masked_surrogate(inputs, (divergence_N > high) & up_N, (divergence_N > low) & down_N)


def binary_kl(logprobs_N: Tensor, other_logprobs_N: Tensor) -> Tensor:
    """``p log(p / q) + (1 - p) log((1 - p) / (1 - q))`` in nats, ``[N]``: the divergence of p from q, whose logarithms
    are given, over this token and all others."""
    p_N, q_N = logprobs_N.exp(), other_logprobs_N.exp()
    others_N = torch.xlogy(1 - p_N, 1 - p_N) - torch.xlogy(1 - p_N, 1 - q_N)
    return p_N * (logprobs_N - other_logprobs_N) + others_N
