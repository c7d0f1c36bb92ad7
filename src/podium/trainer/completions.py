"""A step's completions with their prompts and grades, and the Parquet files that keep them.

The tokens and texts of a step may take more memory than the controller should use. They stay with the workers that made
them. The controller fetches them a chunk at a time, to grade them and, once the advantages are known, to write them.

Legend: B rows (completions), prompt-major, n a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from podium.data import Batch, Jagged, fields
from podium.rewards import Grade, Grader
from podium.rollout.tasks.examples import template_messages
from podium.runtime import Call, Handle
from podium.telemetry import Sample, metrics as names
from podium.trainer.files import step_name
from podium.trainer.prompts import Prompt
from podium.trainer.token_texts import TokenTexts
from podium.workers import RewardModel, completion_texts, sampled_tokens

__all__ = ["CompletionsLog", "ScoredBatch", "version_range", "write_completions"]

_GRADED_TOKENS: Final = 1 << 19  # of the rows whose texts are here together: enough to keep all graders busy
_WRITTEN_TOKENS: Final = 1 << 16  # of the rows that are here together to be written; prompts count, too
_NO_VERSION: Final = -1
_MISMATCH_STEP: Final = 1e-5  # nats
_NEEDED: Final = (fields.TOKENS, fields.LOSS_MASK, fields.VERSIONS, fields.FINISH_REASON)  # to write a row
_IF_THERE: Final = (fields.ROLLOUT_LOGPROBS, fields.KEPT_SIZES)


@dataclass(frozen=True, kw_only=True)
class ScoredBatch:
    """The completions of one step, which ``collect`` returns and ``learn`` consumes.

    Attributes:
        step: The training step that they are for.
        batch: The generator's columns for B rows. ``group`` and ``version_range`` are fetched, and ``rewards`` once
            graded; the other tensors are references.
        prompts: The step's prompts. Row i answers prompt ``group[i]``.
        tokenizer: The decoder of completions whose generator sent no text.
        grades: One for each row; None until ``graded``.
        figures: Metrics of the step that are known from its rollout.
    """

    step: int
    batch: Batch
    prompts: Sequence[Prompt]
    tokenizer: PreTrainedTokenizerBase
    grades: Sequence[Grade] | None = None
    figures: Mapping[str, float] = field(default_factory=dict)

    def graded(
        self, grader: Grader, data: Sequence[str] = (), reward_model: Handle[RewardModel] | None = None
    ) -> ScoredBatch:
        """Return this with grades, ``rewards``, the rewards' parts and the columns ``data`` of the data.

        With ``reward_model`` the reward finds that model's score of a completion in its row, as "model_score".

        Raises:
            RewardError: The reward failed.
        """
        grades: list[Grade] = []
        examples = [self.prompts[group].example for group in self.groups]
        for rows in self.chunks(_GRADED_TOKENS):
            texts, given = self.texts(rows), [example.row for example in examples[rows.start : rows.stop]]
            if reward_model is not None:
                scores = self._model_scores(reward_model, rows, texts)
                given = [{**row, "model_score": score} for row, score in zip(given, scores, strict=True)]
            grades += grader.grade(texts, given)
        rewards_B = torch.tensor([grade.score for grade in grades], dtype=torch.float32)
        columns: dict[str, Tensor | list[Any]] = {fields.REWARDS: rewards_B}
        for name in sorted({name for grade in grades for name in grade.parts}):
            parts = [grade.parts.get(name, math.nan) for grade in grades]
            columns[fields.PART + name] = torch.tensor(parts, dtype=torch.float32)
        return replace(self, grades=grades, batch=self.batch.with_columns(columns)).with_data(data)

    def with_data(self, names: Sequence[str]) -> ScoredBatch:
        """Return this with these columns of the data."""
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
        columns: dict[str, list[Any]] = {
            "messages": [
                [{"role": "user", "content": text}]
                if isinstance(text := written[group], str)
                else template_messages(text)
                for group in groups
            ],
            "prompt": [prompts[group].text for group in groups],
            "completion": list(texts),
        }
        return reward_model.score(Batch(columns)).dense(fields.REWARDS).tolist()

    @staticmethod
    def join(parts: Sequence[ScoredBatch]) -> ScoredBatch:
        """The graded parts of one step as a whole. A reward's part that only some of them have is NaN in the others."""
        named = sorted({name for part in parts for name in part.batch if name.startswith(fields.PART)})
        nothing = {name: torch.full((1,), math.nan) for name in named}
        batches = [
            part.batch.with_columns(
                {name: nothing[name].expand(len(part.batch)) for name in named if name not in part.batch}
            )
            for part in parts
        ]
        grades = [grade for part in parts for grade in part.grades or ()]
        return replace(parts[0], batch=Batch.concat(batches), grades=grades)

    @cached_property
    def groups(self) -> list[int]:
        """The prompt of each row, as its place in ``prompts``."""
        return self.batch.dense(fields.GROUP).tolist()

    def versions(self) -> list[tuple[int, int]]:
        """The oldest and the newest version of the weights that drew each prompt's tokens; [] where it is not known."""
        if fields.VERSION_RANGE not in self.batch:
            return []
        found: dict[int, tuple[int, int]] = {}
        oldest_B, newest_B = self.batch.dense(fields.VERSION_RANGE).unbind(1)
        for group, oldest, newest in {*zip(self.groups, oldest_B.tolist(), newest_B.tolist(), strict=True)}:
            low, high = found.get(group, (oldest, newest))
            found[group] = min(low, oldest), max(high, newest)
        return [found[group] for group in sorted(found)]

    def oldest_version(self) -> int | None:
        """The oldest version of the weights that drew a token of these rows; None where it is not known."""
        drawn = fields.VERSION_RANGE in self.batch and len(self.batch) > 0
        return int(self.batch.dense(fields.VERSION_RANGE)[:, 0].min()) if drawn else None

    @property
    def firsts(self) -> list[int]:
        """The first row of each trajectory. A row is a trajectory by itself where the batch does not say more."""
        return [row for row in range(len(self.batch)) if self._begins(row)]

    def _begins(self, row: int) -> bool:
        numbers = self._trajectories
        return row == 0 or numbers is None or numbers[row] != numbers[row - 1]

    @cached_property
    def _trajectories(self) -> list[int] | None:
        return self.batch.dense(fields.TRAJECTORY).tolist() if fields.TRAJECTORY in self.batch else None

    @property
    def by_prompt(self) -> list[Grade]:
        """The grade of the first row of each prompt that has one."""
        found: dict[int, Grade] = {}
        for group, grade in zip(self.groups, self.grades or (), strict=True):
            found.setdefault(group, grade)
        return [*found.values()]

    @property
    def rewards_B(self) -> Tensor:
        """The score of each row: float32 ``[B]``."""
        return self.batch.dense(fields.REWARDS)

    @property
    def correct_B(self) -> Tensor:
        """Whether each row was graded correct: bool ``[B]``."""
        return torch.tensor([grade.correct for grade in self.grades or ()], dtype=torch.bool)

    def metrics(self) -> dict[str, float]:
        """Accuracy, completions that were cut off, and tokens: the metrics that this process knows by itself."""
        reasons, firsts = self.batch.python(fields.FINISH_REASON), torch.tensor(self.firsts)
        return {
            names.ACCURACY: float(self.correct_B[firsts].float().mean()),
            names.TRUNCATED: reasons.count("length") / len(reasons),
            names.TOKENS: float(self.batch.jagged(fields.TOKENS).offsets[-1]),
            **{
                names.REWARD_PART_PREFIX + name.removeprefix(fields.PART): float(
                    self.batch.dense(name)[firsts].nanmean()
                )
                for name in self.batch
                if name.startswith(fields.PART)
            },
        }

    def samples(self, count: int) -> tuple[Sample, ...]:
        """The first completion of each of the first ``count`` prompts."""
        firsts = [row for row, group in enumerate(self.groups) if row == 0 or group != self.groups[row - 1]][:count]
        samples: list[Sample] = []
        for row in firsts:
            prompt, text = self.prompts[self.groups[row]], self.texts(range(row, row + 1))[0]
            score = self.grades[row].score if self.grades else math.nan
            samples.append(Sample(prompt.shown, text, score, prompt.example.answer))
        return tuple(samples)

    def with_rows(self, rows: Sequence[int]) -> ScoredBatch:
        """Only these rows."""
        grades = None if self.grades is None else [self.grades[row] for row in rows]
        return replace(self, batch=self.batch.take(list(rows)), grades=grades)

    def chunks(self, most: int) -> Iterator[range]:
        """All rows in order, in ranges of at most ``most`` tokens, or of one row that is longer."""
        return _chunks(self.batch.jagged(fields.TOKENS).offsets, most)

    def texts(self, rows: range) -> list[str]:
        """What the policy wrote in these rows."""
        columns = (fields.TEXT,) if fields.TEXT in self.batch else (fields.TOKENS, fields.LOSS_MASK)
        return completion_texts(self.batch.select(*columns).slice(rows.start, rows.stop), self.tokenizer)


