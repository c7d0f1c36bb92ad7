"""From a generator's batch to text and grades, and to the Parquet files of a run.

Legend: B rows (completions), prompt-major, n a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from podium.data import Batch, Jagged, fields
from podium.rewards import Grade
from podium.telemetry import Sample
from podium.trainer.run_dir import CompletionRecord, CompletionsWriter

__all__ = ["CompletionsLog", "Judged", "decode_completions", "sampled_tokens"]


def sampled_tokens(batch: Batch) -> Jagged:
    """The tokens that were sampled, without the prompts."""
    mask = batch.jagged(fields.LOSS_MASK)
    ends = torch.nn.functional.pad(mask.values.cumsum(0), (1, 0))
    return Jagged(batch.jagged(fields.TOKENS).values[mask.values], ends[mask.offsets])


def decode_completions(batch: Batch, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text of each completion, without special tokens: what a reward judges and a person reads."""
    rows = [row.tolist() for row in sampled_tokens(batch).unbind()]
    return [str(tokenizer.decode(row, skip_special_tokens=True)) for row in rows]


@dataclass(frozen=True)
class Judged:
    """Completions with what they were asked and what they got; all lists are ``[B]``.

    ``grades`` is None where the reward itself failed and the run ends.
    """

    batch: Batch
    prompts: list[str]
    texts: list[str]
    answers: Sequence[str | None]
    grades: Sequence[Grade] | None

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
                self.texts[row],
                self.grades[row].score if self.grades else math.nan,
                self.answers[row],
            )
            for row in firsts
        )


class CompletionsLog:
    """Writes each step's completions in a thread of its own, so that the next step need not wait for the disk.

    ``flush()`` waits until everything is written and raises what went wrong; a checkpoint is only taken after it.
    """

    def __init__(self, writer: CompletionsWriter) -> None:
        self._writer = writer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="completions")
        self._pending: list[Future[Any]] = []

    def write(self, step: int, judged: Judged, advantages: Jagged | None) -> None:
        """Write ``judged`` with the mean advantage of each completion's tokens."""
        for written in [future for future in self._pending if future.done()]:
            written.result()  # raises here what went wrong there
            self._pending.remove(written)
        self._pending.append(self._thread.submit(self._write, step, judged, advantages))

    def flush(self) -> None:
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()

    def _write(self, step: int, judged: Judged, advantages: Jagged | None) -> None:
        self._writer.write(step, _records(judged, advantages))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=True)
        if error is None:
            self.flush()


def _records(judged: Judged, advantages: Jagged | None) -> list[CompletionRecord]:
    batch = judged.batch
    rows = len(batch)
    tokens = sampled_tokens(batch)
    lasts = (batch.jagged(fields.TOKENS).offsets[1:] - 1).clamp(min=0)
    versions = batch.jagged(fields.VERSIONS).values[lasts].tolist()
    means: Sequence[float | None] = [None] * rows
    if advantages is not None:
        row_N = torch.repeat_interleave(torch.arange(rows), advantages.lengths)
        sums_B = torch.zeros(rows).index_add(0, row_N, advantages.values.float())
        means = (sums_B / tokens.lengths.clamp(min=1)).tolist()
    grades: Sequence[Grade | None] = judged.grades or [None] * rows
    reasons, groups = batch.python(fields.FINISH_REASON), batch.dense(fields.GROUP).tolist()
    return [
        CompletionRecord(
            group=groups[row],
            prompt=judged.prompts[row],
            completion=judged.texts[row],
            reward=math.nan if grade is None else grade.score,
            finish_reason=reasons[row],
            version=versions[row],
            tokens=ids,
            parts=_parts(grade),
            advantage=means[row],
            correct=None if grade is None else grade.correct,
            expected=judged.answers[row],
        )
        for row, (grade, ids) in enumerate(zip(grades, (ids.tolist() for ids in tokens.unbind()), strict=True))
    ]


def _parts(grade: Grade | None) -> Mapping[str, float]:
    return {} if grade is None else grade.parts
