"""Off-policy sequence masking: rows of negative advantage that the policy has left do not train."""

from pydantic import Field
from torch import Tensor

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.declarations import Declaration
from podium.algorithms.records import LossInputs
from podium.algorithms.token_rows import wide
from podium.config import section

__all__ = ["OpsmOptions", "opsm"]


@section("algorithm.options")
class OpsmOptions:
    """How far the policy may be from a completion of negative advantage."""

    opsm_threshold: float = Field(default=0.5, ge=0, le=1e6)
    """A completion of negative advantage does not train if the generator's log-probability of its tokens is higher than
    the policy's by more than this, in nats a token."""


@Declaration(options=OpsmOptions, source="DeepSeek-AI 2025, V3.2, arXiv:2512.02556; 0.5 is that of TRL's documentation")
def opsm(inputs: LossInputs, config: AlgorithmConfig) -> Tensor:
    """0 if A < 0 and the row's mean of ``rollout - logprobs`` is above ``opsm_threshold``, and else 1, ``[N]``.

    Off-policy sequence masking: DeepSeek-AI 2025, "DeepSeek-V3.2", arXiv:2512.02556. The log-probabilities are those of
    the policy as it is, so that both the mismatch of the generator and earlier updates of the step count.
    """
    distance_N = (wide(inputs.rollout_logprobs_N) - wide(inputs.logprobs_N)).detach()
    is_near_N = inputs.row_means(distance_N)[inputs.row_N] <= config.read_options(OpsmOptions).opsm_threshold
    return (is_near_N | (inputs.advantages_N >= 0)).to(distance_N.dtype)
