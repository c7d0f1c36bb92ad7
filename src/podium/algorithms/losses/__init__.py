"""Losses, one file each: :class:`~podium.algorithms.LossInputs` in, a :class:`~podium.algorithms.TokenLoss` out."""
