"""REINFORCE: the policy gradient itself."""

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.declarations import Declaration
from podium.algorithms.records import LossInputs, TokenLoss
from podium.algorithms.token_rows import wide

__all__ = ["reinforce"]


@Declaration(scales_advantage=True, source="Williams 1992, Simple Statistical Gradient-Following Algorithms")
def reinforce(inputs: LossInputs, config: AlgorithmConfig) -> TokenLoss:
    """``-A log p``, ``[N]``, without ratio or clip.

    Williams 1992, "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning". It is
    the loss of RLOO, ReMax, OPO and GPG. With several updates a batch it does not know that the policy has moved.
    """
    return TokenLoss(-wide(inputs.advantages_N.detach()) * wide(inputs.logprobs_N))
