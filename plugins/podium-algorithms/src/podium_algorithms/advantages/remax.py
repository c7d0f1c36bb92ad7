"""ReMax: a greedy completion is the baseline. Legend: B rows, N tokens, M masked tokens (that the policy chose)."""

import torch

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.records import AdvantageInputs, AdvantageOutputs
from podium.algorithms.token_rows import discounted_sums, ends_of_rows, whiten, wide
from podium.errors import DataError
from podium_algorithms.declarations import REMAX

__all__ = ["remax"]


@REMAX
def remax(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutputs:
    """``sum_k gamma^k r_{t+k}`` over the row's masked tokens, less the reward of a greedy completion at the last one.

    ReMax: Li et al. 2023, arXiv:2310.10505, algorithm 1. The baseline is the reward of the completion of the same
    prompt that always takes the most probable token. It is drawn with the weights of the step, graded, and not trained.
    Without rewards of tokens and with gamma 1 the advantage is ``R_i - R_greedy`` at all tokens of row i. The KL in the
    reward is that of later tokens alone, and none of the baseline's, as in the authors' code and in verl.
    ``config.normalize_advantage = True`` whitens the result over the batch's masked tokens, which the paper does not.

    Raises:
        DataError: There are no baselines.
    """
    if inputs.baseline_B is None:
        raise DataError("advantage 'remax' needs baseline_B, the rewards of greedy completions")
    chosen_M = inputs.mask_N.nonzero().squeeze(1)
    row_M = inputs.row_N[chosen_M]
    rewards_M = inputs.rewards_N[chosen_M] - torch.where(ends_of_rows(row_M), wide(inputs.baseline_B)[row_M], 0.0)
    advantages_M = discounted_sums(rewards_M, row_M, config.gamma)
    advantages_N = torch.zeros_like(inputs.rewards_N, dtype=advantages_M.dtype)
    advantages_N[chosen_M] = whiten(advantages_M) if config.normalizes(default=False) else advantages_M
    return AdvantageOutputs(advantages_N=advantages_N)
