"""Reinforcement learning as pure functions of tensors: advantages, losses, weights, divergences and metrics.

    rewards, values ──▶ advantages ──▶ losses (token by token) ──▶ sum under weights of the global batch

The functions work on the flat layout of :class:`podium.data.Jagged` (N tokens of B rows, no padding), on any device, in
float32 at least. Names end in their shape: ``logprobs_N``, ``rewards_B``, ``offsets_B1``.
"""

from typing import TYPE_CHECKING

from podium.lazy import lazy_exports

if TYPE_CHECKING:
    from podium.algorithms.advantages import compute_advantages as compute_advantages
    from podium.algorithms.aggregation import loss_weights as loss_weights
    from podium.algorithms.config import Aggregation as Aggregation, AlgorithmConfig as AlgorithmConfig
    from podium.algorithms.declarations import (
        ADVANTAGES as ADVANTAGES,
        CORRECTIONS as CORRECTIONS,
        LOSSES as LOSSES,
        Declaration as Declaration,
        NamedFunctions as NamedFunctions,
    )
    from podium.algorithms.function_checks import check_functions as check_functions
    from podium.algorithms.kl import (
        KLController as KLController,
        bounded_exp as bounded_exp,
        kl_estimate as kl_estimate,
        penalize as penalize,
    )
    from podium.algorithms.losses import value_loss as value_loss
    from podium.algorithms.metrics import (
        PartialMetrics as PartialMetrics,
        explained_variance as explained_variance,
        flat_groups as flat_groups,
        partial_metrics as partial_metrics,
        value_moments as value_moments,
    )
    from podium.algorithms.objective import policy_loss as policy_loss
    from podium.algorithms.records import (
        AdvantageInputs as AdvantageInputs,
        AdvantageOutputs as AdvantageOutputs,
        LossInputs as LossInputs,
        TokenLoss as TokenLoss,
    )
    from podium.algorithms.token_rows import (
        discounted_sums as discounted_sums,
        group_statistics as group_statistics,
        whiten as whiten,
    )
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
