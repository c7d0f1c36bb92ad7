"""The Parquet files that keep a step's completions, with the figures of each token.

The rows of a step are fetched in chunks from the workers that hold them. Each chunk is written as a part of the file.

Legend: B rows (completions), K sampled tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import Any, Final, Self

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from podium.data import Batch, Jagged, fields, sampled_tokens
from podium.data.sampled_text import count_sampled
from podium.rewards import Grade
from podium.rollout.environments import load_sessions
from podium.runs.files import step_name
from podium.runs.run_files import RunFiles
from podium.runtime import Call
from podium.trainer.completions import ScoredBatch
from podium.trainer.prompts import Pair, Prompt, split_answer
from podium.trainer.token_texts import TokenTexts

LOGGED: Final = "podium_logged"
"""Metadata of a file: the names of those parts of the reward, as JSON, that functions only logged."""

_WRITTEN_TOKENS: Final = 1 << 16  # tokens of the rows of a chunk, prompts included
_MISMATCH_STEP: Final = 1e-5  # nats
_NEEDED: Final = (fields.TOKENS, fields.LOSS_MASK, fields.VERSIONS, fields.FINISH_REASON)  # to write a row
_IF_THERE: Final = (fields.ROLLOUT_LOGPROBS, fields.KEPT_SIZES, fields.STOP_TEXT)
_OF_SESSIONS: Final = (fields.SESSION, fields.AGENT, fields.TURN, fields.TOKEN_REWARDS)


class CompletionsLog:
    """Writes each step's completions to ``folder`` in a thread of its own, by :func:`write_completions`.

    At most one step waits to be written, because the workers keep its tokens until then. A checkpoint is taken only
    after ``flush()``.
    """

    def __init__(self, folder: RunFiles) -> None:
        self.folder = folder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="completions")
        self._pending: Future[None] | None = None
        self._texts: TokenTexts | None = None

    def write(self, scored: ScoredBatch, learned: Batch | None, scores: Call[Batch] | None = None) -> None:
        """Start to write ``scored`` once the previous step is written. Raises the error of the previous step's writing.

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
        """Wait until everything is written. Raises the error of the writing."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self._thread.shutdown(wait=True)
        if kind is None:
            self.flush()


def write_completions(
    folder: RunFiles, scored: ScoredBatch, learned: Batch | None, texts: TokenTexts | None = None
) -> None:
    """Write ``scored`` to the Parquet file of its step in ``folder``, with the figures of each token.

    A file of the same step is replaced.

    Args:
        learned: The columns ``advantages`` and ``old_logprobs`` of the same rows, if they exist.
        texts: The texts of the tokens of earlier steps.

    Rows that the reward left out come last. Their reward is null.
    """
    import pyarrow.parquet as pq  # takes a third of a second, for which a dry run need not wait

    left_out = scored.left_out
    grades = [*(scored.grades or ()), *((left_out.grades if left_out else None) or ())]
    parts = sorted({name for grade in grades for name in grade.parts})
    extra = sorted({name for grade in grades for name in grade.extra})
    logged = sorted({name for grade in grades for name in grade.logged})
    texts = TokenTexts(scored.tokenizer) if texts is None else texts
    sources = [(scored, learned), *([] if left_out is None else [(left_out, None)])]
    tables = (
        _table(batch, columns, rows, parts, extra, texts)
        for batch, columns in sources
        for rows in batch.chunks(_WRITTEN_TOKENS)
    )
    if (first := next(tables, None)) is None:
        return
    with (
        folder.replace(f"{step_name(scored.step)}.parquet") as target,
        pq.ParquetWriter(target, first.schema.with_metadata({LOGGED: json.dumps(logged)}), compression="zstd") as file,
    ):
        for table in chain((first,), tables):
            file.write_table(_fit(table, file.schema))


def _fit(table: Any, schema: Any) -> Any:
    """The table with all columns of ``schema``, those that it lacks empty."""
    import pyarrow as pa

    columns = [
        table.column(field.name) if field.name in table.column_names else pa.nulls(len(table), field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def write_examples(
    folder: RunFiles,
    step: int,
    pairs: Sequence[Pair],
    tokenizer: PreTrainedTokenizerBase,
    scores: Mapping[str, Sequence[float]],
) -> None:
    """Write held-out examples of supervised fine-tuning, with their ``scores`` by the names of columns, to the Parquet
    file of ``step`` in ``folder``. The column ``tokens`` has the ids that are learned."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    prompts, answers, ids = list[str](), list[str](), list[list[int]]()
    for pair in pairs:
        prompt, answer, mask = split_answer(pair)
        learned = [token for token, is_learned in zip(answer, mask, strict=True) if is_learned]
        prompts.append(to_utf8(str(tokenizer.decode(prompt))))
        answers.append(to_utf8(str(tokenizer.decode(learned))))
        ids.append(learned)
    table = {
        "step": pa.array([step] * len(prompts), pa.int64()),
        "group": pa.array(range(len(prompts)), pa.int64()),
        "prompt": pa.array(prompts, pa.string()),
        "expected": pa.array(answers, pa.string()),
        "tokens": pa.array(ids, pa.list_(pa.int32())),
        **{name: pa.array(column, pa.float64()) for name, column in scores.items()},
    }
    with folder.replace(f"{step_name(step)}.parquet") as file:
        pq.write_table(pa.table(table), file, compression="zstd")


