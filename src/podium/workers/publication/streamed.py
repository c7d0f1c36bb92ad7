"""Weights that are sent: bucket by bucket, from where the policy has them into the generators' own tensors."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, cast

from podium.data import TensorRef
from podium.errors import ConfigError, DataError, PodiumError
from podium.runtime import Call
from podium.telemetry import Note, emit
from podium.workers.publication.contract import Publication, is_behind
from podium.workers.publication.pieces import Piece, cut

if TYPE_CHECKING:
    from podium.workers.generator import Generator
    from podium.workers.policy import Policy
    from podium.workers.weights import WeightInfo

__all__ = ["BUCKET_BYTES", "StreamedPublication"]

T = TypeVar("T")

BUCKET_BYTES: Final = 64 * 2**20
"""Large enough that a call costs nothing beside it, small enough that two of them are no burden."""


IN_PLACE_BUCKET: Final = 4
"""Times as large where weights are read in place: nothing is held for a bucket, and each is a call."""


class _Live(NamedTuple):
    """References to the policy's weights themselves, by name of the tensor, and the name of them all."""

    key: str
    refs: Mapping[str, TensorRef]


class StreamedPublication(Publication):
    """Every generator reads each tensor where it is, or where that cannot be in a copy that is stored once, at most two
    buckets at a time.

    With ``delta`` only tensors whose checksum has changed since the last publication are sent, and the generators check
    what they receive and what they hold; where they disagree, all of it is sent. That pays where bytes cross a network
    or much of the model is frozen: on one machine it costs a reading of the weights at either end.

    Args:
        policy: whose first rank sends; all its ranks take part in gathering shards.
        generators: those that receive: groups, or the handles of replicas.
        bucket_bytes: the most that is copied to travel at once; a single row of a tensor may be larger.
        delta: send only what has changed.
    """

    def __init__(
        self,
        policy: Policy,
        generators: Sequence[Generator],
        *,
        bucket_bytes: int = BUCKET_BYTES,
        delta: bool = False,
    ) -> None:
        if bucket_bytes < 1:
            raise ConfigError(f"bucket_bytes = {bucket_bytes}: expected at least 1")
        self._policy = policy
        self._generators = tuple(generators)
        self._bucket_bytes = self._most = bucket_bytes
        self._delta = delta
        self._layout: Sequence[WeightInfo] = ()
        self._buckets: list[list[Piece]] = []
        self._live: _Live | None = None
        self._copied = delta  # whether the policy's weights cannot be read where they are
        self._sums: dict[int, list[int]] = {}  # by bucket, of what the generators hold; empty where that is not known
        self._attempt = 0

    def init(self) -> None:
        self._agree(self._generators)

    def publish(self, version: int) -> None:
        held = [generator.weights_version.submit() for generator in self._generators]
        held_by = dict(zip(self._generators, [call.result() for call in held], strict=True))
        behind = [generator for generator, versions in held_by.items() if is_behind(versions, version)]
        if not behind:
            return
        fresh = [generator for generator in behind if None in held_by[generator]]
        if fresh or not self._buckets:
            self._agree(fresh or behind)
            self._sums = {}
        try:
            self._send(behind, version)
            _wait([generator.end_weights.submit(version) for generator in behind])
        except BaseException as error:
            self._sums = {}
            self._abort(behind, error)
            raise

    def is_stale(self, version: int) -> bool:
        held = [generator.weights_version.submit() for generator in self._generators]
        return any(own is None or own < version for call in held for own in call.result())

    def close(self) -> None:
        self._sums, self._live = {}, None

    def _agree(self, generators: Sequence[Generator]) -> None:
        self._layout = self._policy.weight_layout()
        self._find_live()  # now, since the weights move once
        self._bucket_bytes = self._most * (1 if self._live is None else IN_PLACE_BUCKET)
        _wait([generator.agree_on_weights.submit(self._layout, self._bucket_bytes) for generator in generators])
        self._buckets = cut(self._layout, self._bucket_bytes)

    def _send(self, generators: Sequence[Generator], version: int) -> None:
        step = self._find_live()
        known, self._sums = self._sums, {}
        wrong = self._stream(generators, version, known)
        if self._live is not None and self._policy.weights_state() != (self._live.key, step):
            raise DataError(
                f"the policy was updated while its weights were sent as version {version}, so that the generators hold "
                "some of each; publish again, and let no update begin before publish() returns"
            )
        if wrong and known:
            emit(Note(f"publication of version {version}: generators do not hold {_few(wrong)} as sent; sending all"))
            wrong = self._stream(generators, version, {})
        if wrong:
            raise DataError(f"the weights of version {version} arrived damaged: the checksums of {_few(wrong)} differ")

    def _find_live(self) -> int:
        """Hold references to the policy's weights as they are, if there can be any; how often it has been updated."""
        key, step = ("", 0) if self._copied else self._policy.weights_state()
        if self._copied or (self._live is not None and self._live.key == key):
            return step
        self._live = None
        refs = cast("Sequence[TensorRef] | None", self._policy.weights_in_place())
        self._copied = refs is None
        if refs is not None:
            key, step = self._policy.weights_state()
            self._live = _Live(key, {info.name: ref for info, ref in zip(self._layout, refs, strict=True)})
        return step

    def _bucket(self, index: int, known: dict[int, list[int]]) -> tuple[Sequence[TensorRef | None], list[int] | None]:
        """References to a bucket's pieces, and their checksums in a delta."""
        if self._live is not None:
            refs = self._live.refs
            return [
                refs[name][start:stop] if refs[name].shape else refs[name] for name, start, stop in self._buckets[index]
            ], None
        asked = known.get(index, []) if self._delta else None
        return cast(Any, self._policy.weight_bucket(index, self._bucket_bytes, asked))

    def _stream(self, generators: Sequence[Generator], version: int, known: dict[int, list[int]]) -> list[str]:
        """Send all buckets, while one is being copied preparing the next; what the generators say is wrong."""
        self._attempt += 1
        copying: deque[list[Call[list[list[str]]]]] = deque()
        wrong: list[str] = []
        try:
            for index in range(len(self._buckets)):
                tensors, sums = self._bucket(index, known)
                if sums is not None:
                    self._sums[index] = sums
                attempt = (version, self._attempt)
                copying.append([g.take_weights.submit(attempt, index, cast(Any, tensors), sums) for g in generators])
                del tensors  # the last reference here: what the generators have copied leaves the store
                if len(copying) == 2:
                    wrong += _names(_wait(copying.popleft()))
            while copying:
                wrong += _names(_wait(copying.popleft()))
        except PodiumError:
            for taking in copying:  # none of them may still be writing when the next publication comes
                with contextlib.suppress(PodiumError):
                    _wait(taking)
            raise
        return wrong

    def _abort(self, generators: Sequence[Generator], error: BaseException) -> None:
        """Free those that wait at the gate. Who is dead, or broken, has nobody waiting."""
        for generator in generators:
            with contextlib.suppress(PodiumError):
                generator.abort_weights(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")


def _wait(calls: Sequence[Call[T]]) -> list[T]:
    """All results; or the first error, once all have ended."""
    failed: list[PodiumError] = []
    results: list[T] = []
    for call in calls:
        try:
            results.append(call.result())
        except PodiumError as error:
            failed.append(error)
    if failed:
        raise failed[0]
    return results


def _names(taken: Sequence[list[list[str]]]) -> list[str]:
    """Of each call, of each rank: all names."""
    return [name for ranks in taken for names in ranks for name in names]


def _few(names: Sequence[str]) -> str:
    unique = list(dict.fromkeys(names))
    return ", ".join(unique[:3]) + (f" and {len(unique) - 3} more" if len(unique) > 3 else "")
