"""KPop: a mask of tokens at which the binary divergence between generator and trainer is large in either direction."""

import math
from typing import Final

import torch
from torch import Tensor

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.records import LossInputs
from podium.algorithms.token_rows import wide
from podium_algorithms.declarations import KPOP, KpopOptions
from podium_algorithms.losses.dppo_kl import binary_kl

__all__ = ["kpop"]

_LEAST: Final = 1e-6


@KPOP
def kpop(inputs: LossInputs, config: AlgorithmConfig) -> Tensor:
    """1 if ``D(p, q) <= kpop_kl`` and ``D(q, p) <= kpop_kl``, and else 0, ``[N]``; p and q are the token's
    probabilities under ``old`` and ``rollout``.

    KPop: Guo et al. 2026, "Taming Training-Inference Mismatch in Reinforcement Learning with Adaptive Masking Regions",
    ringtech.notion.site/kpop. ``D(p, q) = p log(p / q) + (1 - p) log((1 - p) / (1 - q))`` treats the vocabulary as this
    token and all others: rare tokens may differ by a large ratio, and confident ones by a small one. 0.1 is the bound
    of the paper; AReaL's example has 2. It is a mask, as in AReaL and in verl: ``correction: [truncate, kpop]`` has the
    importance weights too. Probabilities count as at least 1e-6 and at most 1 - 1e-6, as in prime-rl, since a
    probability that rounds to 1 would have an infinite divergence.
    """
    with torch.no_grad():
        columns = (inputs.old_logprobs_N, inputs.rollout_logprobs_N)
        old_N, rollout_N = (wide(column_N).clamp(math.log(_LEAST), math.log1p(-_LEAST)) for column_N in columns)
        apart_N = torch.maximum(binary_kl(old_N, rollout_N), binary_kl(rollout_N, old_N))
    return (apart_N <= config.read_options(KpopOptions).kpop_kl).to(apart_N.dtype)
