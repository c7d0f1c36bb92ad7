"""What padding changes beyond the windows and chunks of a model is found on a tiny twin."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from podium.rollout.engines import EngineConfig
from podium.rollout.engines.short_twins import SHORT, make_short_twin
from podium.rollout.engines.transformers import TransformersEngine
from podium.rollout.sampling import SamplingParams

from .conftest import VOCABULARY, compute_trained_logprobs

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA4 = {"num_local_experts": 2, "intermediate_size_mlp": 32, "no_rope_layers": [1, 0], "attn_scale": 0.5}
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
    "llama_4_scaling_beta": 0.5, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
LATE = "padding changes its logits in texts beyond its windows, chunks or the like"


def make_model(model_type: str, **fields: Any) -> Any:
    config = transformers.AutoConfig.for_model(model_type, **{**SHAPE, **fields})
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    ("model_type", "fields", "is_late"),
    [
        ("llama4_text", {**LLAMA4, "floor_scale": 32, "attention_chunk_size": 4096}, True),
        ("llama4_text", {**LLAMA4, "attn_temperature_tuning": False, "attention_chunk_size": 24}, False),
        ("mistral", {"sliding_window": 24}, False),
        ("ministral3", {"rope_parameters": YARN}, False),
        ("gemma3_text", {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}, False),
    ],
)
def test_logprobs_agree_in_texts_beyond_windows_and_chunks(
    model_type: str, fields: dict[str, Any], is_late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, source = make_model(model_type, **fields), torch.Generator().manual_seed(0)
    prompts = [torch.randint(4, VOCABULARY, (length,), generator=source).tolist() for length in (60, 20, 41, 5)]
    completions = TransformersEngine(EngineConfig(), model).generate(
        prompts, SamplingParams(max_new_tokens=9), range(4)
    )
    for prompt, completion in zip(prompts, completions, strict=True):
        expected = compute_trained_logprobs(model, prompt, completion, 1.0)
        assert (completion.logprobs - expected).abs().max() < 1e-4
    notes = [record.getMessage() for record in caplog.records if record.name == "podium"]
    name = type(model).__name__
    assert notes == ([f"{name} generates from prompts of one length at a time, because {LATE}"] if is_late else [])


@pytest.mark.parametrize(
    ("model_type", "lengths"),
    [
        ("llama4_text", ["floor_scale", "attention_chunk_size"]),
        ("mistral", ["sliding_window"]),
        ("gpt_neo", ["window_size"]),
        pytest.param("deepseek_v32", ["index_topk"], marks=pytest.mark.exhaustive),
        ("gemma3n_text", ["sliding_window"]),
        ("gemma4_text", ["sliding_window"]),
    ],
)
def test_a_twin_of_a_large_model_is_tiny_and_has_short_lengths(model_type: str, lengths: list[str]) -> None:
    config = transformers.AutoConfig.for_model(model_type)
    twin: Any = make_short_twin(SimpleNamespace(config=config))
    assert [getattr(twin.config, name) for name in lengths] == [SHORT] * len(lengths)
    assert all(getattr(config, name) > SHORT for name in lengths), "the model's own stays"
    assert sum(parameter.numel() for parameter in twin.parameters()) < 2e8
    assert next(twin.parameters()).dtype == torch.float32


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gpt2"])
def test_a_model_without_such_lengths_needs_no_twin(model_type: str) -> None:
    assert make_short_twin(SimpleNamespace(config=transformers.AutoConfig.for_model(model_type))) is None


def test_a_model_whose_twin_cannot_be_made_gets_prompts_of_one_length(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_model: Any) -> Any:
        raise ValueError("no such size")

    monkeypatch.setattr("podium.rollout.engines.transformers.make_short_twin", refuse)
    model = make_model("mistral", sliding_window=24)
    TransformersEngine(EngineConfig(), model).generate([[5, 6], [7]], SamplingParams(max_new_tokens=2), range(2))
    assert "one length at a time, because what padding changes in long texts cannot be tried" in caplog.text
    assert "no such size" in caplog.text
