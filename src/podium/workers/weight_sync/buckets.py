"""Buckets of weights: how tensors are cut into them, the policy's end and the generator's end.

A piece is some rows of one tensor. A bucket is a list of pieces of about one size in bytes.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from podium.data import InPlace
from podium.errors import DataError
from podium.rollout.engines import Engine
from podium.workers.weight_sync.gather import WeightInfo, WholeWeights

__all__ = ["Bucket", "Piece", "WeightReceiver", "WeightSender", "checksum", "cut"]

_WORDS = 512  # 64-bit words in a row of the table that is summed
_CACHED_ROWS = 128  # so many rows are still in the processor's cache when they are summed the other way

Bucket = tuple[list[Tensor | None], list[int] | None]
"""The rows of each piece, None where the generators hold them; and the pieces' checksums, if they were asked for."""


class Piece(NamedTuple):
    """Rows ``start:stop`` of a tensor; 0 and 1 for a tensor without dimensions."""

    name: str
    start: int
    stop: int


@lru_cache(maxsize=8)
def cut(weights: tuple[WeightInfo, ...], bucket_bytes: int) -> list[list[Piece]]:
    """All rows of all tensors, in order, in buckets of at most ``bucket_bytes``. A larger row has its own bucket."""
    buckets: list[list[Piece]] = []
    room = 0
    for name, shape, itemsize in weights:
        rows, row_bytes = _rows(shape), math.prod(shape[1:]) * itemsize
        most = max(1, bucket_bytes // max(1, row_bytes))
        for start in range(0, rows, most):
            stop = min(start + most, rows)
            if not buckets or (stop - start) * row_bytes > room:
                buckets.append([])
                room = bucket_bytes
            buckets[-1].append(Piece(name, start, stop))
            room -= (stop - start) * row_bytes
    return buckets


def _rows(shape: Sequence[int]) -> int:
    return shape[0] if shape else 1


def checksum(values: Tensor) -> int:
    """64 bits that say whether two tensors have the same bytes.

    The bytes are laid out as a table of 64-bit words. The table's row sums and column sums, modulo 2**64, are hashed,
    so that the cost is one reading of the bytes, on any device. A change goes unseen only if it cancels out in each
    row and each column: the checksum guards against accidents, not against malice.
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


class WeightSender:
    """Makes buckets of a model's weights. Gathers one whole tensor at a time, however the model is sharded.

    Args:
        sends: whether this rank's buckets travel. Other ranks only take part in gathering.

    Attributes:
        weights: Tensors that :meth:`bucket` cuts, in the model's order.
        in_place: The same tensors, which readers map where they are. It is None where they must be gathered.
    """

    def __init__(self, model: nn.Module, *, sends: bool) -> None:
        self._whole = WholeWeights(model)
        self._sends = sends
        self._held: tuple[str, Tensor] | None = None  # a gathered tensor of which more pieces will be asked for
        self.weights = tuple(self._whole.manifest())
        self.in_place = InPlace(self._whole.tensors) if sends and self._whole.is_plain else None

    def bucket(self, index: int, bucket_bytes: int, known: Sequence[int] | None) -> Bucket:
        """Bucket ``index`` of those that :func:`cut` makes; views of the model's own tensors where those are whole.

        Buckets are asked for in order. Where the model is sharded, all ranks ask together.

        Args:
            known: the checksums of what the generators hold, or an empty list. Pieces with the same checksum are left
                out. None sends all pieces, without checksums.
        """
        if index == 0:
            self._held = None
        if not self._sends and not self._whole.sharded:
            return [], None
        rows = [self._rows(piece) for piece in cut(self.weights, bucket_bytes)[index]]
        if not self._sends:
            return [], None
        if known is None:
            return list(rows), None
        sums = [checksum(values) for values in rows]
        held = known or [-1] * len(sums)
        return [None if own == theirs else values for values, own, theirs in zip(rows, sums, held, strict=True)], sums

    def _rows(self, piece: Piece) -> Tensor:
        if self._held is None or self._held[0] != piece.name:
            self._held = piece.name, self._whole.gather(piece.name)
        tensor = self._held[1]
        if not tensor.ndim or piece.stop == len(tensor):
            self._held = None
        return tensor[piece.start : piece.stop] if tensor.ndim else tensor


class WeightReceiver:
    """Copies buckets into an engine's own tensors while nothing is drawn from them.

    Two buckets may come at once, in threads of their own; they hold different rows.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._buckets: list[list[Piece]] = []
        self._lock = threading.Lock()
        self._version: int | None = None  # of the weights that are arriving
        self._missing: dict[str, int] = {}  # rows of each tensor that have not arrived
        self._sums: dict[Piece, tuple[int, int]] = {}  # checksums of a piece as it was sent, and as the engine holds it

    def prepare(self, weights: Sequence[WeightInfo], bucket_bytes: int) -> None:
        """Expect all of ``weights``, in the buckets that :func:`cut` makes of them. Generation goes on.

        Raises:
            ConfigError: these are not the tensors of the engine's model.
        """
        self._engine.check_weights({info.name: info.shape for info in weights})
        with self._lock:
            self._missing = {info.name: _rows(info.shape) for info in weights}
            self._buckets = cut(tuple(weights), bucket_bytes)

    def receive(
        self, version: int, index: int, tensors: Sequence[Tensor | None], sums: Sequence[int] | None
    ) -> list[str]:
        """Copy one bucket. The first waits for the token that is being drawn; the next token waits for the finish.

        Args:
            version: the version of the weights.
            index: the bucket's place among those of :func:`cut`.
            tensors: the rows of each piece, or None where the engine's own are said to be right.
            sums: the checksum of each piece, where they are to be checked.

        Returns:
            Names of tensors that arrived damaged, or that the engine does not hold as the sender says.
        """
        with self._lock:
            self._version = version
            self._engine.gate.close()
        wrong: list[str] = []
        for at, (piece, values) in enumerate(zip(self._buckets[index], tensors, strict=True)):
            if self._copy(piece, values, None if sums is None else sums[at]):
                with self._lock:
                    self._missing[piece.name] -= piece.stop - piece.start
            else:
                wrong.append(piece.name)
        return wrong

    def _copy(self, piece: Piece, values: Tensor | None, expected: int | None) -> bool:
        if values is None:
            sent, kept = self._sums.get(piece, (None, None))
            return sent is not None and sent == expected and self._own_sum(piece) in (None, kept)
        self._sums.pop(piece, None)
        if expected is not None and checksum(values) != expected:
            return False
        self._engine.load(piece.name, piece.start, values)
        if expected is not None:
            own = self._engine.rows(*piece)
            self._sums[piece] = expected, expected if own is None or own.dtype == values.dtype else checksum(own)
        return True

    def _own_sum(self, piece: Piece) -> int | None:
        own = self._engine.rows(*piece)
        return None if own is None else checksum(own)  # None: the engine keeps its weights in a form of its own

    def finish(self, version: int) -> None:
        """Draw from the new weights.

        Raises:
            DataError: rows have not arrived; names their tensors.
        """
        with self._lock:
            missing = [name for name, rows in self._missing.items() if rows]
            if self._version != version or missing:
                raise DataError(
                    f"the weights of version {version} are not whole: rows of {len(missing)} tensors have not come, "
                    f"such as {missing[:3]}; sync them again"
                )
            self._engine.loaded()
            self._engine.gate.open(version)
            self._version = None

    def abort(self, reason: str) -> None:
        """End a sync that has begun to write: nothing is drawn until the next sync has finished."""
        with self._lock:
            if self._version is not None:
                version, self._version = self._version, None
                self._engine.gate.refuse(f"the weights of version {version} came only in part ({reason}); sync again")
