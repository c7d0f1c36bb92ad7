"""A batch cut into micro-batches of a token budget: rows padded, packed end to end, or with prompts that they share.

A micro-batch records the hidden states that predict tokens with loss, so that the output layer runs on those alone. A
row's last token predicts nothing and is no input. Rows without loss are left out.

A row's prompt here is what precedes its first token with loss. Rows with the same prompt can share it.

Legend: B rows, T padded length, N tokens of the batch, K tokens of the micro-batch that carry loss.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple, Self

import torch
from torch import Tensor

from podium.data import Batch, Jagged, fields
from podium.data.sampled_text import count_sampled
from podium.errors import DataError
from podium.training.shared_prompts import SharedPrompts, row_places, share_prompts, starts

_WORTH_SHARING: Final = 20


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
        input_ids: int64 ``[B, T]``, right-padded; packed or with shared prompts ``[1, T]``.
        position_ids: int64 ``[1, T]``; None when padded, because rows then begin at 0 as models assume.
        packed: Where packed rows begin, or what rows see that share prompts; None when padded. Padded rows need no
            attention mask: attention is causal and padding comes last, so that only positions nobody reads see it.
        select: int64 ``[K]``, the places in the flattened ``input_ids`` whose hidden state predicts a token with loss.
        targets: int64 ``[K]``, the tokens with loss.
        index: int64 ``[K]``, the places of these tokens among the batch's N tokens.
        input_index: int64 ``[I]``, the places of the rows' input tokens among the batch's N tokens, row by row.
        input_places: int64 ``[I]``, the places of these in the flattened ``input_ids``. Rows share those of prompts.
        columns: The values ``[K, …]`` of the batch's token columns at these places, by name.
        offsets: int64 ``[B + 1]``, where the K tokens of each row begin.
    """

    input_ids: Tensor
    position_ids: Tensor | None
    packed: PackedRows | SharedPrompts | None
    select: Tensor
    targets: Tensor
    index: Tensor
    input_index: Tensor
    input_places: Tensor
    columns: Mapping[str, Tensor]
    offsets: Tensor


def empty_micro_batch(device: torch.device) -> MicroBatch:
    """Make a micro-batch of one token and no loss: a pass that only takes part in collectives."""
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    return MicroBatch(zero[None], None, None, zero, zero[:0], zero[:0], zero[:0], zero[:0], {}, zero)


def plan(
    lengths: Sequence[int], max_tokens: int, *, packed: bool, equal: bool = False, turn: int | None = None
) -> list[list[int]]:
    """Choose the rows of each micro-batch, longest first, so that padded rows are of like length.

    A micro-batch holds at most ``max_tokens`` tokens, padding included. A longer row gets a micro-batch of its own.
    With ``equal``, the rows of a micro-batch have one length. Rows of more than ``turn`` tokens share no micro-batch
    with shorter rows.
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


def plan_shared(prompts: Sequence[int], rests: Sequence[int], group: Sequence[int], max_tokens: int) -> list[list[int]]:
    """As :func:`plan`, where a micro-batch holds the prompt of its rows' ``group`` once. Groups stay together if they
    fit, those with the longest row first."""
    lengths = [prompts[prompt] + rest for prompt, rest in zip(group, rests, strict=True)]
    longest: dict[int, int] = {}
    for prompt, length in zip(group, lengths, strict=True):
        longest[prompt] = max(length, longest.get(prompt, 0))
    micros: list[list[int]] = []
    used, last = 0, -1
    for row in sorted(range(len(rests)), key=lambda row: (-longest[group[row]], group[row], -lengths[row], row)):
        cost = rests[row] if group[row] == last and micros else lengths[row]
        if micros and used + cost <= max_tokens:
            micros[-1].append(row)
            used += cost
        else:
            micros.append([row])
            used = lengths[row]
        last = group[row]
    return micros


class MicroBatches:
    """Micro-batches that are made when they are asked for. Their number is known before."""

    def __init__(self, makers: Sequence[Callable[[], MicroBatch]]) -> None:
        self.makers = makers

    def __len__(self) -> int:
        return len(self.makers)

    def __iter__(self) -> Iterator[MicroBatch]:
        return (make() for make in self.makers)


def cut(
    batch: Batch,
    max_tokens: int,
    *,
    packed: bool,
    equal: bool = False,
    turn: int | None = None,
    share: bool = False,
    columns: Sequence[str] = (),
) -> MicroBatches:
    """Cut ``batch``, which is on the model's device; ``columns`` names token columns to bring along.

    ``packed``, ``equal`` and ``turn`` are those of :func:`plan`. With ``share``, rows with the same prompt share it
    where that spares at least one token in ``_WORTH_SHARING``.

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
    losses_B = count_sampled(tokens.like(mask))
    lengths = tokens.lengths.tolist()
    live = [row for row, losses in enumerate(losses_B.tolist()) if losses]
    prompts = _prompts(tokens, mask, live) if share and live else None
    if prompts is None:
        groups = plan([lengths[row] - 1 for row in live], max_tokens, packed=packed, equal=equal, turn=turn)
    else:
        rests = [lengths[row] - 1 - prompts.lengths[prompt] for row, prompt in zip(live, prompts.group, strict=True)]
        groups = plan_shared(prompts.lengths, rests, prompts.group, max_tokens)

    def make(group: Sequence[int]) -> MicroBatch:
        rows = torch.tensor([live[index] for index in group], device=mask.device)
        offsets = torch.nn.functional.pad(losses_B[rows].cumsum(0), (1, 0))
        prompts_of_batch = None if prompts is None else prompts.of(group)
        return _micro_batch(tokens, mask, values, rows, offsets, packed=packed, prompts=prompts_of_batch)

    return MicroBatches([partial(make, group) for group in groups])


