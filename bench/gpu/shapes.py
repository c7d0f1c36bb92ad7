"""The models and the loads of the stages, at full size and tiny for a dry run. Weights are always random."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from bench.gpu.stage import Stage
from bench.workload import ALPHABET, StepLoad

QWEN2_5_0_5B: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "tie_word_embeddings": True,
}
TINY: dict[str, Any] = {
    **QWEN2_5_0_5B,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
}
TOKENIZER = f"chars:{ALPHABET}"
# The steps of all trainers: 256 completions of 256 tokens to prompts of 64.
LOAD = StepLoad(shape="100m", prompts=32, completions=8, prompt_tokens=64, new_tokens=256)
TINY_LOAD = StepLoad(shape="1m", prompts=4, completions=2, prompt_tokens=8, new_tokens=8)


def reward(completion: str, example: Mapping[str, Any]) -> float:
    """A random number, because a model with random weights writes no text that could be told apart by its worth."""
    del completion, example
    return random.random()


def model_config(stage: Stage) -> dict[str, Any]:
    """The configuration of the model: Qwen2.5-0.5B's shape."""
    return TINY if stage.dry else QWEN2_5_0_5B


def load_of(stage: Stage) -> StepLoad:
    return TINY_LOAD if stage.dry else LOAD
