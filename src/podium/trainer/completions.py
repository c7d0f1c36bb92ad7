"""A step's completions with their prompts and grades.

The tokens and texts of a step may take more memory than the controller should use. They stay with the workers that made
them. The controller fetches them a chunk at a time, to grade them and, once the advantages are known, to write them.

Legend: B rows (completions), prompt-major, n a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from podium.data import Batch, completion_texts, fields, sampled_tokens
from podium.data.sampled_text import count_sampled
from podium.errors import DataError
from podium.rewards import Grade, Grader
from podium.rewards.config import list_learned_parts
from podium.rollout.tasks.messages import template_messages
from podium.rollout.tasks.reward_encoder import list_scored_tools
from podium.runtime import Handle
from podium.spelling import write_count
from podium.telemetry import Sample, metrics as names
from podium.telemetry.progress import Counting
from podium.trainer.prompts import Prompt
from podium.workers import RewardModel
from podium.workers.learner import LEFT_OUT

_LOGGED: Final = "logged/"  # as fields.PART, of a number that the reward only logs, which no estimator sees
_FIGURES: Final = (fields.PART, _LOGGED)

_GRADED: Final = "graded_rewards"  # as the column rewards, float32 [B]: those that the grades have
_JUDGED: Final = "is_judged"  # bool [B], of sessions: see ScoredBatch.judged

_GRADED_TOKENS: Final = 1 << 19  # tokens of the rows whose texts are fetched at once: enough for all graders
_IDS: Final = frozenset({"completion_ids", "prompt_ids"})  # tokens that a reward may ask for
_NO_VERSION: Final = -1


@dataclass(frozen=True, kw_only=True)
class ScoredBatch:
    """The completions of one step, which ``collect`` returns and ``learn`` consumes.

    Attributes:
        step: The training step of these completions.
        steps_before: The number of steps that the model which drew them has finished, for a reward that asks for it.
        batch: The generator's columns for B rows. ``group`` and ``version_range`` are fetched, and ``rewards`` once
            graded; the other tensors are references.
        prompts: The step's prompts. Row i answers prompt ``group[i]``.
        tokenizer: The decoder of completions whose generator sent no text.
        grades: One for each row; None until ``graded``.
        figures: Metrics of the step that are known from its rollout.
        left_out: Rows that every reward function left out by returning None. They are not trained.
        max_new_tokens: The most tokens that a completion may have, for a reward that asks for it.
    """

    step: int
    steps_before: int
    batch: Batch
    prompts: Sequence[Prompt]
    tokenizer: PreTrainedTokenizerBase
    grades: Sequence[Grade] | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    left_out: ScoredBatch | None = None
    max_new_tokens: int | None = None

    def graded(
        self,
        grader: Grader,
        data: Sequence[str] = (),
        reward_model: Handle[RewardModel] | None = None,
    ) -> ScoredBatch:
        """Return the rows that the reward scored, with grades, ``rewards``, the rewards' parts and the columns ``data``
        of the data. The other rows are ``left_out``.

        Args:
            grader: Runs the reward.
            data: Names of columns.
            reward_model: The model whose score of a completion the reward finds in its row, as "model_score".

        Raises:
            RewardError: The reward failed.
        """
        grades = self.grades_of(grader, reward_model)
        return self.with_grades(grades, torch.tensor([grade.score for grade in grades], dtype=torch.float32), data)

    def with_grades(self, grades: Sequence[Grade], rewards_B: Tensor, data: Sequence[str] = ()) -> ScoredBatch:
        """Return this with grades, and without the rows whose grade says that the reward left them out."""
        grades = _fill_parts(grades)
        columns: dict[str, Tensor | list[Any]] = {fields.REWARDS: rewards_B, _GRADED: rewards_B}
        if fields.SESSION in self.batch:  # before those that are left out are taken from it
            rows = torch.tensor(self.judged, dtype=torch.int64)
            columns[_JUDGED] = torch.zeros(len(self.batch), dtype=torch.bool).index_fill(0, rows, True)
        for name in sorted({name for grade in grades for name in grade.parts}):
            parts = [grade.parts.get(name, math.nan) for grade in grades]
            is_logged = any(name in grade.logged for grade in grades)
            columns[(_LOGGED if is_logged else fields.PART) + name] = torch.tensor(parts, dtype=torch.float32)
        graded_rows = replace(self, grades=grades, batch=self.batch.with_columns(columns))
        if not any(grade.abstained for grade in grades):
            return graded_rows.with_data(data)
        rows_by_kind: tuple[list[int], list[int]] = ([], [])
        for row, grade in enumerate(grades):
            rows_by_kind[grade.abstained].append(row)
        scored, others = map(graded_rows.with_rows, rows_by_kind)
        return replace(scored, left_out=others).with_data(data)

    def with_rewards(self, batch: Batch) -> ScoredBatch:
        """Return a copy whose grades, which are recorded, have the rewards with which ``batch`` is trained.

        A stage of a subclass may have changed the column ``rewards``, or added ``token_rewards``.

        Raises:
            DataError: ``batch`` has not the same number of rows.
        """
        if self.grades is None or _GRADED not in self.batch:
            return self
        if len(batch) != len(self.batch):
            raise DataError(
                f"step {self.step}: a stage returned {write_count(len(batch), 'row')} of {len(self.batch)}: keep all "
                f"rows, and leave some out of the loss by the column {LEFT_OUT!r}, bool [B]"
            )
        rewards_B = batch.dense(fields.REWARDS)
        if fields.TOKEN_REWARDS in batch and fields.TOKEN_REWARDS not in self.batch:
            columns = batch.select(fields.TOKEN_REWARDS, fields.LOSS_MASK).fetch()
            values, mask = columns.jagged(fields.TOKEN_REWARDS), columns.jagged(fields.LOSS_MASK)
            sampled = values.like(torch.where(mask.values.bool(), values.values, 0.0))
            rewards_B = rewards_B + torch.stack([row.sum() for row in sampled.unbind()])
        changes = (rewards_B.double() - self.batch.dense(_GRADED).double()).tolist()
        grades = [
            replace(grade, score=grade.score + change) if change else grade
            for grade, change in zip(self.grades, changes, strict=True)
        ]
        return replace(self, grades=grades, batch=self.batch.with_columns({_GRADED: rewards_B}))

    def grades_of(self, grader: Grader, reward_model: Handle[RewardModel] | None) -> list[Grade]:
        """The grade of each row, those that the reward leaves out too. Raises RewardError if the reward fails."""
        grades: list[Grade] = []
        examples = [self.prompts[group].example for group in self.groups]
        with Counting("rows graded", len(examples), whole=True) as count:
            for rows in self.chunks(_GRADED_TOKENS):
                texts, data_rows = self.texts(rows), [example.row for example in examples[rows.start : rows.stop]]
                if reward_model is not None:
                    scores = self._model_scores(reward_model, rows, texts)
                    data_rows = [{**row, "model_score": score} for row, score in zip(data_rows, scores, strict=True)]
                grades += grader.grade(texts, data_rows, self._extras(rows, grader.extras))
                count.done = len(grades)
        return grades

    def _extras(self, rows: range, asked: Collection[str]) -> list[dict[str, Any]]:
        """What the reward asks for beside text and row, for each of these rows."""
        extras: list[dict[str, Any]] = [{} for _ in rows]
        if not _IDS.isdisjoint(asked):
            for extra, ids in zip(extras, self._read_ids(rows), strict=True):
                extra |= {name: ids[name] for name in _IDS.intersection(asked)}
        if "stop_text" in asked and fields.STOP_TEXT in self.batch:
            for extra, text in zip(extras, self.batch.python(fields.STOP_TEXT)[rows.start : rows.stop], strict=True):
                extra["stop_text"] = text
        for extra in extras:
            if "trainer_state" in asked:
                extra["trainer_state"] = self.steps_before
            if "max_new_tokens" in asked and self.max_new_tokens is not None:
                extra["max_new_tokens"] = self.max_new_tokens
        return extras

    def _read_ids(self, rows: range) -> Iterator[dict[str, list[int]]]:
        """Yield the ids of the completion of each row, and those of its prompt. In sessions the completion is the last
        answer of the row, and its prompt is what the model read before it."""
        names = [name for name in (fields.TOKENS, fields.LOSS_MASK, fields.TURN) if name in self.batch]
        batch = self.batch.select(*names).slice(rows.start, rows.stop).fetch()
        if fields.TURN not in batch:
            for group, ids in zip(self.groups[rows.start : rows.stop], sampled_tokens(batch).unbind(), strict=True):
                yield {"completion_ids": ids.tolist(), "prompt_ids": self.prompts[group].token_ids.tolist()}
            return
        for ids, turns in zip(batch.jagged(fields.TOKENS).unbind(), batch.jagged(fields.TURN).unbind(), strict=True):
            places = (turns == turns.max()).nonzero().flatten()
            yield {"completion_ids": ids[places].tolist(), "prompt_ids": ids[: int(places[0])].tolist()}

    def with_data(self, names: Sequence[str]) -> ScoredBatch:
        """Return a copy with these columns of the data."""
        if not names:
            return self
        rows = [self.prompts[group].example.row for group in self.groups]
        return replace(
            self, batch=self.batch.with_columns({fields.DATA + name: [row[name] for row in rows] for name in names})
        )

    def _model_scores(self, reward_model: Handle[RewardModel], rows: range, texts: Sequence[str]) -> list[float]:
        groups = self.groups[rows.start : rows.stop]
        prompts = {group: self.prompts[group] for group in dict.fromkeys(groups)}
        written = {group: prompt.example.prompt for group, prompt in prompts.items()}
        tools = {group: list_scored_tools(prompt.example) for group, prompt in prompts.items()}
        columns: dict[str, list[Any]] = {
            "messages": [
                [{"role": "user", "content": text}]
                if isinstance(text := written[group], str)
                else template_messages(text)
                for group in groups
            ],
            "prompt": [prompts[group].text for group in groups],
            "completion": list(texts),
            "tools": [tools[group] for group in groups],
        }
        return reward_model.score(Batch(columns)).dense(fields.REWARDS).tolist()

    @staticmethod
    def join(parts: Sequence[ScoredBatch]) -> ScoredBatch:
        """Join the graded parts of one step. A part of a reward that only some of them have is NaN in the others, but
        for grades that a rule gave."""
        named = sorted({name for part in parts for name in part.batch if name.startswith(_FIGURES)})
        nothing = {name: torch.full((1,), math.nan) for name in named}
        batches = [
            part.batch.with_columns(
                {name: nothing[name].expand(len(part.batch)) for name in named if name not in part.batch}
            )
            for part in [part for part in parts if len(part.batch)] or parts[:1]
        ]
        grades = [grade for part in parts for grade in part.grades or ()]
        others = [part.left_out for part in parts if part.left_out is not None]
        left_out = ScoredBatch.join(others) if others else None
        joined = replace(parts[0], batch=Batch.concat(batches), grades=grades, left_out=left_out)
        return joined._with_ruled_parts()

    def _with_ruled_parts(self) -> ScoredBatch:
        """Return this with the score of a rule in those parts that only other draws of the step have."""
        grades = _fill_parts(self.grades or ())
        rows = [
            row for row, (grade, before) in enumerate(zip(grades, self.grades or (), strict=True)) if grade != before
        ]
        columns: dict[str, Tensor] = {}
        for name in list_learned_parts(grades) if rows else ():
            if fields.PART + name in self.batch:
                columns[fields.PART + name] = self.batch.dense(fields.PART + name).clone()
                columns[fields.PART + name][rows] = torch.tensor([grades[row].parts[name] for row in rows])
        return replace(self, batch=self.batch.with_columns(columns), grades=grades) if columns else self

    @cached_property
    def groups(self) -> list[int]:
        """The index in ``prompts`` of each row's prompt."""
        return self.batch.dense(fields.GROUP).tolist()

    def first_group(self) -> int:
        """The first prompt of a part of a step, in which the reward may have left out all completions."""
        return (self if len(self.batch) or self.left_out is None else self.left_out).groups[0]

    def versions(self) -> list[tuple[int, int]]:
        """The oldest and the newest version of the weights that sampled each prompt's tokens; [] if it is not known."""
        if fields.VERSION_RANGE not in self.batch:
            return []
        ranges: dict[int, tuple[int, int]] = {}
        oldest_B, newest_B = self.batch.dense(fields.VERSION_RANGE).unbind(1)
        for group, oldest, newest in {*zip(self.groups, oldest_B.tolist(), newest_B.tolist(), strict=True)}:
            low, high = ranges.get(group, (oldest, newest))
            ranges[group] = min(low, oldest), max(high, newest)
        return [ranges[group] for group in sorted(ranges)]

    def oldest_version(self) -> int | None:
        """The oldest version of the weights that sampled a token of these rows; None if it is not known."""
        is_sampled = fields.VERSION_RANGE in self.batch and len(self.batch) > 0
        return int(self.batch.dense(fields.VERSION_RANGE)[:, 0].min()) if is_sampled else None

    @property
    def firsts(self) -> list[int]:
        """The first row of each trajectory. Each row is a trajectory if the batch has no column that says otherwise."""
        return [row for row in range(len(self.batch)) if self._begins(row)]

    @property
    def _lasts(self) -> list[int]:
        """The last row of each trajectory, which shows how the trajectory ended."""
        return [row for row in range(len(self.batch)) if row + 1 == len(self.batch) or self._begins(row + 1)]

    def _begins(self, row: int) -> bool:
        numbers = self._trajectories
        return row == 0 or numbers is None or numbers[row] != numbers[row - 1]

    @cached_property
    def judged(self) -> list[int]:
        """The rows whose grades are the verdicts: one of each completion, and one of each session of an environment.

        A session is represented by its first agent, which is the client itself if the client has sampled anything. If
        the reward leaves this agent out, no other one takes its place.
        """
        if _JUDGED in self.batch:
            return self.batch.dense(_JUDGED).nonzero().flatten().tolist()
        if fields.SESSION not in self.batch:
            return self.firsts
        numbers = self.batch.dense(fields.SESSION).tolist()
        return [row for row, number in enumerate(numbers) if row == 0 or number != numbers[row - 1]]

    @cached_property
    def _trajectories(self) -> list[int] | None:
        return self.batch.dense(fields.TRAJECTORY).tolist() if fields.TRAJECTORY in self.batch else None

    @property
    def verdicts(self) -> list[Grade]:
        """The grades of the rows that are ``judged``."""
        grades = self.grades or ()
        return [grades[row] for row in self.judged]

    @property
    def rewards_B(self) -> Tensor:
        """The score of each row: float32 ``[B]``."""
        return self.batch.dense(fields.REWARDS)

    @cached_property
    def verdicts_known(self) -> bool:
        """Whether each of the verdicts says correct or not correct."""
        return self.grades is not None and all(grade.correct is not None for grade in self.verdicts)

    def with_verdicts(self, known: bool | None) -> ScoredBatch:
        """Return this with a verdict in each grade, by :meth:`passes`, or with none if ``known`` is False. None changes
        nothing."""
        if known is None or self.grades is None:
            return self
        grades = [
            replace(grade, correct=self.is_correct(row, grade.score) if known else None)
            for row, grade in enumerate(self.grades)
        ]
        return replace(self, grades=grades)

    def is_correct(self, row: int, score: float) -> bool:
        """Whether a row with this whole reward counts as correct: by its verdict, or without one if ``score`` is at
        least 1 and its session, if it is one, did not end because the context was full or a limit used up."""
        verdict = None if self.grades is None else self.grades[row].correct
        if verdict is not None:
            return verdict
        is_full = fields.GRADE in self.batch and self.batch.python(fields.GRADE)[row].full
        return score >= 1 and not is_full

    def metrics(self) -> dict[str, float]:
        """Accuracy, completions that were cut off, and tokens: the metrics that this process knows by itself.

        There is no accuracy where some score is no verdict.
        """
        reasons, judged = self.batch.python(fields.FINISH_REASON), torch.tensor(self.judged, dtype=torch.int64)
        ends = [reasons[row] for row in self._lasts]
        correct = torch.tensor([bool(grade.correct) for grade in self.verdicts])
        return {
            **({names.ACCURACY: float(correct.float().mean())} if self.verdicts_known and len(judged) else {}),
            names.TRUNCATED: ends.count("length") / len(ends),
            names.TOKENS: float(self.batch.jagged(fields.TOKENS).offsets[-1]),
            **{  # without parts that none of these completions has, such as those of groups that a filter dropped
                names.REWARD_PART_PREFIX + name.partition("/")[2]: float(parts_J.nanmean())
                for name in self.batch
                if name.startswith(_FIGURES) and not bool((parts_J := self.batch.dense(name)[judged]).isnan().all())
            },
            **({} if self.left_out is None else {names.ABSTAINED: float(len(self.left_out.firsts))}),
            **self._agent_rewards(),
            **self._source_rewards(),
        }

    def _source_rewards(self) -> dict[str, float]:
        """The mean reward of each source of the data, where there are several."""
        rewards: dict[str, list[float]] = {}
        for row, grade in zip(self.judged, self.verdicts, strict=True):
            rewards.setdefault(self.prompts[self.groups[row]].example.source, []).append(grade.score)
        return {
            names.SOURCE_REWARD_PREFIX + source: fmean(scores) for source, scores in sorted(rewards.items()) if source
        }

    def _agent_rewards(self) -> dict[str, float]:
        """The mean reward of each agent that has a name."""
        if fields.AGENT not in self.batch:
            return {}
        agents, grades, earned = self.batch.python(fields.AGENT), self.grades or (), dict[str, list[float]]()
        for row in self.firsts:
            earned.setdefault(agents[row], []).append(grades[row].score)
        return {
            names.AGENT_REWARD_PREFIX + agent: fmean(agent_rewards)
            for agent, agent_rewards in sorted(earned.items())
            if agent
        }

    def samples(self, count: int) -> tuple[Sample, ...]:
        """Return the first completion of each of the first ``count`` prompts that have completions."""
        firsts = [row for row, group in enumerate(self.groups) if row == 0 or group != self.groups[row - 1]][:count]
        samples: list[Sample] = []
        for row in firsts:
            prompt, text = self.prompts[self.groups[row]], self.texts(range(row, row + 1))[0]
            grade = self.grades[row] if self.grades else Grade(math.nan)
            details = {**grade.parts, **grade.extra}
            cut_off = self.batch.python(fields.FINISH_REASON)[row] == "length"
            answer = prompt.example.answer
            samples.append(Sample(prompt.shown, text, grade.score, answer, self.groups[row], details, cut_off))
        return tuple(samples)

    def with_rows(self, rows: Sequence[int]) -> ScoredBatch:
        """Return a copy with these rows only."""
        grades = None if self.grades is None else [self.grades[row] for row in rows]
        return replace(self, batch=self.batch.take(list(rows)), grades=grades)

    def chunks(self, most: int) -> Iterator[range]:
        """All rows in order, in ranges of at most ``most`` tokens, or of one row that is longer."""
        return _chunks(self.batch.jagged(fields.TOKENS).offsets, most)

    def token_counts(self) -> list[int]:
        """Return the number of tokens that were sampled in each row."""
        return count_sampled(self.batch.select(fields.LOSS_MASK).fetch().jagged(fields.LOSS_MASK)).tolist()

    def texts(self, rows: range) -> list[str]:
        """Return the texts that the policy wrote in these rows."""
        columns = (fields.TEXT,) if fields.TEXT in self.batch else (fields.TOKENS, fields.LOSS_MASK)
        return completion_texts(self.batch.select(*columns).slice(rows.start, rows.stop), self.tokenizer)


