"""The policy's end of a streamed publication: whole tensors, one at a time, cut as they are asked for."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from podium.workers.publication.pieces import Piece, checksum
from podium.workers.weights import WeightInfo, WholeWeights

__all__ = ["Bucket", "WeightSender"]

Bucket = tuple[list[Tensor | None], list[int] | None]
"""Of each piece its rows, None where the receivers have them; and its checksum, if checksums were asked for."""


class WeightSender:
    """Buckets of one model's weights. No more is whole at a time than one tensor, however the model is sharded.

    Args:
        sends: whether this rank's buckets travel. The others only take part in gathering.
    """

    def __init__(self, model: nn.Module, *, sends: bool) -> None:
        self._weights = WholeWeights(model)
        self._sends = sends
        self._held: tuple[str, Tensor] | None = None  # a tensor of which further pieces will be asked for

    def layout(self) -> list[WeightInfo]:
        """All tensors, in the order in which they are gathered most cheaply."""
        return self._weights.layout()

    def bucket(self, pieces: Sequence[Piece], known: Sequence[int | None] | None) -> Bucket:
        """The rows of ``pieces``; views of the model's own tensors where those are whole.

        With a sharded model all ranks call together.

        Args:
            known: the checksums of what the receivers hold, None where they hold nothing; those that still agree are
                left out. None: send all, and no checksums.
        """
        if not self._sends and not self._weights.sharded:
            return [], None
        rows = [self._rows(piece) for piece in pieces]
        if not self._sends:
            return [], None
        if known is None:
            return list(rows), None
        sums = [checksum(values) for values in rows]
        changed = zip(rows, sums, known, strict=True)
        return [values if own != theirs else None for values, own, theirs in changed], sums

    def _rows(self, piece: Piece) -> Tensor:
        if self._held is None or self._held[0] != piece.name:
            self._held = piece.name, self._weights.gather(piece.name)
        whole = self._held[1]
        if not whole.ndim or piece.stop == len(whole):
            self._held = None
        return whole[piece.start : piece.stop] if whole.ndim else whole
