"""Group-relative advantages of each part of a reward. Legend: B rows, G distinct groups, N tokens."""

import torch

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.records import AdvantageInputs, AdvantageOutputs
from podium.algorithms.token_rows import EPSILON, group_statistics, whiten
from podium.errors import DataError
from podium_algorithms.declarations import GDPO, PartOptions

__all__ = ["gdpo"]


@GDPO
def gdpo(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutputs:
    """``sum over parts p of w_p (R_ip - mean(R_p)) / std(R_p)`` over i's group, whitened over the batch's rows.

    Group reward-decoupled normalization: Liu et al. 2026, "GDPO", arXiv:2601.05242. Each part of the reward is
    normalized by itself, so that a part of small variance keeps its weight, where ``grpo`` normalizes the sum. The
    weights w are the option ``part_weights``, by the names of the parts; without it each part has the weight 1. A row
    whose reward lacks a part gets 0 for it, and so do all rows where no reward has a part and those of each group are
    equal, as those of sessions that all reached a limit. ``config.normalize_advantage = False`` leaves the whitening
    over the batch out.

    Raises:
        DataError: The rewards have no parts, or none of a name in ``part_weights``; or there are rewards besides them.
    """
    if not inputs.parts_B and bool(group_statistics(inputs.row_rewards_B, inputs.group_B).flat_G.all()):
        return AdvantageOutputs(advantages_N=inputs.spread(torch.zeros_like(inputs.row_rewards_B)))
    weights = config.read_options(PartOptions).part_weights or dict.fromkeys(inputs.parts_B, 1.0)
    if missing := sorted(weights.keys() - inputs.parts_B.keys()) or ([] if weights else ["any name"]):
        raise DataError(
            f"advantage 'gdpo' needs the parts of rewards, and there is no part of {missing[0]}; there are "
            f"{sorted(inputs.parts_B)}, without what log_metric logs: give several rewards (reward.name: [a, b]), or "
            "return a mapping with parts"
        )
    if inputs.token_rewards_N is not None and bool(inputs.token_rewards_N[inputs.mask_N].any()):
        raise DataError(
            "advantage 'gdpo' reads the parts of rewards alone, and these completions have other rewards too: set "
            "algorithm.kl_in to loss, or return rewards of turns as parts"
        )
    advantages_B = torch.zeros_like(inputs.row_rewards_B)
    for name in sorted(weights):
        part_B = inputs.parts_B[name].to(advantages_B)
        has_part_B = ~part_B.isnan()
        stats = group_statistics(part_B[has_part_B], inputs.group_B[has_part_B])
        centered_B = part_B[has_part_B] - stats.mean_G[stats.index_B]
        normal_B = centered_B / (stats.std_G[stats.index_B] + EPSILON)
        advantages_B[has_part_B] += weights[name] * torch.where(stats.flat_G[stats.index_B], 0.0, normal_B)
    return AdvantageOutputs(
        advantages_N=inputs.spread(whiten(advantages_B) if config.normalizes(default=True) else advantages_B)
    )