def _fill_parts(grades: Sequence[Grade]) -> Sequence[Grade]:
    """Give grades that a rule gave, which have no parts, the rule's score in each part of which something is
    learned."""
    if all(grade.ruled is None for grade in grades):
        return grades
    names = list_learned_parts(grades)
    return [grade.with_parts(names) for grade in grades]


def version_range(batch: Batch) -> Tensor:
    """Compute the column ``version_range`` of a batch from the version of each token: int64 ``[B, 2]``.

    A row without a sampled token counts as sampled by the newest weights. The tokens are fetched for a few rows at a
    time.
    """
    tokens, ends = batch.select(fields.VERSIONS, fields.LOSS_MASK), []
    for rows in _chunks(batch.jagged(fields.VERSIONS).offsets, _GRADED_TOKENS):
        part = tokens.slice(rows.start, rows.stop).fetch()
        versions, sampled = part.jagged(fields.VERSIONS), part.jagged(fields.LOSS_MASK).values.bool()
        row_K = torch.repeat_interleave(torch.arange(len(rows)), versions.lengths)[sampled]
        own_K = versions.values[sampled].long()
        none_R = torch.full((len(rows),), _NO_VERSION)
        ends.append(
            torch.stack(
                [none_R.scatter_reduce(0, row_K, own_K, how, include_self=False) for how in ("amin", "amax")], 1
            )
        )
    range_B2 = torch.cat(ends) if ends else torch.empty(0, 2, dtype=torch.int64)
    return range_B2.where(range_B2 != _NO_VERSION, range_B2.max().clamp(min=0)) if len(batch) else range_B2


def _chunks(offsets: Tensor, most: int) -> Iterator[range]:
    """All rows in order, in ranges of at most ``most`` tokens, or of one row that is longer."""
    ends: list[int] = offsets.tolist()
    start, rows = 0, len(ends) - 1
    for row in range(1, rows):
        if ends[row + 1] - ends[start] > most:
            yield range(start, row)
            start = row
    if rows:
        yield range(start, rows)
