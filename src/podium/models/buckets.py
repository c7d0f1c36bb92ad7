"""Buckets of weights: how tensors are cut into them, and how two ends compare what they hold.

A piece is some rows of one tensor. A bucket is a list of pieces of about one size in bytes.
"""

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from podium.data.adapters import Adapter

_WORDS = 512  # 64-bit words in a row of the table that is summed
_CACHED_ROWS = 128  # so many rows are still in the processor's cache when they are summed the other way

Bucket = tuple[list[Tensor | None], list[int] | None]
"""The rows of each piece, None where the generators hold them; and the pieces' checksums, if they were asked for."""


class WeightInfo(NamedTuple):
    """A whole tensor's name, shape and bytes an element, and whether it stays as it is."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    frozen: bool = False

    @property
    def rows(self) -> int:
        """Number of rows; 1 for a tensor without dimensions."""
        return self.shape[0] if self.shape else 1


class WeightManifest(NamedTuple):
    """What a policy's weights are at one moment. Equal manifests are those of equal weights.

    Attributes:
        weights: All tensors, whole, in the order in which they are gathered.
        step: The number of updates of the policy.
        place: The name of the memory that ``Policy.weights_in_place`` returned references to; "" where the weights are
            not in such memory.
        adapters: The adapters that the generators merge, whose matrices are among the tensors.
    """

    weights: tuple[WeightInfo, ...]
    step: int
    place: str
    adapters: tuple[Adapter, ...] = ()


class Piece(NamedTuple):
    """Rows ``start:stop`` of a tensor; 0 and 1 for a tensor without dimensions."""

    name: str
    start: int
    stop: int


@lru_cache(maxsize=8)
def cut(weights: tuple[WeightInfo, ...], bucket_bytes: int) -> list[list[Piece]]:
    """Cut all tensors, in order, into buckets of at most ``bucket_bytes``. A larger row has its own bucket.

    A bucket's tensors are all frozen, or none is.
    """
    buckets: list[list[Piece]] = []
    room, frozen = 0, False
    for info in weights:
        room, frozen = room if info.frozen == frozen else -1, info.frozen
        row_bytes = math.prod(info.shape[1:]) * info.itemsize
        most = max(1, bucket_bytes // max(1, row_bytes))
        for start in range(0, info.rows, most):
            stop = min(start + most, info.rows)
            if not buckets or (stop - start) * row_bytes > room:
                buckets.append([])
                room = bucket_bytes
            buckets[-1].append(Piece(info.name, start, stop))
            room -= (stop - start) * row_bytes
    return buckets


def fill(rows: Sequence[Tensor], known: Sequence[int] | None) -> Bucket:
    """Make a bucket of the rows of its pieces.

    Args:
        known: The checksums of what the generators hold, or an empty list. Pieces with the same checksum are left
            out. None keeps all pieces, without checksums.
    """
    if known is None:
        return list(rows), None
    sums = [checksum(values) for values in rows]
    known_sums = known or [-1] * len(sums)
    return [
        None if checksum_here == theirs else values
        for values, checksum_here, theirs in zip(rows, sums, known_sums, strict=True)
    ], sums


def checksum(values: Tensor) -> int:
    """Return 64 bits that say whether two tensors have the same bytes.

    The bytes are laid out as a table of 64-bit words. The table's row sums and column sums, modulo 2**64, are hashed,
    so that the cost is one reading of the bytes, on any device. A change goes unseen only if it cancels out in each
    row and each column: the checksum guards against accidents, not against malice.
    """
    raw = values.detach().reshape(-1).contiguous().view(torch.uint8)
    nbytes_in_table = len(raw) // (8 * _WORDS) * 8 * _WORDS
    digest = hashlib.blake2b(raw[nbytes_in_table:].cpu().numpy().tobytes(), digest_size=8)
    if nbytes_in_table:
        table = raw[:nbytes_in_table] if raw.storage_offset() % 8 == 0 else raw[:nbytes_in_table].clone()
        words = table.view(torch.int64).view(-1, _WORDS)
        columns = torch.zeros(_WORDS, dtype=torch.int64, device=words.device)
        for part in words.split(_CACHED_ROWS if words.device.type == "cpu" else len(words)):
            digest.update(part.sum(1).cpu().numpy().tobytes())
            columns += part.sum(0)
        digest.update(columns.cpu().numpy().tobytes())
    return int.from_bytes(digest.digest(), "little")
