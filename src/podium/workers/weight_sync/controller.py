"""The controller's end of a weight sync: the contract, the sync within one process, and the sync between processes."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from podium.data import TensorRef
from podium.errors import ConfigError, DataError, PodiumError
from podium.exceptions import read_text
from podium.models.buckets import cut
from podium.runtime import Call, Handle, wait
from podium.spelling import write_share
from podium.telemetry import Note, emit
from podium.workers.weight_sync.on_device import route

if TYPE_CHECKING:
    from podium.data.adapters import Adapter
    from podium.models.buckets import Piece, WeightInfo, WeightManifest
    from podium.workers.policy import Policy
    from podium.workers.weight_sync.receiver import WeightReceiver

T = TypeVar("T")

BUCKET_BYTES: Final = 64 * 2**20
"""A call costs little beside the copy of a bucket of this size, and two such buckets take little memory."""

IN_PLACE_BUCKETS: Final = 4
"""Buckets are so many times larger where weights are read in place, since no memory is held for them."""


class WeightSync(ABC):
    """Sends the policy's weights to the generators. This object lives in the controller.

    A version is a number that the caller gives to the current weights. A run uses the number of the step.

    Args:
        generators: The handles of groups or of replicas.
    """

    def __init__(self, generators: Sequence[Handle[WeightReceiver]]) -> None:
        self._generators = tuple(generators)

    @abstractmethod
    def init(self) -> None:
        """Check, before anything is trained, that the weights fit the generators' models.

        Raises:
            EndpointError: The weights do not fit. The error's cause is a ConfigError that names the tensor.
        """

    @abstractmethod
    def sync(self, version: int, generators: Sequence[Handle[WeightReceiver]] | None = None) -> None:
        """Send the policy's current weights, from which the next token is then drawn.

        With ``generators``, only these generators get the weights.

        Generators that hold ``version`` already are skipped. Generators that were restarted get all weights. If the
        sync fails, generators that had begun to receive draw nothing until the next sync, which sends all weights.

        Raises:
            ConfigError: A generator holds a later version.
            WorkerDied, EndpointError: The policy or a generator failed.
        """

    def is_stale(self, version: int) -> bool:
        """Whether a generator's weights are older than ``version``, or never came because it was restarted."""
        return any(
            generator_version is None or generator_version < version
            for _, versions in self._read_held_versions()
            for generator_version in versions
        )

    @abstractmethod
    def close(self) -> None:
        """Free everything that is kept between syncs. Idempotent; the workers continue."""

    def _read_held_versions(
        self, generators: Sequence[Handle[WeightReceiver]] | None = None
    ) -> list[tuple[Handle[WeightReceiver], list[int | None]]]:
        """Return the generators, each with the version that each of its ranks holds."""
        generators = self._generators if generators is None else generators
        calls = [generator.weights_version.submit() for generator in generators]
        return [(generator, call.result()) for generator, call in zip(generators, calls, strict=True)]


class ColocatedSync(WeightSync):
    """The generator reads the policy's own parameters, or gathers them into a copy. A sync is one call.

    Args:
        generator: The generator's handle. Each of its processes holds a policy too.
    """

    def __init__(self, generator: Handle[WeightReceiver]) -> None:
        super().__init__([generator])

    def init(self) -> None:
        """Do nothing: the engine is made from the policy's own model, so the weights fit."""

    def sync(self, version: int, generators: Sequence[Handle[WeightReceiver]] | None = None) -> None:
        for generator in self._generators if generators is None else generators:
            _is_behind(generator.refresh(version), version)

    def close(self) -> None:
        """Do nothing, because nothing is kept between syncs."""


