"""Truncated importance weights of tokens."""

from pydantic import Field
from torch import Tensor

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.declarations import Declaration
from podium.algorithms.kl import bounded_exp
from podium.algorithms.records import LossInputs
from podium.algorithms.token_rows import wide
from podium.config import section

__all__ = ["TruncateOptions", "generator_log_ratio", "truncate"]


@section("algorithm.options")
class TruncateOptions:
    """The cap of importance weights."""

    weight_cap: float = Field(default=2.0, gt=1, le=1e9)
    """Importance weights are at most this."""


def generator_log_ratio(inputs: LossInputs) -> Tensor:
    """``old_logprobs - rollout_logprobs``, ``[N]``, without gradient."""
    return (wide(inputs.old_logprobs_N) - wide(inputs.rollout_logprobs_N)).detach()


@Declaration(
    weighs=True,
    options=TruncateOptions,
    source="Yao et al. 2025, On the Rollout-Training Mismatch; IMPALA, arXiv:1802.01561",
)
def truncate(inputs: LossInputs, config: AlgorithmConfig) -> Tensor:
    """``min(exp(old - rollout), weight_cap)``, ``[N]``: truncated importance weights.

    Generator and trainer compute different log-probabilities, because their kernels, precision or version of the
    weights differ. Multiplied into the loss, these weights make samples of the generator stand for samples of the old
    policy. The cap bounds their variance at the price of a small bias: Ionides 2008; for token policies Espeholt et al.
    2018, "IMPALA", arXiv:1802.01561, section 4.1; between a rollout engine and its trainer Yao et al. 2025, "On the
    Rollout-Training Mismatch in Modern RL Systems".
    """
    return bounded_exp(generator_log_ratio(inputs)).clamp(max=config.read_options(TruncateOptions).weight_cap)
