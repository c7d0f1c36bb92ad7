"""The generator's end of a streamed publication: buckets in, an engine whose weights are of one version."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence

from torch import Tensor

from podium.errors import DataError
from podium.rollout.engines import Engine
from podium.workers.publication.pieces import Piece, checksum, cut, rows_of
from podium.workers.weights import WeightInfo

__all__ = ["WeightReceiver"]


class WeightReceiver:
    """Copies buckets into an engine's own tensors while nothing is drawn from them.

    Two buckets may come at once, from threads of their own; they hold different rows.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._rows: Mapping[str, int] = {}  # of each tensor that is to come
        self._buckets: list[list[Piece]] = []
        self._lock = threading.Lock()
        self._attempt: tuple[int, int] | None = None
        self._arrived: Counter[str] = Counter()  # rows
        self._sums: dict[Piece, tuple[int, int]] = {}  # of a piece as announced, and as it is kept here

    def agree(self, layout: Sequence[WeightInfo], bucket_bytes: int) -> None:
        """Check that the tensors that will come are those of the engine's model; they come as ``cut`` cuts them.

        Raises:
            ConfigError: they are not.
        """
        self._engine.check_weights({info.name: info.shape for info in layout})
        self._rows = {info.name: rows_of(info.shape) for info in layout}
        self._buckets = cut(layout, bucket_bytes)

    def take(
        self,
        attempt: tuple[int, int],
        index: int,
        tensors: Sequence[Tensor | None],
        sums: Sequence[int] | None,
    ) -> list[str]:
        """Copy one bucket. The first of an attempt waits for the token that is being drawn; the next waits for the end.

        Args:
            attempt: version and number of the publication.
            index: of the bucket.
            tensors: of each of its pieces the rows, or None where those here are still right.
            sums: checksums of the pieces, if they are to be checked.

        Returns:
            Names of tensors that have come damaged, or are not here as they should be. They must be sent again.
        """
        with self._lock:
            if self._attempt != attempt:
                self._engine.gate.close()
                self._attempt, self._arrived = attempt, Counter()
        right: Counter[str] = Counter()
        wrong: list[str] = []
        for at, (piece, values) in enumerate(zip(self._buckets[index], tensors, strict=True)):
            if self._take(piece, values, None if sums is None else sums[at]):
                right[piece.name] += piece.stop - piece.start
            else:
                wrong.append(piece.name)
        with self._lock:
            self._arrived += right
        return wrong

    def _take(self, piece: Piece, values: Tensor | None, expected: int | None) -> bool:
        if values is None:
            announced, kept = self._sums.get(piece, (None, None))
            return expected is not None and announced == expected and self._own_sum(piece) in (None, kept)
        self._sums.pop(piece, None)
        if expected is not None and checksum(values) != expected:
            return False
        self._engine.load(piece.name, piece.start, values)
        if expected is not None:
            own = self._engine.rows(*piece)
            kept = expected if own is None or own.dtype == values.dtype else checksum(own)
            self._sums[piece] = expected, kept
        return True

    def _own_sum(self, piece: Piece) -> int | None:
        """Of what the engine holds; None where it cannot be read."""
        own = self._engine.rows(*piece)
        return None if own is None else checksum(own)

    def end(self, version: int) -> None:
        """Draw from the new weights.

        Raises:
            DataError: rows have not come; names their tensors.
        """
        with self._lock:
            missing = [name for name, rows in self._rows.items() if self._arrived[name] != rows]
            if self._attempt is None or self._attempt[0] != version or missing:
                raise DataError(
                    f"the weights of version {version} are not whole: rows of {len(missing)} tensors have not come, "
                    f"such as {missing[:3]}; publish them again"
                )
            self._engine.loaded()
            self._engine.gate.open(version)
            self._attempt = None

    def abort(self, reason: str) -> None:
        """Give up the publication that is under way, if there is one: nothing is drawn until the next has ended."""
        with self._lock:
            if self._attempt is not None:
                version, self._attempt = self._attempt[0], None
                self._engine.gate.refuse(
                    f"the weights of version {version} came only in part ({reason}); publish them again"
                )
