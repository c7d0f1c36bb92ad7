"""What a step's rollouts say about themselves, and how the metrics of several updates become one.

What takes a look at each token is :meth:`podium.workers.Estimator.describe`. Legend: B rows (completions).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from torch import Tensor

from podium.algorithms import flat_groups
from podium.data import Batch, fields
from podium.telemetry import metrics as names

__all__ = ["KL_COEF", "join_updates", "rollout_metrics"]

KL_COEF: Final = "policy/kl_coef"
_LARGEST: Final = frozenset({names.RATIO_MAX, names.MISMATCH_MAX})


def rollout_metrics(batch: Batch, correct_B: Tensor) -> dict[str, float]:
    """Rewards, accuracy, groups without variance and tokens of one step's completions: what needs no token here.

    ``batch`` has ``tokens``, ``rewards``, ``group`` and ``finish_reason``; ``correct_B`` is bool.
    """
    rewards_B = batch.dense(fields.REWARDS)
    reasons = batch.python(fields.FINISH_REASON)
    return {
        names.REWARD_MEAN: float(rewards_B.mean()),
        names.REWARD_STD: float(rewards_B.std(correction=0)),
        names.ACCURACY: float(correct_B.float().mean()),
        names.FLAT_GROUPS: flat_groups(rewards_B, batch.dense(fields.GROUP)),
        names.TRUNCATED: reasons.count("length") / len(reasons),
        names.TOKENS: float(batch.jagged(fields.TOKENS).offsets[-1]),
    }


def join_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One value a metric over a step's optimizer steps: the mean, or the largest of what is a maximum already."""
    joined: dict[str, float] = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        found = [update[name] for update in updates if name in update]
        joined[name] = max(found) if name in _LARGEST else sum(found) / len(found)
    return joined
