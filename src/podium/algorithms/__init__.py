"""Reinforcement learning as pure functions of tensors: advantages, losses, weights, divergences, metrics.

    rewards, values ──▶ advantages ──▶ losses (token by token) ──▶ sum under weights of the global batch

Everything works on the flat layout of :class:`podium.data.Jagged` (N tokens of B rows, no padding), on any device, in
float32 at least. Names end in their shape: ``logprobs_N``, ``rewards_B``, ``offsets_B1``.
"""

from podium.algorithms.advantages import (
    ESTIMATORS,
    AdvantageEstimator,
    GroupStatistics,
    compute_advantages,
    group_statistics,
    needs_values,
    resolve_advantage,
    uses_values,
)
from podium.algorithms.aggregation import AGGREGATIONS, Aggregation, loss_weights
from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.kl import AdaptiveKL, FixedKL, KLEstimator, kl_estimate, make_kl_controller, penalise
from podium.algorithms.losses import PolicyLoss, SFTLoss, ValueLoss, clipped_value_loss, ppo_clip
from podium.algorithms.metrics import (
    PartialMetrics,
    explained_variance,
    flat_groups,
    partial_metrics,
    value_moments,
)
from podium.algorithms.off_policy import Mismatch, mismatch, truncated_weights
from podium.algorithms.records import (
    AdvantageInputs,
    AdvantageOutputs,
    PolicyLossInputs,
    SFTLossInputs,
    TokenLoss,
    ValueLossInputs,
)
from podium.algorithms.segments import discounted_sums, whiten

__all__ = [  # noqa: RUF022 - by topic
    "AlgorithmConfig",
    "AdvantageInputs",
    "AdvantageOutputs",
    "PolicyLossInputs",
    "SFTLossInputs",
    "TokenLoss",
    "ValueLossInputs",
    "ESTIMATORS",
    "AdvantageEstimator",
    "GroupStatistics",
    "compute_advantages",
    "discounted_sums",
    "group_statistics",
    "needs_values",
    "resolve_advantage",
    "uses_values",
    "whiten",
    "AGGREGATIONS",
    "Aggregation",
    "loss_weights",
    "PolicyLoss",
    "SFTLoss",
    "ValueLoss",
    "clipped_value_loss",
    "ppo_clip",
    "AdaptiveKL",
    "FixedKL",
    "KLEstimator",
    "kl_estimate",
    "make_kl_controller",
    "penalise",
    "Mismatch",
    "mismatch",
    "truncated_weights",
    "PartialMetrics",
    "explained_variance",
    "flat_groups",
    "partial_metrics",
    "value_moments",
]
