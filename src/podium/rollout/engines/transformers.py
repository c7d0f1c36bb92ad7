"""The engine for every architecture: ``generate`` of transformers, drawing with this package's own numbers.

It is also what the native engine is tested against. ``generate`` calls a logits processor before it picks a token; ours
draws the token there, from the seed and position of each completion, and leaves ``generate`` no choice but that token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from podium.errors import ConfigError
from podium.rollout.engines.base import EngineConfig, assemble, check_request
from podium.rollout.engines.draw import draw, uniforms
from podium.rollout.engines.weights import ModelEngine
from podium.rollout.sampling import Completion, SamplingParams

__all__ = ["TransformersEngine"]


class TransformersEngine(ModelEngine):
    """Generates with ``model.generate``, up to ``config.slots`` completions side by side, prompts padded on the left.

    Models that carry a recurrent state (Mamba and kin), which padding would disturb, get prompts of one length at a
    time. The model's own generation settings are not used. In float32 the same seeds give the same ids in any batch
    except where a draw falls within rounding of the boundary between two tokens (seen: never in 114,688 tokens).

    New weights come in between two batches of ``slots`` completions, since ``generate`` keeps keys and values of its
    own: a completion is of one version, and weights may have to wait for as long as a batch takes.

    Args:
        config: ``slots`` and ``dtype`` are used.
        model: any ``transformers`` model with a decoder-only ``generate``.
        pad_token_id: an id of the vocabulary to fill with; which one does not matter.

    Raises:
        ConfigError: a model without ``generate``, or an encoder-decoder.
    """

    def __init__(self, config: EngineConfig, model: nn.Module, pad_token_id: int = 0) -> None:
        model_config: Any = getattr(model, "config", None)
        if not hasattr(model, "generate") or getattr(model_config, "is_encoder_decoder", False):
            raise ConfigError(
                f"the transformers engine needs a decoder-only model with generate(); got {type(model).__name__}"
            )
        super().__init__(model, config)
        self._pad_token_id = pad_token_id

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int]
    ) -> list[Completion]:
        model: Any = self._source.model
        text_config = model.config.get_text_config()
        positions = getattr(text_config, "max_position_embeddings", None)
        check_request(prompts, params, seeds, vocabulary=text_config.vocab_size, positions=positions)
        rows = [list(prompt) for prompt in prompts for _ in range(params.n)]
        ids = torch.zeros(len(rows), params.max_new_tokens, dtype=torch.int64)
        logprobs = torch.zeros(len(rows), params.max_new_tokens)
        versions = torch.zeros_like(ids)
        kept: list[list[Tensor]] | None = [[] for _ in rows] if params.filtered else None
        with _sampling_mode(model):
            for part in self._parts(rows, bool(getattr(model, "_is_stateful", False))):
                with self.gate:
                    versions[part] = self.version
                    processor = self._draw_part([rows[i] for i in part], params, [seeds[i] for i in part])
                count = len(processor.ids)
                ids[part, :count] = torch.stack(processor.ids, 1).cpu()
                logprobs[part, :count] = torch.stack(processor.logprobs, 1).cpu()
                if kept is not None:
                    for row, index in enumerate(part):
                        kept[index] = [sets[row] for sets in processor.kept]
        return assemble(ids, logprobs, params, versions, kept)

    def _parts(self, rows: list[list[int]], one_length: bool) -> Iterator[list[int]]:
        """Indices of the rows to generate together."""
        if one_length:
            groups = [[i for i, row in enumerate(rows) if len(row) == size] for size in sorted({len(r) for r in rows})]
        else:
            groups = [list(range(len(rows)))]
        for group in groups:
            for start in range(0, len(group), self._config.slots):
                yield group[start : start + self._config.slots]

    def _draw_part(self, rows: list[list[int]], params: SamplingParams, seeds: list[int]) -> _Drawing:
        model: Any = self._source.model
        device = next(model.parameters()).device
        width = max(map(len, rows))
        tokens = torch.tensor([[self._pad_token_id] * (width - len(row)) + row for row in rows], device=device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
        processor = _Drawing(params, torch.tensor(seeds, device=device))
        settings = GenerationConfig(
            do_sample=False,
            max_new_tokens=params.max_new_tokens,
            eos_token_id=list(params.stop_token_ids) or None,
            pad_token_id=self._pad_token_id,
            use_cache=True,
        )
        model.generate(
            tokens,
            attention_mask=mask,
            generation_config=settings,
            logits_processor=LogitsProcessorList([processor]),
        )
        return processor


class _Drawing(LogitsProcessor):
    """Draws each step's tokens, remembers them, and masks every other token."""

    def __init__(self, params: SamplingParams, seeds_B: Tensor) -> None:
        self._params = params
        self._uniforms = uniforms(seeds_B, 0, params.max_new_tokens)
        self.ids: list[Tensor] = []
        self.logprobs: list[Tensor] = []
        self.kept: list[list[Tensor]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        result = draw(scores.float(), self._params, self._uniforms[:, len(self.ids)])
        self.ids.append(result.ids_B)
        self.logprobs.append(result.logprobs_B)
        if result.kept_ids_BK is not None and result.kept_sizes_B is not None:
            order = result.kept_ids_BK.cpu()
            self.kept.append([order[row, :size].clone() for row, size in enumerate(result.kept_sizes_B.tolist())])
        return torch.full_like(scores, float("-inf")).scatter_(1, result.ids_B.unsqueeze(1), 0.0)


@contextmanager
def _sampling_mode(model: Any) -> Iterator[None]:
    """No dropout, and none of the generation settings that the model carries; as it was afterwards."""
    training = [module for module in model.modules() if module.training]
    settings = model.generation_config
    model.eval()
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = settings
        for module in training:
            module.training = True
