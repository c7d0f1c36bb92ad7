"""From a generator's batch to text and grades, and to the Parquet files of a run.

Tokens and texts of a step may be more than this process should hold, so they stay with the workers that made them and
come here a chunk at a time: to be graded, and again to be written once the advantages are known.

Legend: B rows (completions), prompt-major, n a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from podium.data import Batch, Jagged, fields
from podium.rewards import Grade
from podium.telemetry import Sample
from podium.trainer.run_dir import CompletionRecord, CompletionsWriter
from podium.workers import completion_texts, sampled_tokens

__all__ = ["CompletionsLog", "Judged"]

_WRITTEN_TOKENS: Final = 1 << 16  # that are here together to be written; prompts count, too


@dataclass(frozen=True)
class Judged:
    """Completions with what they were asked and what they got; all lists are ``[B]``.

    ``batch`` is the generator's, with ``group`` here and its other tensors wherever they are. ``grades`` is None where
    the reward itself failed and the run ends.
    """

    batch: Batch
    prompts: list[str]
    answers: Sequence[str | None]
    tokenizer: PreTrainedTokenizerBase
    grades: Sequence[Grade] | None = None

    def chunks(self, most: int) -> Iterator[range]:
        """All rows in order, in ranges of at most ``most`` tokens, or of one row that is longer."""
        ends: list[int] = self.batch.jagged(fields.TOKENS).offsets.tolist()
        start = 0
        for row in range(1, len(self.batch)):
            if ends[row + 1] - ends[start] > most:
                yield range(start, row)
                start = row
        if len(self.batch):
            yield range(start, len(self.batch))

    def texts(self, rows: range) -> list[str]:
        """What the policy wrote in these rows."""
        columns = (fields.TEXT,) if fields.TEXT in self.batch else (fields.TOKENS, fields.LOSS_MASK)
        return completion_texts(self.batch.select(*columns).slice(rows.start, rows.stop), self.tokenizer)

    @property
    def rewards_B(self) -> Tensor:
        """float32 ``[B]``."""
        return torch.tensor([grade.score for grade in self.grades or ()], dtype=torch.float32)

    @property
    def correct_B(self) -> Tensor:
        """bool ``[B]``."""
        return torch.tensor([grade.correct for grade in self.grades or ()], dtype=torch.bool)

    def samples(self, count: int) -> tuple[Sample, ...]:
        """The first completion of each of the first ``count`` prompts."""
        groups = self.batch.dense(fields.GROUP).tolist()
        firsts = [row for row, group in enumerate(groups) if row == 0 or group != groups[row - 1]][:count]
        return tuple(
            Sample(
                self.prompts[row],
                self.texts(range(row, row + 1))[0],
                self.grades[row].score if self.grades else math.nan,
                self.answers[row],
            )
            for row in firsts
        )


class CompletionsLog:
    """Writes each step's completions in a thread of its own, so that the next step need not wait for the disk.

    At most one step is being written: its tokens are kept by their workers until then. ``flush()`` waits until
    everything is written and raises what went wrong; a checkpoint is only taken after it.
    """

    def __init__(self, writer: CompletionsWriter) -> None:
        self._writer = writer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="completions")
        self._pending: Future[None] | None = None

    def write(self, step: int, judged: Judged, advantages: Jagged | None) -> None:
        """Write ``judged`` with the mean advantage of each completion's tokens."""
        self.flush()
        self._pending = self._thread.submit(self._write, step, judged, advantages)

    def flush(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(self, step: int, judged: Judged, advantages: Jagged | None) -> None:
        parts = {name for grade in judged.grades or () for name in grade.parts}
        self._writer.write(step, (_records(judged, advantages, rows) for rows in judged.chunks(_WRITTEN_TOKENS)), parts)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=True)
        if error is None:
            self.flush()


def _records(judged: Judged, advantages: Jagged | None, rows: range) -> list[CompletionRecord]:
    """Of some of the rows, with the mean advantage of each one's tokens."""
    columns = (fields.TOKENS, fields.LOSS_MASK, fields.VERSIONS, fields.GROUP, fields.FINISH_REASON)
    batch = judged.batch.select(*columns).slice(rows.start, rows.stop).fetch()
    tokens = sampled_tokens(batch)
    lasts = (batch.jagged(fields.TOKENS).offsets[1:] - 1).clamp(min=0)
    versions = batch.jagged(fields.VERSIONS).values[lasts].tolist()
    means: Sequence[float | None] = [None] * len(rows)
    if advantages is not None:
        advantages = advantages.slice(rows.start, rows.stop).fetch()
        row_N = torch.repeat_interleave(torch.arange(len(rows)), advantages.lengths)
        sums_B = torch.zeros(len(rows)).index_add(0, row_N, advantages.values.float())
        means = (sums_B / tokens.lengths.clamp(min=1)).tolist()
    grades: Sequence[Grade | None] = judged.grades[rows.start : rows.stop] if judged.grades else [None] * len(rows)
    reasons, groups = batch.python(fields.FINISH_REASON), batch.dense(fields.GROUP).tolist()
    texts = judged.texts(rows)
    return [
        CompletionRecord(
            group=groups[at],
            prompt=judged.prompts[row],
            completion=texts[at],
            reward=math.nan if grade is None else grade.score,
            finish_reason=reasons[at],
            version=versions[at],
            tokens=ids.numpy(),
            parts=_parts(grade),
            advantage=means[at],
            correct=None if grade is None else grade.correct,
            expected=judged.answers[row],
        )
        for at, (row, grade, ids) in enumerate(zip(rows, grades, tokens.unbind(), strict=True))
    ]


def _parts(grade: Grade | None) -> Mapping[str, float]:
    return {} if grade is None else grade.parts
