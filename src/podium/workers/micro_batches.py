"""A batch cut into micro-batches of a token budget, as padded rows or packed end to end.

A micro-batch records the hidden states that predict tokens with loss, so that the output layer runs on those alone. A
row's last token predicts nothing and is no input. Rows without loss are left out.

Legend: B rows, T padded length, N tokens of the batch, K tokens of the micro-batch that carry loss.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from podium.data import Batch, Jagged, fields
from podium.errors import DataError
from podium.workers.texts import sampled_counts

__all__ = ["MicroBatch", "PackedRows", "cut", "empty_micro_batch", "plan"]


class PackedRows(NamedTuple):
    """Where packed rows begin, for variable-length attention.

    Attributes:
        offsets: int32 ``[B + 1]``, cumulative lengths.
        longest: The length of the longest row, a number on the CPU.
    """

    offsets: Tensor
    longest: int


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through the model together.

    Attributes:
        input_ids: int64 ``[B, T]``, right-padded; packed ``[1, T]``.
        position_ids: int64 ``[1, T]``; None when padded, because rows then begin at 0 as models assume.
        packed: Where packed rows begin; None when padded. Padded rows need no attention mask: attention is causal and
            padding comes last, so that only positions nobody reads would see it.
        select: int64 ``[K]``, the places in the flattened ``input_ids`` whose hidden state predicts a token with loss.
        targets: int64 ``[K]``, the tokens with loss.
        index: int64 ``[K]``, the places of these tokens among the batch's N tokens.
        columns: The values ``[K, …]`` of the batch's token columns at these places, by name.
        offsets: int64 ``[B + 1]``, where the K tokens of each row begin.
    """

    input_ids: Tensor
    position_ids: Tensor | None
    packed: PackedRows | None
    select: Tensor
    targets: Tensor
    index: Tensor
    columns: Mapping[str, Tensor]
    offsets: Tensor


def empty_micro_batch(device: torch.device) -> MicroBatch:
    """Make a micro-batch of one token and no loss: a pass that only takes part in collectives."""
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    return MicroBatch(zero[None], None, None, zero, zero[:0], zero[:0], {}, zero)


def plan(
    lengths: Sequence[int], max_tokens: int, *, packed: bool, equal: bool = False, turn: int | None = None
) -> list[list[int]]:
    """Choose the rows of each micro-batch, longest first, so that padded rows are of like length.

    A micro-batch holds at most ``max_tokens`` tokens, padding included. A longer row gets one of its own. With
    ``equal``, the rows of a micro-batch are of one length. With ``turn``, rows of more than so many tokens share none
    with shorter ones.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    groups: list[list[int]] = []
    used = 0
    for row in order:
        longest = lengths[groups[-1][0]] if groups else 0
        if groups and not (equal and lengths[row] != longest) and not (turn and lengths[row] <= turn < longest):
            cost = used + lengths[row] if packed else (len(groups[-1]) + 1) * longest
            if cost <= max_tokens:
                groups[-1].append(row)
                used += lengths[row]
                continue
        groups.append([row])
        used = lengths[row]
    return groups


def cut(
    batch: Batch,
    max_tokens: int,
    *,
    packed: bool,
    equal: bool = False,
    turn: int | None = None,
    columns: Sequence[str] = (),
) -> Iterator[MicroBatch]:
    """Cut ``batch``, which is on the model's device; ``columns`` names token columns to bring along.

    ``packed``, ``equal`` and ``turn`` are those of :func:`plan`.

    Raises:
        DataError: A column is missing or not aligned with the tokens, or there is loss at a row's first token, which
            nothing predicts.
    """
    tokens, mask = batch.jagged(fields.TOKENS), batch.jagged(fields.LOSS_MASK).values.bool()
    values: dict[str, Tensor] = {}
    for name in columns:
        column = batch.jagged(name)
        if not torch.equal(column.offsets, tokens.offsets):
            raise DataError(f"token column {name!r} does not have the row lengths of {fields.TOKENS!r}")
        values[name] = column.values
    if bool(mask[tokens.offsets[:-1][tokens.lengths > 0]].any()):
        raise DataError(f"{fields.LOSS_MASK} is set at a row's first token, which no earlier token predicts")
    losses_B = sampled_counts(tokens.like(mask))
    lengths = tokens.lengths.tolist()
    live = [row for row, losses in enumerate(losses_B.tolist()) if losses]
    for group in plan([lengths[row] - 1 for row in live], max_tokens, packed=packed, equal=equal, turn=turn):
        rows = torch.tensor([live[place] for place in group], device=mask.device)
        offsets = torch.nn.functional.pad(losses_B[rows].cumsum(0), (1, 0))
        yield _micro_batch(tokens, mask, values, rows, offsets, packed=packed)


def _micro_batch(
    tokens: Jagged, mask: Tensor, values: Mapping[str, Tensor], rows: Tensor, offsets: Tensor, *, packed: bool
) -> MicroBatch:
    lengths = tokens.lengths[rows]
    inputs = lengths - 1
    width = int(inputs.max())
    row_of = torch.repeat_interleave(torch.arange(len(rows), device=rows.device), lengths)
    first = torch.cumsum(lengths, 0) - lengths
    within = torch.arange(len(row_of), device=rows.device) - first[row_of]
    flat = tokens.offsets[rows][row_of] + within  # places of this micro-batch's tokens among the batch's N
    ids = tokens.values[flat]
    if packed:
        base, size = torch.cumsum(inputs, 0) - inputs, int(inputs.sum())
    else:
        base, size = torch.arange(len(rows), device=rows.device) * width, len(rows) * width
    place = base[row_of] + within  # of a token as input
    is_input = within < inputs[row_of]
    input_ids = ids.new_zeros(size)
    input_ids[place[is_input]] = ids[is_input]
    chosen = mask[flat]
    index = flat[chosen]
    position_ids, rows_packed = None, None
    if packed:
        position_ids = within[is_input][None]
        rows_packed = PackedRows(torch.nn.functional.pad(torch.cumsum(inputs, 0), (1, 0)).int(), width)
    return MicroBatch(
        input_ids=input_ids.view(1, -1) if packed else input_ids.view(len(rows), width),
        position_ids=position_ids,
        packed=rows_packed,
        select=place[chosen] - 1,
        targets=ids[chosen],
        index=index,
        columns={name: column[index] for name, column in values.items()},
        offsets=offsets,
    )
