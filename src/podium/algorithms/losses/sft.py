"""The loss of supervised fine-tuning: cross-entropy of the target tokens."""

from __future__ import annotations

from dataclasses import dataclass

from podium.algorithms.records import SFTLossInputs, TokenLoss
from podium.algorithms.segments import wide
from podium.telemetry.metrics import ENTROPY

__all__ = ["SFTLoss"]


@dataclass(frozen=True)
class SFTLoss:
    """``-log p(target)`` at each token, in nats.

    >>> import torch
    >>> SFTLoss()(SFTLossInputs(logprobs_N=torch.tensor([-0.5, -2.0]))).loss_N.tolist()
    [0.5, 2.0]
    """

    def __call__(self, inputs: SFTLossInputs) -> TokenLoss:
        """The loss at each token, ``[N]``."""
        metrics = {} if inputs.entropy_N is None else {ENTROPY: wide(inputs.entropy_N.detach())}
        return TokenLoss(-wide(inputs.logprobs_N), metrics)
