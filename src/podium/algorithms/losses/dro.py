"""Direct reward optimization: the policy gradient under a quadratic penalty."""

from pydantic import Field

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.declarations import Declaration
from podium.algorithms.losses.ppo_clip import log_ratio
from podium.algorithms.records import LossInputs, TokenLoss
from podium.algorithms.token_rows import wide
from podium.config import section

__all__ = ["DroOptions", "dro"]


@section("algorithm.options")
class DroOptions:
    """How strongly DRO holds the policy."""

    dro_beta: float = Field(default=0.05, gt=0, le=1e6)
    """The squared log-ratio of the policy and the generator is multiplied by half of this."""


@Declaration(
    options=DroOptions,
    ratio_to="rollout",
    source="Richemond et al. 2024, arXiv:2405.19107, token by token; dro_beta 0.05 is that of Tinker's example",
)
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
