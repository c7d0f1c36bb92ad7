"""Pass@k as the reward, in closed form. Legend: B rows, G distinct groups, N tokens."""

import torch
from torch import Tensor

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.records import AdvantageInputs, AdvantageOutputs
from podium.algorithms.token_rows import group_statistics
from podium.errors import DataError
from podium_algorithms.declarations import PASS_AT_K, PassOptions

__all__ = ["pass_at_k"]


@PASS_AT_K
def pass_at_k(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutputs:
    """``(1 - p) / s`` for rows that pass, and ``(1 - p - q) / s`` for those that fail, at all tokens of the row.

    ``1 - p = C(f, k) / C(n, k)`` is the chance that none of k rows of the group passes, of whose n rows f fail; ``q =
    C(f - 1, k - 1) / C(n - 1, k - 1)`` is the chance that all others fail with a row that fails; ``s = sqrt(p (1 -
    p))``. It is the mean of group-relative advantages over all ways to choose k rows, whose reward is whether one of
    them passes: Chen et al. 2025, "Pass@k Training", arXiv:2508.10751, equations 14 and 15. A row passes if its reward
    is at least the option ``pass_reward``. ``config.normalize_advantage = False`` leaves the division by s out. A group
    where any k rows pass, or none does, gives 0.

    Raises:
        DataError: No group has more rows than ``pass_k``. Smaller groups beside larger ones give 0.
    """
    options, rewards_B = config.read_options(PassOptions), inputs.row_rewards_B
    failed_B = (rewards_B < options.pass_reward).to(rewards_B.dtype)
    stats = group_statistics(failed_B, inputs.group_B)
    if len(rewards_B) and int(stats.size_G.max()) <= options.pass_k:
        raise DataError(
            f"advantage 'pass_at_k' with algorithm.options.pass_k = {options.pass_k} got groups of at most "
            f"{int(stats.size_G.max())} completions, which teach it nothing: set pass_k below sampling.n"
        )
    fails_G = (stats.mean_G * stats.size_G).round()
    none_G = _draw_only_failures(fails_G, stats.size_G, options.pass_k)
    others_G = _draw_only_failures(fails_G - 1, stats.size_G - 1, options.pass_k - 1)
    deviation_G = (none_G * (1 - none_G)).sqrt()
    index_B, teaches_G = stats.index_B, (deviation_G > 0) & (stats.size_G > options.pass_k)
    advantages_B = none_G[index_B] - failed_B * others_G[index_B]
    if config.normalizes(default=True):
        advantages_B = advantages_B / deviation_G[index_B]
    return AdvantageOutputs(advantages_N=inputs.spread(torch.where(teaches_G[index_B], advantages_B, 0.0)))


def _draw_only_failures(fails_G: Tensor, size_G: Tensor, count: int) -> Tensor:
    """The chance ``C(fails, count) / C(size, count)`` that ``count`` rows, drawn without return, all fail."""
    chance_G = torch.ones_like(fails_G)
    for drawn in range(count):
        chance_G = chance_G * ((fails_G - drawn) / (size_G - drawn).clamp(min=1)).clamp(min=0)
    return chance_G
