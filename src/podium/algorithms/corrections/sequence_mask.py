"""Importance weights of whole rows, and 0 where generator and trainer are too far apart."""

from pydantic import Field
from torch import Tensor

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.corrections.sequence_truncate import sequence_ratios
from podium.algorithms.declarations import Declaration
from podium.algorithms.records import LossInputs
from podium.config import section

__all__ = ["SequenceMaskOptions", "sequence_mask"]


@section("algorithm.options")
class SequenceMaskOptions:
    """The weights of rows that are kept."""

    sequence_low: float = Field(default=0.0, ge=0, le=1)
    """A completion whose importance weight is below this does not train."""
    sequence_high: float = Field(default=3.0, ge=1, le=1e9)
    """A completion whose importance weight is above this does not train."""


@Declaration(
    weighs=True, options=SequenceMaskOptions, source="Liu et al. 2025, When Speed Kills Stability; bounds of TRL"
)
def sequence_mask(inputs: LossInputs, config: AlgorithmConfig) -> Tensor:
    """``w`` if ``sequence_low <= w <= sequence_high`` and else 0, with w of ``sequence_truncate`` before its cap,
    ``[N]``.

    Masked importance sampling of sequences: Liu et al. 2025, "When Speed Kills Stability"; TRL's default.
    """
    options, weights_N = config.read_options(SequenceMaskOptions), sequence_ratios(inputs)
    return weights_N * ((weights_N >= options.sequence_low) & (weights_N <= options.sequence_high))