def _table(
    scored: ScoredBatch,
    learned: Batch | None,
    rows: range,
    parts: Sequence[str],
    extra: Sequence[str],
    texts: TokenTexts,
) -> Any:
    """Some of the rows as a pyarrow.Table, with the ``parts`` of the reward and the ``extra`` texts that it logged."""
    import pyarrow as pa

    columns = (*_NEEDED, *(name for name in (*_IF_THERE, *_OF_SESSIONS) if name in scored.batch))
    batch = scored.batch.select(*columns).slice(rows.start, rows.stop).fetch()
    if learned is not None:
        batch = batch.merge(learned.slice(rows.start, rows.stop).fetch())
    tokens = sampled_tokens(batch)
    lasts = (batch.jagged(fields.TOKENS).offsets[1:] - 1).clamp(min=0)
    groups = scored.groups[rows.start : rows.stop]
    prompts = [scored.prompts[group] for group in groups]
    grades: Sequence[Grade | None] = scored.grades[rows.start : rows.stop] if scored.grades else [None] * len(rows)
    part_of = [grade.parts if grade else {} for grade in grades]
    completions = [to_utf8(text) for text in scored.texts(rows)]
    texts_by_row: Sequence[Any] | None = None
    if all(name in batch for name in _OF_SESSIONS):
        texts_by_row = load_sessions("a row of a session").conversations(batch, scored.tokenizer, texts)
    lengths = (
        [conversation.lengths for conversation in texts_by_row]
        if texts_by_row is not None
        else [texts.lengths(row.tolist(), text) for row, text in zip(tokens.unbind(), completions, strict=True)]
    )
    table: Mapping[str, Any] = {
        "step": pa.array([scored.step] * len(rows), pa.int64()),
        "group": pa.array(groups, pa.int64()),
        "prompt": pa.array([to_utf8(prompt.text) for prompt in prompts], pa.string()),
        "completion": pa.array(completions, pa.string()),
        "expected": pa.array([_answer(prompt) for prompt in prompts], pa.string()),
        "correct": pa.array([_is_correct(grade, scored.verdicts_known) for grade in grades], pa.bool_()),
        "reward": pa.array([_score(grade) for grade in grades], pa.float64()),
        "advantage": pa.array(_means(batch, tokens), pa.float64()),
        "finish_reason": pa.array(batch.python(fields.FINISH_REASON), pa.string()),
        **({"stop_text": pa.array(batch.python(fields.STOP_TEXT), pa.string())} if fields.STOP_TEXT in batch else {}),
        "version": pa.array(batch.jagged(fields.VERSIONS).values[lasts].tolist(), pa.int64()),
        "tokens": pa.ListArray.from_arrays(tokens.offsets.int().numpy(), tokens.values.int().numpy()),
        "token_chars": pa.array(lengths, pa.list_(pa.int32())),
        **{
            name: pa.ListArray.from_arrays(tokens.offsets.int().numpy(), values_K.numpy())
            for name, values_K in _token_values(batch).items()
        },
        **(_prompt_column(batch) if texts_by_row is None else _session_columns(batch, texts_by_row)),
        **{f"reward_{name}": pa.array([row_parts.get(name) for row_parts in part_of], pa.float64()) for name in parts},
        **{f"logged_{name}": pa.array([_logged(grade, name) for grade in grades], pa.string()) for name in extra},
    }
    return pa.table(table)


