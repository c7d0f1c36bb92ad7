"""Attention over rows that share their prompts: a group has one copy of the tokens before the first token with loss.

A group of completions has one prompt. Where each row carries its own copy, as in padded or packed rows, the model
computes the same states once a row. Here a forward pass holds each prompt once, and completions after it::

    tokens     prompt 0 | prompt 1 | rest of row 0 | rest of row 1 | rest of row 2
    sees       itself     itself     prompt 0        prompt 0        prompt 1        and what precedes it in its row

Everything but attention works token by token. Results are those of separate rows within rounding.

Legend: S tokens of the pass, G prompts, R rows, P and C the longest prompt and rest of a row, D size of a head.
"""

from functools import partial
from typing import Any, Final, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

_FAR: Final = 1 << 40  # a position that no query reaches
_QUERIES: Final = 512  # of a row, that attend at the same time


class Block(NamedTuple):
    """Stretches of tokens that stand end to end, and their places in a padded table.

    Attributes:
        shape: Rows and columns of the table.
        places: int64 ``[rows * columns]``, the token of each place; any token at a place of padding. None without
            padding, where the table is a view.
        inverse: int64 ``[tokens]``, the place of each token. None as above.
    """

    shape: tuple[int, int]
    places: Tensor | None
    inverse: Tensor | None


class SharedPrompts(NamedTuple):
    """Who sees whom in a forward pass over shared prompts, which stand first, and the rests of rows.

    Attributes:
        size: The number of the prompts' tokens.
        prompts: Their table ``[G, P]``.
        rests: The table ``[R, C]`` of what follows the prompts. C may be 0.
        group: int64 ``[R]``, the prompt of each row.
        queries: int64 ``[R or 1, C]``, the positions of the tokens of ``rests`` in their rows.
        keys: int64 ``[R or 1, P + C]``, the positions of what they may see; far behind them all where there is padding.
        offsets: int32 ``[G + R + 1]``, where the stretches begin, for kernels of variable length.
        key_places: int64, the tokens that each stretch may see, end to end.
        key_offsets: int32 ``[G + R + 1]``, where those of each stretch begin.
        longest: The most queries and the most keys of a stretch.
    """

    size: int
    prompts: Block
    rests: Block
    group: Tensor
    queries: Tensor
    keys: Tensor
    offsets: Tensor
    key_places: Tensor
    key_offsets: Tensor
    longest: tuple[int, int]


def share_prompts(prompts_G: Tensor, rests_R: Tensor, group_R: Tensor, device: torch.device) -> SharedPrompts:
    """Lay out prompts of these lengths and, after them, the rests of rows, which belong to the prompts ``group_R``."""
    own_R, size = prompts_G[group_R], int(prompts_G.sum())
    prompts, rests = _block(prompts_G, device), _block(rests_R, device)
    length_R1 = own_R[:, None] if prompts.places is not None else own_R[:1, None]
    queries = length_R1 + torch.arange(rests.shape[1])
    positions = torch.arange(prompts.shape[1]).expand(len(length_R1), -1)
    keys = torch.cat([positions.masked_fill(positions >= length_R1, _FAR), queries], 1)
    row = torch.repeat_interleave(torch.arange(len(own_R)), own_R + rests_R)
    within = torch.arange(len(row)) - starts(own_R + rests_R)[row]
    places = row_places(prompts_G, rests_R, group_R, row, within)
    stretches, seen = torch.cat([prompts_G, rests_R]), torch.cat([prompts_G, own_R + rests_R])
    return SharedPrompts(
        size=size,
        prompts=prompts,
        rests=rests,
        group=group_R.to(device),
        queries=queries.to(device),
        keys=keys.to(device),
        offsets=F.pad(stretches.cumsum(0), (1, 0)).int().to(device),
        key_places=torch.cat([torch.arange(size), places]).to(device),
        key_offsets=F.pad(seen.cumsum(0), (1, 0)).int().to(device),
        longest=(int(stretches.max()), int(seen.max())),
    )


def row_places(prompts_G: Tensor, rests_R: Tensor, group_R: Tensor, row: Tensor, within: Tensor) -> Tensor:
    """Return where tokens stand in the pass, given their rows and their positions there."""
    length = prompts_G[group_R][row]
    rest = int(prompts_G.sum()) + starts(rests_R)[row] + within - length
    return torch.where(within < length, starts(prompts_G)[group_R][row] + within, rest)