class StreamedSync(WeightSync):
    """Every generator copies each tensor from the policy's own memory, on the host or on a shared device. Where that is
    not possible, the policy stores the weights in buckets, each once and at most two at a time, and the generators copy
    the buckets.

    With ``delta`` only tensors whose checksum has changed since the last sync are sent. The generators check what they
    receive and what they hold; if they disagree, everything is sent. Delta pays where bytes cross a network or much of
    the model is frozen. On one machine it costs one reading of the weights at either end.

    Args:
        policy: The policy's handle. Its first rank sends; all its ranks take part in gathering shards.
        generators: The receivers: groups, or the handles of replicas.
        bucket_bytes: The most bytes in a bucket. A single row of a tensor may be larger.
        delta: Whether to send only weights that have changed.

    Raises:
        ConfigError: ``bucket_bytes`` is below 1.
    """

    def __init__(
        self,
        policy: Handle[Policy],
        generators: Sequence[Handle[WeightReceiver]],
        *,
        bucket_bytes: int = BUCKET_BYTES,
        delta: bool = False,
    ) -> None:
        if bucket_bytes < 1:
            raise ConfigError(f"bucket_bytes = {bucket_bytes}: expected at least 1")
        super().__init__(generators)
        self._policy = policy
        self._bucket_bytes = bucket_bytes
        self._delta = delta
        self._copied = delta  # whether the policy's weights cannot be read where they are
        self._loans = DeviceLoans(policy)
        self._place = ""  # the memory that ``_refs`` point to, as the manifest names it
        self._refs: Mapping[str, TensorRef] = {}  # the policy's weights, where they can be read in place
        # What each generator was told to expect: the weights, the size of a bucket, and the adapters.
        self._announced: dict[Handle[WeightReceiver], tuple[Sequence[WeightInfo], int, Sequence[Adapter]]] = {}
        self._filled: set[Handle[WeightReceiver]] = set()  # those of them that hold the frozen weights
        # The checksums of what the generators hold, by bucket and piece; empty where they are not known.
        self._sums: dict[int, list[int]] = {}

    def init(self) -> None:
        self._prepare(self._generators)

    def sync(self, version: int, generators: Sequence[Handle[WeightReceiver]] | None = None) -> None:
        versions_held = self._read_held_versions(generators)
        behind = [generator for generator, versions in versions_held if _is_behind(versions, version)]
        if not behind:
            return
        for generator in (generator for generator, versions in versions_held if None in versions):
            self._sums = {}
            self._announced.pop(generator, None)
        try:
            self._send(behind, version)
            _wait([generator.finish_weight_sync.submit(version) for generator in behind])
            self._filled.update(behind)
        except BaseException as error:
            self._forget()
            reason = f"{type(error).__name__}: {read_text(error).partition(chr(10))[0]}"
            for generator in behind:  # generators that died or are broken have no request that waits
                with contextlib.suppress(PodiumError):
                    generator.abort_weight_sync(reason)
            raise

    def close(self) -> None:
        self._refs, self._place = {}, ""
        self._forget()

    def _forget(self) -> None:
        """Announce the weights again in the next sync, and send all of them."""
        self._sums = {}
        self._announced.clear()

    def _send(self, generators: Sequence[Handle[WeightReceiver]], version: int) -> None:
        former_sums, self._sums = self._sums, {}
        manifest, wrong = self._stream(generators, version, former_sums)
        if wrong and former_sums:
            emit(Note(f"weight sync {version}: generators do not hold {_list_few(wrong)} as sent; sending all"))
            self._forget()
            manifest, wrong = self._stream(generators, version, {})
        if self._policy.weight_manifest() != manifest:
            raise DataError(
                f"the policy was updated while its weights were sent as version {version}, so the generators hold a "
                "mixture of two versions; sync again, and start no update before sync() returns"
            )
        if wrong:
            raise DataError(
                f"the weights of version {version} arrived damaged: the checksums of {_list_few(wrong)} differ"
            )

    def _prepare(self, generators: Sequence[Handle[WeightReceiver]]) -> tuple[WeightManifest, int]:
        """Announce the weights to generators that do not expect them yet; return their manifest and a bucket's size."""
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
        announced = manifest.weights, bucket_bytes, manifest.adapters
        new = [generator for generator in generators if self._announced.get(generator) != announced]
        _wait([generator.prepare_weight_sync.submit(*announced) for generator in new])
        self._announced.update(dict.fromkeys(new, announced))
        self._filled.difference_update(new)
        return manifest, bucket_bytes

    def _stream(
        self, generators: Sequence[Handle[WeightReceiver]], version: int, known: Mapping[int, list[int]]
    ) -> tuple[WeightManifest, list[str]]:
        """Bring all weights to the generators: on the device where that is possible, and otherwise in buckets. Return
        the manifest, and the names of tensors that the generators hold wrong."""
        manifest, bucket_bytes = self._prepare(generators)
        near: list[Handle[WeightReceiver]] = []
        wrong: list[str] = []
        try:
            if not self._refs and not self._delta:
                near = self._loans.open(generators)
            copied = _wait([generator.copy_opened.submit(version) for generator in near])
        finally:
            with contextlib.suppress(PodiumError):  # a policy that has died lends nothing
                self._loans.end()
        far = [generator for generator in generators if generator not in near]
        for generator, ranks in zip(near, copied, strict=True):
            if damaged := [name for names in ranks for name in names]:
                self._loans.refuse(generator, f"{_list_few(damaged)} arrived damaged on the device")
                far.append(generator)
        if far:
            wrong += self._send_buckets(far, version, known, manifest, bucket_bytes)
        return manifest, wrong

    def _send_buckets(
        self,
        generators: Sequence[Handle[WeightReceiver]],
        version: int,
        known: Mapping[int, list[int]],
        manifest: WeightManifest,
        bucket_bytes: int,
    ) -> list[str]:
        """Send all buckets, and prepare one while the one before is copied; return the names of tensors that the
        generators hold wrong. Frozen weights go to the generators that lack them, and with delta to all, which then
        compare checksums."""
        frozen = {info.name for info in manifest.weights if info.frozen}
        copying: deque[list[Call[list[list[str]]]]] = deque()
        wrong: list[str] = []

        def wait_for_oldest() -> None:
            for ranks in _wait(copying.popleft()):
                wrong.extend(name for names in ranks for name in names)

        try:
            for index, pieces in enumerate(cut(manifest.weights, bucket_bytes)):
                is_known = pieces[0].name in frozen and not self._delta
                receivers = [g for g in generators if not is_known or g not in self._filled]
                if not receivers:
                    continue
                tensors, sums = self._read_bucket(index, pieces, known, bucket_bytes)
                copying.append([g.receive_weights.submit(version, index, tensors, sums) for g in receivers])
                del tensors  # the last reference here: the store frees what all generators have copied
                if len(copying) == 2:
                    wait_for_oldest()
            while copying:
                wait_for_oldest()
        except PodiumError:
            for calls in copying:  # none of them may still be writing when the next sync begins
                with contextlib.suppress(PodiumError):
                    _wait(calls)
            raise
        return wrong

    def _read_bucket(
        self, index: int, pieces: Sequence[Piece], known: Mapping[int, list[int]], bucket_bytes: int
    ) -> tuple[Any, list[int] | None]:
        """Return references to the rows of ``pieces``, and the checksums that the generators compare."""
        if self._refs:
            refs = [(self._refs[piece.name], piece) for piece in pieces]
            return [ref[piece.start : piece.stop] if ref.shape else ref for ref, piece in refs], None
        known_sums = known.get(index, []) if self._delta else None
        tensors, sums = cast(Any, self._policy.weight_bucket(index, bucket_bytes, known_sums))
        if sums is not None:
            self._sums[index] = sums
        return tensors, sums


