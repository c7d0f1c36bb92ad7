"""What of the weights travels together: rows of tensors, in buckets of about one size."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from podium.workers.weights import WeightInfo

__all__ = ["Piece", "checksum", "cut", "rows_of"]

_WORDS = 512  # 64-bit words of a row of the table that is summed
_CACHED_ROWS = 128  # so many are still in the processor's cache when they are summed the other way


class Piece(NamedTuple):
    """Rows ``start:stop`` of a tensor; 0 and 1 for one without dimensions."""

    name: str
    start: int
    stop: int


def rows_of(shape: Sequence[int]) -> int:
    """Rows of a tensor of that shape; one without dimensions has one."""
    return shape[0] if shape else 1


def cut(layout: Sequence[WeightInfo], bucket_bytes: int) -> list[list[Piece]]:
    """All rows of all tensors, in order, in buckets of at most ``bucket_bytes``; a row that is larger has its own.

    How a tensor is cut depends on the tensor and ``bucket_bytes`` alone.
    """
    buckets: list[list[Piece]] = []
    room = 0
    for name, shape, itemsize in layout:
        rows, row_bytes = rows_of(shape), math.prod(shape[1:]) * itemsize
        most = max(1, bucket_bytes // max(1, row_bytes))
        for start in range(0, rows, most):
            stop = min(start + most, rows)
            if not buckets or (stop - start) * row_bytes > room:
                buckets.append([])
                room = bucket_bytes
            buckets[-1].append(Piece(name, start, stop))
            room -= (stop - start) * row_bytes
    return buckets


def checksum(values: Tensor) -> int:
    """64 bits that say whether two tensors have the same bytes.

    The bytes are laid out as a table of 64-bit words; its row sums and column sums, modulo 2**64, are hashed. Reading
    is all it costs, on any device (7 GB/s on one core, where CRC-32 makes 1.6). A change goes unseen only where it
    cancels out in each row and each column; it guards against accidents, not against malice.
    """
    raw = values.detach().reshape(-1).contiguous().view(torch.uint8)
    whole = len(raw) // (8 * _WORDS) * 8 * _WORDS
    digest = hashlib.blake2b(raw[whole:].cpu().numpy().tobytes(), digest_size=8)
    if whole:
        table = raw[:whole] if raw.storage_offset() % 8 == 0 else raw[:whole].clone()
        words = table.view(torch.int64).view(-1, _WORDS)
        columns = torch.zeros(_WORDS, dtype=torch.int64, device=words.device)
        for part in words.split(_CACHED_ROWS if words.device.type == "cpu" else len(words)):
            digest.update(part.sum(1).cpu().numpy().tobytes())
            columns += part.sum(0)
        digest.update(columns.cpu().numpy().tobytes())
    return int.from_bytes(digest.digest(), "little")
