"""Podium's own advantage estimators, ``(AdvantageInputs, AlgorithmConfig) -> AdvantageOutputs``, and the check of what
an estimator returns.

Legend: B rows, G distinct groups, N tokens, M masked tokens (those of N that the policy chose, in order).
"""

from typing import cast

import torch
from torch import Tensor

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.declarations import ADVANTAGES
from podium.algorithms.records import AdvantageInputs, AdvantageOutputs, is_own_column
from podium.algorithms.token_rows import EPSILON, discounted_sums, ends_of_rows, group_statistics, whiten, wide
from podium.errors import DataError


def compute_advantages(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutputs:
    """Run the estimator that ``config.advantage`` names, and check what it returns.

    Raises:
        ConfigError: The estimator cannot be found.
        DataError: The estimator returned something other than finite ``[N]`` tensors that are 0 outside the mask, or a
            column of its own under a name of Podium's.
    """
    outputs = cast("object", ADVANTAGES.load(config.advantage)(inputs, config))
    who = f"advantage estimator {config.advantage!r}"
    if not isinstance(outputs, AdvantageOutputs):
        raise DataError(f"{who} returned {type(outputs).__name__}; expected AdvantageOutputs")
    if outputs.returns_N is None and ADVANTAGES.declaration(config.advantage).needs_values:
        raise DataError(f"{who} returned no returns_N, which are the critic's targets")
    columns: dict[str, object] = {"advantages_N": outputs.advantages_N, "returns_N": outputs.returns_N}
    for name, values_N in columns.items():
        if values_N is None and name == "returns_N":
            continue
        checked_N = _check_shape(values_N, len(inputs.mask_N), f"{who} returned {name}")
        if not bool(checked_N.isfinite().all()):
            row = int(inputs.row_N[~checked_N.isfinite()][0])
            raise DataError(
                f"{who} returned {name} with values that are not finite, first in row {row}: check the "
                "reward of that row"
            )
        if bool((checked_N[~inputs.mask_N] != 0).any()):
            raise DataError(
                f"{who} returned {name} with values that are not 0 outside mask_N; inputs.spread(values_B) makes a "
                "tensor that is 0 there"
            )
    for name, values in outputs.columns.items():
        if not is_own_column(name):
            raise DataError(f"{who} returned the column {name!r}, which is a name of Podium's: choose another one")
        _check_shape(values, len(inputs.mask_N), f"{who} returned the column {name!r}")
    return outputs


def _check_shape(values: object, tokens: int, what: str) -> Tensor:
    """Return ``values``. Raises DataError if they are not a tensor of one value a token."""
    if not isinstance(values, Tensor):
        raise DataError(f"{what} as {type(values).__name__}; expected a tensor of one value a token")
    if values.shape != (tokens,):
        raise DataError(f"{what} of shape {list(values.shape)}; expected one value a token, [{tokens}]")
    return values


@ADVANTAGES.own["grpo"]
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


@ADVANTAGES.own["dr_grpo"]
def dr_grpo(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutputs:
    """``R_i - mean(R)`` over the rows of i's group, the same at all tokens of row i.

    Dr. GRPO: Liu et al. 2025, "Understanding R1-Zero-Like Training", arXiv:2503.20783, section 3.2. It is ``grpo``
    without the division by the standard deviation, and with the aggregation ``sequence-sum-constant``, unless the
    configuration sets ``normalize_advantage`` or ``aggregation``.
    """
    return grpo(inputs, config)


@ADVANTAGES.own["rloo"]
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


@ADVANTAGES.own["reinforce_pp"]
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


@ADVANTAGES.own["reinforce_pp_baseline"]
def reinforce_pp_baseline(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutputs:
    """``R_i - mean(R)`` over the rows of i's group, then whitened over the batch's masked tokens.

    The form of REINFORCE++ with a baseline: Hu et al. 2025, arXiv:2501.03262. The deviation is that of the whole batch,
    not of the group, so that easy and hard prompts keep their proportions. ``config.normalize_advantage = False``
    leaves the whitening out. A group of a single row, whose baseline is its own reward, gives 0 before the whitening;
    verl takes 0 as its baseline. The paper adds the KL to the loss, as ``kl_estimator = k2`` with ``kl_in = loss``.
    """
    rewards_B = inputs.row_rewards_B
    stats = group_statistics(rewards_B, inputs.group_B)
    centered_B = torch.where(stats.flat_G[stats.index_B], 0.0, rewards_B - stats.mean_G[stats.index_B])
    advantages_N = inputs.spread(centered_B)
    if config.normalizes(default=True):
        advantages_N[inputs.mask_N] = whiten(advantages_N[inputs.mask_N])
    return AdvantageOutputs(advantages_N=advantages_N)


@ADVANTAGES.own["gae"]
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