class CompletionsLog:
    """Writes each step's completions to ``folder`` in a thread of its own, by :func:`write_completions`.

    At most one step waits to be written, because the workers keep its tokens until then. A checkpoint is taken only
    after ``flush()``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="completions")
        self._pending: Future[None] | None = None
        self._texts: TokenTexts | None = None

    def write(self, scored: ScoredBatch, learned: Batch | None, scores: Call[Batch] | None = None) -> None:
        """Start to write ``scored``, once the step before is written. Raises what the writing of that step raised.

        Args:
            learned: The columns ``advantages`` and, where they are known, ``old_logprobs`` of the same rows.
            scores: A call that returns ``old_logprobs``. It is waited for in this object's thread.
        """
        self.flush()
        self._texts = self._texts or TokenTexts(scored.tokenizer)
        self._pending = self._thread.submit(self._write, scored, learned, scores, self._texts)

    def _write(self, scored: ScoredBatch, learned: Batch | None, scores: Call[Batch] | None, texts: TokenTexts) -> None:
        if learned is not None and scores is not None:
            learned = learned.merge(scores.result())
        write_completions(self.folder, scored, learned, texts)

    def flush(self) -> None:
        """Wait until everything is written. Raises what the writing raised."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self._thread.shutdown(wait=True)
        if kind is None:
            self.flush()


