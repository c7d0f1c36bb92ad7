"""What a step's rollouts say about themselves, and how the metrics of several updates become one.

Legend: B rows (completions), N tokens over all rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from torch import Tensor

from podium.algorithms import flat_groups
from podium.algorithms import mismatch as token_mismatch
from podium.data import Batch, fields
from podium.telemetry import metrics as names
from podium.trainer.completions import sampled_tokens

__all__ = ["KL_COEF", "join_updates", "mismatch", "rollout_metrics"]

KL_COEF: Final = "policy/kl_coef"
_LARGEST: Final = frozenset({names.RATIO_MAX, names.MISMATCH_MAX})


def rollout_metrics(batch: Batch, correct_B: Tensor) -> dict[str, float]:
    """Rewards, accuracy, groups without variance and lengths of one step's completions.

    ``batch`` has ``tokens``, ``loss_mask``, ``rewards``, ``group`` and ``finish_reason``; ``correct_B`` is bool.
    """
    rewards_B = batch.dense(fields.REWARDS)
    lengths_B = sampled_tokens(batch).lengths.float()
    reasons = batch.python(fields.FINISH_REASON)
    return {
        names.REWARD_MEAN: float(rewards_B.mean()),
        names.REWARD_STD: float(rewards_B.std(correction=0)),
        names.ACCURACY: float(correct_B.float().mean()),
        names.FLAT_GROUPS: flat_groups(rewards_B, batch.dense(fields.GROUP)),
        names.LENGTH_MEAN: float(lengths_B.mean()),
        names.LENGTH_MAX: float(lengths_B.max()),
        names.TRUNCATED: reasons.count("length") / len(reasons),
        names.TOKENS: float(len(batch.jagged(fields.TOKENS).values)),
    }


def mismatch(batch: Batch) -> dict[str, float]:
    """How far the generator's log-probabilities of the sampled tokens lie from the trainer's, in nats."""
    mask_N = batch.jagged(fields.LOSS_MASK).values
    old_N, rollout_N = batch.jagged(fields.OLD_LOGPROBS).values, batch.jagged(fields.ROLLOUT_LOGPROBS).values
    apart = token_mismatch(old_N[mask_N], rollout_N[mask_N]).difference_N
    return {names.MISMATCH_MEAN: float(apart.mean()), names.MISMATCH_MAX: float(apart.max())}


def join_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One value a metric over a step's optimizer steps: the mean, or the largest of what is a maximum already."""
    joined: dict[str, float] = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        found = [update[name] for update in updates if name in update]
        joined[name] = max(found) if name in _LARGEST else sum(found) / len(found)
    return joined
