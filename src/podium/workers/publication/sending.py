"""The policy's end of a streamed publication: whole tensors, one at a time, cut as they are asked for."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from podium.data import InPlace
from podium.errors import DataError
from podium.workers.publication.pieces import Piece, checksum, cut
from podium.workers.weights import WeightInfo, WholeWeights

__all__ = ["Bucket", "WeightSender"]

Bucket = tuple[list[Tensor | None], list[int] | None]
"""Of each piece its rows, None where the receivers have them; and the checksums, if they were asked for."""


class WeightSender:
    """Buckets of one model's weights, which may change between publications. No more is whole at a time than one
    tensor, however the model is sharded.

    Args:
        sends: whether this rank's buckets travel. The others only take part in gathering.

    Attributes:
        in_place: the tensors of :meth:`layout`, to be read where they are; None where they must be gathered.
    """

    def __init__(self, model: nn.Module, *, sends: bool) -> None:
        self._weights = WholeWeights(model)
        self._sends = sends
        self._buckets: dict[int, list[list[Piece]]] = {}  # by their size
        self._held: tuple[str, Tensor] | None = None  # a tensor of which further pieces will be asked for
        self._step = -1
        self.in_place = InPlace(self._weights.tensors) if sends and self._weights.whole else None

    def layout(self) -> list[WeightInfo]:
        """All tensors, in the order in which they are gathered."""
        return self._weights.layout()

    def bucket(self, index: int, bucket_bytes: int, known: Sequence[int] | None, step: int) -> Bucket:
        """Bucket ``index`` of those that ``cut`` makes; views of the model's own tensors where those are whole.

        Buckets are asked for in order, by all ranks together where the model is sharded.

        Args:
            step: how often the model has been updated, which must not change before the last bucket.
            known: the checksums of what the receivers hold, or an empty list; pieces that still agree are left out.
                None: send all, and no checksums.

        Raises:
            DataError: the model was updated since bucket 0.
        """
        if index == 0:
            self._held, self._step = None, step
        if step != self._step:
            raise DataError(
                f"bucket {index} of the weights was asked for after the policy had been updated: those before it are "
                "of older weights; publish again, from bucket 0"
            )
        if bucket_bytes not in self._buckets:
            self._buckets[bucket_bytes] = cut(self.layout(), bucket_bytes)
        if not self._sends and not self._weights.sharded:
            return [], None
        rows = [self._rows(piece) for piece in self._buckets[bucket_bytes][index]]
        if not self._sends:
            return [], None
        if known is None:
            return list(rows), None
        sums = [checksum(values) for values in rows]
        held = known or [-1] * len(sums)
        return [None if own == theirs else values for values, own, theirs in zip(rows, sums, held, strict=True)], sums

    def _rows(self, piece: Piece) -> Tensor:
        if self._held is None or self._held[0] != piece.name:
            self._held = piece.name, self._weights.gather(piece.name)
        whole = self._held[1]
        if not whole.ndim or piece.stop == len(whole):
            self._held = None
        return whole[piece.start : piece.stop] if whole.ndim else whole