def starts(lengths: Tensor) -> Tensor:
    """Return where stretches begin that stand end to end."""
    return lengths.cumsum(0) - lengths


def _block(lengths: Tensor, device: torch.device) -> Block:
    width = int(lengths.max())
    shape = (len(lengths), width)
    if bool((lengths == width).all()):
        return Block(shape, None, None)
    inside = torch.arange(width) < lengths[:, None]
    places = (starts(lengths)[:, None] + torch.arange(width)).masked_fill(~inside, 0)
    return Block(shape, places.flatten().to(device), inside.flatten().nonzero()[:, 0].to(device))


def _mask_of_seen(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Whether tokens at positions ``queries [R, C]`` see those at ``keys [R, S]``: bool ``[R, 1, C, S]``."""
    query_positions, key_positions = queries[:, None, :, None], keys[:, None, None, :]
    return (
        query_positions >= key_positions
        if window is None
        else (query_positions >= key_positions) & (query_positions - window < key_positions)
    )


class _Spread(torch.autograd.Function):
    """Put tokens into a table with padding. Both passes copy, since no token has two places."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, places: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return tokens.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradients[0].index_select(0, inverse), None, None


class _Join(torch.autograd.Function):
    """Take the tokens out of a table with padding, whose gradient is 0."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.rows = len(table)
        return table.index_select(0, inverse)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (inverse,) = ctx.saved_tensors
        table = gradients[0].new_zeros(ctx.rows, *gradients[0].shape[1:])
        table[inverse] = gradients[0]
        return table, None


def _table(tokens: Tensor, block: Block) -> Tensor:
    """``[tokens, heads, D]`` -> ``[rows, heads, columns, D]``."""
    if block.places is not None:
        tokens = cast(Tensor, _Spread.apply(tokens, block.places, block.inverse))
    return tokens.unflatten(0, block.shape).transpose(1, 2)


def _tokens(table: Tensor, block: Block) -> Tensor:
    """The reverse of :func:`_table`."""
    flat = table.transpose(1, 2).flatten(0, 1)
    return flat if block.inverse is None else cast(Tensor, _Join.apply(flat, block.inverse))


def attend_shared(
    q: Tensor, k: Tensor, v: Tensor, rows: SharedPrompts, dropout: float, scaling: float | None, window: int | None
) -> Tensor:
    """Query ``[1, heads, S, D]``, key and value ``[1, kv heads, S, D]`` -> ``[1, S, heads, D]``."""
    attend = partial(
        F.scaled_dot_product_attention, dropout_p=dropout, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
    )
    flat = [states[0].transpose(0, 1) for states in (q, k, v)]
    prompts = [_table(states[: rows.size], rows.prompts) for states in flat]
    if window is not None and rows.prompts.shape[1] > window:
        places = torch.arange(rows.prompts.shape[1], device=q.device)[None]
        attended = attend(*prompts, attn_mask=_mask_of_seen(places, places, window))
    else:
        attended = attend(*prompts, is_causal=True)
    parts = [_tokens(attended, rows.prompts)]
    if rows.rests.shape[1]:
        query, *others = (_table(states[rows.size :], rows.rests) for states in flat)
        both = zip(prompts[1:], others, strict=True)
        key, value = (torch.cat([prompt.index_select(0, rows.group), rest], 2) for prompt, rest in both)
        ends = [*range(_QUERIES, rows.rests.shape[1], _QUERIES), rows.rests.shape[1]]
        mixed = list[Tensor]()
        for begin, end in zip([0, *ends], ends, strict=False):  # a mask of all queries would be large
            reach = rows.prompts.shape[1] + end
            seen = _mask_of_seen(rows.queries[:, begin:end], rows.keys[:, :reach], window)
            mixed.append(attend(query[:, :, begin:end], key[:, :, :reach], value[:, :, :reach], attn_mask=seen))
        parts.append(_tokens(torch.cat(mixed, 2) if len(mixed) > 1 else mixed[0], rows.rests))
    return torch.cat(parts)[None]
