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
from podium.models.whole_weights import full_weights
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
