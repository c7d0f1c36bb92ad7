"""How the stages of training steps follow one another in time. There is one schedule so far: ``sync``.

evaluate(0) ─▶ step(1) ─▶ [evaluate] ─▶ [save] ─▶ step(2) ─▶ … ─▶ step(last) ─▶ evaluate ─▶ save
                                a stop asked for ───▶ the step ends, save, return
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from podium.telemetry import StepFinished, emit
from podium.trainer.interrupt import StopRequest

__all__ = ["Loop", "Plan", "sync"]


class Loop(Protocol):
    """What a schedule drives."""

    def step(self, step: int) -> Mapping[str, float]:
        """Train once; the metrics of the step."""
        ...

    def evaluate(self, step: int) -> bool:
        """Score held-out items with the weights after ``step``; whether that is good enough to end the run."""
        ...

    def save(self, step: int) -> None:
        """Write a checkpoint from which training goes on at ``step + 1``."""
        ...


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which steps to take and what happens between them; ``eval_every`` or ``save_every`` of 0: only at the end."""

    first: int
    last: int
    eval_at_start: bool
    eval_every: int
    save_every: int


def sync(loop: Loop, plan: Plan, stop: StopRequest) -> int:
    """One stage after the other, one step after the other: every rollout comes from the newest weights.

    Returns the last step taken.
    """
    if plan.eval_at_start and plan.first == 1:
        loop.evaluate(0)
    for step in range(plan.first, plan.last + 1):
        metrics = loop.step(step)
        emit(StepFinished(step, metrics))
        reached = False
        if (step == plan.last or _due(step, plan.eval_every)) and not stop.requested:
            reached = loop.evaluate(step)
        ends = step == plan.last or reached or stop.requested
        if ends or _due(step, plan.save_every):
            loop.save(step)
        if ends:
            return step
    return max(plan.last, plan.first - 1)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
