"""Rejection of rows by the geometric mean of their tokens' ratios."""

from torch import Tensor

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.corrections import generator_log_ratio
from podium.algorithms.kl import bounded_exp
from podium.algorithms.records import LossInputs
from podium_algorithms.declarations import GEOMETRIC, GeometricOptions

__all__ = ["geometric"]


@GEOMETRIC
def geometric(inputs: LossInputs, config: AlgorithmConfig) -> Tensor:
    """1 if ``geometric_low <= exp(mean over the row of old - rollout) <= geometric_high`` and else 0, ``[N]``.

    The mean does not grow with the length, as the product of ``sequence_mask`` does: ``seq_mean_k1`` of verl's
    rejection.
    """
    options = config.read_options(GeometricOptions)
    ratio_N = bounded_exp(inputs.row_means(generator_log_ratio(inputs)))[inputs.row_N]
    return ((ratio_N >= options.geometric_low) & (ratio_N <= options.geometric_high)).to(ratio_N.dtype)
