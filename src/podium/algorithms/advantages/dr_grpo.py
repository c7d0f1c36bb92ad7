"""The advantages of Dr. GRPO. Legend: B rows, N tokens."""

from podium.algorithms.advantages.grpo import grpo
from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.declarations import advantage_declaration
from podium.algorithms.records import AdvantageInputs, AdvantageOutputs

__all__ = ["dr_grpo"]


@advantage_declaration("dr_grpo")
def dr_grpo(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutputs:
    """``R_i - mean(R)`` over the rows of i's group, the same at all tokens of row i.

    Dr. GRPO: Liu et al. 2025, "Understanding R1-Zero-Like Training", arXiv:2503.20783, section 3.2. It is ``grpo``
    without the division by the standard deviation, and with the aggregation ``sequence-sum-constant``, unless the
    configuration sets ``normalize_advantage`` or ``aggregation``.
    """
    return grpo(inputs, config)
