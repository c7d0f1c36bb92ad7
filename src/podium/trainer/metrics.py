"""What a step's rollouts say about themselves, and how the metrics of several updates become one.

Legend: B rows, P prompts, n completions a prompt, N tokens over all rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from podium.data import Batch, fields
from podium.telemetry import metrics as names

__all__ = ["explained_variance", "join_updates", "mismatch", "rollout_metrics"]

_LARGEST = frozenset({names.RATIO_MAX, names.MISMATCH_MAX, names.LENGTH_MAX})


def rollout_metrics(batch: Batch, correct_B: Tensor, n: int) -> dict[str, float]:
    """Rewards, accuracy, groups without variance and lengths of one step's completions.

    ``batch`` has its rows prompt-major, ``n`` a prompt, with ``rewards``, ``loss_mask`` and ``finish_reason``.
    """
    rewards_B = batch.dense(fields.REWARDS)
    rewards_Pn = rewards_B.view(-1, n)
    mask = batch.jagged(fields.LOSS_MASK)
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), mask.values.cumsum(0)])[mask.offsets]
    lengths_B = (ends[1:] - ends[:-1]).to(torch.float32)
    reasons = batch.python(fields.FINISH_REASON)
    return {
        names.REWARD_MEAN: float(rewards_B.mean()),
        names.REWARD_STD: float(rewards_B.std(correction=0)),
        names.ACCURACY: float(correct_B.to(torch.float32).mean()),
        names.FLAT_GROUPS: float((rewards_Pn.amax(1) == rewards_Pn.amin(1)).to(torch.float32).mean()),
        names.LENGTH_MEAN: float(lengths_B.mean()),
        names.LENGTH_MAX: float(lengths_B.max()),
        names.TRUNCATED: reasons.count("length") / len(reasons),
        names.TOKENS: float(len(mask.values)),
    }


def mismatch(batch: Batch) -> dict[str, float]:
    """How far the generator's log-probabilities of the sampled tokens lie from the trainer's, in nats."""
    mask_N = batch.jagged(fields.LOSS_MASK).values
    trainer_N, generator_N = batch.jagged(fields.OLD_LOGPROBS).values, batch.jagged(fields.ROLLOUT_LOGPROBS).values
    apart = (trainer_N - generator_N)[mask_N].abs()
    return {names.MISMATCH_MEAN: float(apart.mean()), names.MISMATCH_MAX: float(apart.max())}


def explained_variance(values_N: Tensor, returns_N: Tensor, mask_N: Tensor) -> float:
    """``1 - Var(returns - values) / Var(returns)`` over the masked tokens; 0 where the returns do not vary."""
    returns, values = returns_N[mask_N], values_N[mask_N]
    spread = float(returns.var(correction=0))
    return 1.0 - float((returns - values).var(correction=0)) / spread if spread > 0 else 0.0


def join_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One value a metric over a step's optimizer steps: the mean, or the largest of what is a maximum already."""
    joined: dict[str, float] = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        found = [update[name] for update in updates if name in update]
        joined[name] = max(found) if name in _LARGEST else sum(found) / len(found)
    return joined
