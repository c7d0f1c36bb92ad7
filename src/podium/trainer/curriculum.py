"""A curriculum: prompts are skipped by their running pass rate, the share of their completions that were correct.

    steps ─▶ graded ─▶ share of each prompt ─▶ running pass rate ─▶ which prompts a later step passes over

Step s knows the rates after step s - 1 - k, where k is the staleness of the schedule: collect of step s never begins
before that step is learned. So the choice does not depend on which thread is faster, and a resumed run makes it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from threading import Lock
from typing import Final

from podium.runs.sections import PromptChoice
from podium.spelling import write_count
from podium.telemetry import Note, emit
from podium.trainer.completions import ScoredBatch
from podium.trainer.group_filter import sum_rewards
from podium.trainer.prompts import draw_uniform

_LEAST: Final = 0.05  # the probability with which a curriculum takes a prompt at least, so that its rate is measured


class PassRates:
    """The running pass rate of each example that was trained, and which examples are passed over.

    Args:
        choice: The entries of ``batch.prompts``.
        seed: The seed of the run.
        lag: The staleness of the schedule.
        examples: The number of examples in an epoch.
    """

    def __init__(self, choice: PromptChoice, seed: int, lag: int, examples: int) -> None:
        self._choice, self._seed, self._lag, self._examples = choice, seed, lag, examples
        self._rates: dict[int, float] = {}
        self._lock = Lock()  # steps take prompts while another is saved
        self._known: dict[int, tuple[dict[int, float], dict[int, float | None]]] = {}  # see _learn
        self._pending: dict[int, dict[int, float]] = {}  # by step, the shares that no step knows yet
        self._in_row = 0  # examples that were passed over since the last one that was taken
        self._noted = False

    @property
    def used(self) -> bool:
        """Whether examples may be passed over."""
        return self._choice.curriculum != "none" or self._choice.skip_solved is not None

    def add(self, step: int, shares: Mapping[int, float]) -> None:
        """Note the share of correct completions of examples that ``step`` drew."""
        with self._lock:
            self._pending.setdefault(step, {}).update(shares)

    def find_reason(self, step: int, number: int, example: int) -> str | None:
        """Return why ``step`` passes over the ``example``, which is prompt ``number`` of the run; None to take it."""
        with self._lock:
            for earlier in sorted(at for at in self._pending if at < step - self._lag):
                self._learn(earlier)
        reason = self._judge(self._rates.get(example), number) if self.used else None
        if reason is None or self._in_row >= self._examples:
            if reason is not None and not self._noted:
                self._noted = True
                emit(
                    Note(
                        f"step {step}: all {write_count(self._examples, 'prompt')} are {reason}; the next one is "
                        "trained nevertheless: add harder prompts to data.train, or end the run (eval.stop_at)"
                    )
                )
            self._in_row = 0
            return None
        self._in_row += 1
        return reason

    def _learn(self, step: int) -> None:
        """Move the rates by the shares of ``step``. These, and the rates before, are kept for a checkpoint after a step
        that must not know them yet, although another one that runs ahead of it does."""
        shares = self._pending.pop(step)
        self._known = {at: kept for at, kept in self._known.items() if at > step - self._lag}
        self._known[step] = shares, {index: self._rates.get(index) for index in shares}
        for index, share in shares.items():
            self._rates[index] = (self._rates[index] + share) / 2 if index in self._rates else share

    def _judge(self, rate: float | None, number: int) -> str | None:
        if rate is None:
            return None
        if self._choice.skip_solved is not None and rate >= self._choice.skip_solved:
            return "solved (batch.prompts.skip_solved)"
        chance = {"none": 1.0, "failures": 1 - rate, "variance": 4 * rate * (1 - rate)}[self._choice.curriculum]
        if draw_uniform(self._seed, number) < max(chance, _LEAST):
            return None
        return "passed over (batch.prompts.curriculum)"

    def state(self, step: int) -> dict[str, dict[str, float]]:
        """Return what a checkpoint after ``step`` keeps: rates under "", and shares by the step that they are of."""
        with self._lock:
            kept = {at: shares for at, shares in self._pending.items() if at <= step}
            rates: dict[int, float | None] = {**self._rates}
            for at in sorted((at for at in self._known if at > step - self._lag), reverse=True):
                kept[at], before = self._known[at]
                rates |= before
        measured_rates = {index: rate for index, rate in rates.items() if rate is not None}
        state = {"": measured_rates, **{str(at): shares for at, shares in sorted(kept.items())}}
        return {name: {str(index): share for index, share in shares.items()} for name, shares in state.items()}

    def restore(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Go on from what :meth:`state` returned."""
        tables = {name: {int(index): share for index, share in shares.items()} for name, shares in state.items()}
        self._rates = tables.pop("", {})
        self._pending, self._known = {int(step): shares for step, shares in tables.items()}, {}


def shares_of(scored: ScoredBatch, examples: Iterable[int]) -> dict[int, float]:
    """Return the share of correct completions of each example. ``examples`` are those of the step's prompts by place.

    They are correct by :meth:`.ScoredBatch.is_correct`.
    """
    places, rewards = [*examples], sum_rewards(scored)
    passes: dict[int, list[bool]] = {}
    for row in scored.judged:
        passes.setdefault(places[scored.groups[row]], []).append(scored.is_correct(row, rewards[row]))
    return {example: sum(values) / len(values) for example, values in passes.items()}
