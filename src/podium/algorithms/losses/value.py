"""The loss of a critic: squared error, held near the old values.

Squared error: Schulman et al. 2017, arXiv:1707.06347, equation 9. Clipping is not in that paper but in its authors'
code; Engstrom et al. 2020, "Implementation Matters in Deep Policy Gradients", arXiv:2005.12729, section 3, write it
down.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.metrics import VALUE_CLIP_FRACTION
from podium.algorithms.records import TokenLoss, ValueLossInputs
from podium.algorithms.segments import wide
from podium.telemetry.metrics import VALUE_LOSS

__all__ = ["ValueLoss", "clipped_value_loss"]


def clipped_value_loss(values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, clip: float | None) -> TokenLoss:
    """``max((V - R)², (clip(V, V_old - c, V_old + c) - R)²) / 2``, ``[N]``; c None leaves the second out.

    >>> values, old, returns = torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([2.0])
    >>> clipped_value_loss(values, old, returns, 0.5).loss_N.tolist()
    [1.125]
    """
    values_N, old_values_N, returns_N = wide(values_N), wide(old_values_N.detach()), wide(returns_N.detach())
    loss_N = (values_N - returns_N).square() / 2
    held_N = torch.zeros_like(loss_N, dtype=torch.bool)
    if clip is not None:
        near_N = old_values_N + (values_N - old_values_N).clamp(-clip, clip)
        near_loss_N = (near_N - returns_N).square() / 2
        held_N = near_loss_N > loss_N
        loss_N = torch.maximum(loss_N, near_loss_N)
    return TokenLoss(loss_N, {VALUE_LOSS: loss_N.detach(), VALUE_CLIP_FRACTION: held_N.to(loss_N.dtype)})


@dataclass(frozen=True)
class ValueLoss:
    """The clipped value loss with ``config.value_clip``.

    >>> one = torch.ones(1)
    >>> inputs = ValueLossInputs(values_N=one, old_values_N=one, returns_N=3 * one)
    >>> ValueLoss(AlgorithmConfig())(inputs).loss_N.tolist()
    [2.0]
    """

    config: AlgorithmConfig

    def __call__(self, inputs: ValueLossInputs) -> TokenLoss:
        """The loss at each token, ``[N]``."""
        return clipped_value_loss(inputs.values_N, inputs.old_values_N, inputs.returns_N, self.config.value_clip)
