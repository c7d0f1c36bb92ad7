"""Tiny configurations of many architectures, by their model type."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

_BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_OLD = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 48}
_WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}
_STATES = {"state_size": 8, "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 48}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 8,
}
_SPARSE = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}
_LATER = {"intermediate_size_mlp": 64, "num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8}

LONGROPE: dict[str, Any] = {
    **_BASE,
    "model_type": "phi3",
    "initializer_range": 0.3,
    "original_max_position_embeddings": 16,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0, 8.0, 16.0, 32.0],
        "original_max_position_embeddings": 16,
    },
}
"""A model that rotates texts of more than 16 tokens in another way."""

APART: dict[str, dict[str, Any]] = {
    "llama": _BASE,
    "qwen3": {**_BASE, "head_dim": 8},
    "mistral": {**_BASE, "sliding_window": 8},
    "mixtral": {**_BASE, "num_local_experts": 4},
    "qwen3_moe": {**_BASE, **_EXPERTS},
    "gemma3_text": {**_BASE, **_WINDOWS, "head_dim": 8},
    "olmo3": {**_BASE, **_WINDOWS},
    "gpt2": _OLD,
}
"""Architectures that keep packed rows apart."""

MIXING: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_BASE, **_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": {**_BASE, **_DELTA},
    "qwen3_5_moe_text": {**_BASE, **_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 16},
    "gpt_oss": {**_BASE, **_WINDOWS, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "lfm2": {**_BASE, "layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "falcon_h1": {**_BASE, **_MAMBA, "head_dim": 8, "mamba_d_ssm": 32, "mamba_d_head": 8},
    "jamba": {
        **_BASE,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "bamba": {**_BASE, **_MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **{**_BASE, **_MAMBA, "layer_types": ["mamba", "attention"]},
        **{"num_local_experts": 2, "num_experts_per_tok": 1, "shared_intermediate_size": 32},
    },
    "mamba": _STATES,
    "mamba2": {**_STATES, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
    "minimax": {
        **{**_BASE, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"]},
        **{"num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 8},
    },
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 48},
    "gpt_neo": {
        **{"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
        **{"vocab_size": 48, "max_position_embeddings": 64, "window_size": 8},
    },
    "gptj": {**_OLD, "rotary_dim": 4},
    "xglm": {
        **{"d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4},
        **{"vocab_size": 48, "max_position_embeddings": 64},
    },
    "recurrent_gemma": {
        **{**_BASE, "lru_width": 32, "attention_window_size": 8, "block_types": ["recurrent", "attention"]},
        **{"num_key_value_heads": 1, "head_dim": 8},
    },
    "gemma2": {**_BASE, "head_dim": 8, "sliding_window": 8},
    "vaultgemma": {**_BASE, "head_dim": 8, "sliding_window": 8},
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 48},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 48, "max_seq_len": 64},
    "deepseek_v32": {**_BASE, **_SPARSE, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4},
    "llama4_text": {
        **{**_BASE, **_LATER, "attention_chunk_size": 32, "layer_types": ["chunked_attention", "full_attention"]},
        **{"no_rope_layers": [1, 0], "attn_temperature_tuning": False},
    },
}
"""Architectures that mix packed rows, or leave out of attention what packed rows cannot have."""


def make(family: str, dtype: torch.dtype = torch.float32, **settings: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**(APART | MIXING).get(family, _BASE), **settings})
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
