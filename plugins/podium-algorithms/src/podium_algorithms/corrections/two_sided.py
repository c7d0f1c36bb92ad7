"""A mask of tokens whose probabilities under generator and trainer are too far apart, on either side."""

from torch import Tensor

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.corrections import generator_log_ratio
from podium.algorithms.kl import bounded_exp
from podium.algorithms.records import LossInputs
from podium_algorithms.declarations import TWO_SIDED, TwoSidedOptions

__all__ = ["two_sided"]


@TWO_SIDED
def two_sided(inputs: LossInputs, config: AlgorithmConfig) -> Tensor:
    """1 if ``ratio_low <= exp(old - rollout) <= ratio_high`` and else 0, ``[N]``: ``token_k1`` of verl's rejection."""
    options, ratio_N = config.read_options(TwoSidedOptions), bounded_exp(generator_log_ratio(inputs))
    return ((ratio_N >= options.ratio_low) & (ratio_N <= options.ratio_high)).to(ratio_N.dtype)
