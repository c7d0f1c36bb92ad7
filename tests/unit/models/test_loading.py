from __future__ import annotations

import json
import os
import resource
import stat
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from podium.errors import CheckpointError, ConfigError
from podium.models import LoraConfig, ModelConfig, load_model
from podium.models.loading import (
    _architecture as read_architecture,
    load_scorer,
    position_limit,
    save_pretrained,
    vocabulary_size,
)
from podium.models.tokenizers import load_tokenizer
from podium.models.whole_weights import WholeWeights, full_weights
from podium_dryrun.memory import model_size
from tests.unit.workers.tiny import ADAPTED, SHAPE, TINY

IDS = torch.tensor([[4, 9, 15, 7, 7, 12]])


UNTIED = {**SHAPE, "tie_word_embeddings": False}
EXPERTS = {name: value for name, value in UNTIED.items() if name != "head_dim"}
EXPERTS |= {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_from_scratch_follows_the_seed_alone_and_leaves_torchs_generator() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = load_model(TINY)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert same(first, load_model(TINY))
    assert not same(first, load_model(replace(TINY, seed=4)))


def test_from_scratch_takes_vocabulary_and_special_tokens_from_the_tokenizer() -> None:
    config = load_model(TINY).config
    assert (config.vocab_size, config.pad_token_id, config.bos_token_id, config.eos_token_id) == (16, 0, 1, 2)
    assert load_model(replace(TINY, config={**SHAPE, "vocab_size": 40})).config.vocab_size == 40


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "qwen33"}, "did you mean qwen3"),
        ({**SHAPE, "hiden_size": 8}, r"model\.config\.hiden_size.*did you mean hidden_size"),
        ({**SHAPE, "num_attention_heads": 4, "num_key_value_heads": 3}, r"num_key_value_heads = 3: expected a divisor"),
        ({"model_type": "qwen3", "num_attention_heads": 2}, r"num_key_value_heads = 32, the default of 'qwen3': exp"),
        (
            {**SHAPE, "sliding_window": 7},
            r"sliding_window = 7: transformers makes it None for 'qwen3', with use_sliding_window = False; change the",
        ),
        (
            {**EXPERTS, "model_type": "qwen2_moe", "sliding_window": 7},
            "sliding_window = 7: transformers makes it 0 for",
        ),
    ],
)
def test_wrong_architectures_name_the_key_and_the_nearest(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model(replace(TINY, config=config))


@pytest.mark.parametrize(
    "fields",
    [
        {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 0},
        {"rope_scaling": {"type": "linear", "factor": 4}, "num_key_value_heads": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000}},
        {"torch_dtype": "bfloat16", "eos_token_id": [2, 3], "id2label": {0: "a", 1: "b"}},
        {"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"model_type": "gpt2", "n_embd": 16},
        {"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"]},
    ],
)
def test_fields_that_transformers_spells_in_another_way_are_taken(fields: dict[str, Any]) -> None:
    read_architecture(replace(TINY, config={"model_type": "qwen3", "num_hidden_layers": 2, **fields}))


def test_wrong_settings_fail_where_they_are_built(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"either model\.path"):
        ModelConfig()
    with pytest.raises(ConfigError, match=r"needs model\.tokenizer"):
        ModelConfig(config=SHAPE)
    with pytest.raises(ConfigError, match="nothing-here"):
        load_model(ModelConfig(path=str(tmp_path / "nothing-here")))
    with pytest.raises(ConfigError, match=r"model\.lora"):
        load_model(replace(TINY, lora=LoraConfig(targets=("no_such_layer",))))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_models_load_with_transformers_in_the_dtype_they_had(tmp_path: Path, dtype: Any) -> None:
    model = load_model(replace(TINY, dtype=dtype))
    save_pretrained(model, dict(full_weights(model)), tmp_path, load_tokenizer(TINY.tokenizer))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert loaded.dtype == getattr(torch, dtype)
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    assert AutoTokenizer.from_pretrained(tmp_path).encode("1+2") == [5, 14, 6]
    again = load_model(ModelConfig(path=str(tmp_path), dtype=dtype))
    assert same(again, model)


