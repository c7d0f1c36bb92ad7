"""Scores by chunks are those of whole logits, in their values and in every gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from podium.data import Batch
from podium.data.masks import mask_columns, pack_ids, unpack_masks
from podium.errors import ConfigError, DataError
from podium.models import load_model
from podium.rollout.sampling import KeptSet
from podium.training import output_layer
from podium.training.micro_batches import MicroBatch, cut
from podium.training.output_layer import KeptTokens, LogitsTail, MaskedTokens, TokenScores, logits_tail, widen_output
from podium.training.scoring import kept_tokens, run_model, score_tokens, token_masks
from tests.unit.training.families import make
from tests.unit.training.test_scoring import with_kept
from tests.unit.workers.tiny import ADAPTED, recorded

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": False},
    "gemma2": {"head_dim": 8, "sliding_window": 8, "final_logit_softcapping": 2.0, "attn_logit_softcapping": None},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 3.0},
    "gpt_neox": {"attention_bias": True},
    "phi": {},  # its output layer has a bias
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_layer, "_CHUNK", 48 * 7)
    monkeypatch.setattr(output_layer, "_FEWEST", 1)
    monkeypatch.setattr(output_layer, "_KEPT", 0)  # the backward pass computes everything again


def plain(
    model: nn.Module, batch: Batch, micro: MicroBatch, kept: KeptTokens | None, masked: MaskedTokens | None
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies from whole logits in float64."""
    log_p = distributions(model, batch, micro, kept, masked)
    entropy = -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(-1)
    return log_p.gather(1, micro.targets[:, None])[:, 0], entropy


def squared(
    model: nn.Module, batch: Batch, micro: MicroBatch, kept: KeptTokens | None, masked: MaskedTokens | None
) -> Tensor:
    """Sums of squared probabilities from whole logits in float64."""
    return distributions(model, batch, micro, kept, masked).exp().square().sum(-1)


def distributions(
    model: nn.Module, batch: Batch, micro: MicroBatch, kept: KeptTokens | None, masked: MaskedTokens | None
) -> Tensor:
    """Log-probabilities of all ids, ``[K, V]``, from whole logits in float64."""
    logits = run_model(model, micro).logits[0].double() / batch.meta["temperature"]
    if (text_ids := batch.meta.get("text_ids")) is not None:
        logits[:, [*text_ids[1], *range(text_ids[0], logits.shape[1])]] = -torch.inf
    if kept is not None:
        inside = torch.zeros_like(logits, dtype=torch.bool)
        inside[kept.token, kept.ids] = True
        logits = logits.masked_fill(~inside, -torch.inf)
    for token, number in enumerate([] if masked is None else masked.number.tolist()):
        ids = unpack_masks(masked.masks[number - 1 : number], logits.shape[1])[0] if masked and number else None
        logits[token] = logits[token] if ids is None else logits[token].masked_fill(~ids, -torch.inf)
    return logits.log_softmax(-1)


def sets_of(batch: Batch) -> Batch:
    """With sets that hold the sampled token and up to two others."""
    kept, generator = list[KeptSet](), torch.Generator().manual_seed(5)
    for row, chosen in zip(batch.jagged("tokens").unbind(), batch.jagged("loss_mask").unbind(), strict=True):
        sets = [torch.cat([t[None], torch.randint(0, 4, (2,), generator=generator).unique()]) for t in row[chosen]]
        kept.append(KeptSet(torch.cat(sets), torch.tensor([0, *map(len, sets)]).cumsum(0)))
    return with_kept(batch, kept)


def masks_of(batch: Batch) -> Batch:
    """With masks for two thirds of the tokens: some of one id, some of many, shared by tokens and rows."""
    generator, masks = torch.Generator().manual_seed(6), list[list[bytes]]()
    for row in batch.jagged("tokens").unbind():
        row_masks = list[bytes]()
        for at, token in enumerate(row.tolist()):
            others = torch.randint(0, 48, (0 if at % 3 else 20,), generator=generator).tolist()
            row_masks.append(b"" if at % 3 == 1 else pack_ids([token, *others], 48))
        masks.append(row_masks)
    return batch.with_columns(mask_columns(masks, batch.jagged("tokens")))


