"""Direct reward optimization: the policy gradient under a quadratic penalty."""

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.losses import log_ratio
from podium.algorithms.records import LossInputs, TokenLoss
from podium.algorithms.token_rows import wide
from podium_algorithms.declarations import DRO, DroOptions

__all__ = ["dro"]


@DRO
def dro(inputs: LossInputs, config: AlgorithmConfig) -> TokenLoss:
    """``-A log p + dro_beta / 2 · (log p - log q)²``, with the generator's log q, ``[N]``.

    Direct reward optimization: Richemond et al. 2024, "Offline Regularised Reinforcement Learning for Large Language
    Models Alignment", arXiv:2405.19107. The paper's square ``(A - dro_beta (log p - log q))² / 2``, where A is the
    reward minus a learned value, has this gradient times dro_beta. It is over whole completions; as in Tinker's loss of
    that name, it is over tokens here. The policy stays near the generator's without ratios, so that completions may be
    old.
    """
    penalty_N = config.read_options(DroOptions).dro_beta / 2 * log_ratio(inputs).square()
    return TokenLoss(penalty_N - wide(inputs.advantages_N.detach()) * wide(inputs.logprobs_N))