@pytest.mark.parametrize("kind", ["glm4_moe", "ernie4_5_moe"])
def test_a_model_from_scratch_has_the_data_types_that_it_has_once_loaded(tmp_path: Path, kind: str) -> None:
    """What routes tokens to experts stays float32 in a model of bfloat16."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    experts = {
        "glm4_moe": {"first_k_dense_replace": 0, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1},
        "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0},
    }
    shape = sizes | experts[kind] | {"num_hidden_layers": 1, "moe_intermediate_size": 16}
    model = load_model(replace(TINY, config={"model_type": kind, **shape}, dtype="bfloat16"))
    save_pretrained(model, dict(full_weights(model)), tmp_path, load_tokenizer(TINY.tokenizer))
    loaded = load_model(ModelConfig(path=str(tmp_path), dtype="bfloat16"))
    types = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    assert types == {name: tensor.dtype for name, tensor in loaded.state_dict().items()}
    assert set(types.values()) == {torch.bfloat16, torch.float32}


@pytest.mark.parametrize("limit", [16, 4096])  # of transformers' text files, and of the weights' file, by safetensors
def test_a_model_that_cannot_be_written_says_the_remedy(tmp_path: Path, limit: int) -> None:
    model = load_model(TINY)
    weights = dict(full_weights(model))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(CheckpointError, match=r"cannot write the model to .*File too large; raise the limit"):
            save_pretrained(model, weights, tmp_path, None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_weights_may_be_read_by_whom_the_umask_lets_read_them(tmp_path: Path, umask: int, mode: int) -> None:
    """safetensors gave them to the user alone, so that a colleague or a server of another user could not load them."""
    model = load_model(TINY)
    weights = dict(full_weights(model))
    before = os.umask(umask)
    try:
        save_pretrained(model, weights, tmp_path, None)
    finally:
        os.umask(before)
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == dict.fromkeys(
        ("config.json", "generation_config.json", "model.safetensors"), mode
    )


@pytest.mark.parametrize(
    ("shape", "targets"),
    [
        (SHAPE, ()),
        (UNTIED, ("lm_head",)),
        (UNTIED, ("embed_tokens",)),
        (UNTIED, ("embed_tokens", "lm_head", "q_proj")),
        (EXPERTS, ()),
    ],
    ids=["all-linear", "head", "embedding", "both", "experts"],
)
def test_adapters_train_alone_and_merge_into_the_weights(
    tmp_path: Path, shape: dict[str, Any], targets: tuple[str, ...]
) -> None:
    config = replace(ADAPTED, config=shape, lora=LoraConfig(rank=4, alpha=8.0, targets=targets))
    model = load_model(config)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        name for name, _ in model.named_parameters() if "lora_" in name
    }
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "lora_embedding" in name:
            torch.nn.init.normal_(parameter)
    merged = load_model(config.plain)
    plain = merged(IDS).logits
    assert not merged.load_state_dict(dict(full_weights(model)), strict=False).unexpected_keys
    assert torch.allclose(merged(IDS).logits, model(IDS).logits, atol=1e-4)
    assert not torch.allclose(merged(IDS).logits, plain, atol=1e-2)
    assert WholeWeights(merged).is_plain
    assert not WholeWeights(model).is_plain
    save_pretrained(model, dict(full_weights(model)), tmp_path, None)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.allclose(loaded(IDS).logits, merged(IDS).logits, atol=1e-5)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_adapters_of_one_tensor_in_two_places_are_refused(target: str) -> None:
    adapted = replace(TINY, lora=LoraConfig(targets=("q_proj", target)))
    message = rf"model\.lora\.targets: .*{target} shares its weight with .*; leave {target} out"
    with pytest.raises(ConfigError, match=message):
        load_model(adapted)
    with pytest.raises(ConfigError, match=message):
        model_size(adapted)  # in a dry run


def test_adapters_of_a_convolution_are_refused() -> None:
    shape = {"model_type": "mamba", "hidden_size": 16, "state_size": 4, "num_hidden_layers": 1}
    with pytest.raises(ConfigError, match=r"model\.lora\.targets: .*conv1d is a Conv1d.*leave conv1d out"):
        load_model(replace(TINY, config=shape, attention="eager", lora=LoraConfig(targets=("conv1d",))))


@pytest.mark.parametrize("targets", [(), ("embed_tokens", "lm_head"), ("q_proj",)])
def test_a_dry_run_counts_the_parameters_of_adapters(targets: tuple[str, ...]) -> None:
    config = replace(TINY, config=UNTIED, lora=LoraConfig(rank=4, targets=targets))
    assert model_size(config).trained == sum(p.numel() for p in load_model(config).parameters() if p.requires_grad)


def test_code_in_a_models_directory_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would ask on the terminal, where somebody may say yes."""
    mark = tmp_path / "code was run"
    (tmp_path / "config.json").write_text(
        '{"model_type": "stranger", "auto_map": {"AutoConfig": "code.Settings", "AutoModelForCausalLM": "code.Model"}}'
    )
    (tmp_path / "code.py").write_text(f"open({str(mark)!r}, 'w')\nclass Settings: pass\nclass Model: pass\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    config = ModelConfig(path=str(tmp_path), tokenizer="chars:01")
    for load in (load_model, position_limit, model_size, lambda config: load_scorer(config.path)):
        with pytest.raises(ConfigError, match="Python code of its own, which Podium does not run"):
            load(config)
    assert not mark.exists()


def test_a_reward_model_that_is_no_directory_is_looked_for_on_the_hub_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would try again for half a minute, in silence, where there is no hub."""
    asked: list[str] = []
    monkeypatch.setattr("podium.models.loading.look_for_hub", asked.append)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"reward\.path = 'nobody/nothing' cannot be loaded"):
        load_scorer("nobody/nothing")
    assert asked == ["nobody/nothing"]


@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize("value", ["someone/kernel", {"text_config": "someone/kernel@v1"}])
def test_a_kernel_of_the_hub_is_not_fetched(tmp_path: Path, name: str, value: Any) -> None:
    load_model(TINY).save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, name: value}))
    with pytest.raises(ConfigError, match=rf"config\.json: {name} = .* names a kernel of the hub"):
        load_model(ModelConfig(path=str(tmp_path), tokenizer="chars:0123"))
    with pytest.raises(ConfigError, match="names a kernel of the hub"):
        load_scorer(str(tmp_path))


def test_a_configuration_that_is_read_without_docstrings_leaves_transformers_as_it_was() -> None:
    writer: Any = sys.modules["transformers.utils.auto_docstring"]  # whose function has the module's name
    usual = writer.auto_class_docstring
    assert position_limit(TINY) == TINY.config["max_position_embeddings"]
    assert writer.auto_class_docstring is usual
    with pytest.raises(ConfigError, match="model_type = 'none'"):
        position_limit(replace(TINY, config={"model_type": "none"}))
    assert writer.auto_class_docstring is usual


@pytest.mark.parametrize("fields", [{"vocab_size": 10**400}, {"text_config": {"vocab_size": (1 << 24) + 1}}])
def test_a_vocabulary_of_more_ids_than_fit_into_memory_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    """A damaged config.json: which of its ids stand for text was asked one by one until memory was full."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **fields}))
    with pytest.raises(
        ConfigError, match=r"config\.json: (text_config\.)?vocab_size = 1\d+: expected at most 16777216$"
    ):
        vocabulary_size(ModelConfig(path=str(tmp_path)))
