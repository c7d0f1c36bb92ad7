"""Weights that go from process to process: bucket by bucket, into the generators' own tensors."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from podium.data import TensorRef
from podium.errors import ConfigError, DataError, PodiumError
from podium.runtime import Call
from podium.telemetry import Note, emit
from podium.workers.weight_sync.buckets import cut
from podium.workers.weight_sync.contract import WeightSync, is_behind

if TYPE_CHECKING:
    from podium.workers.generator import Generator
    from podium.workers.policy import Policy
    from podium.workers.weight_sync.gather import WeightManifest

__all__ = ["BUCKET_BYTES", "StreamedSync"]

T = TypeVar("T")

BUCKET_BYTES: Final = 64 * 2**20
"""Large enough that a call costs nothing beside it, small enough that two of them are no burden."""

IN_PLACE_BUCKETS: Final = 4
"""Buckets are so many times larger where weights are read in place, since no memory is held for them."""

Sums = dict[int, list[int]]
"""The checksums of each bucket's pieces, by the bucket's index."""


class StreamedSync(WeightSync):
    """Every generator copies each tensor from where the policy has it. Where that is not possible, the policy stores
    the weights in buckets, each once and at most two at a time, and the generators copy those.

    With ``delta`` only tensors whose checksum has changed since the last sync are sent. The generators check what they
    receive and what they hold; if they disagree, everything is sent. Delta pays where bytes cross a network or much of
    the model is frozen. On one machine it costs one reading of the weights at either end.

    Args:
        policy: the policy's handle. Its first rank sends; all its ranks take part in gathering shards.
        generators: the receivers: groups, or the handles of replicas.
        bucket_bytes: the most bytes that are copied to travel at once. A single row of a tensor may be larger.
        delta: send only what has changed.

    Raises:
        ConfigError: ``bucket_bytes`` is below 1.
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
        self._bucket_bytes = bucket_bytes
        self._delta = delta
        self._copied = delta  # whether the policy's weights cannot be read where they are
        self._place = ""  # the memory that ``_refs`` point to, as the manifest names it
        self._refs: Mapping[str, TensorRef] = {}  # the policy's weights, where they can be read in place
        self._sums: Sums = {}  # of what the generators hold; empty where that is not known

    def init(self) -> None:
        self._prepare(self._generators)

    def sync(self, version: int) -> None:
        held = self._held_versions()
        behind = [generator for generator, versions in held if is_behind(versions, version)]
        if not behind:
            return
        if any(None in versions for _, versions in held):
            self._sums = {}
        try:
            self._send(behind, version)
            _wait([generator.finish_weight_sync.submit(version) for generator in behind])
        except BaseException as error:
            self._sums = {}
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            for generator in behind:  # generators that died or are broken have no request that waits
                with contextlib.suppress(PodiumError):
                    generator.abort_weight_sync(reason)
            raise

    def is_stale(self, version: int) -> bool:
        return any(own is None or own < version for _, versions in self._held_versions() for own in versions)

    def close(self) -> None:
        self._sums, self._refs, self._place = {}, {}, ""

    def _held_versions(self) -> list[tuple[Generator, list[int | None]]]:
        calls = [generator.weights_version.submit() for generator in self._generators]
        return [(generator, call.result()) for generator, call in zip(self._generators, calls, strict=True)]

    def _send(self, generators: Sequence[Generator], version: int) -> None:
        known, self._sums = self._sums, {}
        manifest, wrong = self._stream(generators, version, known)
        if wrong and known:
            emit(Note(f"weight sync {version}: generators do not hold {_few(wrong)} as sent; sending all"))
            manifest, wrong = self._stream(generators, version, {})
        if self._policy.weight_manifest() != manifest:
            raise DataError(
                f"the policy was updated while its weights were sent as version {version}, so that the generators hold "
                "some of each; sync again, and let no update begin before sync() returns"
            )
        if wrong:
            raise DataError(f"the weights of version {version} arrived damaged: the checksums of {_few(wrong)} differ")

    def _prepare(self, generators: Sequence[Generator]) -> tuple[WeightManifest, int]:
        """Announce the weights as they are now; their manifest and the size of a bucket."""
        manifest = self._policy.weight_manifest()
        if not self._copied and (not manifest.place or manifest.place != self._place):
            self.close()
            refs = cast("Sequence[TensorRef] | None", self._policy.weights_in_place())
            manifest = self._policy.weight_manifest()
            self._copied = refs is None
            if refs is not None:
                self._place = manifest.place
                self._refs = {info.name: ref for info, ref in zip(manifest.weights, refs, strict=True)}
        bucket_bytes = self._bucket_bytes * (IN_PLACE_BUCKETS if self._refs else 1)
        _wait([generator.prepare_weight_sync.submit(manifest.weights, bucket_bytes) for generator in generators])
        return manifest, bucket_bytes

    def _stream(
        self, generators: Sequence[Generator], version: int, known: Sums
    ) -> tuple[WeightManifest, Sequence[str]]:
        """Send all buckets, preparing one while the one before is copied; the manifest, and the names of tensors that
        the generators hold wrong."""
        manifest, bucket_bytes = self._prepare(generators)
        copying: deque[list[Call[list[list[str]]]]] = deque()
        wrong: list[str] = []
        try:
            for index, pieces in enumerate(cut(manifest.weights, bucket_bytes)):
                sums = None
                if self._refs:
                    refs = [self._refs[piece.name] for piece in pieces]
                    tensors: Any = [
                        ref[piece.start : piece.stop] if ref.shape else ref
                        for ref, piece in zip(refs, pieces, strict=True)
                    ]
                else:
                    asked = known.get(index, []) if self._delta else None
                    tensors, sums = cast(Any, self._policy.weight_bucket(index, bucket_bytes, asked))
                if sums is not None:
                    self._sums[index] = sums
                copying.append([g.receive_weights.submit(version, index, tensors, sums) for g in generators])
                del tensors  # the last reference here: the store frees what all generators have copied
                if len(copying) == 2:
                    wrong += _names(_wait(copying.popleft()))
            while copying:
                wrong += _names(_wait(copying.popleft()))
        except PodiumError:
            for calls in copying:  # none of them may still be writing when the next sync begins
                with contextlib.suppress(PodiumError):
                    _wait(calls)
            raise
        return manifest, wrong


def _wait(calls: Sequence[Call[T]]) -> list[T]:
    """All results; or the first error, once all calls have ended."""
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


def _names(results: Sequence[list[list[str]]]) -> list[str]:
    return [name for ranks in results for names in ranks for name in names]


def _few(names: Sequence[str]) -> str:
    unique = list(dict.fromkeys(names))
    return ", ".join(unique[:3]) + (f" and {len(unique) - 3} more" if len(unique) > 3 else "")
