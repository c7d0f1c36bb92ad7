"""The optimal token baseline. Legend: B rows, N tokens, M masked tokens (those that the policy chose), P places."""

import torch
from torch import Tensor

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.records import AdvantageInputs, AdvantageOutputs
from podium.algorithms.token_rows import discounted_sums, group_statistics, whiten, wide
from podium.errors import DataError
from podium_algorithms.declarations import OTB

__all__ = ["otb"]


@OTB
def otb(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutputs:
    """``G_t - sum(W_t G_t) / sum(W_t)`` over the t-th tokens of the rows of i's group, token by token.

    The optimal token baseline: Li et al. 2026, "The Optimal Token Baseline", arXiv:2602.07078. ``G_t`` is what the row
    still earns from its token t on, and ``W_t = sum of 1 - 2 p_j + sum(p²) over its tokens j up to t`` stands for the
    squared norm of the row's gradient so far; p_j is the probability of the token, and sum(p²) is over the vocabulary,
    both before the update. t counts a row's masked tokens.

    As in the authors' code, which is verl's, a token that no other row of its group reached has the baseline 0. As
    everywhere in Podium a group whose rows all earned the same, or that has one row, gives 0; there verl's code gives
    those tokens G_t. Importance weights do not enter W, as they do in verl. ``config.normalize_advantage = True``
    whitens the result over the batch's masked tokens, which the paper does not.

    Raises:
        DataError: There are no log-probabilities or no sums of squared probabilities.
    """
    if inputs.old_logprobs_N is None or inputs.squared_probs_N is None:
        raise DataError("advantage 'otb' needs old_logprobs_N and squared_probs_N of the policy")
    chosen_M = inputs.mask_N.nonzero().squeeze(1)
    row_M = inputs.row_N[chosen_M]
    left_M = discounted_sums(inputs.rewards_N[chosen_M], row_M, config.gamma)
    chances_M = wide(inputs.old_logprobs_N[chosen_M]).exp()
    # One minus twice a probability near 1 plus its square is rounded to a little below 0.
    energy_M = (1 - 2 * chances_M + wide(inputs.squared_probs_N[chosen_M])).clamp(min=0).to(left_M.dtype)
    place_M, weight_M = _count_up(torch.ones_like(row_M), row_M), _count_up(energy_M, row_M)
    groups = group_statistics(inputs.row_rewards_B, inputs.group_B)
    longest = int(place_M.max()) + 1 if len(place_M) else 1
    peers = group_statistics(left_M, groups.index_B[row_M] * longest + place_M)
    sums_P = torch.zeros_like(peers.mean_G)
    weight_P = sums_P.index_add(0, peers.index_B, weight_M)
    # Of weights that are all 0, as where every token was certain, no mean exists: the plain mean takes its place.
    mean_P = torch.where(weight_P > 0, sums_P.index_add(0, peers.index_B, weight_M * left_M) / weight_P, peers.mean_G)
    baseline_M = torch.where(peers.size_G > 1, mean_P, 0.0)[peers.index_B]
    advantages_M = torch.where(groups.flat_G[groups.index_B][row_M], 0.0, left_M - baseline_M)
    advantages_N = torch.zeros_like(inputs.rewards_N, dtype=advantages_M.dtype)
    advantages_N[chosen_M] = whiten(advantages_M) if config.normalizes(default=False) else advantages_M
    return AdvantageOutputs(advantages_N=advantages_N)


def _count_up(values_M: Tensor, row_M: Tensor) -> Tensor:
    """The sum of each row's values up to each token, ``[M]``: by the scan of :func:`discounted_sums`, backwards."""
    return (
        discounted_sums(values_M.flip(0), row_M.amax() - row_M.flip(0) if len(row_M) else row_M, 1.0)
        .flip(0)
        .to(values_M.dtype)
    )
