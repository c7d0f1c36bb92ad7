"""A mask of tokens whose probabilities under generator and trainer are too far apart, on either side."""

from pydantic import Field
from torch import Tensor

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.corrections.truncate import generator_log_ratio
from podium.algorithms.declarations import Declaration
from podium.algorithms.kl import bounded_exp
from podium.algorithms.records import LossInputs
from podium.config import section

__all__ = ["TwoSidedOptions", "two_sided"]


@section("algorithm.options")
class TwoSidedOptions:
    """The ratios that are kept."""

    ratio_low: float = Field(default=0.5, ge=0, le=1)
    """A token does not train if the trainer's probability is less than this multiple of the generator's."""
    ratio_high: float = Field(default=2.0, ge=1, le=1e9)
    """A token does not train if the trainer's probability is more than this multiple of the generator's."""


@Declaration(options=TwoSidedOptions, source="verl, docs/algo/rollout_corr_math.md, rejection by token")
def two_sided(inputs: LossInputs, config: AlgorithmConfig) -> Tensor:
    """1 if ``ratio_low <= exp(old - rollout) <= ratio_high`` and else 0, ``[N]``: ``token_k1`` of verl's rejection."""
    options, ratio_N = config.read_options(TwoSidedOptions), bounded_exp(generator_log_ratio(inputs))
    return ((ratio_N >= options.ratio_low) & (ratio_N <= options.ratio_high)).to(ratio_N.dtype)