def compare(model: nn.Module, *, with_sets: bool | str, entropy_grad: bool, **meta: Any) -> None:
    batch = recorded(temperature=0.7, **meta)
    if with_sets:
        batch = masks_of(batch) if with_sets == "masked" else sets_of(batch)
    (micro,) = cut(batch, 1000, packed=False)
    model = model.eval()
    kept, masked = kept_tokens(batch, micro), token_masks(batch, micro)
    assert (masked is not None) == (with_sets == "masked")
    directions = torch.randn(2, len(micro.targets), generator=torch.Generator().manual_seed(1))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def gradients(logprobs: Tensor, entropy: Tensor) -> list[Tensor | None]:
        loss = (directions[0] * logprobs).sum() + ((directions[1] * entropy).sum() if entropy_grad else 0.0)
        return list(torch.autograd.grad(loss, trained, allow_unused=True))

    expected = plain(model, batch, micro, kept, masked)
    found = score_tokens(model, batch, micro, entropy=True, entropy_grad=entropy_grad)
    assert found.entropy is not None
    assert found.entropy.requires_grad == entropy_grad
    for ours, theirs in zip(found[:2], expected, strict=True):
        assert ours is not None
        assert torch.allclose(
            ours.double(), theirs, rtol=1e-5, atol=1e-6 * max(1.0, float(theirs.detach().abs().max()))
        )
    squares = score_tokens(model, batch, micro, squares=True).squares
    assert squares is not None
    assert not squares.requires_grad
    assert torch.allclose(squares.double(), squared(model, batch, micro, kept, masked), rtol=1e-5, atol=1e-6)
    if not with_sets:
        best = score_tokens(model, batch, micro, best=True).best
        logits = run_model(model, micro).logits[0].double() / batch.meta["temperature"]
        if (text_ids := batch.meta.get("text_ids")) is not None:
            logits[:, [*text_ids[1], *range(text_ids[0], logits.shape[1])]] = -torch.inf
        log_p = logits.log_softmax(-1)
        assert best is not None
        assert not best.requires_grad
        assert torch.allclose(best.double(), log_p.amax(-1), rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(gradients(found.logprobs, found.entropy), gradients(*expected), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert float((ours - theirs).norm()) <= 1e-6 * max(1.0, float(theirs.norm())) * 3


@pytest.mark.each_value
@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("with_sets", [False, True, "masked"], ids=["all", "kept", "masked"])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_score_as_whole_logits(family: str, with_sets: bool | str, entropy_grad: bool) -> None:
    compare(make(family, **FAMILIES[family]), with_sets=with_sets, entropy_grad=entropy_grad)


@pytest.mark.each_value
@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("with_sets", [False, True, "masked"], ids=["all", "kept", "masked"])
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "cohere"])
def test_what_is_kept_of_small_ones_gives_the_same(
    family: str, with_sets: bool | str, entropy_grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_layer, "_KEPT", 1 << 20)
    compare(make(family, **FAMILIES[family]), with_sets=with_sets, entropy_grad=entropy_grad)


@pytest.mark.each_value
@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("kept", [0, 1 << 20], ids=["again", "kept"])
@pytest.mark.parametrize("text_ids", [(40, ()), (48, (1, 17)), (18, (0, 16))])
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "phi"])
def test_ids_that_stand_for_no_text_have_no_share_and_no_gradient(
    family: str, text_ids: tuple[int, tuple[int, ...]], kept: int, entropy_grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_layer, "_KEPT", kept)
    model = make(family, **FAMILIES[family])
    compare(model, with_sets=False, entropy_grad=entropy_grad, text_ids=text_ids)


@pytest.mark.parametrize(
    ("with_sets", "text_ids"),
    [(False, None), (True, None), (False, (16, (0, 3))), ("masked", (46, (0, 3)))],
    ids=["all", "kept", "holes", "masked"],
)
def test_an_output_layer_with_adapters(with_sets: bool | str, text_ids: tuple[int, tuple[int, ...]] | None) -> None:
    assert ADAPTED.lora is not None
    untied = {**ADAPTED.config, "tie_word_embeddings": False}
    config = replace(ADAPTED, config=untied, lora=replace(ADAPTED.lora, targets=("lm_head", "q_proj")))
    model = load_model(config)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    compare(model, with_sets=with_sets, entropy_grad=True, text_ids=text_ids)


