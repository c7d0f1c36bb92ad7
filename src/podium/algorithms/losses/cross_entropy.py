"""The loss of supervised fine-tuning: the cross-entropy of the target tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from podium.algorithms.records import LossInputs, TokenLoss
from podium.algorithms.token_rows import wide

if TYPE_CHECKING:
    from podium.algorithms.config import AlgorithmConfig

__all__ = ["cross_entropy"]


def cross_entropy(inputs: LossInputs, config: AlgorithmConfig) -> TokenLoss:
    """``-log p(target)`` at each token, in nats. Advantages take no part."""
    return TokenLoss(-wide(inputs.logprobs_N))
