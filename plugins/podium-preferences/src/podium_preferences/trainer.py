"""Learning from preferences: a policy (DPO and its relatives) or a reward model.

collect   take rows, of which each has its answers
learn     a value of each answer ─▶ loss of the step, and its derivatives by these values ─▶ update by them
                policy, reference          this process                                    policy

The derivatives are numbers by answer, so that the gradient is exact however rows are spread over ranks and
micro-batches (podium_preferences.objective).

Legend: A answers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from podium.data import Batch, fields
from podium.data.sampled_text import count_sampled
from podium.models.loading import position_limit
from podium.rollout.sampling import SamplingParams
from podium.rollout.tasks import Example, PromptStream, load_examples
from podium.rollout.tasks.examples import RowReader
from podium.runs.evaluation import Evaluation
from podium.telemetry import Note, emit, metrics as names
from podium.telemetry.held_out import ACCURACY, LOSS, REWARD_MARGIN
from podium.telemetry.progress import Counting
from podium.trainer.checks.preflight import check_examples, check_tokens, find_fitting
from podium.trainer.prompts import HeldOut, Pair, pair_batch, split_answer
from podium.trainer.run_setup import read_held_out
from podium.trainer.trainer import Trainer
from podium_preferences.config import PreferenceRun, RMConfig
from podium_preferences.evaluations import write_preferences
from podium_preferences.objective import PreferenceInputs, PreferenceLoss, differentiate, weigh_tokens
from podium_preferences.rows import (
    EncodedPreference,
    EncodedPreferences,
    encode_preferences,
    read_labeled,
    read_pair,
)
from podium_preferences.scored_rows import encode_for_scorer

__all__ = ["Answers", "PreferenceTrainer"]

_TOGETHER: Final = 512  # held-out answers that are sent to the policy at once


@dataclass(frozen=True)
class Answers:
    """The answers of a step.

    Attributes:
        step: The step.
        batch: ``tokens`` and ``loss_mask`` of each answer, and of mismatched answers after these.
        chosen_A: bool ``[A]``: whether the answer is the better one of its pair, or a desirable one.
        paired: Whether the answers are pairs.
        margins_P: float ``[P]`` by pair; None where the data have none.
    """

    step: int
    batch: Batch
    chosen_A: Tensor
    paired: bool
    margins_P: Tensor | None

    @classmethod
    def of(
        cls, rows: Sequence[EncodedPreference], step: int, *, most: int | None = None, mismatched: bool
    ) -> "Answers":
        """Those of some rows of the data.

        Args:
            most: A mismatched answer with its prompt has at most this many tokens.
            mismatched: Whether there are mismatched answers.
        """
        margins = [row.margin for row in rows if row.margin is not None]
        answers = [*chain.from_iterable(row.answers for row in rows)]
        others = _mismatch(answers, most) if mismatched else []
        return cls(
            step,
            pair_batch([*answers, *others]),
            torch.tensor([*chain.from_iterable(row.chosen for row in rows)]),
            all(len(row.answers) == 2 for row in rows),
            torch.tensor(margins, dtype=torch.float64) if margins else None,
        )

    @property
    def learned(self) -> Batch:
        """The answers without the mismatched ones."""
        return self.batch.slice(0, len(self.chosen_A))


def _mismatch(answers: Sequence[Pair], most: int | None) -> list[Pair]:
    """Put the answer of the next row with another prompt after each prompt, where both fit together."""
    parts = [split_answer(pair) for pair in answers]
    count = len(parts)
    following: list[int | None] = [None] * (2 * count)  # the rows twice, since the first one follows the last one
    for place in reversed(range(2 * count - 1)):
        differs = parts[place % count][0] != parts[(place + 1) % count][0]
        following[place] = place + 1 if differs else following[place + 1]
    others: list[Pair] = []
    for (prompt, *_), place in zip(parts, following, strict=False):
        if place is None:
            continue
        _, ids, mask = parts[place % count]
        if most is None or len(prompt) + len(ids) <= most:
            others.append(([*prompt, *ids], [False] * len(prompt) + mask))
    return others


class PreferenceTrainer(Trainer[PreferenceRun, EncodedPreference, Answers]):
    """Trains a policy or a reward model on preferences between answers.

    Evaluation computes loss, accuracy and reward margin of held-out preferences. Where ``eval.metric`` is a reward, a
    policy answers prompts, and the answers are graded, as in every recipe.

    Args:
        config: A :class:`DPOConfig` or :class:`RMConfig`.
        cluster: See :class:`PPOTrainer`.
        backend_options: Options of the cluster's backend.
        workers: Classes that replace those of the roles "policy", "reference" and, for evaluation, "generator".
        reward: The reward of the evaluation.
        data: Rows to use in place of ``config.data.train``, as in :class:`PPOTrainer`.
        show: Whether the terminal shows the run.
        report: Whether a report is printed at the end.
    """

    _has_noted = False  # that a step has no answers after other prompts

    @property
    def recipe(self) -> str:
        return "rm" if isinstance(self.config, RMConfig) else "dpo"

    def collect(self, step: int) -> Answers:
        """Take rows of the data."""
        with self.clock.stage("examples", step, "collect"):
            return self.join_rows(self.take(step, self.config.batch.examples), step)

    def learn(self, answers: Answers) -> Mapping[str, float]:
        """Take one optimizer step."""
        if self.config.algorithm.reads_labels and len(answers.batch) == len(answers.chosen_A):
            self._note_no_mismatch(answers.step)
        with self.clock.stage("values", answers.step, "learn"):
            inputs = self.values(answers)
        with self.clock.stage("update", answers.step, "learn"):
            loss, updated = self.update(answers, inputs)
        # what the update reports of tokens is weighted by the derivatives, and says nothing
        figures = {name: value for name, value in updated.items() if name not in _OF_TOKENS}
        return {
            **figures,
            **describe(loss, inputs),
            names.TOKENS: float(len(answers.learned.jagged(fields.LOSS_MASK).values)),
        }

    def _note_no_mismatch(self, step: int) -> None:
        """Note, once in a run, that the loss of labels has nothing to estimate its divergence by."""
        if not self._has_noted:
            emit(
                Note(
                    f"step {step}: {self.config.algorithm.loss_name} estimates the policy's divergence from the "
                    "reference by answers after other prompts, and the rows of this step have no two prompts: 0 is "
                    f"taken (batch.examples = {self.config.batch.examples}); give each step rows of several prompts"
                )
            )
        self._has_noted = True

    def update(self, answers: Answers, inputs: PreferenceInputs) -> tuple[PreferenceLoss, Mapping[str, float]]:
        """Take one optimizer step by the values of the answers. Returns the loss, and what the policy reports."""
        loss, derivatives_A = differentiate(self.config.algorithm, inputs)
        weights = weigh_tokens(-derivatives_A, answers.learned.jagged(fields.LOSS_MASK))  # its loss is cross-entropy
        return loss, self.run.roles.policy.update(answers.learned.with_columns({fields.LOSS_WEIGHTS: weights}))

    def values(self, answers: Answers) -> PreferenceInputs:
        """Compute the value of each answer under the weights as they are, and under the reference."""
        return self._make_inputs(answers, *self._compute_values(answers.batch))

    def _compute_values(self, batch: Batch) -> list[Tensor]:
        """The values of a batch's answers, ``[A]``, and those under the reference, if there is one."""
        roles = self.run.roles
        calls = [roles.policy.answer_values.submit(batch)]
        if roles.reference is not None:
            calls.append(roles.reference.answer_values.submit(batch))
        return [call.result().dense(fields.ANSWER_VALUES) for call in calls]

    def _make_inputs(self, answers: Answers, values_A: Tensor, reference_A: Tensor | None = None) -> PreferenceInputs:
        """The inputs of the loss, from the values of all answers, mismatched ones included."""
        mask, count = answers.batch.jagged(fields.LOSS_MASK), len(answers.chosen_A)
        return PreferenceInputs(
            values_A=values_A[:count],
            chosen_A=answers.chosen_A,
            reference_A=None if reference_A is None else reference_A[:count],
            lengths_A=None if isinstance(self.config, RMConfig) else count_sampled(mask)[:count],
            margins_P=answers.margins_P,
            mismatched_M=None if reference_A is None else values_A[count:] - reference_A[count:],
            paired=answers.paired,
        )

    def count_tokens(self, row: EncodedPreference) -> int:
        return sum(len(ids) for ids, _ in row.answers)

    def list_passes(self) -> dict[str, Callable[[Any], Any]]:
        return {
            "values": lambda answers: (answers, self.values(answers)),
            "update": lambda valued: self.update(*valued),
        }

    def join_rows(self, rows: Sequence[EncodedPreference], step: int) -> Answers:
        """The answers of some rows, for ``values``."""
        most = position_limit(self.config.model)
        return Answers.of(rows, step, most=most, mismatched=self.config.algorithm.reads_labels)

    def stage_tokens(self, metrics: Mapping[str, float]) -> dict[str, float]:
        return dict.fromkeys(("values", "update", "step"), metrics[names.TOKENS])

    def evaluate(self, step: int) -> bool:
        if self.run.generators is not None:
            self.run.generators.sync_weights(step)  # only here: nothing else is generated
        return super().evaluate(step)

    def score_set(self, held_out: HeldOut, step: int, name: str) -> Evaluation:
        if not isinstance(held_out, EncodedPreferences):
            return super().score_set(held_out, step, name)
        answers, parts = self.join_rows(held_out, step), list[list[Tensor]]()
        with Counting("answers", len(answers.batch)) as count:
            for start in range(0, len(answers.batch), _TOGETHER):
                parts.append(self._compute_values(answers.batch.slice(start, start + _TOGETHER)))
                count.done += len(parts[-1][0])
        inputs = self._make_inputs(answers, *map(torch.cat, zip(*parts, strict=True)))
        loss, _ = differentiate(self.config.algorithm, inputs)
        rows = len(held_out)
        scores: dict[str, list[float | None]] = {
            ACCURACY: agreement(loss, inputs).tolist(),
            LOSS: loss.losses.view(rows, -1).mean(1).tolist(),
            REWARD_MARGIN: margins(loss, inputs).tolist() if inputs.paired else [None] * rows,
        }
        folder = self.run.directory.evaluations_of(name)
        folder.make_folder()
        write_preferences(folder, step, held_out, scores)
        return Evaluation.of(step, len(held_out), scores, set_name=name)

    def load_held_out(self, tokenizer: PreTrainedTokenizerBase, sampling: SamplingParams) -> Mapping[str, HeldOut]:
        if not self.config.scores_answers:
            return read_held_out(self.config, tokenizer, sampling, self.options.reward, self._read)
        sets: dict[str, HeldOut] = {}
        for name, source in self.config.eval_sets.items():
            data = replace(self.config.data, eval=source)
            examples = load_examples(data.train, data, "test", limit=self.config.eval.items, read=self._read)
            sets[name] = self._encode(examples, tokenizer, f"held-out ({name})" if name else "held-out")
        return sets

    @property
    def _read(self) -> RowReader:
        return read_labeled if self.config.algorithm.reads_labels else read_pair

    def load_data(
        self, tokenizer: PreTrainedTokenizerBase, sampling: SamplingParams
    ) -> PromptStream[EncodedPreference]:
        del sampling
        data, seed = self.config.data, self.config.run.seed
        examples = load_examples(
            data.train, data, "train", seed, read=self._read, evaluates=bool(self.config.eval.items)
        )
        rows = self._encode(examples, tokenizer, "training")
        return PromptStream[EncodedPreference].of(rows, data, seed)

    def _encode(self, examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, what: str) -> EncodedPreferences:
        """Encode rows for which the model has positions, and check that it knows their tokens."""
        model, data = self.config.model, self.config.data
        rows = encode_preferences(examples, tokenizer, data)
        if isinstance(self.config, RMConfig):
            rows = encode_for_scorer(rows, tokenizer, data)
        elif any(row.preference is not None and row.preference.margin is not None for row in rows.examples):
            emit(
                Note(f"column 'margin' is not read: algorithm.loss = {self.config.algorithm.loss_name} has no margins")
            )
        kept = find_fitting(model, data, what, rows.longest, rows.examples)
        rows = rows if kept is None else rows.take(kept)
        check_tokens(model, what, int(rows.token_ids.values.max()))
        check_examples(model, rows.longest, rows.examples, what)
        return rows


