"""Group-relative advantages of turns. Legend: B rows, N tokens, M masked tokens, K turns."""

import torch

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.records import AdvantageInputs, AdvantageOutputs
from podium.algorithms.token_rows import EPSILON, discounted_sums, group_statistics
from podium_algorithms.declarations import GRPO_TURNS
from podium_algorithms.turns import find_turns

__all__ = ["grpo_turns"]


@GRPO_TURNS
def grpo_turns(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutputs:
    """``(G_k - mean(G_k)) / std(G)``, the same at all tokens of turn k.

    ``G_k = r_k + gamma G_{k+1}`` is what a trajectory still earns from its turn k on. Its mean is over the k-th turns
    of the group's trajectories, so a turn is compared with what other trajectories earned from the same turn on.
    Earlier rewards and the number of turns do not count. The standard deviation is over all turns of the group, so that
    turns keep their proportions; ``config.normalize_advantage = False`` leaves the division out. A turn that a single
    trajectory of its group reached, or whose G are all equal, gets 0. With one turn a row this is ``grpo``.

    The outcome form is Shao et al. 2024, arXiv:2402.03300, section 4.1.2. Their form for steps (4.1.3) sums normalized
    rewards of later steps instead, which favors the longer of two trajectories whose rewards are above the mean.
    """
    turns = find_turns(inputs)
    left_K = discounted_sums(turns.rewards_K, turns.row_K, config.gamma)
    group_K = inputs.group_B[turns.row_K]
    groups = group_statistics(left_K, group_K)
    most = int(turns.place_K.max()) + 1 if len(left_K) else 1
    peers = group_statistics(left_K, groups.index_B * most + turns.place_K)
    advantages_K = left_K - peers.mean_G[peers.index_B]
    if config.normalizes(default=True):
        advantages_K = advantages_K / (groups.std_G[groups.index_B] + EPSILON)
    advantages_K = torch.where(peers.flat_G[peers.index_B], 0.0, advantages_K)
    advantages_N = torch.zeros_like(inputs.rewards_N, dtype=advantages_K.dtype)
    advantages_N[inputs.mask_N] = advantages_K[turns.index_M]
    return AdvantageOutputs(advantages_N=advantages_N)
