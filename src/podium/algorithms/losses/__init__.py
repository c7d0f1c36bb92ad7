"""Losses, one file each: tensors of tokens in, a :class:`~podium.algorithms.TokenLoss` out; none aggregates itself."""

from podium.algorithms.losses.policy import PolicyLoss
from podium.algorithms.losses.ppo_clip import ppo_clip
from podium.algorithms.losses.sft import SFTLoss
from podium.algorithms.losses.value import ValueLoss, clipped_value_loss

__all__ = ["PolicyLoss", "SFTLoss", "ValueLoss", "clipped_value_loss", "ppo_clip"]
