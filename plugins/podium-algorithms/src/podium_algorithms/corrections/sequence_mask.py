"""Importance weights of whole rows, and 0 where generator and trainer are too far apart."""

from torch import Tensor

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.records import LossInputs
from podium_algorithms.corrections.sequence_truncate import sequence_ratios
from podium_algorithms.declarations import SEQUENCE_MASK, SequenceMaskOptions

__all__ = ["sequence_mask"]


@SEQUENCE_MASK
def sequence_mask(inputs: LossInputs, config: AlgorithmConfig) -> Tensor:
    """``w`` if ``sequence_low <= w <= sequence_high`` and else 0, with w of ``sequence_truncate`` before its cap,
    ``[N]``.

    Masked importance sampling of sequences: Liu et al. 2025, "When Speed Kills Stability"; TRL's default.
    """
    options, weights_N = config.read_options(SequenceMaskOptions), sequence_ratios(inputs)
    return weights_N * ((weights_N >= options.sequence_low) & (weights_N <= options.sequence_high))
