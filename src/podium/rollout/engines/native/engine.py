"""The native engine: requests in, completions out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from podium.devices import free_memory_bytes
from podium.errors import ConfigError
from podium.rollout.engines.base import EngineConfig, assemble, check_request
from podium.rollout.engines.native.cache import ROW_QUANTUM, KVCache, cache_class
from podium.rollout.engines.native.decoder import Decoder
from podium.rollout.engines.native.slots import SlotLoop
from podium.rollout.engines.native.weights import read_weights, unsupported
from podium.rollout.engines.weights import ModelEngine
from podium.rollout.sampling import Completion, SamplingParams

__all__ = ["NativeEngine"]

_LENGTH_QUANTUM = 32


class NativeEngine(ModelEngine):
    """Decodes Llama- and Qwen-family models in slots, over the model's own parameters; see the package's docstring.

    New weights come in between two tokens. Completions that were under way go on with them: what they hold of keys and
    values is computed anew, so that each token's log-probability is that of a training forward pass with the weights
    of its version over everything before it.

    Args:
        config: see ``EngineConfig``.
        model: a ``transformers`` causal language model for which ``unsupported`` gives None. Where it is unsharded and
            of the dtype to generate in, its q/k/v and gate/up weights become views of one storage each.

    Raises:
        ConfigError: an architecture that this engine does not run.
    """

    def __init__(self, config: EngineConfig, model: nn.Module) -> None:
        reason = unsupported(model)
        if reason is not None:
            raise ConfigError(f"the native engine cannot run this model: {reason}; use engine.name=transformers")
        super().__init__(model, config)
        self._cache: KVCache | None = None
        self._decoder = Decoder(read_weights(self._source.model))

    def loaded(self) -> None:
        # Reading costs microseconds a layer, joins again what was torn apart, and follows a model that was moved.
        self._decoder = Decoder(read_weights(self._source.model))

    def release(self) -> None:
        self._cache = None

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int]
    ) -> list[Completion]:
        config: Any = self._source.model.config
        check_request(prompts, params, seeds, vocabulary=config.vocab_size, positions=config.max_position_embeddings)
        if not prompts:
            return []
        longest = max(map(len, prompts)) + params.max_new_tokens
        length = -(-longest // _LENGTH_QUANTUM) * _LENGTH_QUANTUM
        slots = min(self._config.slots, len(seeds), self._affordable_slots(length))
        cache = self._reserve(slots, length)
        loop = SlotLoop(
            self.gate,
            lambda: self._decoder,
            cache,
            prompts,
            params,
            seeds,
            slots=slots,
            prefill_tokens=self._config.prefill_tokens,
        )
        drawn = loop.run()
        return assemble(drawn.ids_CT, drawn.logprobs_CT, params, drawn.versions_CT, drawn.kept)

    def _reserve(self, slots: int, length: int) -> KVCache:
        """The cache of the last call if it is large enough, else a new one."""
        slots = -(-slots // ROW_QUANTUM) * ROW_QUANTUM
        kept, weights = self._cache, self._decoder.weights
        if kept is None or kept.slots < slots or kept.length < length or not kept.fits(weights):
            self._cache = kept = None  # before the new one, so that both are never held at once
            self._cache = kept = cache_class(weights.device)(weights, slots, length)
        return kept

    def _affordable_slots(self, length: int) -> int:
        weights = self._decoder.weights
        per_slot = cache_class(weights.device).bytes_per_position(weights) * length
        gib = self._config.cache_gib
        budget = free_memory_bytes(weights.device) // 4 if gib is None else int(gib * 2**30)
        slots = budget // per_slot
        if slots < ROW_QUANTUM and gib is not None:
            raise ConfigError(
                f"engine.cache_gib={gib} is too little: {ROW_QUANTUM} slots of {length} positions take "
                f"{ROW_QUANTUM * per_slot / 2**30:.2f} GiB; raise it or lower sampling.max_new_tokens"
            )
        return max(slots - slots % ROW_QUANTUM, ROW_QUANTUM)
