"""Models read in parts are those that transformers loads whole, in one process as the only rank."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from podium.errors import ConfigError
from podium.models import LoraConfig, ModelConfig, load_model, tensor_files
from podium.models.loading import lay_out
from podium.models.tensor_files import find_sources, places, read
from podium.training import ParallelConfig, sharded_loading
from podium.training.data_parallel import is_sharded
from podium.training.row_isolation import choose_batching
from podium.training.sharded_loading import load_parallel
from tests.unit.training.families import APART, MIXING, make
from tests.unit.workers.tiny import TINY

CPU = torch.device("cpu")
FSDP2 = ParallelConfig(strategy="fsdp2")
FAMILIES = [family for family in APART | MIXING if family != "mamba"]  # which FSDP2 refuses


@pytest.fixture(autouse=True)
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def saved(model: PreTrainedModel, folder: Path, **settings: Any) -> ModelConfig:
    model.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return ModelConfig(path=str(folder))


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    parts: dict[str, Any] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: part.full_tensor() if hasattr(part, "full_tensor") else part for name, part in parts.items()}


@pytest.mark.everyday("llama", "gemma2", "qwen3_moe", "qwen3_next", "deepseek_v32")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_read_in_parts_is_the_model(family: str, tmp_path: Path) -> None:
    config = saved(make(family), tmp_path / "model")
    whole, parted = load_model(config), load_parallel(config, FSDP2, CPU)
    assert is_sharded(parted)
    expected, found = tensors_of(whole), tensors_of(parted)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    assert parted.config.to_dict() == whole.config.to_dict()
    assert parted.config._attn_implementation == whole.config._attn_implementation
    assert not parted.training
    with torch.no_grad():
        ids = torch.arange(5, 17)[None]
        assert torch.equal(parted(ids, use_cache=False).logits, whole(ids, use_cache=False).logits)


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe"])
def test_a_stretch_of_a_tensor_is_read_alone(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = saved(make(family), tmp_path / "model")
    monkeypatch.setattr(tensor_files, "_CHUNK", 100)  # bytes
    sources = find_sources(lay_out(config), places(tmp_path / "model" / "model.safetensors"))
    assert sources is not None
    for name, tensor in load_model(config).named_parameters():
        assert sources[name].shape == list(tensor.shape)
        whole = tensor.detach().flatten()
        for first, last in ((0, len(whole)), (len(whole) // 3, 2 * len(whole) // 3), (len(whole) - 5, len(whole))):
            target = torch.full((last - first,), float("nan"))
            read(sources[name], first, target)
            assert torch.equal(target, whole[first:last]), name


@pytest.mark.everyday("qwen3", "lfm2")
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "qwen3_5_text", "lfm2"])
def test_how_rows_share_a_pass_is_found_on_shards(family: str, tmp_path: Path) -> None:
    config = saved(make(family), tmp_path / "model")
    whole, parted = load_model(config), load_parallel(config, FSDP2, CPU)
    for batching in ("padded", "auto"):
        parallel = replace(FSDP2, batching=batching)
        assert choose_batching(parted, parallel, CPU, torch.float32) == choose_batching(
            whole, parallel, CPU, torch.float32
        )
    packed = replace(FSDP2, batching="packed")
    if family == "qwen3":
        assert choose_batching(parted, packed, CPU, torch.float32) == ("packed", "")
    else:
        with pytest.raises(ConfigError, match="cannot take packed rows"):
            choose_batching(parted, packed, CPU, torch.float32)


def test_files_of_another_data_type_tied_weights_and_several_files(tmp_path: Path) -> None:
    model: Any = load_model(TINY)
    model.to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "do_sample": True}))
    for dtype in ("float32", "bfloat16"):
        config = ModelConfig(path=str(tmp_path / "model"), dtype=dtype, gradient_checkpointing=True)
        whole: Any = load_model(config)
        parted: Any = load_parallel(config, FSDP2, CPU)
        assert is_sharded(parted)
        assert parted.get_output_embeddings().weight is parted.get_input_embeddings().weight
        expected, found = tensors_of(whole), tensors_of(parted)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        assert {tensor.dtype for tensor in found.values()} == {tensor.dtype for tensor in expected.values()}
        assert parted.generation_config.to_dict() == whole.generation_config.to_dict()
        assert parted.config.name_or_path == whole.config.name_or_path


def test_models_that_are_loaded_whole_say_why_if_they_are_large(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    untied = make("llama", tie_word_embeddings=False)
    twice = saved(untied, tmp_path / "twice", tie_word_embeddings=True)
    less = saved(untied, tmp_path / "less")
    tensors = load_file(tmp_path / "less" / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "less" / "model.safetensors", {"format": "pt"})
    whys = {
        "its weights are random": TINY,
        "it has adapters": replace(less, lora=LoraConfig(), allow_tensors=("lm_head.weight",)),
        "its files lack lm_head.weight": replace(less, allow_tensors=("lm_head.weight",)),
        "its files hold tied weights twice": twice,
        "transformers converts the tensors of its files": saved(make("mixtral"), tmp_path / "mixtral"),
    }
    monkeypatch.setattr(tensor_files, "_FUSIONS", ())
    for config in whys.values():
        assert not is_sharded(load_parallel(config, FSDP2, CPU))
    assert not [record for record in caplog.records if record.name == "podium"]
    monkeypatch.setattr(sharded_loading, "_LARGE", 0)
    for why, config in whys.items():
        caplog.clear()
        load_parallel(config, FSDP2, CPU)
        (record,) = [record for record in caplog.records if record.name == "podium"]
        assert record.getMessage().endswith(f"before it is sharded: {why}")
        assert record.levelno == logging.WARNING


def test_wrong_files_are_refused_as_ever(tmp_path: Path) -> None:
    config = saved(make("llama"), tmp_path / "model", num_hidden_layers=3)
    with pytest.raises(ConfigError, match=r"missing from the files \(9\): model\.layers\.2"):
        load_parallel(config, FSDP2, CPU)


def test_a_buffer_that_transformers_leaves_out_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would hold whatever lay in memory."""
    config = saved(make("llama"), tmp_path / "model")
    cls = type(make("llama"))
    monkeypatch.setattr(cls, "initialize_weights", lambda self: None)
    model = lay_out(config)
    assert "is not computed by transformers" in sharded_loading._compute_buffers(model, CPU)


def test_a_file_that_ends_early_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(10))
    with path.open("rb", buffering=0) as file, pytest.raises(ConfigError, match="shorter while it was read"):
        tensor_files._fill(file, torch.empty(11, dtype=torch.uint8), 0)


def test_replicated_models_are_loaded_whole(tmp_path: Path) -> None:
    config = saved(make("llama"), tmp_path / "model")
    assert not is_sharded(load_parallel(config, ParallelConfig(), CPU))
