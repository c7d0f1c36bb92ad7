"""IcePop: importance weights of tokens, and 0 where generator and trainer are too far apart."""

from pydantic import Field
from torch import Tensor

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.corrections.truncate import generator_log_ratio
from podium.algorithms.declarations import Declaration
from podium.algorithms.kl import bounded_exp
from podium.algorithms.records import LossInputs
from podium.config import section

__all__ = ["IcepopOptions", "icepop"]


@section("algorithm.options")
class IcepopOptions:
    """The weights that IcePop keeps."""

    icepop_low: float = Field(default=0.5, ge=0, le=1)
    """A token whose importance weight is below this does not train."""
    icepop_high: float = Field(default=5.0, ge=1, le=1e9)
    """A token whose importance weight is above this does not train."""


@Declaration(
    weighs=True, options=IcepopOptions, source="Ling Team 2025, Ring-1T, arXiv:2510.18855, and its blog IcePop"
)
def icepop(inputs: LossInputs, config: AlgorithmConfig) -> Tensor:
    """``w`` if ``icepop_low <= w <= icepop_high`` and else 0, with ``w = exp(old - rollout)``, ``[N]``.

    IcePop: Ling Team 2025, "Every Step Evolves" (Ring-1T), arXiv:2510.18855. It is ``token_mask`` of TRL.
    """
    options, weights_N = config.read_options(IcepopOptions), bounded_exp(generator_log_ratio(inputs))
    return weights_N * ((weights_N >= options.icepop_low) & (weights_N <= options.icepop_high))
