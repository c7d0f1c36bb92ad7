"""How many tokens a forward pass takes where the configuration leaves the choice to Podium."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from podium.training import ParallelConfig, micro_batch_size
from podium.training.micro_batch_size import choose_micro_batch_tokens

GIB = 2**30
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "qwen2.5-3b": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16},
    "qwen2.5-7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
}


def outline(shape: str) -> nn.Module:
    config = AutoConfig.for_model("qwen2", num_key_value_heads=2, vocab_size=151_936, **SHAPES[shape])
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def choose(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, gib: float | None, ranks: int = 1, **settings: Any
) -> int:
    monkeypatch.setattr(micro_batch_size, "total_memory_bytes", lambda _: None if gib is None else int(gib * GIB))
    trains = settings.pop("trains", True)
    return choose_micro_batch_tokens(
        model, ParallelConfig(**settings), torch.device("cpu"), torch.bfloat16, trains=trains, world_size=ranks
    )


@pytest.mark.parametrize(
    ("shape", "gib", "ranks", "expected"),
    [
        ("qwen2.5-0.5b", 80, 1, 16_384),
        ("qwen2.5-0.5b", 24, 1, 4096),
        ("qwen2.5-3b", 80, 1, 4096),  # its state takes 55 GiB
        ("qwen2.5-3b", 141, 1, 7168),
        ("qwen2.5-7b", 80, 1, 4096),  # it has no room at all, and fails as before
        ("qwen2.5-7b", 80, 8, 4096),
        ("qwen2.5-7b", 141, 8, 7168),
    ],
)
def test_an_accelerator_takes_what_a_third_of_its_memory_beside_the_model_has_room_for(
    monkeypatch: pytest.MonkeyPatch, shape: str, gib: float, ranks: int, expected: int
) -> None:
    strategy = "replicate" if ranks == 1 else "fsdp2"
    assert choose(monkeypatch, outline(shape), gib, ranks, strategy=strategy) == expected


def test_a_cpu_takes_4096_tokens_and_what_is_set_wins_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    model = outline("qwen2.5-0.5b")
    assert choose(monkeypatch, model, None) == 4096
    for gib in (None, 80.0):
        assert choose(monkeypatch, model, gib, micro_batch_tokens=100) == 100


def test_passes_without_gradients_take_most_and_unknown_models_least(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(monkeypatch, outline("qwen2.5-7b"), 80.0, trains=False) == 16_384
    assert choose(monkeypatch, nn.Linear(2, 2), 80.0) == 4096


def test_what_is_frozen_needs_neither_gradient_nor_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = outline("qwen2.5-3b")
    before = choose(monkeypatch, model, 80.0)
    model.requires_grad_(False)
    assert choose(monkeypatch, model, 80.0) > before