@pytest.mark.each_value
@pytest.mark.parametrize("vocabulary", [16, 17, 48, 301])  # the values that are tried have a zero if it is odd
@pytest.mark.parametrize(
    ("family", "tail"),
    [
        ("qwen3", LogitsTail()),
        ("gemma2", LogitsTail(1.0, 2.0)),
        ("cohere", LogitsTail(0.25)),
        ("granite", LogitsTail(1 / 3.0)),
    ],
)
def test_what_follows_the_output_layer_is_found(family: str, tail: LogitsTail, vocabulary: int) -> None:
    found = logits_tail(make(family, **FAMILIES[family], vocab_size=vocabulary))
    assert found is not None
    assert found.cap == tail.cap
    assert found.scale == pytest.approx(tail.scale, rel=1e-6)


def test_a_model_with_a_way_of_its_own_is_run_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("qwen3", **FAMILIES["qwen3"])
    usual = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = usual(*args, **kwargs)
        out.logits = out.logits + out.logits.square() * 0.1
        return out

    monkeypatch.setattr(model, "forward", forward)
    assert logits_tail(model) is None
    compare(model, with_sets=False, entropy_grad=True)


def test_a_scale_that_is_trained_is_no_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("qwen3", **FAMILIES["qwen3"])
    model.scale = nn.Parameter(torch.tensor(0.5))
    usual = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = usual(*args, **kwargs)
        out.logits = out.logits * model.scale
        return out

    monkeypatch.setattr(model, "forward", forward)
    assert logits_tail(model) is None
    compare(model, with_sets=False, entropy_grad=True)  # of all gradients, that of the scale too


def test_a_model_that_looks_up_words_among_its_logits_is_run_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("qwen3", **FAMILIES["qwen3"])
    usual = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = usual(*args, **kwargs)
        out.logits = out.logits - out.logits[..., 47:]
        out.logits[..., 47] += 1.0
        return out

    monkeypatch.setattr(model, "forward", forward)
    assert logits_tail(model) is None
    compare(model, with_sets=False, entropy_grad=True)


def _padding_banned(logits: Tensor) -> Tensor:
    logits[..., 40:] = -100.0
    return logits


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_padding_banned, id="padding of the vocabulary"),
        pytest.param(lambda logits: logits / logits.std(-1, keepdim=True), id="normalization"),
        pytest.param(lambda logits: logits.clamp(-500.0, 500.0), id="limits"),
    ],
)
def test_a_change_that_few_words_or_tokens_show_is_seen(change: Callable[[Tensor], Tensor]) -> None:
    model = make("qwen3", **FAMILIES["qwen3"])
    usual = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = usual(*args, **kwargs)
        out.logits = change(out.logits)
        return out

    model.forward = forward
    assert logits_tail(model) is None
    compare(model, with_sets=False, entropy_grad=True)


def test_dropout_of_logits_is_seen_and_the_search_leaves_no_trace() -> None:
    model = make("qwen3", **FAMILIES["qwen3"]).eval()
    usual = model.forward
    model.get_submodule("model.layers.0").train()  # modes of a model's parts may differ

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = usual(*args, **kwargs)
        out.logits = nn.functional.dropout(out.logits, 0.1, model.training)
        return out

    model.forward = forward
    modes, state = [module.training for module in model.modules()], torch.get_rng_state()
    assert logits_tail(model) is None
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)


def test_a_forward_function_that_a_library_gave_the_output_layer_is_run_and_kept() -> None:
    model = make("llama", **FAMILIES["llama"])
    head: Any = model.get_output_embeddings()
    usual = head.forward

    def given(hidden: Tensor) -> Tensor:
        return usual(hidden) + hidden.mean(-1, keepdim=True) * torch.arange(48.0)

    head.forward = given
    compare(model, with_sets=False, entropy_grad=True)
    assert head.forward is given


