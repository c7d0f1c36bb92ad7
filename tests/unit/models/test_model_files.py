"""A checkpoint's directory is what transformers and peft load, and what was trained, to the last bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from podium.errors import CheckpointError
from podium.models.layout import ModelLayout, model_layout
from podium.models.loading import load_model
from podium.models.manifest import file_sums, write_manifest
from podium.models.model_files import (
    RESUME,
    ModelCopy,
    model_texts,
    read_layout,
    read_model,
)
from podium.models.tokenizers import load_tokenizer
from podium.workers import Critic, Policy
from tests.unit.training.families import APART, MIXING, make
from tests.unit.workers.test_workers import ADAPTED, OPTIM, TINY, recorded

FAMILIES = sorted(APART | MIXING)


def stored(model: nn.Module, folder: Path, *, ranks: int = 1, file_bytes: int = 1 << 30) -> ModelLayout | None:
    layout = model_layout(model)
    if layout is not None:
        (folder / RESUME).mkdir(parents=True)
        for rank in range(ranks):
            copied = ModelCopy(
                model,
                layout,
                model_texts(model, TINY),
                rank=rank,
                ranks=ranks,
                file_bytes=file_bytes,
            )
            copied.write(folder)
    return layout


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(torch.tensor([[4, 5, 6, 7]])).logits


def same(found: nn.Module, expected: nn.Module) -> bool:
    ours, theirs = found.state_dict(), expected.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.everyday(
    "gpt2-True",
    "llama-False",
    "qwen3_moe-False",
    "gemma2-True",
    "mamba2-True",
    "gpt_oss-True",
    "jamba-False",
    "qwen3_next-True",
)
@pytest.mark.parametrize(
    ("family", "tied"),
    list(product(FAMILIES, (False, True))),
)
def test_transformers_loads_what_was_copied_and_it_is_read_back(tmp_path: Path, family: str, tied: bool) -> None:
    """New models, and models that transformers has loaded, which know the names in their files."""
    model = make(family, tie_word_embeddings=tied)
    for round_ in ("new", "loaded"):
        folder = tmp_path / round_
        layout = stored(model, folder, ranks=2, file_bytes=20_000)
        assert layout is not None
        assert (folder / "model.safetensors.index.json").is_file()
        assert read_layout(folder) == layout
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        assert same(loaded, model)
        kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        read_model(model, layout, folder)
        assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())
        model = loaded


@pytest.mark.parametrize(
    "written",
    [
        lambda model, tensors: {name: one.mT if one.ndim > 1 else one for name, one in tensors.items()},
        lambda model, tensors: {"joined": torch.cat([one.reshape(-1) for one in tensors.values()])},
        lambda model, tensors: dict([*tensors.items()][1:]),
    ],
    ids=["transposed", "joined", "left out"],
)
def test_a_parameter_that_is_no_stretch_of_the_files_has_no_layout(
    monkeypatch: pytest.MonkeyPatch, written: Callable[[Any, Mapping[str, Tensor]], Mapping[str, Tensor]]
) -> None:
    monkeypatch.setattr("podium.models.layout._as_written", written)
    assert model_layout(make("llama")) is None
    assert model_layout(nn.Linear(2, 2)) is None


def test_a_policys_checkpoint_is_a_model_with_its_tokenizer(tmp_path: Path) -> None:
    policy = Policy(TINY, OPTIM)
    policy.update(recorded())
    policy.save(str(tmp_path / "policy"))
    names = {path.name for path in (tmp_path / "policy").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "manifest.json", "resume"} <= names
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    assert same(model, policy.model)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    assert tokenizer.decode(tokenizer.encode("1+2=")) == "1+2="
    begun = Policy(replace(TINY, path=str(tmp_path / "policy"), config={}), OPTIM)
    assert same(begun.model, policy.model)


def test_generation_settings_that_contradict_one_another_are_kept(tmp_path: Path) -> None:
    """transformers loads a temperature without ``do_sample``, which models of the hub have, and refuses to write it."""
    stored(load_model(TINY), tmp_path / "base")
    load_tokenizer(TINY.tokenizer).save_pretrained(tmp_path / "base")
    settings = {"temperature": 0.6, "top_p": 0.9, "do_sample": False, "eos_token_id": 2}
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps(settings))
    policy = Policy(replace(TINY, path=str(tmp_path / "base"), config={}), OPTIM)
    policy.save(str(tmp_path / "policy"))
    found = json.loads((tmp_path / "policy" / "generation_config.json").read_text())
    assert {name: found.get(name) for name in settings} == settings
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path / "policy"), policy.model)


def test_buffers_of_truth_values_are_written_and_read_back(tmp_path: Path) -> None:
    model, seen = make("llama"), torch.tensor([True, False, True])
    model.register_buffer("seen", seen.clone())
    layout = stored(model, tmp_path)
    assert layout is not None
    model.get_buffer("seen").zero_()
    read_model(model, layout, tmp_path)
    assert torch.equal(model.get_buffer("seen"), seen)


def test_a_checkpoint_of_adapters_is_what_peft_loads(tmp_path: Path) -> None:
    base = load_model(TINY)
    base.save_pretrained(tmp_path / "base")
    policy = Policy(replace(ADAPTED, path=str(tmp_path / "base"), config={}), OPTIM)
    policy.update(recorded())
    policy.save(str(tmp_path / "policy"))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = PeftModel.from_pretrained(plain, str(tmp_path / "policy"))
    assert torch.equal(logits(loaded), logits(policy.model))
    assert not torch.equal(logits(loaded), logits(base))


def test_a_critics_checkpoint_is_a_model_to_begin_with(tmp_path: Path) -> None:
    critic = Critic(TINY, OPTIM)
    batch = recorded()
    before = critic.values(batch).jagged("values").values
    with torch.no_grad():
        for parameter in cast(Any, critic.model).get_output_embeddings().parameters():
            parameter.add_(0.1)
    critic.save(str(tmp_path / "critic"))
    other = Critic(replace(TINY, path=str(tmp_path / "critic"), config={}), OPTIM)
    assert torch.equal(other.values(batch).jagged("values").values, critic.values(batch).jagged("values").values)
    assert not torch.equal(other.values(batch).jagged("values").values, before)


def one_form(folder: Path) -> None:
    """Give a checkpoint the form of Podium before checkpoints were models: all shards in one directory."""
    for path in folder.iterdir():
        if path.is_file():
            path.unlink()
    for path in (folder / RESUME).iterdir():
        path.rename(folder / path.name)
    (folder / RESUME).rmdir()
    write_manifest(folder, [file_sums(folder.iterdir())])
    content = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**content, "format": 1}))


@pytest.mark.parametrize("old", [False, True], ids=["odd", "old"])
def test_a_checkpoint_that_is_no_model_is_resumed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bool
) -> None:
    """That of a model whose files transformers lays out otherwise, and that of an earlier version."""
    monkeypatch.setattr("podium.workers.learner.model_layout", lambda model: None)
    policy, batch = Policy(TINY, OPTIM), recorded()
    policy.update(batch)
    policy.save(str(tmp_path / "policy"))
    assert {path.name for path in (tmp_path / "policy").iterdir()} == {"resume", "manifest.json"}
    if old:
        one_form(tmp_path / "policy")
    monkeypatch.undo()
    expected = policy.update(batch)
    resumed = Policy(replace(TINY, seed=9), OPTIM)
    resumed.load(str(tmp_path / "policy"))
    assert resumed.update(batch) == expected


def test_files_of_another_model_are_refused(tmp_path: Path) -> None:
    stored(make("llama"), tmp_path / "llama")
    layout = read_layout(tmp_path / "llama")
    assert layout is not None
    for other, message in [
        (make("llama", num_hidden_layers=1), r"of another model: it lacks \[\] and has \['model.layers.1"),
        (make("llama", num_hidden_layers=3), r"of another model: it lacks \['model.layers.2"),
        (make("llama", intermediate_size=32), r"holds \S+ as \[64, 32\], and this run as \[32, 32\]"),
        (make("llama", dtype=torch.bfloat16), r"holds \S+ as torch.float32, and this run as torch.bfloat16"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            read_model(other, layout, tmp_path / "llama")
    stored(make("llama", num_hidden_layers=1), tmp_path / "less")
    shutil.copy(tmp_path / "less" / "model.safetensors", tmp_path / "llama" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"it lacks \['model.layers.1"):
        read_model(make("llama"), layout, tmp_path / "llama")
    (tmp_path / "llama" / RESUME / "model.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"resume/model\.json"):
        read_layout(tmp_path / "llama")
