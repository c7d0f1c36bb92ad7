"""The transformers engine: any architecture, the same promises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, MambaConfig, MambaForCausalLM, T5Config, T5ForConditionalGeneration

from podium.errors import ConfigError
from podium.rollout.engines import EngineConfig, make_engine
from podium.rollout.engines.transformers import TransformersEngine
from podium.rollout.sampling import SamplingParams
from tests.unit.training.families import make

from .conftest import VOCABULARY, MakeModel, compute_trained_logprobs

STOPS = tuple(range(10))


def _mamba() -> Any:
    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=VOCABULARY, hidden_size=32, state_size=8, num_hidden_layers=2, bos_token_id=None, eos_token_id=None
    )
    return MambaForCausalLM(config).eval()


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_p": 0.8}, {"temperature": 0.0}])
def test_logprobs_agree_with_a_training_forward(
    make_model: MakeModel, prompts: list[list[int]], sampling: dict[str, float]
) -> None:
    model = make_model("gpt2")
    params = SamplingParams(max_new_tokens=15, n=2, stop_token_ids=STOPS, **sampling)  # pyright: ignore[reportArgumentType]
    completions = TransformersEngine(EngineConfig(max_sequences=7), model).generate(prompts, params, range(20))
    assert {completion.finish_reason for completion in completions} >= {"stop"}
    for index, completion in enumerate(completions):
        expected = compute_trained_logprobs(model, prompts[index // 2], completion, params.temperature or 1.0)
        assert (completion.logprobs - expected).abs().max() < 1e-5
        assert (completion.kept is not None) == params.filtered


@pytest.mark.everyday("qwen3", "gpt2")
@pytest.mark.parametrize("family", ["gpt2", "qwen3", "mamba"])
def test_a_completion_does_not_depend_on_its_batch(
    make_model: MakeModel, prompts: list[list[int]], family: str
) -> None:
    model = _mamba() if family == "mamba" else make_model(family)
    engine = TransformersEngine(EngineConfig(), model)
    params = SamplingParams(max_new_tokens=20, n=4, stop_token_ids=STOPS)
    together = engine.generate(prompts, params, range(40))
    backwards = [seed for start in range(36, -1, -4) for seed in range(start, start + 4)]
    permuted = TransformersEngine(EngineConfig(max_sequences=11), model).generate(prompts[::-1], params, backwards)
    for seed, completion in zip(backwards, permuted, strict=True):
        assert torch.equal(completion.token_ids, together[seed].token_ids)
        assert (completion.logprobs - together[seed].logprobs).abs().max() < 1e-5
    alone = SamplingParams(max_new_tokens=20, stop_token_ids=STOPS)
    (single,) = engine.generate([prompts[3]], alone, [13])
    assert torch.equal(single.token_ids, together[13].token_ids)


@pytest.mark.parametrize("family", ["minimax", "gemma2", "gpt_oss"])
def test_logprobs_agree_where_padding_on_the_left_may_change_a_row(
    prompts: list[list[int]], family: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = make(family, vocab_size=VOCABULARY, eos_token_id=None)
    params = SamplingParams(max_new_tokens=9)
    for index, completion in enumerate(TransformersEngine(EngineConfig(), model).generate(prompts, params, range(10))):
        expected = compute_trained_logprobs(model, prompts[index], completion, 1.0)
        assert (completion.logprobs - expected).abs().max() < 1e-5
    said = [record.getMessage() for record in caplog.records if record.name == "podium"]
    one_length = "MiniMaxForCausalLM generates from prompts of one length at a time, because padding changes its logits"
    assert said == ([one_length] if family == "minimax" else [])


def test_the_model_is_left_as_it_was_and_its_own_settings_play_no_part(
    make_model: MakeModel, prompts: list[list[int]]
) -> None:
    params = SamplingParams(max_new_tokens=12)
    expected = TransformersEngine(EngineConfig(), make_model("gpt2")).generate(prompts, params, range(10))
    model = make_model("gpt2")
    model.train()
    model.transformer.h[0].eval()  # a frozen part stays so
    settings = GenerationConfig(
        do_sample=True, temperature=0.2, top_k=3, repetition_penalty=1.5, eos_token_id=list(range(50)), num_beams=2
    )
    model.generation_config = settings
    got = TransformersEngine(EngineConfig(), model).generate(prompts, params, range(10))
    assert model.generation_config is settings
    assert model.training
    assert not model.transformer.h[0].training
    assert model.transformer.h[1].attn.training
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine.token_ids, theirs.token_ids)


def test_auto_takes_native_where_it_can_and_says_why_elsewhere(make_model: MakeModel) -> None:
    from podium_native import NativeEngine

    assert isinstance(make_engine(EngineConfig(), make_model("qwen3")), NativeEngine)
    sliding = make_model("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    assert isinstance(make_engine(EngineConfig(), sliding), NativeEngine)
    chunked = make_model("qwen2", layer_types=["full_attention", "chunked_attention"])
    dynamic = make_model("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
    reasons = {"gpt2": make_model("gpt2"), "chunked_attention": chunked, "dynamic": dynamic}
    for reason, model in reasons.items():
        assert isinstance(make_engine(EngineConfig(), model), TransformersEngine)
        with pytest.raises(ConfigError, match=f"cannot run this model: .*{reason}.*or one of transformers"):
            make_engine(EngineConfig(name="native"), model)


@pytest.mark.parametrize(
    ("family", "targets"),
    [("qwen3", {"target_modules": ["q_proj"]}), ("qwen3_moe", {"target_parameters": ["mlp.experts.down_proj"]})],
)
def test_adapters_go_to_the_transformers_engine(
    make_model: MakeModel, prompts: list[list[int]], family: str, targets: dict[str, list[str]]
) -> None:
    peft = pytest.importorskip("peft")
    model = make_model(family)
    adapted = peft.get_peft_model(model, peft.LoraConfig(**targets, r=2, init_lora_weights=False))
    engine = make_engine(EngineConfig(), adapted)
    assert isinstance(engine, TransformersEngine)
    params = SamplingParams(max_new_tokens=5)
    for index, completion in enumerate(engine.generate(prompts, params, range(10))):
        expected = compute_trained_logprobs(adapted.eval(), prompts[index], completion, 1.0)
        assert (completion.logprobs - expected).abs().max() < 1e-5


def test_an_encoder_decoder_is_refused() -> None:
    config = T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(ConfigError, match=r"decoder-only.* not a T5ForConditionalGeneration"):
        make_engine(EngineConfig(), T5ForConditionalGeneration(config))
