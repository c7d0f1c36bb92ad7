"""With which tokens a completion ends, where the configuration leaves that to the model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

from transformers import GenerationConfig, PreTrainedTokenizerBase

from podium.rollout.sampling import SamplingParams
from podium.workers import ModelConfig

__all__ = ["with_stop_tokens"]


def with_stop_tokens(
    sampling: SamplingParams, model: ModelConfig, tokenizer: PreTrainedTokenizerBase
) -> SamplingParams:
    """``sampling`` as configured; without stop tokens of its own, those of the tokenizer and of the model's own
    generation_config.json, which for chat models names the end of a turn too."""
    if sampling.stop_token_ids:
        return sampling
    found = dict.fromkeys([*_ids(tokenizer.eos_token_id), *_ids(_generation_config(model).eos_token_id)])
    return replace(sampling, stop_token_ids=tuple(found))


def _generation_config(model: ModelConfig) -> Any:
    if not model.path:
        return GenerationConfig()
    try:
        return GenerationConfig.from_pretrained(model.path)
    except OSError:  # a model need not have one
        return GenerationConfig()


def _ids(value: object) -> Iterable[int]:
    if isinstance(value, int):
        return [value]
    return cast("list[int]", value) if isinstance(value, list) else []