class _Prompts(NamedTuple):
    """The different prompts of some rows.

    Attributes:
        lengths: Of each prompt, in tokens.
        group: The prompt of each row.
    """

    lengths: list[int]
    group: list[int]

    def of(self, rows: Sequence[int]) -> Self:
        """Return the prompts of some of the rows."""
        numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(self.group[row] for row in rows))}
        group = [numbers[self.group[row]] for row in rows]
        return self._replace(lengths=[self.lengths[prompt] for prompt in numbers], group=group)


def _prompts(tokens: Jagged, mask: Tensor, rows: Sequence[int]) -> _Prompts | None:
    """Find the prompts of ``rows``, or None where sharing them spares too little."""
    losses = mask.nonzero()[:, 0]
    firsts = losses[torch.searchsorted(losses, tokens.offsets[:-1])[torch.tensor(rows, device=mask.device)]]
    ids, offsets = tokens.values.cpu().numpy(), tokens.offsets.tolist()
    numbers: dict[bytes, int] = {}
    lengths, group = list[int](), list[int]()
    for row, first in zip(rows, firsts.tolist(), strict=True):
        prompt = ids[offsets[row] : first]
        number = numbers.setdefault(prompt.tobytes(), len(numbers))
        if number == len(lengths):
            lengths.append(len(prompt))
        group.append(number)
    count = sum(offsets[row + 1] - offsets[row] - 1 for row in rows)
    spared = sum(lengths[number] for number in group) - sum(lengths)
    return _Prompts(lengths, group) if shares_enough(spared, count) else None


def shares_enough(spared: int, count: int) -> bool:
    """Whether prompts are shared where that spares so many of ``count`` tokens."""
    return spared * _WORTH_SHARING >= count


def _micro_batch(
    tokens: Jagged,
    mask: Tensor,
    values: Mapping[str, Tensor],
    rows: Tensor,
    offsets: Tensor,
    *,
    packed: bool,
    prompts: _Prompts | None = None,
) -> MicroBatch:
    lengths = tokens.lengths[rows]
    inputs = lengths - 1
    width = int(inputs.max())
    row_of = torch.repeat_interleave(torch.arange(len(rows), device=rows.device), lengths)
    within = torch.arange(len(row_of), device=rows.device) - starts(lengths)[row_of]
    flat = tokens.offsets[rows][row_of] + within  # places of this micro-batch's tokens among the batch's N
    ids = tokens.values[flat]
    rows_packed: PackedRows | SharedPrompts | None = None
    if prompts is not None:
        prompts_G, group_R = torch.tensor(prompts.lengths), torch.tensor(prompts.group)
        rests_R = inputs.cpu() - prompts_G[group_R]
        rows_packed = share_prompts(prompts_G, rests_R, group_R, rows.device)
        position, before = (
            row_places(prompts_G, rests_R, group_R, row_of.cpu(), at.cpu()).to(rows.device)
            for at in (within, within - 1)
        )
        size = int(prompts_G.sum() + rests_R.sum())
    else:
        base = starts(inputs) if packed else torch.arange(len(rows), device=rows.device) * width
        size = int(inputs.sum()) if packed else len(rows) * width
        position = base[row_of] + within  # of a token as input
        before = position - 1
        if packed:
            rows_packed = PackedRows(torch.nn.functional.pad(torch.cumsum(inputs, 0), (1, 0)).int(), width)
    is_input = within < inputs[row_of]
    input_ids, position_ids = ids.new_zeros(size), None
    input_ids[position[is_input]] = ids[is_input]
    if rows_packed is not None:
        position_ids = ids.new_zeros(1, size)
        position_ids[0, position[is_input]] = within[is_input]
    chosen = mask[flat]
    index = flat[chosen]
    return MicroBatch(
        input_ids=input_ids.view(len(rows), width) if rows_packed is None else input_ids.view(1, -1),
        position_ids=position_ids,
        packed=rows_packed,
        select=before[chosen],
        targets=ids[chosen],
        index=index,
        input_index=flat[is_input],
        input_places=position[is_input],
        columns={name: column[index] for name, column in values.items()},
        offsets=offsets,
    )
