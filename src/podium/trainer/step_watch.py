"""Watches the steps of a run for signs that nothing is learned, or something else than was intended."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from podium.algorithms import ADVANTAGES, LOSSES
from podium.data import fields
from podium.errors import DataError, PodiumError, RewardError
from podium.runs.config import PPOConfig
from podium.spelling import write_count
from podium.telemetry import Note, emit, metrics as names
from podium.telemetry.sinks.jsonl import STEP_FIELDS
from podium.trainer.completions import ScoredBatch
from podium.trainer.group_filter import explain_flat

NOTED_MISMATCH: Final = 0.05  # nats a token; bfloat16 alone makes 0.007
_FLAT_STEPS: Final = (5, 50, 500)  # steps in a row, after which a note says that nothing is learned
_MISMATCH_REMEDY: Final = (
    "Try engine.name = transformers, parallel.batching = padded, or one data type for both (model.dtype, engine.dtype, "
    "parallel.precision). With a schedule that runs ahead, the age of the generator's weights adds to the difference"
)


def check_numbers(metrics: Mapping[str, Any], step: int) -> None:
    """Raise DataError if a metric of a step is no number: metrics.jsonl would have no row of it and of later steps."""
    for name, value in metrics.items():
        try:
            if isinstance(value, str | bytes):
                raise TypeError
            float(value)
        except (TypeError, ValueError, RuntimeError):
            raise DataError(
                f"step {step}: the metric {name!r} is {value!r} ({type(value).__name__}), which a stage or a worker of "
                "your own returned: expected a number"
            ) from None


def check_names(metrics: Mapping[str, Any], added: Collection[str], step: int) -> None:
    """Raise DataError if a metric of a step would be dropped, because it has the name of one of the metrics that are
    ``added``, or of another field of the row in metrics.jsonl."""
    for name in metrics:
        if name in STEP_FIELDS or name in added:
            what = "a field of each row of metrics.jsonl" if name in STEP_FIELDS else "a metric that the run measures"
            raise DataError(
                f"step {step}: the metric {name!r}, which a stage, a loss or a worker of your own returned, has the "
                f"name of {what}, and would be dropped: give it another one, such as 'mine/{name}'"
            )


class StepWatch:
    """Emits notes about the steps of a run, and ends it where going on would mislead.

    Args:
        config: That of the run.
    """

    def __init__(self, config: PPOConfig) -> None:
        self.config = config
        self._staleness, self._replays = config.run.staleness, config.replays
        self._mismatch_noted = False
        self._flat_steps = 0
        self._noted_left_out = False
        weighs_parts = ADVANTAGES.declaration(config.algorithm.advantage).weighs_parts
        self._tells_parts = weighs_parts and not config.algorithm.options.get("part_weights")

    def check_left_out(self, scored: ScoredBatch, reward: str, ranks: int) -> None:
        """Say once that the reward leaves completions out.

        Raises:
            RewardError: It leaves so many out that the policy has nothing to train on.
        """
        if scored.left_out is None:
            return
        count, rows = len(scored.left_out.batch), len(scored.batch)
        total = write_count(count + rows, "completion")
        what = f"step {scored.step}: the reward {reward} returned None for {count} of {total}"
        if rows < ranks:
            raise RewardError(
                f"{what}, and the policy trains on {write_count(ranks, 'rank')}: a function that ends without "
                "`return` returns None; return a number for each completion that the policy should be trained on"
            )
        if not self._noted_left_out:
            self._noted_left_out = True
            emit(
                Note(
                    f"{what}, which are not trained ({names.ABSTAINED}). A function that ends without `return` returns "
                    "None"
                )
            )

    def check_graded(self, scored: ScoredBatch) -> None:
        """Say once which parts of the reward an estimator learns that weighs all of them alike.

        Raises:
            PodiumError: A token was sampled by older weights than the schedule allows.
        """
        self._tell_parts(scored)
        bound, oldest = self._staleness, scored.oldest_version()
        if self._replays:  # the versions are those of another run
            return
        if bound is not None and oldest is not None and scored.step - 1 - oldest > bound:
            raise PodiumError(
                f"step {scored.step}: a token was drawn by version {oldest} of the weights, which is more than the "
                f"{write_count(bound, 'update')} behind that run.schedule = {self.config.run.schedule!r} allows: the "
                "generator did not take newer weights"
            )

    def _tell_parts(self, scored: ScoredBatch) -> None:
        """Each number of a mapping is a part, and may be meant for the eye alone."""
        parts = sorted(name.removeprefix(fields.PART) for name in scored.batch if name.startswith(fields.PART))
        if not self._tells_parts or not parts:
            return
        self._tells_parts = False
        emit(
            Note(
                f"algorithm.advantage = {self.config.algorithm.advantage!r} learns the parts {', '.join(parts)} of the "
                "reward, each with the weight 1; to choose which parts count, set algorithm.options.part_weights"
            )
        )

    def check_mismatch(self, metrics: Mapping[str, float], step: int) -> None:
        """Compare the generator's log-probabilities of the step's tokens with the trainer's. Done at each step, since
        weights change.

        Raises:
            PodiumError: They differ by more than ``algorithm.max_mismatch``.
        """
        apart, most = metrics.get(names.MISMATCH_MEAN, 0.0), self.config.algorithm.max_mismatch
        was_noted, self._mismatch_noted = self._mismatch_noted, not apart <= NOTED_MISMATCH
        what = (
            f"step {step}: the generator's and the trainer's log-probabilities of the same tokens differ by "
            f"{apart:.3g} nats on average ({names.MISMATCH_MEAN})"
        )
        if self._replays:  # the policy of another loss is soon another one than that which sampled
            if self._mismatch_noted and not was_noted:
                emit(Note(f"{what}: the policy differs much from the one that sampled the replayed completions"))
            return
        if most is not None and not apart <= most:
            raise PodiumError(
                f"{what}, and algorithm.max_mismatch = {most:g}: the two do not compute the same model. "
                f"{_MISMATCH_REMEDY}; a larger algorithm.max_mismatch allows more, and null allows everything"
            )
        if self._mismatch_noted and not was_noted:
            emit(Note(f"{what}; usual are 0.01 or less. {_MISMATCH_REMEDY}"))

    def check_signal(self, metrics: Mapping[str, float], step: int) -> None:
        """Emit a note if, for several steps in a row, all completions of each prompt had the same reward."""
        self._count_flat(metrics)
        if self._flat_steps not in _FLAT_STEPS:
            return
        what = explain_flat(metrics, self.config.sampling.max_new_tokens)
        emit(Note(f"nothing is learned: for {write_count(self._flat_steps, 'step')}, up to step {step}, {what}"))

    def go_on(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Count the steps before a resume, whose ``rows`` metrics.jsonl has, in order."""
        for row in rows:
            self._count_flat(row)

    def _count_flat(self, metrics: Mapping[str, Any]) -> None:
        estimator = ADVANTAGES.declaration(self.config.algorithm.advantage)
        flat = estimator.needs_groups and metrics.get(names.FLAT_GROUPS) == 1.0
        by_rewards = estimator.compares == "rewards" and not estimator.needs_greedy
        flat = flat or (metrics.get(names.REWARD_STD) == 0.0 and by_rewards)
        flat = flat or metrics.get(names.LEFT_OUT) == 1.0
        flat = flat and all(  # others learn without rewards
            LOSSES.declaration(name).scales_advantage for name in self.config.algorithm.losses
        )
        self._flat_steps = self._flat_steps + 1 if flat else 0