def _prompt_column(batch: Batch) -> dict[str, Any]:
    """Return the tokens of each row's prompt, which a replay needs."""
    import pyarrow as pa

    tokens, mask_N = batch.jagged(fields.TOKENS), batch.jagged(fields.LOSS_MASK).values.bool()
    prompts = Jagged.from_lengths(tokens.values[~mask_N], tokens.lengths - count_sampled(tokens.like(mask_N)))
    column = pa.ListArray.from_arrays(prompts.offsets.int().numpy(), prompts.values.int().numpy())
    return {"prompt_tokens": column}


def _is_correct(grade: Grade | None, known: bool) -> bool | None:
    return None if grade is None or grade.abstained or not known else grade.correct


def _score(grade: Grade | None) -> float | None:
    """The reward of a completion: NaN if it was not graded, None if the reward left it out."""
    if grade is None:
        return math.nan
    return None if grade.abstained else float(grade.score)


def _session_columns(batch: Batch, said: Sequence[Any]) -> dict[str, Any]:
    """Return the columns of a session: its number, its agent and its turns."""
    import pyarrow as pa

    return {
        "session": pa.array(batch.dense(fields.SESSION).tolist(), pa.int64()),
        "agent": pa.array(batch.python(fields.AGENT), pa.string()),
        "conversation": pa.array([to_utf8(conversation.text) for conversation in said], pa.string()),
        "turn_read": pa.array([[*map(to_utf8, conversation.read)] for conversation in said], pa.list_(pa.string())),
        "turn_said": pa.array([[*map(to_utf8, conversation.said)] for conversation in said], pa.list_(pa.string())),
        "turn_tokens": pa.array([conversation.tokens for conversation in said], pa.list_(pa.int32())),
        "turn_rewards": pa.array([conversation.rewards for conversation in said], pa.list_(pa.float32())),
    }


def _token_values(batch: Batch) -> dict[str, Tensor]:
    """Return the figures of each sampled token by the names of their columns: int32 or float32 ``[K]``.

    Floats but the generator's log-probabilities, which a replay needs, are rounded to eight bits of precision. The
    mismatch is first rounded to multiples of 1e-5 nats, because
    smaller differences are rounding errors of float32. Rounding makes the file smaller, since fewer values differ.
    """
    mask_N = batch.jagged(fields.LOSS_MASK).values.bool()

    def select_sampled(name: str) -> Tensor:
        return batch.jagged(name).values[mask_N]

    columns = {"token_versions": select_sampled(fields.VERSIONS).int()}
    if fields.ROLLOUT_LOGPROBS in batch:
        columns["token_logprobs"] = select_sampled(fields.ROLLOUT_LOGPROBS).float()
    if fields.ADVANTAGES in batch:
        columns["token_advantages"] = select_sampled(fields.ADVANTAGES).bfloat16().float()
    if fields.OLD_LOGPROBS in batch and fields.ROLLOUT_LOGPROBS in batch:
        apart_K = select_sampled(fields.ROLLOUT_LOGPROBS).float() - select_sampled(fields.OLD_LOGPROBS).float()
        steps_K = (apart_K / _MISMATCH_STEP).round() + 0.0  # no minus zero
        columns["token_mismatch"] = (steps_K * _MISMATCH_STEP).bfloat16().float()
    if fields.KEPT_SIZES in batch:
        columns["token_kept"] = select_sampled(fields.KEPT_SIZES).int()
    return columns


def _means(batch: Batch, tokens: Jagged) -> Sequence[float | None]:
    """Return the mean advantage of each row's sampled tokens."""
    if fields.ADVANTAGES not in batch:
        return [None] * len(batch)
    advantages = batch.jagged(fields.ADVANTAGES)
    row_N = torch.repeat_interleave(torch.arange(len(batch)), advantages.lengths)
    sums_B = torch.zeros(len(batch)).index_add(0, row_N, advantages.values.float())
    return (sums_B / tokens.lengths.clamp(min=1)).tolist()


def _logged(grade: Grade | None, name: str) -> str | None:
    return None if grade is None or name not in grade.extra else to_utf8(grade.extra[name])


def to_utf8(text: str) -> str:
    # Lone surrogates, which a tokenizer's bytes can decode to, have no UTF-8.
    return text.encode("utf-8", "replace").decode()


def _answer(prompt: Prompt) -> str | None:
    return None if prompt.example.answer is None else to_utf8(prompt.example.answer)
