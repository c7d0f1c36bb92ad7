"""Tiny models of each family, and what a training forward pass says about completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from podium.rollout.sampling import Completion
from podium_testing.engines import VOCABULARY, compute_trained_logprobs

__all__ = ["VOCABULARY", "MakeModel", "compute_trained_logprobs", "same"]

MakeModel = Callable[..., Any]

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def _llama(**changes: Any) -> Any:
    shape = {**_SHAPE, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}
    return LlamaForCausalLM(LlamaConfig(**{**shape, "rope_parameters": _LLAMA3_ROPE, **changes}))


def _qwen2(**changes: Any) -> Any:
    return Qwen2ForCausalLM(Qwen2Config(**{**_SHAPE, "num_key_value_heads": 4, **changes}))


def _qwen3(**changes: Any) -> Any:
    shape = {**_SHAPE, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True}
    return Qwen3ForCausalLM(Qwen3Config(**{**shape, **changes}))


def _mistral(**changes: Any) -> Any:
    return MistralForCausalLM(MistralConfig(**{**_SHAPE, "num_key_value_heads": 2, "sliding_window": 9, **changes}))


def _qwen3_moe(**changes: Any) -> Any:
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [0]}
    shape = {**_SHAPE, **experts, "num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 32}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**shape, "norm_topk_prob": True, **changes}))


def _smollm3(**changes: Any) -> Any:
    shape = {**_SHAPE, "num_key_value_heads": 2, "no_rope_layers": [1, 0, 1], "num_hidden_layers": 3}
    windows = {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 7}
    return SmolLM3ForCausalLM(SmolLM3Config(**{**shape, **windows, "use_sliding_window": True, **changes}))


def _gpt2(**changes: Any) -> Any:
    shape = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
    return GPT2LMHeadModel(GPT2Config(**{**shape, "bos_token_id": None, "eos_token_id": None, **changes}))


_FAMILIES: dict[str, MakeModel] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "smollm3": _smollm3,
    "gpt2": _gpt2,
}


@pytest.fixture
def make_model() -> MakeModel:
    """``make_model(family, seed=0, **config)``: random weights, biases and norms far from their defaults."""

    def make(family: str, seed: int = 0, **changes: Any) -> Any:
        torch.manual_seed(seed)
        model = _FAMILIES[family](**changes).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.3 if "norm" in name else 0.05)
        return model

    return make


@pytest.fixture
def prompts() -> list[list[int]]:
    """Ten prompts of 2 to 29 tokens."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(2, 30, (10,), generator=generator).tolist()
    return [torch.randint(0, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def same(first: Sequence[Completion], second: Sequence[Completion]) -> bool:
    """Whether two lists of completions are equal bit by bit."""
    return len(first) == len(second) and all(
        torch.equal(a.token_ids, b.token_ids)
        and torch.equal(a.logprobs, b.logprobs)
        and a.finish_reason == b.finish_reason
        for a, b in zip(first, second, strict=True)
    )
