"""Attention of whole prompts, side by side, whose bits depend neither on what is beside a prompt nor on what follows.

On the CPU the queries of 128 positions read the keys from position 0 to the end of those 128, whatever the lengths of
the prompts are: a kernel that is given more keys sums them in another order (MKL cuts more than 384 in halves). So what
a token becomes depends on the tokens before it alone, and a prompt may go on from what an earlier one computed.
Elsewhere one call computes all.

Legend: N tokens, packed; P prompts; H heads, K kv heads, D head_dim; T positions of keys and values.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["PromptAttention"]

_BLOCK = 128  # positions whose queries read equally many keys
_QUANTUM = 32  # kernels take queries in blocks of 32; whole blocks keep their sums in one order


class _Block(NamedTuple):
    """Queries of positions ``begin`` to ``end`` of the prompts that have any there; None for all prompts."""

    begin: int
    end: int
    prompts: Tensor | None


class PromptAttention:
    """Where the tokens of prompts lie in a grid ``[P, positions]``, and which keys each of them reads.

    Args:
        starts: For each prompt how many of its positions are known before. At least one token follows them.
        lengths: For each prompt how many positions it has.
        device: Where the tensors are.

    Attributes:
        rows: The prompt of each token, ``[N]``.
        positions: Its position, ``[N]``.
        last_rows: The last token of each prompt, ``[P]``.
        width: Positions T that keys and values need.
        used: Those of them that hold a token, rounded up.
    """

    def __init__(self, starts: Sequence[int], lengths: Sequence[int], device: torch.device) -> None:
        longest = max(lengths)
        self.used = _round_up(longest, _QUANTUM)
        block = _BLOCK if device.type == "cpu" else self.used
        self.width = self.used if self.used <= block else _round_up(longest, block)
        self._first = min(starts) // block * block if device.type == "cpu" else min(starts)
        self._count, self._device = len(lengths), device
        spans = list(zip(starts, lengths, strict=True))
        self.positions = torch.cat([torch.arange(start, end) for start, end in spans])
        counts = torch.tensor([end - start for start, end in spans])
        self.rows = torch.repeat_interleave(torch.arange(len(spans)), counts)
        self.last_rows = counts.cumsum(0).sub_(1)
        self._slots = (self.rows * (self.width - self._first) + self.positions - self._first).to(device)
        self._blocks = list[_Block]()
        for begin in range(self._first, self.width, block):
            end = min(begin + block, self.width)
            sharing = [row for row, (start, stop) in enumerate(spans) if start < end and stop > begin]
            if sharing:
                prompts = None if len(sharing) == len(spans) else torch.tensor(sharing, device=device)
                self._blocks.append(_Block(begin, end, prompts))
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
        """Return what the queries read.

        Args:
            query: ``[N, H, D]``.
            keys: ``[P, K, T, D]``, as the values.
            values: See there.
            window: As many positions a token attends to, its own among them; None for all before it.

        Returns:
            ``[N, H * D]``.
        """
        heads, dim = query.shape[1:]
        grid = query.new_zeros(self._count, self.width - self._first, heads, dim)
        grid.view(-1, heads, dim)[self._slots] = query
        for begin, end, prompts in self._blocks:
            rows = slice(None) if prompts is None else prompts
            columns = slice(begin - self._first, end - self._first)
            mask = self._mask(begin, end, window)
            mixed = F.scaled_dot_product_attention(
                grid[rows, columns].transpose(1, 2),
                keys[rows, :, :end],
                values[rows, :, :end],
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=heads > keys.shape[1],
            )
            grid[rows, columns] = mixed.transpose(1, 2)
        return grid.view(-1, heads * dim)[self._slots]

    def _mask(self, begin: int, end: int, window: int | None) -> Tensor | None:
        """Which of ``end`` keys the queries from ``begin`` on read, ``[1, 1, end - begin, end]``; None if all before
        it."""
        if window is not None and window >= end:
            window = None
        if (begin, window) not in self._masks:
            queries = torch.arange(begin, end).unsqueeze(1)
            seen = torch.arange(end) <= queries
            if window is not None:
                seen &= torch.arange(end) > queries - window
            is_causal = begin == 0 and window is None
            self._masks[begin, window] = None if is_causal else seen[None, None].to(self._device)
        return self._masks[begin, window]


def _round_up(size: int, quantum: int) -> int:
    return -(-size // quantum) * quantum
