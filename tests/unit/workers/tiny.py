"""A tiny model and recorded batches for the tests of the workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from podium.algorithms import loss_weights
from podium.data import Batch, Jagged
from podium.models import LoraConfig, ModelConfig

ALPHABET = "0123456789+="
SHAPE: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": True,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # so that predictions differ from token to token
}
TINY = ModelConfig(config=SHAPE, tokenizer=f"chars:{ALPHABET}", seed=3)
ADAPTED = replace(TINY, lora=LoraConfig(rank=4, alpha=8.0))
LENGTHS = (5, 9, 30, 2, 17, 12, 23, 3)
PROMPTS = (11, 5)
RESTS = (7, 1, 12, 12, 3, 9, 20, 1)


def tokens(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> tuple[Jagged, Tensor]:
    """Random tokens and a mask over the latter part of each row."""
    generator = torch.Generator().manual_seed(seed)
    rows = Jagged.from_rows([torch.randint(4, 16, (length,), generator=generator) for length in lengths])
    mask = torch.cat([torch.arange(length) >= max(1, length // 3) for length in lengths])
    return rows, mask


def grouped(prompts: tuple[int, ...] = PROMPTS, rests: tuple[int, ...] = RESTS, seed: int = 0) -> tuple[Jagged, Tensor]:
    """As :func:`tokens`: prompts of these lengths, and after each of them four rows of sampled tokens."""
    generator = torch.Generator().manual_seed(seed)
    texts = [torch.randint(4, 16, (length,), generator=generator) for length in prompts]
    rows = [
        torch.cat([texts[number // 4], torch.randint(4, 16, (length,), generator=generator)])
        for number, length in enumerate(rests)
    ]
    mask = torch.cat([torch.arange(len(row)) >= prompts[number // 4] for number, row in enumerate(rows)])
    return Jagged.from_rows(rows), mask


def recorded(lengths: tuple[int, ...] | None = LENGTHS, seed: int = 0, **meta: Any) -> Batch:
    """Completions as a rollout leaves them, with advantages, returns and weights. None as lengths means groups."""
    rows, mask = tokens(lengths, seed) if lengths else grouped(seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)

    def column(spread: float, shift: float = 0.0) -> Jagged:
        return rows.like((torch.randn(len(mask), generator=generator) * spread + shift) * mask)

    columns: Mapping[str, Any] = {
        "tokens": rows,
        "loss_mask": rows.like(mask),
        "advantages": column(1.0),
        "returns": column(1.0, 0.5),
        "values": column(0.1),
        "rollout_logprobs": column(0.1, -2.5),
        "ref_logprobs": column(0.1, -2.5),
        "old_logprobs": column(0.1, -2.5),
        "loss_weights": rows.like(loss_weights(mask, rows.offsets)),
    }
    return Batch(columns, {"temperature": 1.0, **meta})


def oracle_logprobs(model: torch.nn.Module, row: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of each token of one row given those before it; 0 for the first."""
    with torch.no_grad():
        logits = model(row[None]).logits[0, :-1].float() / temperature
    picked = torch.log_softmax(logits, -1).gather(1, row[1:, None])[:, 0]
    return torch.cat([torch.zeros(1), picked])
