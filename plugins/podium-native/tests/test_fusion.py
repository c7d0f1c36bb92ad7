"""Joined projections: one storage, the same parameters."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from podium.rollout.engines import EngineConfig
from podium.rollout.sampling import SamplingParams
from podium_native import NativeEngine
from podium_native.parameters import read_weights
from tests.unit.rollout.engines.conftest import MakeModel, compute_trained_logprobs


def _storages(model: Any) -> list[int]:
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    groups = ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj))
    return [len({part.weight.untyped_storage().data_ptr() for part in group}) for group in groups]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_parameters_share_storage_and_stay_themselves(make_model: MakeModel, family: str) -> None:
    model = make_model(family)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    identities = {name: id(parameter) for name, parameter in model.named_parameters()}
    assert _storages(model) == [3, 2]
    read_weights(model)
    assert _storages(model) == [1, 1]
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == identities
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())

    places = [parameter.data_ptr() for parameter in model.parameters()]
    read_weights(model)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places


def test_an_optimizer_made_before_goes_on_and_the_engine_sees_its_steps(make_model: MakeModel) -> None:
    model, twin = make_model("qwen3"), make_model("qwen3")
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, twin)]
    with torch.inference_mode():  # a worker may build its engine there; the weights must stay trainable
        engine = NativeEngine(EngineConfig(), model)
    tokens = torch.randint(0, 97, (4, 12))
    prompt, params = [5, 6, 7], SamplingParams(max_new_tokens=10)
    for step in range(1, 4):
        for m, optimizer in zip((model, twin), optimizers, strict=True):
            m(tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        engine.refresh(step)
        (completion,) = engine.generate([prompt], params, [step])
        assert set(completion.versions.tolist()) == {step} == {engine.version}
        assert (completion.logprobs - compute_trained_logprobs(twin, prompt, completion, 1.0)).abs().max() < 1e-5
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert _storages(model) == [1, 1]


def test_loading_in_place_keeps_the_views(make_model: MakeModel) -> None:
    model, other = make_model("qwen2"), make_model("qwen2", seed=1)
    engine = NativeEngine(EngineConfig(), model)
    model.load_state_dict(other.state_dict())
    assert _storages(model) == [1, 1]
    (completion,) = engine.generate([[1, 2]], SamplingParams(max_new_tokens=10), [3])
    assert (completion.logprobs - compute_trained_logprobs(other, [1, 2], completion, 1.0)).abs().max() < 1e-5


def test_refresh_joins_again_what_was_replaced(make_model: MakeModel) -> None:
    model, other = make_model("llama"), make_model("llama", seed=1)
    engine = NativeEngine(EngineConfig(), model)
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    assert _storages(model) == [3, 2]
    engine.refresh(1)
    assert _storages(model) == [1, 1]
    (completion,) = engine.generate([[1, 2]], SamplingParams(max_new_tokens=10), [3])
    assert (completion.logprobs - compute_trained_logprobs(other, [1, 2], completion, 1.0)).abs().max() < 1e-5


def test_a_joined_model_saves_and_copies_like_any(make_model: MakeModel, tmp_path: Path) -> None:
    model = make_model("llama")
    read_weights(model)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    twin = copy.deepcopy(model)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
        assert torch.equal(twin.state_dict()[name], value)
    with torch.no_grad():
        twin.model.layers[0].self_attn.q_proj.weight.zero_()
    assert model.model.layers[0].self_attn.q_proj.weight.any()
