from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from podium.data import Batch, Jagged
from podium.errors import DataError
from podium.models import ModelConfig, load_model
from podium.models.loading import plain_model
from podium.rollout.sampling import KeptSet
from podium.training.micro_batches import cut
from podium.training.output_layer import TokenScores
from podium.training.scoring import kept_tokens, score_tokens
from tests.unit.workers.tiny import TINY, oracle_logprobs, recorded

GEMMA = replace(
    TINY,
    config={
        "model_type": "gemma2",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 8,
        "max_position_embeddings": 64,
        "final_logit_softcapping": 1.0,
        "attn_logit_softcapping": None,
    },
)
LLAMA = replace(
    TINY,
    config={**{k: v for k, v in TINY.config.items() if k != "model_type"}, "model_type": "llama"},
)


def scores(model: torch.nn.Module, batch: Batch, budget: int, *, packed: bool, entropy: bool = False) -> TokenScores:
    logprobs = torch.zeros(len(batch.jagged("tokens").values))
    entropies = torch.zeros_like(logprobs)
    for micro in cut(batch, budget, packed=packed):
        with torch.no_grad():
            out = score_tokens(model, batch, micro, entropy=entropy)
        logprobs[micro.index] = out.logprobs
        if out.entropy is not None:
            entropies[micro.index] = out.entropy
    return TokenScores(logprobs, entropies if entropy else None)


@pytest.mark.each_value
@pytest.mark.parametrize("config", [TINY, GEMMA, LLAMA], ids=["qwen3", "gemma2", "llama"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("packed", "budget"), [(False, 1000), (False, 25), (True, 1000), (True, 25)])
def test_padded_and_packed_rows_score_as_each_row_alone(
    config: ModelConfig, temperature: float, packed: bool, budget: int
) -> None:
    model, batch = load_model(config), recorded(temperature=temperature)
    mask = batch.jagged("loss_mask").values
    alone = torch.cat([oracle_logprobs(model, row, temperature) for row in batch.jagged("tokens").unbind()]) * mask
    got = scores(model, batch, budget, packed=packed).logprobs
    assert torch.allclose(got, alone, atol=1e-5)
    expected = "sdpa" if plain_model(model)._supports_sdpa else "eager"  # Gemma 2 has it up to transformers 5.23
    assert plain_model(model).config._attn_implementation == expected


def test_packed_gradients_are_those_of_padded_rows() -> None:
    grads = []
    for packed in (False, True):
        model, batch = load_model(TINY), recorded()
        for micro in cut(batch, 1000, packed=packed):
            score_tokens(model, batch, micro).logprobs.sum().backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        assert a is not None
        assert b is not None
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-4 * float(a.abs().max()))


def test_entropy_is_that_of_the_distribution_and_has_its_gradient() -> None:
    model, batch = load_model(TINY), recorded((9,), temperature=0.7)
    (micro,) = cut(batch, 100, packed=False)
    out = score_tokens(model, batch, micro, entropy=True, entropy_grad=True)
    logits = model(micro.input_ids).logits[0][micro.select] / 0.7
    expected = torch.distributions.Categorical(logits=logits).entropy()
    assert out.entropy is not None
    assert torch.allclose(out.entropy, expected, atol=1e-5)
    weight = next(model.parameters())
    mine, theirs = (torch.autograd.grad(entropy.sum(), weight)[0] for entropy in (out.entropy, expected))
    assert torch.allclose(mine, theirs, atol=1e-5)
    plain = score_tokens(model, batch, micro, entropy=True).entropy
    assert plain is not None
    assert not plain.requires_grad
    assert torch.allclose(plain, expected, atol=1e-5)


def with_kept(batch: Batch, kept: list[KeptSet]) -> Batch:
    """With the sets of each row's sampled tokens."""
    mask = batch.jagged("loss_mask")
    sizes = torch.zeros(len(mask.values), dtype=torch.int64)
    sizes[mask.values] = torch.cat([row.offsets.diff() for row in kept])
    return batch.with_columns(kept_sizes=mask.like(sizes), kept_ids=Jagged.from_rows([row.ids for row in kept]))


def test_kept_sets_restrict_the_distribution() -> None:
    model, batch = load_model(TINY), recorded((9, 6), temperature=0.7)
    generator = torch.Generator().manual_seed(5)
    rows, mask = batch.jagged("tokens"), batch.jagged("loss_mask")
    kept = []
    for row, chosen in zip(rows.unbind(), mask.unbind(), strict=True):
        sets = [torch.cat([t[None], torch.randint(0, 4, (2,), generator=generator).unique()]) for t in row[chosen]]
        kept.append(KeptSet(torch.cat(sets), torch.tensor([0, *map(len, sets)]).cumsum(0)))
    batch = with_kept(batch, kept)
    got = scores(model, batch, 1000, packed=False, entropy=True)
    assert got.entropy is not None
    for row in range(2):
        logits = model(rows.row(row)[None]).logits[0].detach() / 0.7
        for place, position in enumerate(mask.row(row).nonzero()[:, 0].tolist()):
            ids = kept[row].at(place)
            probabilities = logits[position - 1][ids].softmax(0)
            at = int(rows.offsets[row]) + position
            assert float(got.logprobs[at]) == pytest.approx(float(probabilities[0].log()), abs=1e-5)
            entropy = -(probabilities * probabilities.log()).sum()
            assert float(got.entropy[at]) == pytest.approx(float(entropy), abs=1e-5)


def test_kept_sets_go_with_their_tokens_where_fewer_carry_loss() -> None:
    batch = with_kept(recorded((9,)), [KeptSet(torch.arange(12), torch.arange(7) * 2)])
    mask = batch.jagged("loss_mask")
    places = mask.values.nonzero()[:, 0]
    fewer = mask.like(torch.zeros_like(mask.values).index_fill(0, places[[1, 4]], True))
    (micro,) = cut(batch.with_columns(loss_mask=fewer), 100, packed=False)
    kept = kept_tokens(batch, micro)
    assert kept is not None
    assert kept.ids.tolist() == [2, 3, 8, 9]
    assert kept.token.tolist() == [0, 0, 1, 1]


def test_a_token_with_loss_and_without_a_kept_set_is_an_error() -> None:
    batch = with_kept(recorded((9,)), [KeptSet(torch.arange(6), torch.arange(7))])
    mask = batch.jagged("loss_mask")
    (micro,) = cut(batch.with_columns(loss_mask=mask.like(torch.arange(9) > 0)), 100, packed=False)
    with pytest.raises(DataError, match=r"[1-9] of \d+ tokens with loss have no kept set"):
        kept_tokens(batch, micro)


def test_kept_gradient_stays_within_the_set() -> None:
    model, batch = load_model(replace(TINY, config={**TINY.config, "tie_word_embeddings": False})), recorded((3,))
    (micro,) = cut(batch, 100, packed=False)
    ids = torch.tensor([int(micro.targets[0]), 1, int(micro.targets[1]), 1])
    kept = with_kept(batch, [KeptSet(ids, torch.tensor([0, 2, 4]))])
    score_tokens(model, kept, micro).logprobs.sum().backward()
    head = model.get_output_embeddings()
    assert head is not None
    touched = head.weight.grad.abs().sum(1).nonzero()[:, 0].tolist()
    assert set(touched) == {1, *micro.targets.tolist()}
