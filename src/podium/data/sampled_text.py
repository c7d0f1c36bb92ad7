"""The text of sampled tokens: rewards grade it and people read it. Text is never tokenized again.

Text is a column of UTF-8 bytes, laid out like tokens, so that it can stay with the worker that made it.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from podium.data import fields
from podium.data.batch import Batch
from podium.data.jagged import Jagged

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A tokenizer's bytes may decode to lone surrogates, which plain UTF-8 cannot encode.
_CODING = ("utf-8", "surrogatepass")


def count_sampled(mask: Jagged) -> Tensor:
    """Return how many tokens of each row are set in ``mask``, a token column of bool: int64 ``[B]``."""
    return torch.nn.functional.pad(mask.values.cumsum(0), (1, 0))[mask.offsets].diff()


def sum_rows(column: Jagged) -> Tensor:
    """Return the sum of each row of a token column: float64 ``[B]``."""
    rows_N = torch.repeat_interleave(torch.arange(len(column.lengths)), column.lengths.cpu())
    values_N = column.values.double().cpu()
    return values_N.new_zeros(len(column.lengths)).index_add(0, rows_N, values_N)


def sampled_tokens(batch: Batch) -> Jagged:
    """Return the tokens that were sampled, without the prompts."""
    mask = batch.jagged(fields.LOSS_MASK)
    return Jagged.from_lengths(batch.jagged(fields.TOKENS).values[mask.values], count_sampled(mask))


def decode_sampled(batch: Batch, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Decode each completion, without special tokens, from ``tokens`` and ``loss_mask``."""
    rows: list[Any] = [*sampled_tokens(batch).unbind()]
    untyped: Any = tokenizer  # transformers leaves these types open
    return [str(untyped.decode(row.tolist(), skip_special_tokens=True)) for row in rows]


def text_column(texts: list[str]) -> Jagged:
    """Encode ``texts [B]`` as a column of bytes: uint8, B rows."""
    rows = [text.encode(*_CODING) for text in texts]
    joined = bytearray(b"".join(rows))
    values = torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
    return Jagged.from_lengths(values, torch.tensor([len(row) for row in rows], dtype=torch.int64))


def completion_texts(batch: Batch, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the text of each completion, wherever its tensors are: the column ``text``, or the decoded tokens."""
    if fields.TEXT not in batch:
        return decode_sampled(batch.select(fields.TOKENS, fields.LOSS_MASK).fetch(), tokenizer)
    text = batch.jagged(fields.TEXT).fetch()
    joined, ends = text.values.numpy().tobytes(), text.offsets.tolist()
    return [joined[start:end].decode(*_CODING) for start, end in itertools.pairwise(ends)]
