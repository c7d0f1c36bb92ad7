"""The loss of supervised fine-tuning."""

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.declarations import Declaration
from podium.algorithms.records import LossInputs, TokenLoss
from podium.algorithms.token_rows import wide

__all__ = ["cross_entropy"]


@Declaration(imitates=True)
def cross_entropy(inputs: LossInputs, config: AlgorithmConfig) -> TokenLoss:
    """``-log p(target)`` at each token, in nats: supervised fine-tuning. Advantages take no part."""
    return TokenLoss(-wide(inputs.logprobs_N))
