"""Generalized advantage estimation over turns. Legend: N tokens, M masked tokens, K turns."""

import torch

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.records import AdvantageInputs, AdvantageOutputs
from podium.algorithms.token_rows import discounted_sums, ends_of_rows, whiten, wide
from podium.errors import DataError
from podium_algorithms.declarations import GAE_TURNS
from podium_algorithms.turns import find_turns

__all__ = ["gae_turns"]


@GAE_TURNS
def gae_turns(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutputs:
    """As ``gae`` with a turn in place of a token: ``A_k = sum_j (gamma lam)^j d_{k+j}``, the same at all its tokens.

    ``d_k = r_k + gamma V_{k+1} - V_k``, where ``V_k`` is the critic's value before the first token of turn k and
    ``r_k`` the reward of that turn. After the last turn V is ``inputs.bootstrap_B``, or 0. ``gamma`` and ``lam`` so
    count turns of a conversation, however long an answer is. The critic's target at each token of a turn is
    ``A_k + V_k``. Equation 16 of Schulman et al. 2016, arXiv:1506.02438, whose actions are turns here, as those of Zhou
    et al. 2024, "ArCHer", arXiv:2402.19446, are. The advantages are whitened over the batch's masked tokens unless
    ``config.normalize_advantage = False``.

    Raises:
        DataError: There are no values.
    """
    if inputs.values_N is None:
        raise DataError("advantage 'gae_turns' needs the critic's values: add a critic, or choose 'grpo_turns'")
    chosen_M = inputs.mask_N.nonzero().squeeze(1)
    turns = find_turns(inputs)
    values_K = wide(inputs.values_N[chosen_M])[turns.first_K]
    after_end_K = torch.zeros_like(values_K) if inputs.bootstrap_B is None else wide(inputs.bootstrap_B)[turns.row_K]
    next_values_K = torch.where(ends_of_rows(turns.row_K), after_end_K, values_K.roll(-1))
    delta_K = turns.rewards_K + config.gamma * next_values_K - values_K
    advantages_K = discounted_sums(delta_K, turns.row_K, config.gamma * config.lam)

    advantages_M = advantages_K[turns.index_M]
    advantages_N = torch.zeros_like(inputs.rewards_N, dtype=advantages_M.dtype)
    returns_N = torch.zeros_like(advantages_N)
    advantages_N[chosen_M] = whiten(advantages_M) if config.normalizes(default=True) else advantages_M
    returns_N[chosen_M] = (advantages_K + values_K)[turns.index_M]
    return AdvantageOutputs(advantages_N=advantages_N, returns_N=returns_N)
