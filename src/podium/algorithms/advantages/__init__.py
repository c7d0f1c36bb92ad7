"""Advantage estimators, one file each: ``(AdvantageInputs, AlgorithmConfig) -> AdvantageOutputs``."""

from podium.algorithms.advantages.gae import gae
from podium.algorithms.advantages.groups import GroupStatistics, group_statistics
from podium.algorithms.advantages.grpo import grpo
from podium.algorithms.advantages.reinforce_pp import reinforce_pp
from podium.algorithms.advantages.resolve import (
    ESTIMATORS,
    AdvantageEstimator,
    compute_advantages,
    needs_values,
    resolve_advantage,
    uses_values,
)
from podium.algorithms.advantages.rloo import rloo

__all__ = [
    "ESTIMATORS",
    "AdvantageEstimator",
    "GroupStatistics",
    "compute_advantages",
    "gae",
    "group_statistics",
    "grpo",
    "needs_values",
    "reinforce_pp",
    "resolve_advantage",
    "rloo",
    "uses_values",
]
