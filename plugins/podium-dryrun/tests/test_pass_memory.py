"""What a pass over tensors without elements counts is what a real pass holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from podium.algorithms import AlgorithmConfig
from podium.data import Batch, Jagged, fields
from podium.models import LoraConfig, ModelConfig, load_model
from podium.models.adapters import with_adapters
from podium.models.loading import checkpoint_layers, lay_out
from podium.models.value_head import add_value_head
from podium.training.micro_batches import MicroBatch, cut
from podium.training.scoring import score_tokens
from podium_dryrun.pass_memory import PassMemory, count_pass

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
CONFIG = ModelConfig(config=LLAMA, tokenizer="chars:0123456789")
EMBEDDING = 512 * 64 * 4


def rows(prompt: int = 20, rest: int = 30, count: int = 4) -> tuple[Batch, MicroBatch]:
    tokens = Jagged.from_rows([torch.arange(prompt + rest) for _ in range(count)])
    mask = torch.cat([torch.arange(prompt + rest) >= prompt for _ in range(count)])
    batch = Batch({fields.TOKENS: tokens, fields.LOSS_MASK: tokens.like(mask)})
    (micro,) = cut(batch, 10**9, packed=False, share=True)
    return batch, micro


def count(change: Callable[[Any], nn.Module | None] = lambda model: None, rest: int = 30, **options: Any) -> PassMemory:
    outline = lay_out(CONFIG)
    with torch.device("meta"):
        changed = change(outline)
    return count_pass(outline if changed is None else changed, rows(rest=rest)[1], torch.float32, **options)


def saved_bytes(model: nn.Module) -> int:
    """The bytes that autograd keeps for the backward pass of a real pass, beside parameters and buffers."""
    known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    batch, micro = rows()
    kept = dict[int, int]()
    alive = list[Tensor]()

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor.detach())  # so that no address comes twice
        return tensor

    model.eval()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        score_tokens(model, batch, micro, entropy=True)
    return sum(kept.values())


@pytest.mark.parametrize("adapted", [False, True])
def test_activations_are_what_a_real_pass_saves(adapted: bool) -> None:
    model: Any = load_model(CONFIG)
    lora = LoraConfig(rank=4)
    if adapted:
        model = with_adapters(model, lora, 0)
    counted = count((lambda outline: with_adapters(outline, lora, 0)) if adapted else lambda outline: None)
    assert counted.activations == pytest.approx(saved_bytes(model), rel=0.03)


def test_the_gradient_of_a_tied_embedding_waits_for_its_other_half() -> None:
    """The output layer's gradient comes first. With adapters the embedding has none."""
    assert count(rest=2).working >= EMBEDDING
    assert count(lambda outline: with_adapters(outline, LoraConfig(rank=4), 0), rest=2).working < EMBEDDING


def test_checkpointed_layers_hold_their_inputs_alone() -> None:
    inputs = 3 * (20 + 4 * 1) * 64 * 4  # three layers, a shared prompt, and what follows it
    checkpointed, whole = count(checkpoint_layers, rest=2), count(rest=2)
    assert inputs < checkpointed.activations < whole.activations / 3
    assert checkpointed.working > whole.working, "a layer's activations come again in the backward pass"


def test_a_pass_without_scores_makes_no_logits() -> None:
    _, micro = rows()
    logits = len(micro.select) * 512 * 4
    assert count().activations - count(scores=False).activations > 0.9 * logits


def test_small_blocks_count_beside_large_ones_that_come_later() -> None:
    """The gradient of the embedding is made when activations are gone, whose blocks malloc keeps."""
    returned, kept = count(), count(kept_bytes=EMBEDDING)
    assert kept.activations == returned.activations
    assert kept.working > returned.working


def test_bfloat16_halves_the_activations_of_products() -> None:
    outline, (_, micro) = lay_out(CONFIG), rows()
    half = count_pass(outline, micro, torch.bfloat16)
    assert half.activations < 0.85 * count().activations


@pytest.mark.everyday("values1", "values3")
@pytest.mark.parametrize(
    "values",
    [
        {"options": {"score_centering": 256}},
        {"options": {"score_centering": 256}, "loss": "clip_cov"},  # which reads the figures of a minibatch
        {"loss": "teacher_kl", "options": {"teacher": "model", "teacher_top_k": 256}},
        {"loss": "gspo", "correction": "truncate", "options": {"score_centering": 256}},
    ],
)
def test_what_a_loss_reads_and_computes_is_counted(values: dict[str, Any]) -> None:
    plain, counted = (count(algorithm=AlgorithmConfig(**part).resolve()) for part in ({}, values))
    assert sum(counted) - sum(plain) > 4 * 30 * 256 * 8, "a column of so many tokens at least"


def test_a_value_head_on_the_policy_is_counted() -> None:
    algorithm = AlgorithmConfig(advantage="gae", options={"critic_trunk": "shared"}).resolve()
    counted = count(lambda model: add_value_head(model), algorithm=algorithm)
    assert sum(counted) > sum(count(algorithm=AlgorithmConfig().resolve()))
