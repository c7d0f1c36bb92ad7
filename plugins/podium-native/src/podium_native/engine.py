"""The native engine: requests in, completions out."""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn

from podium.devices import free_memory_bytes
from podium.errors import ConfigError
from podium.rollout.engines.config import RECORDS, EngineConfig, NativeOptions
from podium.rollout.engines.journal import Drawn
from podium.rollout.engines.model import ModelEngine
from podium.rollout.engines.requests import Event, PromptTokens, RequestId, SessionRoom
from podium.rollout.sampling import SamplingParams
from podium_native.cache import LENGTH_QUANTUM, cache_class, round_up
from podium_native.decoder import Decoder
from podium_native.graphs import DecodeGraphs, graphless, renew
from podium_native.lanes import Lanes
from podium_native.parameters import find_unsupported, read_weights
from podium_native.products import ROW_QUANTUM

__all__ = ["FIRST_ANSWER", "NativeEngine"]

FIRST_ANSWER = 256  # positions that a lane has behind the prompt at first, where lanes grow


class NativeEngine(ModelEngine):
    """Decodes models in lanes, over the model's own parameters; see the package's docstring.

    Requests begin and end between any two tokens. New weights come in between two tokens. Completions in flight go on
    with them: their keys and values are computed anew, so that each token's log-probability is that of a training
    forward pass with the weights of its version over everything before it.

    Args:
        config: See ``EngineConfig``.
        model: A ``transformers`` causal language model that ``supports`` accepts. Where it is unsharded and of the
            dtype to generate in, its q/k/v and gate/up weights become views of one storage each.

    Raises:
        ConfigError: ``engine.options.cuda_graphs`` is set, and the model is a mixture of experts.
    """

    auto_rank = 2
    options = NativeOptions
    constrains = True
    records = RECORDS["native"]

    def __init__(self, config: EngineConfig, model: nn.Module) -> None:
        super().__init__(config, model)
        options = config.read_options(NativeOptions)
        self._wide_output = options.float32_output
        self._decoder = Decoder(read_weights(self.model), wide_output=self._wide_output)
        self._budget_bytes = 0
        reason = graphless(self._decoder.weights)
        if options.cuda_graphs and reason:
            raise ConfigError(f"engine.options.cuda_graphs: the model has experts, and {reason}; leave it out")
        is_default = options.cuda_graphs is None and self._decoder.weights.device.type == "cuda" and not reason
        self._graphs = DecodeGraphs() if options.cuda_graphs or is_default else None
        self._lanes = Lanes(
            self.gate,
            lambda: self._decoder,
            options.prefill_tokens,
            self.count,
            self._grow,
            self._graphs,
            self.vocabulary,
        )

    def restrict(self, limit: int, holes: Sequence[int] = ()) -> None:
        super().restrict(limit, holes)
        self._decoder = Decoder(read_weights(self.model, limit), holes, wide_output=self._wide_output)

    @classmethod
    def supports(cls, model: nn.Module) -> str | None:
        return find_unsupported(model)

    def loaded(self) -> None:
        # Reading costs microseconds a layer, joins again what was torn apart, and follows a model that was moved.
        limit, holes = self.text_ids or (None, ())
        weights = read_weights(self.model, limit)
        self._decoder.unpack()
        if self._graphs is None or not renew(self._decoder.weights, weights):
            self._decoder = Decoder(weights, holes, wide_output=self._wide_output)

    def release(self) -> None:
        if not self._lanes.live:
            self._lanes.clear()
            self._decoder.unpack()

    def check(self, subject: str, prompt: Sequence[int], params: SamplingParams) -> None:
        super().check(subject, prompt, params)
        gib, least = self.config.cache_gib, self._bytes(ROW_QUANTUM, len(prompt) + params.max_new_tokens)
        if gib is not None and least > gib * 2**30:
            raise ConfigError(
                f"engine.cache_gib={gib} is too little for {subject}: {ROW_QUANTUM} sequences of its length take "
                f"{least / 2**30:.2f} GiB; raise engine.cache_gib or lower sampling.max_new_tokens"
            )

    @torch.inference_mode()  # the lanes' state was made in it
    def drop(self, ids: Collection[RequestId]) -> None:
        self._lanes.drop(ids)

    def forget_sessions(self, names: Collection[str]) -> None:
        self._lanes.forget_sessions(names)

    @property
    def session_room(self) -> SessionRoom:
        cache, per_position = self._lanes.cache, self._bytes(1, 1) // LENGTH_QUANTUM
        if cache is None:
            return SessionRoom(ROW_QUANTUM, self._budget() // 2 // per_position)
        # Lanes that are still to come take up to half of the budget.
        nbytes = min(self._lanes.memory.limit_bytes, self._budget_bytes // 2)
        return SessionRoom(min(cache.lanes, self.config.max_sequences), nbytes // per_position)

    @torch.inference_mode()
    def advance(self, interrupted: Callable[[], bool]) -> list[Event]:
        waiting = self.waiting if self.waiting and self._make_room() else None
        events = self._lanes.advance(waiting, self.config.max_sequences, interrupted)
        counts = self._lanes.prompt_tokens, self._lanes.reused_tokens, self._lanes.memory.evicted_tokens
        self.prefilled_tokens, self.prompt_tokens = self._lanes.prefilled_tokens, PromptTokens(*counts)
        return events

    @torch.inference_mode()
    def drawn(self) -> list[tuple[RequestId, Drawn]]:
        return self._lanes.drawn()

    def _make_room(self) -> bool:
        """Have lanes for what waits. Return False where it must wait until no lane is live.

        What lanes hold is copied where the old cache and the new one fit into memory at once. Otherwise nothing longer
        than a lane begins before the others have ended. Texts that lanes lose move to pages, which take what lanes
        leave of the budget: at least half of it where requests allow that completions are reused.

        Lanes have room for the longest completion, or grow while they decode: a chat of a few words may be as long as
        the model's context. Their number is that for which the longest completion would fit.
        """
        lanes, most = self._lanes, self.config.max_sequences
        if lanes.cache is not None and not lanes.live and not lanes.cache.fits(self._decoder.weights):
            lanes.clear()
        cache = lanes.cache
        length = round_up(self.waiting.longest, LENGTH_QUANTUM)
        count = round_up(min(most, lanes.live + len(self.waiting)), ROW_QUANTUM)
        if cache is not None and cache.length >= length and cache.lanes >= count:
            return True
        nbytes_held = 0 if cache is None else self._bytes(cache.lanes, cache.length)
        gib, budget = self.config.cache_gib, self._budget()
        for_lanes = budget // 2 if any(request.reuse_completions for request in self.waiting) else budget
        affordable = max(ROW_QUANTUM, for_lanes // self._bytes(1, length) // ROW_QUANTUM * ROW_QUANTUM)
        count = min(count, affordable)
        later = count if cache is None else max(count, cache.lanes)
        # What grows is copied, beside what it was: within a budget that the configuration sets, and on the CPU alone.
        fits = gib is None or 2 * self._bytes(later, length) <= for_lanes
        if later <= affordable and fits and self._decoder.weights.device.type == "cpu" and self._graphs is None:
            prompt = max(len(request.prompt) for request in self.waiting)
            length = min(length, round_up(prompt + FIRST_ANSWER, LENGTH_QUANTUM))
        if cache is not None:
            if cache.length >= length and cache.lanes >= count:
                return True
            larger, longer = max(count, cache.lanes), max(length, cache.length)
            if (lanes.live or lanes.remembers) and nbytes_held + self._bytes(larger, longer) <= for_lanes:
                # A conversation grows by a little at a time; the cache grows at once for several turns.
                doubled = min(2 * cache.length, self.positions or 2 * cache.length)
                spacious = (
                    length > cache.length and nbytes_held + self._bytes(larger, max(longer, doubled)) <= for_lanes
                )
                self._resize(larger, round_up(max(longer, doubled), LENGTH_QUANTUM) if spacious else longer, budget)
                return True
            if lanes.live:
                return cache.length >= length
            lanes.spill(range(cache.lanes))
            lanes.clear_lanes()  # before the new one, so that both are never held at once
            # Conversations grow by a little at a time, and this empties all lanes: it happens once.
            room = budget if self._bytes(count, length) > for_lanes else for_lanes
            longest = min(room // self._bytes(count, LENGTH_QUANTUM) * LENGTH_QUANTUM, 2 * length)
            length = max(length, min(longest, round_up(self.positions or longest, LENGTH_QUANTUM)))
        self._resize(count, length, budget)
        return True

    def _budget(self) -> int:
        """Bytes for lanes and pages together."""
        if self.config.cache_gib is not None:
            return int(self.config.cache_gib * 2**30)
        cache = self._lanes.cache
        nbytes_held = self._lanes.memory.nbytes + (0 if cache is None else self._bytes(cache.lanes, cache.length))
        return (free_memory_bytes(self._decoder.weights.device) + nbytes_held) // 4

    def _grow(self, longest: int) -> None:
        """Have twice as many positions as before in each lane, ``longest`` at most. Pages make room for them."""
        lanes, cache = self._lanes, self._lanes.cache
        assert cache is not None
        length = min(2 * cache.length, round_up(longest, LENGTH_QUANTUM))
        budget = lanes.memory.limit_bytes + self._bytes(cache.lanes, cache.length)
        self._resize(cache.lanes, length, budget)

    def _resize(self, count: int, length: int, budget: int) -> None:
        self._budget_bytes = budget
        self._lanes.resize(count, length)
        self._lanes.memory.limit_bytes = max(0, budget - self._bytes(count, length))
        self._lanes.memory.shrink()

    def _bytes(self, lanes: int, length: int) -> int:
        weights = self._decoder.weights
        per_position = cache_class(weights.device).bytes_per_position(weights)
        return lanes * round_up(length, LENGTH_QUANTUM) * per_position
