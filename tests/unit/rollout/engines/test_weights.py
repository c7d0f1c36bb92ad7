"""How new weights reach an engine: shared, copied, received."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from podium.errors import ConfigError, GenerationError
from podium.rollout.engines import EngineConfig, make_engine
from podium.rollout.engines.engine_lookup import choose_dtype
from podium.rollout.sampling import SamplingParams

from .conftest import MakeModel, same

PARAMS = SamplingParams(max_new_tokens=12, n=2)
PROMPTS = [[1, 2, 3], [4, 5]]
NAMES: list[Any] = ["native", "transformers"]


@pytest.fixture
def one_rank_mesh(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def _train(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.arange(24).view(2, 12)
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()


@pytest.mark.parametrize("name", NAMES)
def test_another_dtype_is_a_copy_that_refresh_fills(make_model: MakeModel, name: Any) -> None:
    model = make_model("qwen3")
    engine = make_engine(EngineConfig(name=name, dtype="bfloat16"), model)
    with pytest.raises(GenerationError, match="has no weights yet: call refresh"):
        engine.generate(PROMPTS, PARAMS, range(4))
    for version in (1, 2):
        engine.refresh(version)
        assert next(model.parameters()).dtype == torch.float32
        lower = copy.deepcopy(model).to(torch.bfloat16)
        lower.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)  # loaders keep frequencies in float32
        reference = make_engine(EngineConfig(name=name), lower)
        reference.refresh(version)
        assert same(engine.generate(PROMPTS, PARAMS, range(4)), reference.generate(PROMPTS, PARAMS, range(4)))
        _train(model)


def test_an_accelerator_generates_in_bfloat16_unless_told_otherwise(make_model: MakeModel) -> None:
    """torch's meta device stands for an accelerator: it is no CPU."""
    cuda, cpu, own = torch.device("cuda"), torch.device("cpu"), EngineConfig()
    assert [choose_dtype(own, device).dtype for device in (cuda, cpu)] == ["bfloat16", None]
    assert choose_dtype(EngineConfig(dtype="float32"), cuda).dtype == "float32"
    for config, found in (({}, torch.bfloat16), ({"dtype": "float32"}, torch.float32)):
        settings: Any = {"name": "transformers", **config}
        engine: Any = make_engine(EngineConfig(**settings), make_model("qwen3").to("meta"))
        assert next(engine.model.parameters()).dtype == found


def test_a_copy_has_the_buffers_of_the_model_too_and_in_their_data_type() -> None:
    """Routing biases stay float32 where transformers loads a model in bfloat16."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "vocab_size": 16, "v_head_dim": 8}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "first_k_dense_replace": 0}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    ranks = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
    model: Any = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("deepseek_v3", **sizes, **heads, **experts, **ranks)
    )
    model.model.layers[0].mlp.gate.e_score_correction_bias.copy_(torch.tensor([3.001, -3.0, 1.0, 0.0]))
    engine: Any = make_engine(EngineConfig(name="transformers", dtype="bfloat16"), model)
    engine.refresh(1)
    assert torch.equal(engine.model.model.layers[0].mlp.gate.e_score_correction_bias, torch.tensor([3.001, -3, 1, 0]))
    assert engine.model.lm_head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("name", NAMES)
def test_a_sharded_model_is_gathered_into_a_copy(make_model: MakeModel, one_rank_mesh: Any, name: Any) -> None:
    model, plain = make_model("qwen3"), make_model("qwen3")
    for layer in model.model.layers:
        fully_shard(layer, mesh=one_rank_mesh)
    fully_shard(model, mesh=one_rank_mesh)
    engine = make_engine(EngineConfig(name=name), model)
    reference = make_engine(EngineConfig(name=name), plain)
    for version in (1, 2):
        engine.refresh(version)
        reference.refresh(version)
        got, expected = (each.generate(PROMPTS, PARAMS, range(4)) for each in (engine, reference))
        for mine, theirs in zip(got, expected, strict=True):
            assert torch.equal(mine.token_ids, theirs.token_ids)
            assert (mine.logprobs - theirs.logprobs).abs().max() < 1e-5  # sharded training rounds differently
        _train(model)
        _train(plain)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("name", NAMES)
def test_received_weights_are_copied_in_place(make_model: MakeModel, name: Any, family: str) -> None:
    sender = make_model(family, seed=1)
    engine = make_engine(EngineConfig(name=name), make_model(family))
    before = engine.generate(PROMPTS, PARAMS, range(4))
    engine.refresh(5, sender.state_dict())
    after = engine.generate(PROMPTS, PARAMS, range(4))
    reference = make_engine(EngineConfig(name=name), sender)
    reference.refresh(5)
    assert not same(before, after)
    assert same(after, reference.generate(PROMPTS, PARAMS, range(4)))
    assert {version for completion in after for version in completion.versions.tolist()} == {5}


def test_weights_that_do_not_fit_are_named(make_model: MakeModel) -> None:
    engine = make_engine(EngineConfig(), make_model("qwen3"))
    weights = dict(make_model("qwen3").named_parameters())
    norm = weights.pop("model.norm.weight")
    with pytest.raises(ConfigError, match=r"missing \['model.norm.weight'\] \(1\)"):
        engine.refresh(1, weights)
    with pytest.raises(ConfigError, match=r"unknown \['extra'\]"):
        engine.refresh(1, {**weights, "model.norm.weight": norm, "extra": norm})
    with pytest.raises(ConfigError, match=r"model.norm.weight has shape \[3\].* \[64\]"):
        engine.refresh(1, {**weights, "model.norm.weight": norm[:3]})
    assert engine.version == 0
