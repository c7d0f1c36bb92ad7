"""Podium's advantage estimators. Each is a function ``(AdvantageInputs, AlgorithmConfig) -> AdvantageOutputs``.

Legend: B rows, G distinct groups, N tokens over all rows, M masked tokens (those of N that the policy chose, in order).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.named import resolve_advantage
from podium.algorithms.records import AdvantageInputs, AdvantageOutputs
from podium.algorithms.token_rows import EPSILON, discounted_sums, ends_of_rows, whiten, wide
from podium.errors import DataError

__all__ = ["GroupStatistics", "compute_advantages", "gae", "group_statistics", "grpo", "reinforce_pp", "rloo"]


def compute_advantages(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutputs:
    """Run the estimator that ``config.advantage`` names, and check what it returns.

    Raises:
        ConfigError: The estimator cannot be found.
        DataError: The estimator returned something else than finite ``[N]`` tensors that are 0 outside the mask.
    """
    outputs = cast("object", resolve_advantage(config.advantage)(inputs, config))
    who = f"advantage estimator {config.advantage!r}"
    if not isinstance(outputs, AdvantageOutputs):
        raise DataError(f"{who} returned {type(outputs).__name__}; expected AdvantageOutputs")
    for name, values_N in (("advantages_N", outputs.advantages_N), ("returns_N", outputs.returns_N)):
        if values_N is None:
            continue
        tokens = len(inputs.mask_N)
        if values_N.shape != (tokens,):
            raise DataError(
                f"{who} returned {name} of shape {list(values_N.shape)}; expected one value a token, [{tokens}]"
            )
        if not bool(values_N.isfinite().all()):
            row = int(inputs.row_N[~values_N.isfinite()][0])
            raise DataError(f"{who} returned {name} that are not finite, first in row {row}: look at that row's reward")
        if bool((values_N[~inputs.mask_N] != 0).any()):
            raise DataError(
                f"{who} returned {name} that are not 0 outside mask_N; inputs.spread(values_B) sees to that"
            )
    return outputs


@dataclass(frozen=True)
class GroupStatistics:
    """Moments of groups of rows.

    Attributes:
        index_B: int64 ``[B]``, the group of each row, 0 to G - 1; ``stats.mean_G[stats.index_B]`` is ``[B]``.
        size_G: int64 ``[G]``.
        mean_G: float ``[G]``.
        std_G: float ``[G]``, the standard deviation of a sample (divided by size - 1); 0 in groups of one row.
        flat_G: bool ``[G]``, whether all values of the group are equal.
    """

    index_B: Tensor
    size_G: Tensor
    mean_G: Tensor
    std_G: Tensor
    flat_G: Tensor


def group_statistics(values_B: Tensor, group_B: Tensor) -> GroupStatistics:
    """Compute the moments of ``values_B`` in each group. Groups have any size, and their rows come in any order.

    >>> stats = group_statistics(torch.tensor([1.0, 5.0, 3.0]), torch.tensor([4, 0, 4]))
    >>> stats.mean_G[stats.index_B].tolist(), stats.flat_G.tolist()
    ([2.0, 5.0, 2.0], [True, False])
    """
    values_B = wide(values_B)
    # torch.unique carries no annotations
    found = torch.unique(group_B, return_inverse=True)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    names_G, index_B = cast("tuple[Tensor, Tensor]", found)
    zeros_G = values_B.new_zeros(len(names_G))
    size_G = torch.zeros_like(names_G).index_add(0, index_B, torch.ones_like(index_B))
    mean_G = zeros_G.index_add(0, index_B, values_B) / size_G
    squares_G = zeros_G.index_add(0, index_B, (values_B - mean_G[index_B]).square())
    std_G = (squares_G / (size_G - 1).clamp(min=1)).sqrt()
    # Extremes tell whether a group is flat: the mean of equal numbers may differ from them by a rounding error.
    highest_G = zeros_G.scatter_reduce(0, index_B, values_B, "amax", include_self=False)
    lowest_G = zeros_G.scatter_reduce(0, index_B, values_B, "amin", include_self=False)
    return GroupStatistics(index_B, size_G, mean_G, std_G, highest_G == lowest_G)


def grpo(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutputs:
    """``(R_i - mean(R)) / std(R)`` over the rows of i's group, the same at all tokens of row i.

    Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, section 4.1.2 (outcome supervision).
    ``config.normalize_advantage = False`` leaves the division out: Dr. GRPO, Liu et al. 2025, "Understanding
    R1-Zero-Like Training", arXiv:2503.20783, section 3.2. A group without variance, and so a group of a single row,
    gives zeros.
    """
    rewards_B = inputs.row_rewards_B
    stats = group_statistics(rewards_B, inputs.group_B)
    advantages_B = rewards_B - stats.mean_G[stats.index_B]
    if config.normalizes(default=True):
        advantages_B = advantages_B / (stats.std_G[stats.index_B] + EPSILON)
    advantages_B = torch.where(stats.flat_G[stats.index_B], 0.0, advantages_B)
    return AdvantageOutputs(advantages_N=inputs.spread(advantages_B))


def rloo(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutputs:
    """``R_i - mean of the group's other rows``, the same at all tokens of row i: REINFORCE with leave-one-out baseline.

    Ahmadian et al. 2024, "Back to Basics", arXiv:2402.14740; the baseline is from Kool et al. 2019, "Buy 4 REINFORCE
    Samples, Get a Baseline for Free!". The papers do not normalize; ``config.normalize_advantage = True`` whitens the
    result over the batch's masked tokens. A group of a single row has no baseline and gives 0.
    """
    rewards_B = inputs.row_rewards_B
    stats = group_statistics(rewards_B, inputs.group_B)
    # R_i - (sum - R_i) / (n - 1) = (R_i - mean) * n / (n - 1)
    scale_G = stats.size_G / (stats.size_G - 1).clamp(min=1)
    advantages_B = (rewards_B - stats.mean_G[stats.index_B]) * scale_G[stats.index_B]
    advantages_N = inputs.spread(torch.where(stats.flat_G[stats.index_B], 0.0, advantages_B))
    if config.normalizes(default=False):
        advantages_N[inputs.mask_N] = whiten(advantages_N[inputs.mask_N])
    return AdvantageOutputs(advantages_N=advantages_N)


def reinforce_pp(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutputs:
    """``sum_k gamma^k r_{t+k}`` over the row's masked tokens, then whitened over the batch's masked tokens.

    REINFORCE++: Hu et al. 2025, arXiv:2501.03262. The rewards are those of ``inputs.rewards_N``: the score at a row's
    last token, a KL penalty at each token. No critic and no groups take part. ``config.normalize_advantage = False``
    leaves the whitening out.
    """
    chosen_M = inputs.mask_N.nonzero().squeeze(1)
    to_go_M = discounted_sums(inputs.rewards_N[chosen_M], inputs.row_N[chosen_M], config.gamma)
    advantages_N = torch.zeros_like(inputs.rewards_N)
    advantages_N[chosen_M] = whiten(to_go_M) if config.normalizes(default=True) else to_go_M
    return AdvantageOutputs(advantages_N=advantages_N)


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
