"""Generalized advantage estimation. Legend: N tokens, M masked tokens (those of N that the policy chose, in order)."""

import torch

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.declarations import advantage_declaration
from podium.algorithms.records import AdvantageInputs, AdvantageOutputs
from podium.algorithms.token_rows import discounted_sums, ends_of_rows, whiten, wide
from podium.errors import DataError

__all__ = ["gae"]


@advantage_declaration("gae")
def gae(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutputs:
    """``A_t = sum_k (gamma lam)^k d_{t+k}`` with ``d_t = r_t + gamma V_{t+1} - V_t``; returns are ``A_t + V_t``.

    Generalized advantage estimation: Schulman et al. 2016, arXiv:1506.02438, equation 16. t counts a row's masked
    tokens: gaps in the mask are stepped over, so that the successor of the token before a tool's answer is the token
    after it. After the last token V is ``inputs.bootstrap_B``, or 0. The advantages, not the returns, are whitened over
    the batch's masked tokens unless ``config.normalize_advantage = False``.

    Raises:
        DataError: There are no values.
    """
    if inputs.values_N is None:
        raise DataError("advantage 'gae' needs the critic's values: add a critic, or choose an estimator without one")
    chosen_M = inputs.mask_N.nonzero().squeeze(1)
    row_M = inputs.row_N[chosen_M]
    values_M = wide(inputs.values_N[chosen_M])
    after_end_M = torch.zeros_like(values_M) if inputs.bootstrap_B is None else wide(inputs.bootstrap_B)[row_M]
    next_values_M = torch.where(ends_of_rows(row_M), after_end_M, values_M.roll(-1))
    delta_M = inputs.rewards_N[chosen_M] + config.gamma * next_values_M - values_M
    advantages_M = discounted_sums(delta_M, row_M, config.gamma * config.lam)

    advantages_N = torch.zeros_like(inputs.rewards_N, dtype=advantages_M.dtype)
    returns_N = torch.zeros_like(advantages_N)
    advantages_N[chosen_M] = whiten(advantages_M) if config.normalizes(default=True) else advantages_M
    returns_N[chosen_M] = advantages_M + values_M
    return AdvantageOutputs(advantages_N=advantages_N, returns_N=returns_N)
