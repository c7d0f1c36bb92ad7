"""IcePop: importance weights of tokens, and 0 where generator and trainer are too far apart."""

from torch import Tensor

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.corrections import generator_log_ratio
from podium.algorithms.kl import bounded_exp
from podium.algorithms.records import LossInputs
from podium_algorithms.declarations import ICEPOP, IcepopOptions

__all__ = ["icepop"]


@ICEPOP
def icepop(inputs: LossInputs, config: AlgorithmConfig) -> Tensor:
    """``w`` if ``icepop_low <= w <= icepop_high`` and else 0, with ``w = exp(old - rollout)``, ``[N]``.

    IcePop: Ling Team 2025, "Every Step Evolves" (Ring-1T), arXiv:2510.18855. It is ``token_mask`` of TRL.
    """
    options, weights_N = config.read_options(IcepopOptions), bounded_exp(generator_log_ratio(inputs))
    return weights_N * ((weights_N >= options.icepop_low) & (weights_N <= options.icepop_high))
