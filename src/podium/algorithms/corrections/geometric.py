"""Rejection of rows by the geometric mean of their tokens' ratios."""

from pydantic import Field
from torch import Tensor

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.corrections.truncate import generator_log_ratio
from podium.algorithms.declarations import Declaration
from podium.algorithms.kl import bounded_exp
from podium.algorithms.records import LossInputs
from podium.config import section

__all__ = ["GeometricOptions", "geometric"]


@section("algorithm.options")
class GeometricOptions:
    """The geometric means that are kept."""

    geometric_low: float = Field(default=0.999, ge=0, le=1)
    """A completion does not train if the geometric mean of its tokens' ratios is below this."""
    geometric_high: float = Field(default=1.001, ge=1, le=1e9)
    """A completion does not train if the geometric mean of its tokens' ratios is above this."""


@Declaration(
    options=GeometricOptions, source="Li et al. 2025, geometric sequence masking; bounds of verl's documentation"
)
def geometric(inputs: LossInputs, config: AlgorithmConfig) -> Tensor:
    """1 if ``geometric_low <= exp(mean over the row of old - rollout) <= geometric_high`` and else 0, ``[N]``.

    The mean does not grow with the length, as the product of ``sequence_mask`` does: ``seq_mean_k1`` of verl's
    rejection.
    """
    options = config.read_options(GeometricOptions)
    ratio_N = bounded_exp(inputs.row_means(generator_log_ratio(inputs)))[inputs.row_N]
    return ((ratio_N >= options.geometric_low) & (ratio_N <= options.geometric_high)).to(ratio_N.dtype)