def version_range(batch: Batch) -> Tensor:
    """The column ``version_range`` of a batch that lacks it, from the version of each token: int64 ``[B, 2]``.

    A row without a sampled token counts as drawn by the newest. The tokens are here for some rows at a time.
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


def write_completions(
    folder: Path, scored: ScoredBatch, learned: Batch | None, texts: TokenTexts | None = None
) -> None:
    """Write ``scored`` to the Parquet file of its step in ``folder``, with what is known of each token.

    A file of the same step is replaced.

    Args:
        learned: The columns ``advantages`` and ``old_logprobs`` of the same rows, as far as there are such.
        texts: The texts of the tokens that earlier steps had.
    """
    import pyarrow.parquet as pq  # a third of a second, which a dry run need not wait

    path = folder / f"{step_name(scored.step)}.parquet"
    aside = path.with_name(f".{path.name}.tmp")
    parts = sorted({name for grade in scored.grades or () for name in grade.parts})
    texts = TokenTexts(scored.tokenizer) if texts is None else texts
    with ExitStack() as stack:
        file = None
        for rows in scored.chunks(_WRITTEN_TOKENS):
            table = _table(scored, learned, rows, parts, texts)
            if file is None:
                file = stack.enter_context(pq.ParquetWriter(aside, table.schema, compression="zstd"))
            file.write_table(table)
    aside.replace(path)


def _table(scored: ScoredBatch, learned: Batch | None, rows: range, parts: Sequence[str], texts: TokenTexts) -> Any:
    """Some of the rows as a pyarrow.Table."""
    import pyarrow as pa

    columns = (*_NEEDED, *(name for name in _IF_THERE if name in scored.batch))
    in_sessions = fields.TRAJECTORY in scored.batch
    batch = scored.batch.select(*columns).slice(rows.start, rows.stop).fetch()
    if learned is not None:
        batch = batch.merge(learned.slice(rows.start, rows.stop).fetch())
    tokens = sampled_tokens(batch)
    lasts = (batch.jagged(fields.TOKENS).offsets[1:] - 1).clamp(min=0)
    groups = scored.groups[rows.start : rows.stop]
    prompts = [scored.prompts[group] for group in groups]
    grades: Sequence[Grade | None] = scored.grades[rows.start : rows.stop] if scored.grades else [None] * len(rows)
    part_of = [grade.parts if grade else {} for grade in grades]
    completions = [_utf8(text) for text in scored.texts(rows)]
    lengths = [texts.lengths(row.tolist(), text) for row, text in zip(tokens.unbind(), completions, strict=True)]
    table: Mapping[str, Any] = {
        "step": pa.array([scored.step] * len(rows), pa.int64()),
        "group": pa.array(groups, pa.int64()),
        "prompt": pa.array([_utf8(prompt.text) for prompt in prompts], pa.string()),
        "completion": pa.array(completions, pa.string()),
        "expected": pa.array([_answer(prompt) for prompt in prompts], pa.string()),
        "correct": pa.array([grade.correct if grade else None for grade in grades], pa.bool_()),
        "reward": pa.array([float(grade.score) if grade else math.nan for grade in grades], pa.float64()),
        "advantage": pa.array(_means(batch, tokens), pa.float64()),
        "finish_reason": pa.array(batch.python(fields.FINISH_REASON), pa.string()),
        "version": pa.array(batch.jagged(fields.VERSIONS).values[lasts].tolist(), pa.int64()),
        "tokens": pa.ListArray.from_arrays(tokens.offsets.int().numpy(), tokens.values.int().numpy()),
        "token_chars": pa.array(lengths, pa.list_(pa.int32())),
        **{
            name: pa.ListArray.from_arrays(tokens.offsets.int().numpy(), values_K.numpy())
            for name, values_K in _token_values(batch).items()
        },
        **({"conversation": pa.array(_conversations(batch, scored.tokenizer), pa.string())} if in_sessions else {}),
        **{f"reward_{name}": pa.array([own.get(name) for own in part_of], pa.float64()) for name in parts},
    }
    return pa.table(table)


def _token_values(batch: Batch) -> dict[str, Tensor]:
    """What is known of each sampled token, by the name of its column: int32 or float32 ``[K]``.

    Floats are rounded to eight bits of precision, and the mismatch before that to multiples of 1e-5 nats: what is less
    is a rounding error of float32. Fewer values differ then, and the file is smaller.
    """
    mask_N = batch.jagged(fields.LOSS_MASK).values.bool()

    def sampled(name: str) -> Tensor:
        return batch.jagged(name).values[mask_N]

    found = {"token_versions": sampled(fields.VERSIONS).int()}
    if fields.ADVANTAGES in batch:
        found["token_advantages"] = sampled(fields.ADVANTAGES).bfloat16().float()
    if fields.OLD_LOGPROBS in batch and fields.ROLLOUT_LOGPROBS in batch:
        apart_K = sampled(fields.ROLLOUT_LOGPROBS).float() - sampled(fields.OLD_LOGPROBS).float()
        steps_K = (apart_K / _MISMATCH_STEP).round() + 0.0  # no minus zero
        found["token_mismatch"] = (steps_K * _MISMATCH_STEP).bfloat16().float()
    if fields.KEPT_SIZES in batch:
        found["token_kept"] = sampled(fields.KEPT_SIZES).int()
    return found


def _means(batch: Batch, tokens: Jagged) -> Sequence[float | None]:
    """The mean advantage of each row's sampled tokens."""
    if fields.ADVANTAGES not in batch:
        return [None] * len(batch)
    own = batch.jagged(fields.ADVANTAGES)
    row_N = torch.repeat_interleave(torch.arange(len(batch)), own.lengths)
    sums_B = torch.zeros(len(batch)).index_add(0, row_N, own.values.float())
    return (sums_B / tokens.lengths.clamp(min=1)).tolist()


def _conversations(batch: Batch, tokenizer: Any) -> list[str]:
    """All that was said in each row, special tokens included."""
    rows = [row.tolist() for row in batch.jagged(fields.TOKENS).unbind()]
    return [_utf8(str(tokenizer.decode(row, skip_special_tokens=False))) for row in rows]


def _utf8(text: str) -> str:
    # Lone surrogates, which a tokenizer's bytes can decode to, have no UTF-8.
    return text.encode("utf-8", "replace").decode()


def _answer(prompt: Prompt) -> str | None:
    return None if prompt.example.answer is None else _utf8(prompt.example.answer)
