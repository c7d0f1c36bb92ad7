"""The loss of a critic."""

from typing import Final

import torch

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.records import LossInputs, TokenLoss
from podium.algorithms.token_rows import wide
from podium.telemetry.metrics import VALUE_LOSS

__all__ = ["value_loss"]

VALUE_CLIP_FRACTION: Final = "value/clip_fraction"  # share of tokens whose value was held near the old value


def value_loss(inputs: LossInputs, config: AlgorithmConfig) -> TokenLoss:
    """``max((V - R)², (clip(V, V_old - c, V_old + c) - R)²) / 2`` with ``c = config.value_clip``, ``[N]``.

    The squared error: Schulman et al. 2017, arXiv:1707.06347, equation 9. The second square, which
    ``value_clip = None`` leaves out, is not in that paper but in its authors' code: Engstrom et al. 2020,
    "Implementation Matters in Deep Policy Gradients", arXiv:2005.12729, section 3.

    >>> columns = {"values": torch.ones(1), "old_values": torch.zeros(1), "returns": torch.full((1,), 2.0)}
    >>> inputs = LossInputs(offsets_B1=torch.tensor([0, 1]), columns=columns)
    >>> value_loss(inputs, AlgorithmConfig(value_clip=0.5)).loss_N.tolist()
    [1.125]
    """
    values_N, returns_N = wide(inputs.values_N), wide(inputs.returns_N.detach())
    old_values_N, clip = wide(inputs.old_values_N.detach()), config.value_clip
    loss_N = (values_N - returns_N).square() / 2
    held_N = torch.zeros_like(loss_N, dtype=torch.bool)
    if clip is not None:
        near_N = old_values_N + (values_N - old_values_N).clamp(-clip, clip)
        near_loss_N = (near_N - returns_N).square() / 2
        held_N = near_loss_N > loss_N
        loss_N = torch.maximum(loss_N, near_loss_N)
    return TokenLoss(loss_N, {VALUE_LOSS: loss_N.detach(), VALUE_CLIP_FRACTION: held_N.to(loss_N.dtype)})
