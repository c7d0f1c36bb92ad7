"""Packed masks of token ids, and the columns in which a batch carries those that its tokens were drawn under.

Bit ``i % 8`` of byte ``i // 8`` of a mask says whether id i was allowed. The mask ``b""`` allows every id.

Legend: B rows, N tokens over all rows, M masks, W bytes of a mask, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from podium.data.batch import Batch
from podium.data.fields import MASK_BITS, MASK_NUMBERS
from podium.data.jagged import Jagged
from podium.errors import DataError

_BITS: Final = 8


def pack_ids(ids: Iterable[int], vocabulary: int, *, without: bool = False) -> bytes:
    """Return the packed mask of ``ids``, or with ``without`` that of all others."""
    packed = bytearray((vocabulary + _BITS - 1) // _BITS)
    for token_id in ids:
        if token_id < vocabulary:
            packed[token_id // _BITS] |= 1 << token_id % _BITS
    return bytes(~byte & 0xFF for byte in packed) if without else bytes(packed)


def unpack_masks(masks_MW: Tensor, vocabulary: int) -> Tensor:
    """Return packed masks, uint8 ``[M, W]``, as bool ``[M, V]``. Ids beyond a mask's bits are not allowed."""
    if masks_MW.device.type == "cpu":  # a hundred times faster
        packed: np.ndarray = masks_MW.numpy()
        bits = np.unpackbits(packed, axis=1, count=min(vocabulary, 8 * packed.shape[1]), bitorder="little")
        missing = vocabulary - bits.shape[1]
        bits_MV: Any = np.pad(bits, ((0, 0), (0, missing))) if missing else bits
        return torch.as_tensor(bits_MV).bool()
    shifts = torch.arange(_BITS, dtype=torch.uint8, device=masks_MW.device)
    bits = (masks_MW.unsqueeze(-1) >> shifts).bitwise_and_(1).flatten(1)[:, :vocabulary].bool()
    return torch.nn.functional.pad(bits, (0, vocabulary - bits.shape[1])) if bits.shape[1] < vocabulary else bits


def mask_columns(masks: Sequence[Sequence[bytes]], tokens: Jagged) -> dict[str, Jagged]:
    """Return the columns with the masks of B rows' tokens. Each mask of a row is there once.

    Args:
        masks: By row and token, the packed mask that the token was drawn under. All of a batch have one size.
        tokens: The rows' tokens.
    """
    numbers, parts, sizes = list[int](), list[bytes](), list[int]()
    for row_masks in masks:
        table = {b"": 0}
        numbers += [table.setdefault(mask, len(table)) for mask in row_masks]
        parts += table
        sizes.append(sum(map(len, table)))
    packed = bytearray(b"".join(parts))
    bits = torch.frombuffer(packed, dtype=torch.uint8) if packed else torch.empty(0, dtype=torch.uint8)
    return {
        MASK_NUMBERS: tokens.like(torch.tensor(numbers, dtype=torch.int64)),
        MASK_BITS: Jagged.from_lengths(bits, torch.tensor(sizes, dtype=torch.int64)),
    }


def read_mask_columns(batch: Batch) -> tuple[Tensor, Tensor] | None:
    """Return the masks of a batch, uint8 ``[M, W]``, and by token the number of its mask among these, from 1, int64
    ``[N]``; None if every token was drawn from all ids.

    Raises:
        DataError: The two columns do not fit each other.
    """
    if MASK_NUMBERS not in batch or not len(bits := batch.jagged(MASK_BITS).values):
        return None
    numbers, sizes_B = batch.jagged(MASK_NUMBERS), batch.jagged(MASK_BITS).lengths
    counts_B = torch.tensor([int(row.max()) if len(row) else 0 for row in numbers.unbind()], device=sizes_B.device)
    width = int(sizes_B.max()) // max(1, int(counts_B[sizes_B.argmax()]))
    if not torch.equal(counts_B * width, sizes_B):
        raise DataError(
            f"{MASK_BITS} has rows of {_ints(sizes_B)} bytes, and {MASK_NUMBERS} names {_ints(counts_B)} "
            "masks in these rows: change both columns together"
        )
    before_N = torch.repeat_interleave(counts_B.cumsum(0) - counts_B, numbers.lengths)
    return bits.view(-1, width), torch.where(numbers.values > 0, numbers.values + before_N, 0)


def _ints(values: Tensor) -> list[int]:
    """The first values, for a message."""
    return [int(value) for value in values[:8]]
