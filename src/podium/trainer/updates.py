"""The optimizer steps of a step, and their metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from podium.algorithms import AlgorithmConfig
from podium.data import fields
from podium.telemetry import metrics as names

if TYPE_CHECKING:
    from podium.data import Batch
    from podium.runtime import Call, Handle
    from podium.trainer.answer_loss import Answers
    from podium.trainer.prompts import Prompt
    from podium.workers import Policy

_LARGEST: Final = frozenset({names.RATIO_MAX, names.MISMATCH_MAX, names.SKIPPED_STEPS})


def join_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Join the metrics of a step's optimizer steps: means, and for maxima and counts the largest value."""
    joined: dict[str, float] = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        values = [update[name] for update in updates if name in update]
        joined[name] = max(values) if name in _LARGEST else sum(values) / len(values)
    return joined


def submit_update(
    policy: Handle[Policy],
    minibatch: Batch,
    answers: Answers | None,
    prompts: Sequence[Prompt],
    updates: list[Mapping[str, float]],
) -> list[Call[dict[str, float]]]:
    """Submit an optimizer step by a minibatch of completions, and by the data's ``answers`` to its prompts, if the loss
    has a weight for them. Their loss is added to ``updates``."""
    batch = None
    if answers is not None and answers.weight:
        batch = answers.batch_of(prompts, minibatch.dense(fields.GROUP).tolist(), policy.group.world_size)
    if answers is None or batch is None:
        return [policy.update.submit(minibatch)]
    learned = policy.accumulate(batch, AlgorithmConfig(loss="cross_entropy"), weight=answers.weight)
    updates.append({"loss/cross_entropy": learned[names.LOSS] / answers.weight})
    return [policy.accumulate.submit(minibatch), policy.step.submit()]
