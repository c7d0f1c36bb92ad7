"""The generators' end of a weight sync: an engine in a worker, and the ways by which new weights reach it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor

from podium.data import copy_tensor
from podium.data.adapters import Adapter
from podium.devices import choose_device, end_idle_threads, give_back_memory, return_free_blocks
from podium.errors import ConfigError, DataError
from podium.models.buckets import Piece, WeightInfo, checksum, cut
from podium.models.config import ModelConfig
from podium.models.loading import load_model
from podium.models.tokenizers import load_tokenizer
from podium.models.vocabulary import TextIds, find_text_ids
from podium.models.whole_weights import WholeWeights
from podium.rollout.engines import Engine, EngineConfig, make_engine
from podium.rollout.engines.engine_lookup import choose_dtype, model_device
from podium.runtime import Worker, endpoint, nothing
from podium.training.offload import Offload
from podium.workers.siblings import find_sibling
from podium.workers.weight_sync.on_device import Loan, Site, open_loan, site_of

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from podium.training.train_engine import TrainEngine


class SourcePolicy(Protocol):
    """A policy as an engine in the same process reads it: the worker that has the endpoint ``lend_weights``."""

    @property
    def adapted(self) -> bool: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def engine(self) -> TrainEngine: ...

    @property
    def model(self) -> nn.Module: ...


class WeightReceiver(Worker):
    """A worker with an engine, which is made at its first use.

    If a colocated policy is neither sharded nor adapted, the engine reads the policy's own parameters, so the next
    completion uses the updated weights. Sharded or adapted weights are gathered into one copy, in place. Without a
    colocated policy, the engine has a model of its own and receives weights in buckets. Two buckets may arrive at the
    same time, in threads of their own; they hold different rows. Of adapters the weights that they are trained on come
    once and are kept in host memory beside the engine; each sync brings the adapters, which the engine merges.

    Args:
        model: The model. Colocated with a policy, the policy's own model is used, and this one only for copies.
        engine: The engine and its limits.

    Raises:
        ConfigError: The worker owns an accelerator, but torch sees none.
    """

    def __init__(self, model: ModelConfig, engine: EngineConfig | None = None) -> None:
        self._device = choose_device(self.ctx.devices)  # now, although the engine comes later: a start says what lacks
        self.config = model.plain
        self.engine_config = engine or EngineConfig()
        self._engine: Engine | None = None
        self._making = threading.Lock()
        self._resting: Offload | None = None  # the engine's own weights, once they have left their device
        self._synced: int | None = None  # the version of the weights that tokens are drawn from
        self._lock = threading.Lock()
        self._arriving: int | None = None  # the version of the weights of which a bucket has come
        self._buckets: list[list[Piece]] = []
        self._weights: dict[str, WeightInfo] = {}  # the tensors that a sync brings; frozen ones come once
        self._missing: dict[str, int] = {}  # rows of each that have not arrived
        self._adapters: tuple[Adapter, ...] = ()
        self._apart: dict[str, Tensor | None] = {}  # matrices of the adapters and the weights without them, on the host
        self._opened: tuple[list[Tensor], list[int]] | None = None  # the policy's own tensors, with their checksums
        self._sums: dict[Piece, tuple[int, int]] = {}  # checksums of a piece as it was sent, and as the engine holds it

    @endpoint(concurrent=True)
    def weights_version(self) -> int | None:
        """Return the version of the weights that were last synced; None where none were, or arrived only in part."""
        return self._synced

    @property
    def reads_policy(self) -> bool:
        """Whether completions are drawn from the colocated policy's own parameters, so that they must not leave."""
        policy = self._policy
        return policy is not None and not policy.adapted and not getattr(self._engine, "copied", False)

    @endpoint(collect=nothing())
    def rest(self) -> None:
        """Free the engine's cache, and move its own weights off the device until they are needed.

        While completions are being drawn, nothing is moved.
        """
        with self._making:
            if self._engine is None or not self._engine.idle:
                return
            self._engine.release()
            if self._resting is None and not self.reads_policy:
                self._resting = Offload(self._own_tensors)
            if self._resting is not None:
                self._resting.sleep()
            give_back_memory(self._device)

    @endpoint()
    def refresh(self, version: int) -> int:
        """Read the colocated policy's weights as they are now; all ranks call, since shards are gathered from all.

        Returns:
            The version of the weights afterwards. If the weights have ``version`` or a later one already, they stay.

        Raises:
            ConfigError: There is no policy in this worker process.
        """
        policy = self._policy
        if policy is None:
            raise ConfigError(
                "generator.refresh() reads a colocated policy, and this worker process has none; send the weights "
                "by a podium.workers.StreamedSync"
            )
        if self._synced is not None and self._synced >= version:
            return self._synced
        _read(policy, self._ready_engine(), version)
        self._synced = version
        end_idle_threads()  # completions may be drawn in another thread
        return version

    # -- a streamed sync, in the order of its calls; they run while completions are drawn -------------------------

    @endpoint(collect=nothing(), concurrent=True)
    def prepare_weight_sync(
        self, weights: Sequence[WeightInfo], bucket_bytes: int, adapters: Sequence[Adapter] = ()
    ) -> None:
        """Expect all of ``weights`` in the next sync, in the buckets that :func:`.cut` makes of them, and in each sync
        after it those that are not frozen. ``adapters`` are merged here once their matrices have come.

        Raises:
            ConfigError: These are not the tensors of the engine's model, or the engine reads a colocated policy's
                parameters, which nobody overwrites.
        """
        if self._policy is not None:
            raise ConfigError(
                "this generator reads a colocated policy: call refresh(version) instead of sending weights"
            )
        matrices = {name for adapter in adapters for name in (adapter.down, adapter.up)}
        self._ready_engine().check_weights({info.name: info.shape for info in weights if info.name not in matrices})
        with self._lock:
            self._weights = {info.name: info for info in weights}
            self._missing = {info.name: info.rows for info in weights}
            self._adapters = tuple(adapters)
            self._apart = dict.fromkeys((*matrices, *(adapter.weight for adapter in adapters)))
            self._buckets = cut(tuple(weights), bucket_bytes)

    @endpoint(concurrent=True, readonly=True)
    def receive_weights(
        self, version: int, index: int, tensors: Sequence[Tensor | None], sums: Sequence[int] | None = None
    ) -> list[str]:
        """Copy a bucket into the engine's own tensors. The first bucket waits for the token that is being drawn. From
        then on no token is drawn before ``finish_weight_sync`` or ``abort_weight_sync``.

        Args:
            version: The version of the weights.
            index: The bucket's place among those of :func:`.cut`.
            tensors: The rows of each piece, or None for pieces that have not changed.
            sums: The checksum of each piece, where they are to be checked.

        Returns:
            Names of tensors that arrived damaged, or whose unchanged rows differ from the sender's.
        """
        engine = self._begin(version)
        wrong: list[str] = []
        for at, (piece, values) in enumerate(zip(self._buckets[index], tensors, strict=True)):
            if self._copy(engine, piece, values, None if sums is None else sums[at]):
                self._note_arrival(piece)
            else:
                wrong.append(piece.name)
        return wrong

    @endpoint(concurrent=True)
    def device_site(self) -> Site:
        """Return where this process computes, for a policy on the same device."""
        return site_of(self._device)

    @endpoint(concurrent=True)
    def open_weights(self, loans: Sequence[Loan]) -> str:
        """Open the loan of this rank, without copying. Return why that is not possible; "" if it is."""
        loan = loans[self.ctx.rank]
        try:
            self._opened = open_loan(loan, self._device), loan.sums
        except (OSError, RuntimeError) as error:
            return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return ""

    @endpoint(concurrent=True)
    def copy_opened(self, version: int) -> list[str]:
        """Copy all weights from the tensors that :meth:`open_weights` opened, and close these tensors. As with
        ``receive_weights``, no token is drawn from then on before the sync ends.

        Returns:
            Names of tensors that arrived damaged.

        Raises:
            DataError: No weights are open.
        """
        opened, self._opened = self._opened, None
        if opened is None:
            raise DataError(f"no weights of version {version} are being received here; sync again")
        engine, (tensors, sums), wrong = self._begin(version), opened, list[str]()
        self._sums.clear()  # they are of what is overwritten now
        try:
            for at, (name, info) in enumerate(self._weights.items()):
                if not self._missing[name]:
                    continue
                if checksum(tensors[at]) == sums[at]:
                    self._put(engine, Piece(name, 0, info.rows), tensors[at])
                    self._note_arrival(Piece(name, 0, info.rows))
                else:
                    wrong.append(name)
        finally:
            if self._device.type == "cuda":  # until then the copies read the policy's memory
                torch.cuda.synchronize(self._device)
            tensors.clear()
        return wrong

    @endpoint(collect=nothing(), concurrent=True)
    def finish_weight_sync(self, version: int) -> None:
        """Draw from the weights of ``version``.

        Raises:
            DataError: Rows have not arrived. The message names their tensors.
        """
        engine = self._ready_engine()
        with self._lock:
            missing = [name for name, rows in self._missing.items() if rows]
            if self._arriving != version or missing:
                raise DataError(
                    f"the weights of version {version} are incomplete: rows of {len(missing)} tensors have not "
                    f"arrived, such as {missing[:3]}; sync them again"
                )
            if self._adapters:
                matrices = {name for adapter in self._adapters for name in (adapter.down, adapter.up)}
                stored = {name: tensor for name, tensor in self._apart.items() if tensor is not None}
                on_device = {name: stored[name].to(self._device) for name in matrices}
                engine.load_adapters(self._adapters, stored | on_device)
            engine.loaded()
            engine.gate.open(version)
            self._synced, self._arriving = version, None

    @endpoint(collect=nothing(), concurrent=True)
    def abort_weight_sync(self, reason: str) -> None:
        """End a sync that failed. If the sync has begun to write, calls that wait for its end get an error, and no
        token is drawn before the next sync has finished.
        """
        self._opened = None
        engine = self._ready_engine()
        with self._lock:
            if self._arriving is not None:
                version, self._arriving = self._arriving, None
                engine.gate.refuse(f"the weights of version {version} arrived only in part ({reason}); sync again")

    def _begin(self, version: int) -> Engine:
        """Let no token be drawn while the weights of ``version`` come. Return the engine."""
        engine = self._ready_engine()
        with self._lock:
            if self._arriving != version:
                self._missing |= {name: info.rows for name, info in self._weights.items() if not info.frozen}
            self._synced, self._arriving = None, version
            engine.gate.close()
        return engine

    def _note_arrival(self, piece: Piece) -> None:
        """Count rows that the engine holds. They may come twice, where others of their sync were damaged."""
        with self._lock:
            self._missing[piece.name] = max(0, self._missing[piece.name] - (piece.stop - piece.start))

    def _copy(self, engine: Engine, piece: Piece, values: Tensor | None, expected: int | None) -> bool:
        """Whether the engine holds the piece that was sent: ``values``, or if None, what was sent before."""
        if values is None:
            sent, kept = self._sums.get(piece, (None, None))
            rows = self._find_rows(engine, piece)
            return sent is not None and sent == expected and (rows is None or checksum(rows) == kept)
        self._sums.pop(piece, None)
        if expected is not None and checksum(values) != expected:
            return False
        self._put(engine, piece, values)
        if expected is not None:
            rows = self._find_rows(engine, piece)
            self._sums[piece] = expected, expected if rows is None or rows.dtype == values.dtype else checksum(rows)
        return True

    def _put(self, engine: Engine, piece: Piece, values: Tensor) -> None:
        if piece.name not in self._apart:
            engine.load(piece.name, piece.start, values)
            return
        with self._lock:
            if self._apart[piece.name] is None:
                self._apart[piece.name] = torch.empty(self._weights[piece.name].shape, dtype=values.dtype)
        copy_tensor(cast("Tensor", self._find_rows(engine, piece)), values)

    def _find_rows(self, engine: Engine, piece: Piece) -> Tensor | None:
        """The rows as they are here; None where the engine keeps its weights in a form of its own."""
        if piece.name not in self._apart:
            return engine.rows(*piece)
        tensor = self._apart[piece.name]
        return tensor[piece.start : piece.stop] if tensor is not None and tensor.ndim else tensor

    @property
    def _policy(self) -> SourcePolicy | None:
        return find_sibling(self.ctx, "lend_weights")

    def _ready_engine(self) -> Engine:
        """Return the engine, which is made when colocated workers and collectives are there, with its weights."""
        with self._making:
            if self._engine is None:
                self._engine = self._make_engine()
                end_idle_threads()
                return_free_blocks(self._device)
            if self._resting is not None:
                self._resting.wake()
            return self._engine

    def _own_tensors(self) -> list[Tensor]:
        """The engine's own weights on the worker's device. vLLM keeps its weights elsewhere, and they stay."""
        model = cast("nn.Module | None", getattr(self._engine, "model", None))
        tensors = () if model is None else (*model.parameters(), *model.buffers())
        return [tensor for tensor in tensors if tensor.device.type == self._device.type]

    def _make_engine(self) -> Engine:
        policy = self._policy
        device = self._device if policy is None else policy.device
        config = choose_dtype(self.engine_config, device)
        shared = None if policy is None or policy.adapted else policy.model
        engine = make_engine(config, self._own_model(config, device) if shared is None else shared)
        if self._text_ids is not None:
            engine.restrict(*self._text_ids)
        with contextlib.suppress(ConfigError):  # a model without a tokenizer draws ids alone
            untyped: Any = self._tokenizer  # transformers leaves these types open
            engine.decode = partial(untyped.decode, skip_special_tokens=True)
        if policy is not None:
            _read(policy, engine, 0)
        elif config.dtype == "float16":
            engine.refresh(0)
        return engine

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.config.tokenizer_source)

    @cached_property
    def _text_ids(self) -> TextIds | None:
        """The ids that are drawn; None for all of them, also where the model has no tokenizer."""
        try:
            return find_text_ids(self.config, self._tokenizer)
        except ConfigError:
            return None

    def _own_model(self, engine: EngineConfig, device: torch.device) -> nn.Module:
        """The model in the data type that the engine computes in, so that it needs no copy; not in float16, which
        models are not loaded in."""
        dtype = self.config.dtype if engine.dtype in (None, "float16") else engine.dtype
        return load_model(replace(self.config, dtype=dtype), model_device(engine, device)).requires_grad_(False)


def _read(policy: SourcePolicy, engine: Engine, version: int) -> None:
    """Bring the policy's weights, as they are now, into the engine. Adapted weights are merged into its copy.

    Raises:
        ConfigError: The copy is of another model; names the tensor.
    """
    policy.engine.wake()
    if not policy.adapted:
        engine.refresh(version)
        return
    weights = WholeWeights(policy.model)
    engine.check_weights({info.name: info.shape for info in weights.manifest})
    with engine.gate.changing(version):
        for info in weights.manifest:
            rows = engine.rows(info.name, 0, 1)
            engine.load(info.name, 0, weights.gather(info.name, None if rows is None else rows.dtype))
        engine.loaded()
