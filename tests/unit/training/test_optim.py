from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers

from podium.errors import ConfigError
from podium.models import load_model
from podium.training import OptimConfig, ParallelConfig, TrainEngine
from podium.training.config import EndingOptim
from podium.training.optimizer import find_matrices
from podium.workers import Policy
from tests.unit.workers.tiny import TINY


def rates(config: OptimConfig, steps: int) -> list[float]:
    return [config.learning_rate(step) for step in range(steps)]


def test_warm_up_rises_to_the_peak_and_stays_there() -> None:
    assert rates(OptimConfig(lr=1.0, warmup_steps=4), 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_and_cosine_reach_zero_at_the_end_and_stay_there() -> None:
    linear = rates(EndingOptim(lr=1.0, lr_schedule="linear", warmup_steps=1, total_steps=5), 8)
    assert linear == [1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0, 0.0]
    cosine = rates(EndingOptim(lr=2.0, lr_schedule="cosine", total_steps=4), 6)
    assert cosine == pytest.approx([2.0, 1 + math.sqrt(0.5), 1.0, 1 - math.sqrt(0.5), 0.0, 0.0])


def test_a_schedule_may_begin_later() -> None:
    linear = EndingOptim(lr=1.0, lr_schedule="linear", warmup_steps=2, total_steps=8, first_step=3)
    assert rates(linear, 9) == pytest.approx([0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 2 / 3, 1 / 3, 0.0])
    assert rates(EndingOptim(lr=1.0, warmup_steps=2, total_steps=9, first_step=1), 5) == [0.5, 0.5, 1.0, 1.0, 1.0]
    with pytest.raises(ConfigError, match=r"warmup_steps = 5 is not below the 5 optimizer steps"):
        EndingOptim(lr_schedule="linear", warmup_steps=5, total_steps=8, first_step=3)


def test_a_schedule_that_ends_must_know_where() -> None:
    with pytest.raises(ConfigError, match=r"warmup_steps = 5 is not below the 5 optimizer steps"):
        EndingOptim(lr_schedule="linear", warmup_steps=5, total_steps=5)
    with pytest.raises(ConfigError, match=r"falls to 0 at the end of a run"):
        Policy(TINY, OptimConfig(lr_schedule="linear"))


def test_weight_decay_spares_norms() -> None:
    optim = OptimConfig(lr=0.5, weight_decay=0.1)
    engine = TrainEngine(load_model(TINY), optim=optim, parallel=ParallelConfig(), device=torch.device("cpu"))
    model, optimizer = engine.model, engine.optimizer
    assert optimizer is not None
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 0.95 if parameter.dim() >= 2 else 1.0
        assert torch.allclose(parameter, before[name] * factor), name


@pytest.mark.parametrize(
    ("kind", "fields", "others"),
    [
        ("llama", {}, ""),
        ("qwen2", {}, ""),
        ("gpt2", {}, ""),
        ("gemma3_text", {}, ""),
        ("cohere", {"use_qk_norm": True}, "q_norm.weight k_norm.weight"),
        ("gpt_oss", {}, "experts.gate_up_proj_bias experts.down_proj_bias"),
        ("recurrent_gemma", {}, "rg_lru.input_gate_bias rg_lru.recurrent_gate_bias"),
        ("kimi_linear", {}, "forget_gate.A_log"),
        ("mamba", {}, "mixer.A_log"),
        ("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1}, "mamba.A_log"),
        (
            "zamba",
            {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
            "mamba.A_log mamba.D mamba.dt_proj_bias",
        ),
        ("qwen3_next", {}, ""),
        ("inkling_text", {}, ""),  # its embedding is an InklingNormedEmbedding
        ("roberta-prelayernorm", {"is_decoder": True}, ""),
    ],
)
def test_norms_biases_vectors_and_state_spaces_do_not_decay_whatever_their_dimensions(
    kind: str, fields: dict[str, Any], others: str
) -> None:
    settings = transformers.AutoConfig.for_model(kind, num_hidden_layers=4, **fields)
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(settings)
    matrices = find_matrices(model)
    spared = {
        ".".join(name.split(".")[-2:]) for name, p in model.named_parameters() if p.dim() > 1 and p not in matrices
    }
    assert spared == set(others.split())
    assert all(parameter.dim() > 1 for parameter in matrices)


def test_a_linear_layer_in_a_norm_and_a_linear_layer_with_one_output_decay() -> None:
    norm = torch.nn.LayerNorm([2, 8])
    norm.scale = torch.nn.Linear(8, 8)  # as where a norm depends on another input
    modules = {"norm": norm, "head": torch.nn.Linear(8, 1), "k_norm": torch.nn.Linear(8, 8)}
    modules["pre_norm1"] = torch.nn.ParameterDict({"weight": torch.ones(2, 8)})
    model = torch.nn.ModuleDict(modules)
    names = [name for name, parameter in model.named_parameters() if parameter in find_matrices(model)]
    assert names == ["norm.scale.weight", "head.weight", "k_norm.weight"]
