"""Adapters of all layers that a configuration names, also where peft itself leaves some out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from podium.errors import ConfigError
from podium.models import LoraConfig, ModelConfig, load_model
from podium.models.whole_weights import WholeWeights, full_weights
from podium_dryrun.memory import model_size
from tests.unit.workers.tiny import ADAPTED, SHAPE, TINY

IDS = torch.tensor([[4, 9, 15, 7, 7, 12]])
_COMMON = {
    **{
        name: SHAPE[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    },
    "intermediate_size": 32,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHAPES: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "granitemoe": {"num_local_experts": 4},
    "llama4_text": {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 32, "head_dim": 8},
    "phimoe": {"num_local_experts": 4},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_moe": _EXPERTS,
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": [2, 2], "head_dim": 8},
}


def make(model_type: str, *targets: str) -> ModelConfig:
    shape = {"model_type": model_type, **_COMMON, **SHAPES[model_type]}
    return replace(ADAPTED, config=shape, lora=LoraConfig(rank=2, alpha=8.0, targets=targets))


@pytest.mark.parametrize("coarse", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", [SHAPE, {"model_type": "qwen3_moe", **_COMMON, **_EXPERTS}], ids=["dense", "moe"])
def test_updates_far_below_the_steps_of_a_coarse_type_are_kept_on_average(
    shape: Any, stored: str, coarse: torch.dtype
) -> None:
    """Rounding to the nearest would keep less than a tenth of them."""
    model = load_model(replace(ADAPTED, config=shape, dtype="float32"))
    weights = WholeWeights(model)
    if stored == "bfloat16":  # as a model of bfloat16 that is read in float32
        for name, parameter in model.named_parameters():
            parameter.data = parameter if "lora_" in name else parameter.bfloat16().float()
        weights = WholeWeights(model)
    before = {name: weights.gather(name, coarse) for name in weights.adapted}
    plain = dict(full_weights(load_model(replace(TINY, config=shape))))
    if stored == "bfloat16":
        plain = {name: tensor.bfloat16().float() for name, tensor in plain.items()}
    assert all(torch.equal(before[name], plain[name].to(coarse)) for name in before), "no update, no change"
    source, kept, updates = torch.Generator().manual_seed(1), 0.0, 0.0
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=1e-4 if coarse == torch.bfloat16 else 1e-5, generator=source)
    for name in before:
        merged, delta = weights.gather(name, coarse), weights.gather(name) - plain[name]
        assert torch.equal(merged, weights.gather(name, coarse))
        kept += float(((merged.double() - before[name].double()) * delta).sum())
        updates += float(delta.double().square().sum())
    assert updates > 0
    assert 0.8 < kept / updates < 1.2


def test_a_merge_in_float32_is_the_sum() -> None:
    model = load_model(ADAPTED)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    layer: Any = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    expected = layer.base_layer.weight + (up @ down) * 2.0
    assert torch.equal(dict(full_weights(model))["model.layers.0.self_attn.q_proj.weight"], expected)


def list_adapted(model: Any) -> set[str]:
    """The last parts of the places of all layers and matrices with adapters."""
    places = [*model.targeted_module_names, *(name.removesuffix(".weight") for name in model.targeted_parameter_names)]
    return {".".join(place.split(".")[-2:]) for place in places}


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("gpt_oss", {"experts.gate_up_proj", "experts.down_proj"}),
        pytest.param("granitemoe", {"experts.gate_up_proj", "experts.down_proj"}, marks=pytest.mark.exhaustive),
        pytest.param("llama4_text", {"experts.gate_up_proj", "shared_expert.gate_proj"}, marks=pytest.mark.exhaustive),
        pytest.param("phimoe", {"experts.gate_up_proj", "experts.down_proj"}, marks=pytest.mark.exhaustive),
        ("qwen2_moe", {"experts.gate_up_proj", "shared_expert.gate_proj", "shared_expert.down_proj"}),
        pytest.param("qwen3_moe", {"experts.gate_up_proj", "experts.down_proj"}, marks=pytest.mark.exhaustive),
        ("hunyuan_v1_moe", {"experts.gate_up_proj", "shared_mlp.gate_proj", "shared_mlp.up_proj"}),
    ],
)
@pytest.mark.filterwarnings("ignore:.*_pattern keys did not match")  # peft's own, for experts
def test_without_targets_experts_and_linear_layers_beside_them_have_adapters(
    tmp_path: Path, model_type: str, expected: set[str]
) -> None:
    config = make(model_type)
    model = load_model(config)
    assert {"self_attn.q_proj", *expected} <= list_adapted(model)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        name for name, _ in model.named_parameters() if "lora_" in name
    }
    assert model_size(config).trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    merged = load_model(config.plain)
    plain = merged(IDS).logits
    assert not merged.load_state_dict(dict(full_weights(model)), strict=False).unexpected_keys
    assert torch.allclose(merged(IDS).logits, model(IDS).logits, atol=1e-4)
    assert not torch.allclose(merged(IDS).logits, plain, atol=1e-2)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(load_model(config.plain), tmp_path)
    assert torch.equal(again(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize(
    ("model_type", "targets", "expected"),
    [
        ("qwen3_moe", ("q_proj", "gate_up_proj"), {"self_attn.q_proj", "experts.gate_up_proj"}),
        ("gpt_oss", ("down_proj",), {"experts.down_proj"}),
        ("gpt_oss", ("experts.gate_up_proj", "v_proj"), {"experts.gate_up_proj", "self_attn.v_proj"}),
        (
            "hunyuan_v1_moe",
            ("gate_proj", "up_proj"),
            {"experts.gate_up_proj", "shared_mlp.gate_proj", "shared_mlp.up_proj"},
        ),
    ],
)
def test_targets_name_joined_experts_and_linear_layers_of_one_name(
    model_type: str, targets: tuple[str, ...], expected: set[str]
) -> None:
    assert list_adapted(load_model(make(model_type, *targets))) == expected


@pytest.mark.parametrize("targets", [("q_proj", "kv_proj"), ("w1", "down_proj"), ("q_proj", ".*mlp.*")])
def test_a_target_that_names_nothing_is_refused_beside_others(targets: tuple[str, ...]) -> None:
    config = replace(TINY, lora=LoraConfig(targets=targets))
    (wrong,) = {*targets} - {"q_proj", "down_proj"}
    with pytest.raises(ConfigError, match=r"model\.lora\.targets has .*it has down_proj, gate_proj, k_proj") as refused:
        load_model(config)
    assert repr(wrong) in str(refused.value)
    with pytest.raises(ConfigError, match=r"model\.lora\.targets has"):
        model_size(config)  # in a dry run


@pytest.mark.parametrize("model_type", ["llama4_text", "phimoe"])
def test_a_router_that_is_a_linear_layer_by_name_alone_has_no_adapter(model_type: str) -> None:
    assert not {name for name in list_adapted(load_model(make(model_type))) if name.endswith("router")}
    with pytest.raises(ConfigError, match=r"router is a \w+Router, which does not answer as a linear layer"):
        load_model(make(model_type, "router"))


def test_peft_alone_leaves_out_what_podium_adds() -> None:
    """If this fails, peft has learned it, and podium.models.adapters can do with less."""
    settings = peft.LoraConfig(r=2, target_modules="all-linear")
    assert not list_adapted(peft.get_peft_model(load_model(make("gpt_oss").plain), settings)) & {"experts.down_proj"}
