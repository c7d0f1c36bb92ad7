"""Off-policy sequence masking: rows of negative advantage that the policy has left do not train."""

from torch import Tensor

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.records import LossInputs
from podium.algorithms.token_rows import wide
from podium_algorithms.declarations import OPSM, OpsmOptions

__all__ = ["opsm"]


@OPSM
def opsm(inputs: LossInputs, config: AlgorithmConfig) -> Tensor:
    """0 if A < 0 and the row's mean of ``rollout - logprobs`` is above ``opsm_threshold``, and else 1, ``[N]``.

    Off-policy sequence masking: DeepSeek-AI 2025, "DeepSeek-V3.2", arXiv:2512.02556. The log-probabilities are those of
    the policy as it is, so that both the mismatch of the generator and earlier updates of the step count.
    """
    distance_N = (wide(inputs.rollout_logprobs_N) - wide(inputs.logprobs_N)).detach()
    is_near_N = inputs.row_means(distance_N)[inputs.row_N] <= config.read_options(OpsmOptions).opsm_threshold
    return (is_near_N | (inputs.advantages_N >= 0)).to(distance_N.dtype)