@pytest.mark.parametrize("with_sets", [False, True, "masked"], ids=["all", "kept", "masked"])
@pytest.mark.parametrize("layer", [nn.Linear(4, 9), nn.Sequential(nn.Linear(4, 9))], ids=["linear", "other"])
def test_no_tokens_give_gradients_of_zero(layer: nn.Module, with_sets: bool) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    kept = KeptTokens(none, none) if with_sets else None
    hidden = torch.ones(0, 4, requires_grad=True)
    scores = output_layer.output_scores(hidden, layer, none, tail=LogitsTail(), kept=kept, entropy=True)
    assert scores.entropy is not None
    assert scores.logprobs.shape == scores.entropy.shape == (0,)
    scores.logprobs.sum().backward()
    for parameter in layer.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()


def test_second_derivatives_are_refused() -> None:
    hidden, layer = torch.randn(5, 4), nn.Linear(4, 9)
    scores = output_layer.output_scores(hidden, layer, torch.ones(5, dtype=torch.int64), tail=LogitsTail())
    (gradient,) = torch.autograd.grad(scores.logprobs.sum(), layer.weight, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        gradient.square().sum().backward()


def test_as_many_targets_as_tokens() -> None:
    with pytest.raises(DataError, match="1 hidden states stand for 0 tokens"):
        output_layer.output_scores(
            torch.ones(1, 4), nn.Linear(4, 9), torch.ones(0, dtype=torch.int64), tail=LogitsTail()
        )


@pytest.mark.parametrize(("kept", "times"), [(0, 2), (1 << 20, 1)])
def test_logits_of_few_tokens_exist_at_a_time(kept: int, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_layer, "_KEPT", kept)
    model, batch = make("llama", **FAMILIES["llama"]), recorded()
    (micro,) = cut(batch, 1000, packed=False)
    sizes = list[int]()
    own = output_layer._logits

    def watched(hidden_CH: Tensor, *others: Any) -> Tensor:
        sizes.append(len(hidden_CH))
        return own(hidden_CH, *others)

    monkeypatch.setattr(output_layer, "_logits", watched)
    scores: TokenScores = score_tokens(model, batch, micro)
    scores.logprobs.sum().backward()
    assert max(sizes) == 7
    assert sum(sizes) == times * len(micro.targets), "once forward, and once again backward where none are kept"


def test_half_precision_computes_and_learns_as_the_model_does() -> None:
    model, batch = make("llama", **FAMILIES["llama"]), recorded(temperature=0.7)
    (micro,) = cut(batch, 1000, packed=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = score_tokens(model, batch, micro)
        expected = plain(model, batch, micro, None, None)[0]
    head = model.get_output_embeddings()
    assert head is not None
    ours, theirs = (torch.autograd.grad(value.sum(), head.weight)[0] for value in (found.logprobs, expected))
    assert torch.allclose(found.logprobs.double(), expected, atol=0.02)
    assert float((ours - theirs).norm() / theirs.norm()) < 0.02
    assert ours.dtype == head.weight.dtype


@pytest.mark.parametrize("kept", [0, 1 << 25])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_output_layer_in_float32_is_that_of_float64_under_bfloat16(
    monkeypatch: pytest.MonkeyPatch, family: str, kept: int
) -> None:
    """Log-probabilities, and the gradients of hidden states and weights, of the hidden states as they are."""
    monkeypatch.setattr(output_layer, "_KEPT", kept)
    model = make(family, **FAMILIES[family])
    layer = cast(nn.Linear, model.get_output_embeddings())
    generator = torch.Generator().manual_seed(3)
    hidden_KH = (3 * torch.randn(9, layer.in_features, generator=generator)).bfloat16().requires_grad_()
    targets_K = torch.randint(layer.out_features, (9,), generator=generator)
    tail = logits_tail(model)
    assert tail is not None
    hidden_64, layer_64 = hidden_KH.detach().double().requires_grad_(), copy.deepcopy(layer).double()
    expected_KV = (tail(layer_64(hidden_64)) / 0.7).log_softmax(-1)
    expected_K = expected_KV.gather(1, targets_K[:, None])[:, 0]

    def score() -> tuple[Tensor, ...]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logprobs_K = output_layer.output_scores(hidden_KH, layer, targets_K, tail=tail, temperature=0.7).logprobs
        return logprobs_K.detach(), *torch.autograd.grad(logprobs_K.sum(), [hidden_KH, layer.weight])

    wanted = (expected_K, *torch.autograd.grad(expected_K.sum(), [hidden_64, layer_64.weight]))
    assert float((score()[0] - expected_K.detach()).abs().max()) > 1e-4, "bfloat16 rounds"
    widen_output(model)
    found = score()
    torch.testing.assert_close(found[0].double(), expected_K.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[1], wanted[1].bfloat16(), rtol=2**-7, atol=1e-6)  # in the data type of the states
    torch.testing.assert_close(found[2].double(), wanted[2], rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("has_tail", [True, False])
def test_scores_of_a_whole_model_come_from_the_layer_in_float32(
    monkeypatch: pytest.MonkeyPatch, has_tail: bool
) -> None:
    """With chunks of logits, and in a model whose own function follows the layer, which sees them all."""
    model, batch = make("llama", **FAMILIES["llama"]), recorded(temperature=0.7)
    if not has_tail:
        monkeypatch.setattr("podium.training.scoring.logits_tail", lambda _model: None)
    (micro,) = cut(batch, 1000, packed=False)
    head, states = cast(nn.Linear, model.get_output_embeddings()), list[Tensor]()
    head.register_forward_pre_hook(lambda _head, args: states.append(args[0].detach()))
    widen_output(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found_K = score_tokens(model, batch, micro).logprobs
    states_KH = states[-1].flatten(0, 1).index_select(0, micro.select).double()
    logits = states_KH @ head.weight.detach().double().T / 0.7
    expected_K = logits.log_softmax(-1).gather(1, micro.targets[:, None])[:, 0]
    torch.testing.assert_close(found_K.double(), expected_K, rtol=1e-6, atol=1e-6)


def test_an_output_layer_with_adapters_is_not_widened() -> None:
    assert ADAPTED.lora is not None
    untied = {**ADAPTED.config, "tie_word_embeddings": False}
    model = load_model(replace(ADAPTED, config=untied, lora=replace(ADAPTED.lora, targets=("lm_head",))))
    with pytest.raises(ConfigError, match=r"parallel\.precision\.output = float32: the output layer is a \w+, not a"):
        widen_output(model)


@pytest.mark.each_value
@pytest.mark.parametrize("has_tail", [True, False])
@pytest.mark.parametrize("kept", [0, 1 << 25])
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "phi"])
def test_log_probabilities_of_chosen_ids_and_the_most_probable_ones(
    monkeypatch: pytest.MonkeyPatch, family: str, kept: int, has_tail: bool
) -> None:
    """With entropies and holes beside them, in their values and in the gradient of every parameter."""
    monkeypatch.setattr(output_layer, "_KEPT", kept)
    model, batch = make(family, **FAMILIES[family]), recorded(temperature=0.7).with_meta(text_ids=(46, (0, 3)))
    if not has_tail:
        monkeypatch.setattr("podium.training.scoring.logits_tail", lambda _model: None)
    (micro,) = cut(batch, 1000, packed=False)
    log_p = distributions(model, batch, micro, None, None)
    best = log_p.detach().topk(5, -1)
    pull_KJ = torch.randn(len(log_p), 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    targets_K = micro.targets[:, None]
    entropy = -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum()
    wanted = (log_p.gather(1, best.indices) * pull_KJ).sum() + log_p.gather(1, targets_K).sum() + entropy
    expected = torch.autograd.grad(wanted, list(model.parameters()))
    chosen = score_tokens(model, batch, micro, entropy=True, entropy_grad=True, chosen_KJ=best.indices)
    assert chosen.chosen is not None and chosen.entropy is not None
    torch.testing.assert_close(chosen.chosen.double(), log_p.detach().gather(1, best.indices), rtol=1e-5, atol=1e-5)
    total = (chosen.chosen * pull_KJ.float()).sum() + chosen.logprobs.sum() + chosen.entropy.sum()
    for found, right in zip(torch.autograd.grad(total, list(model.parameters())), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        top = score_tokens(model, batch, micro, top=5).top
    assert top is not None
    torch.testing.assert_close(top.double(), torch.cat([best.values, best.indices.double()], 1), rtol=1e-5, atol=1e-5)
