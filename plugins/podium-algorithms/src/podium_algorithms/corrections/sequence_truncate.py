"""Truncated importance weights of whole rows."""

from torch import Tensor

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.corrections import generator_log_ratio
from podium.algorithms.declarations import TruncateOptions
from podium.algorithms.kl import bounded_exp
from podium.algorithms.records import LossInputs
from podium.algorithms.token_rows import row_sums
from podium_algorithms.declarations import SEQUENCE_TRUNCATE

__all__ = ["sequence_ratios", "sequence_truncate"]


def sequence_ratios(inputs: LossInputs) -> Tensor:
    """``exp(sum over the row of old - rollout)`` at each token of the row, ``[N]``."""
    log_ratio_B = row_sums(generator_log_ratio(inputs), inputs.row_N, len(inputs.offsets_B1) - 1)
    return bounded_exp(log_ratio_B)[inputs.row_N]


@SEQUENCE_TRUNCATE
def sequence_truncate(inputs: LossInputs, config: AlgorithmConfig) -> Tensor:
    """``min(exp(sum over the row of old - rollout), weight_cap)`` at each token of the row, ``[N]``.

    The weight of a whole completion is unbiased, which the weights of its tokens are not, and of high variance: Liu et
    al. 2025, "When Speed Kills Stability". It is ``sequence_truncate`` of TRL and ``rollout_is: sequence`` of verl.
    """
    return sequence_ratios(inputs).clamp(max=config.read_options(TruncateOptions).weight_cap)