_OF_TOKENS: Final = frozenset({names.LOSS, names.ENTROPY})


def describe(loss: PreferenceLoss, inputs: PreferenceInputs) -> dict[str, float]:
    """The metrics of a step: its loss, and how the implied rewards prefer the better answers."""
    figures = {
        names.LOSS: loss.losses,
        names.ACCURACY: agreement(loss, inputs),
        **dict(zip((names.REWARD_CHOSEN, names.REWARD_REJECTED), inputs.split(loss.rewards_A), strict=True)),
    }
    if inputs.paired:
        figures[names.REWARD_MARGIN] = margins(loss, inputs)
    if inputs.lengths_A is not None:  # a policy's
        logprobs = inputs.split(inputs.values_A)
        figures |= dict(zip((names.LOGPROBS_CHOSEN, names.LOGPROBS_REJECTED), logprobs, strict=True))
    return {name: float(figure.mean()) for name, figure in figures.items() if len(figure)}


def margins(loss: PreferenceLoss, inputs: PreferenceInputs) -> Tensor:
    """The reward of the better answer of each pair minus that of the worse one, ``[P]``."""
    chosen_P, rejected_P = inputs.split(loss.rewards_A)
    return chosen_P - rejected_P


def agreement(loss: PreferenceLoss, inputs: PreferenceInputs) -> Tensor:
    """1 for a pair whose better answer has the higher reward, 0 where the worse one has it, 0.5 where both are equal:
    ``[P]``. Of answers with labels, 1 where the reward has the sign that the label says: ``[A]``."""
    if inputs.paired:
        return (margins(loss, inputs).sign() + 1) / 2
    return (torch.where(inputs.chosen_A, loss.rewards_A, -loss.rewards_A).sign() + 1) / 2
