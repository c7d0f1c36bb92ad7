"""Simple preference optimization."""

import torch.nn.functional as F
from pydantic import Field

from podium.algorithms.declarations import Declaration
from podium.config import section
from podium_preferences.objective import PreferenceInputs, PreferenceLoss

__all__ = ["SimPOOptions", "simpo"]


@section("algorithm.options")
class SimPOOptions:
    """The constants of SimPO, as for Llama-3-Base: Meng et al. 2024, arXiv:2405.14734, appendix B."""

    beta: float = Field(default=2.0, gt=0, le=1e3)
    """The mean log-probability of an answer's tokens, times this coefficient, is its reward."""
    gamma: float = Field(default=1.0, ge=0, le=1e3)
    """The reward of the better answer is to be larger than that of the worse one by this margin."""


@Declaration(options=SimPOOptions, source="Meng et al. 2024, SimPO, arXiv:2405.14734, appendix B")
def simpo(inputs: PreferenceInputs, options: SimPOOptions) -> PreferenceLoss:
    """``-log sigmoid(β log P(chosen) - β log P(rejected) - gamma)`` of each pair, without a reference.

    ``log P`` is the mean log-probability of an answer's tokens. Meng et al. 2024, "SimPO", arXiv:2405.14734,
    equation 6. The implied reward is ``β log P``.
    """
    rewards_A = options.beta * inputs.token_means(inputs.values_A)
    chosen_P, rejected_P = inputs.split(rewards_A)
    return PreferenceLoss(-F.logsigmoid(chosen_P - rejected_P - options.gamma), rewards_A)