def _is_behind(held: Iterable[int | None], version: int) -> bool:
    """Whether a rank needs ``version``, given the version that each rank holds (None: no synced weights).

    Raises:
        ConfigError: A rank holds a later version.
    """
    versions = list(held)
    latest = max(
        (generator_version for generator_version in versions if generator_version is not None), default=version
    )
    if latest > version:
        raise ConfigError(
            f"sync({version}): a generator has the weights of version {latest}; versions must rise, because a "
            "token's version names the weights that generated it"
        )
    return any(generator_version != version for generator_version in versions)


def _wait(calls: Sequence[Call[T]]) -> list[T]:
    """Return all results; or raise the first error, once all calls have ended."""
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


def _list_few(names: Sequence[str]) -> str:
    unique = list(dict.fromkeys(names))
    return ", ".join(unique[:3]) + (f" and {len(unique) - 3} more" if len(unique) > 3 else "")


class DeviceLoans:
    """The controller's end: which generators copy the weights on their device, in each sync.

    Args:
        policy: The policy's handle.
    """

    def __init__(self, policy: Handle[Policy]) -> None:
        self._policy = policy
        self._possible = True  # whether a rank of the policy has weights on a device that can share them
        self._refused: dict[Handle[WeightReceiver], str] = {}  # not asked again: handles that nobody opens stay taken
        self._said: list[str] = []
        self._out = False

    def open(self, generators: Sequence[Handle[WeightReceiver]]) -> list[Handle[WeightReceiver]]:
        """Lend the weights, and return the generators that have opened them. The others must get buckets.

        A note says which way the weights go, whenever that changes.
        """
        lenders = self._policy.weight_site() if self._possible else []
        self._possible = any(lender.device for lender in lenders)
        if not self._possible:
            return []
        why: dict[Handle[WeightReceiver], str] = {}
        routes: dict[Handle[WeightReceiver], list[int]] = {}
        for generator in generators:
            way = self._refused.get(generator) or route(lenders, generator.device_site())
            if isinstance(way, str):
                why[generator] = way
            else:
                routes[generator] = way
        refused = self._lend(routes, len(lenders)) if routes else {}
        self._refused |= refused
        why |= refused
        self._say(len(generators) - len(why), list(why.values()))
        return [generator for generator in generators if generator not in why]

    def refuse(self, generator: Handle[WeightReceiver], why: str) -> None:
        """Lend nothing to this generator from now on."""
        self._refused[generator] = why
        emit(Note(f"weight sync: {why}; a generator gets its weights through host memory from now on"))

    def end(self) -> None:
        """Let the policy let go of what it lent. Idempotent."""
        if self._out:
            self._out = False
            self._policy.lend_weights([])

    def _lend(
        self, routes: Mapping[Handle[WeightReceiver], list[int]], ranks: int
    ) -> dict[Handle[WeightReceiver], str]:
        """Lend the weights to these generators; return why some of them cannot open theirs."""
        counts = [sum(way.count(rank) for way in routes.values()) for rank in range(ranks)]
        self._out = True
        lent = self._policy.lend_weights(counts)
        loans = [list(loan.loans) for loan in lent]
        refused: dict[Handle[WeightReceiver], str] = {}
        calls: dict[Handle[WeightReceiver], Call[list[str]]] = {}
        for generator, way in routes.items():
            if why := next((lent[rank].why for rank in way if lent[rank].why), ""):
                refused[generator] = why
            else:
                calls[generator] = generator.open_weights.submit([loans[rank].pop() for rank in way])
        wait([*calls.values()])  # none of them may still be opening when an error ends the sync
        for generator, call in calls.items():
            if why := next(filter(None, call.result()), ""):
                refused[generator] = why
        return refused

    def _say(self, opened: int, why: list[str]) -> None:
        lent = write_share(opened, opened + len(why), "generator", "copies", "copy")
        text = [f"{lent} the policy's weights on {'its' if opened == 1 else 'their'} device, by CUDA IPC"]
        text += [f"{why.count(reason)} get them through host memory: {reason}" for reason in dict.fromkeys(why)]
        if text != self._said:
            self._said = text
            emit(Note("weight sync: " + "; ".join(text)))
