"""Rows that share their prompts in a forward pass give what they give alone. A fault there is found at the start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from podium.algorithms import TokenLoss
from podium.data import Batch, Jagged
from podium.models import LoraConfig, load_model
from podium.models.adapters import with_adapters
from podium.training import ParallelConfig, TrainEngine, shared_prompts, varlen
from podium.training.config import OptimConfig
from podium.training.micro_batches import cut, plan_shared
from podium.training.row_isolation import interference, may_share_prompts
from podium.training.scoring import score_tokens
from podium.training.shared_prompts import SharedPrompts, attend_shared, share_prompts
from podium.training.varlen import Bounds, _flash
from tests.unit.training.families import APART, LONGROPE, make
from tests.unit.workers.tiny import PROMPTS, RESTS, TINY, grouped, oracle_logprobs, recorded

CPU = torch.device("cpu")


def scored(model: torch.nn.Module, batch: Batch, budget: int, *, share: bool) -> tuple[Tensor, list[Tensor]]:
    """Log-probabilities of all tokens, and the gradients of their weighted sum."""
    logprobs = torch.zeros(len(batch.jagged("tokens").values))
    model.zero_grad()
    for micro in cut(batch, budget, packed=False, share=share, columns=("advantages",)):
        assert isinstance(micro.packed, SharedPrompts) == share
        found = score_tokens(model, batch, micro).logprobs
        (found * micro.columns["advantages"]).sum().backward()
        logprobs[micro.index] = found.detach()
    return logprobs, [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.each_value
@pytest.mark.parametrize("budget", [1000, 30])
@pytest.mark.parametrize("family", APART)
def test_rows_that_share_prompts_give_what_they_give_alone(family: str, budget: int) -> None:
    model, batch = make(family), recorded(None)
    logprobs, gradients = scored(model, batch, budget, share=True)
    alone = torch.cat([oracle_logprobs(model, row) for row in batch.jagged("tokens").unbind()])
    assert torch.allclose(logprobs, alone * batch.jagged("loss_mask").values, atol=1e-5)
    _, wanted = scored(model, batch, 1000, share=False)
    for own, other in zip(gradients, wanted, strict=True):
        assert torch.allclose(own, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


def test_long_rows_attend_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = make("gemma3_text"), recorded(None)
    wanted, expected = scored(model, batch, 1000, share=True)
    monkeypatch.setattr(shared_prompts, "_QUERIES", 4)
    logprobs, gradients = scored(model, batch, 1000, share=True)
    assert torch.allclose(logprobs, wanted, atol=1e-5)
    for own, other in zip(gradients, expected, strict=True):
        assert torch.allclose(own, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


@pytest.mark.parametrize(("prompts", "rests"), [((6, 6), RESTS), ((6, 6), (5,) * 8), ((1, 9), (1,) * 8)])
def test_prompts_and_rests_of_one_length_need_no_padding(prompts: tuple[int, ...], rests: tuple[int, ...]) -> None:
    model, (rows, mask) = load_model(TINY), grouped(prompts, rests)
    batch = Batch({"tokens": rows, "loss_mask": rows.like(mask), "advantages": rows.like(torch.randn(len(mask)))})
    logprobs, gradients = scored(model, batch, 1000, share=True)
    wanted, expected = scored(model, batch, 1000, share=False)
    assert torch.allclose(logprobs, wanted, atol=1e-5)
    for own, other in zip(gradients, expected, strict=True):
        assert torch.allclose(own, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


def test_groups_stay_together_where_they_fit() -> None:
    group = [0, 1, 0, 1, 1]
    assert plan_shared([10, 4], [5, 3, 2, 8, 1], group, 100) == [[0, 2, 3, 1, 4]]
    assert plan_shared([10, 4], [5, 3, 2, 8, 1], group, 17) == [[0, 2], [3, 1, 4]]
    assert plan_shared([10, 4], [5, 3, 2, 8, 1], group, 14) == [[0], [2], [3], [1, 4]]


def test_a_micro_batch_holds_each_prompt_once() -> None:
    batch = recorded(None)
    (micro,) = cut(batch, 1000, packed=False, share=True)
    assert micro.input_ids.numel() == sum(PROMPTS) + sum(RESTS) - len(RESTS)
    assert torch.equal(micro.input_ids.flatten()[micro.select], batch.jagged("tokens").values[micro.index - 1])
    assert torch.equal(micro.targets, batch.jagged("tokens").values[micro.index])


@pytest.mark.parametrize("packed", [False, True])
def test_rows_that_would_spare_little_share_nothing(packed: bool) -> None:
    rows, mask = grouped((1, 1), (30,) * 8)
    batch = Batch({"tokens": rows, "loss_mask": rows.like(mask)})
    assert not any(isinstance(micro.packed, SharedPrompts) for micro in cut(batch, 100, packed=packed, share=True))
    (micro,) = cut(recorded(), 1000, packed=packed, share=True)
    assert not isinstance(micro.packed, SharedPrompts)


def spoil_group(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda q, k, v, rows, *others: attend(q, k, v, rows._replace(group=rows.group.flip(0)), *others)


def spoil_mask(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda q, k, v, rows, *others: attend(q, k, v, rows._replace(queries=rows.queries + 1), *others)


def forget_prompt(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def without(q: Tensor, k: Tensor, v: Tensor, rows: SharedPrompts, *others: Any) -> Tensor:
        keys = rows.keys.clone()
        keys[:, : rows.prompts.shape[1] - 1] = shared_prompts._FAR
        return attend(q, k, v, rows._replace(keys=keys), *others)

    return without


def see_other_prompts(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def with_others(q: Tensor, k: Tensor, v: Tensor, rows: SharedPrompts, *others: Any) -> Tensor:
        return attend(q, k, v + 1e-9 * v[:, :, :1], rows, *others)  # far below rounding

    return with_others


@pytest.mark.parametrize("spoil", [spoil_group, spoil_mask, forget_prompt, see_other_prompts])
def test_the_proof_finds_attention_that_mixes_rows(
    spoil: Callable[[Callable[..., Tensor]], Callable[..., Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(TINY)
    assert interference(model, CPU, torch.float32, share=True) == ""
    monkeypatch.setattr(varlen, "attend_shared", spoil(attend_shared))
    assert interference(model, CPU, torch.float32, share=True) != ""
    assert not may_share_prompts(model, ParallelConfig(), "padded", CPU, torch.float32)


@pytest.mark.parametrize("family", [*APART, "lfm2", "mamba", "bloom", "gemma2", "gpt_oss", "llama4_text"])
def test_only_models_whose_rows_can_share_do(family: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert (interference(make(family, dtype=dtype), CPU, dtype, share=True) == "") == (family in APART)


def test_models_that_turn_with_their_length_or_have_few_positions_share_nothing() -> None:
    turning = make("phi3", **{name: value for name, value in LONGROPE.items() if name != "model_type"})
    assert not may_share_prompts(turning, ParallelConfig(), "padded", CPU, torch.float32)
    assert not may_share_prompts(make("gpt2", n_positions=6), ParallelConfig(), "padded", CPU, torch.float32)
    for config in (ParallelConfig(batching="padded"), ParallelConfig(batching="packed")):
        assert not may_share_prompts(load_model(TINY), config, "padded", CPU, torch.float32)


@pytest.mark.parametrize("dropout", [False, True])
def test_noise_is_drawn_for_each_row_of_its_own(dropout: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_adapters(load_model(TINY), LoraConfig(rank=2, dropout=0.1 if dropout else 0.0), 0)
    engine = TrainEngine(model, optim=OptimConfig(lr=1e-2), parallel=ParallelConfig(), device=CPU)
    batch, shared = recorded(None), list[bool]()

    def compute(micro: Any) -> TokenLoss:
        shared.append(isinstance(micro.packed, SharedPrompts))
        return TokenLoss(-score_tokens(engine.model, batch, micro).logprobs)

    engine.step(batch, compute)
    assert shared == [not dropout]
    engine.evaluate(batch, lambda micro: {"x": compute(micro).loss_N}, ("x",))
    assert shared == [not dropout, True]


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_kernels_of_variable_length_get_the_same_rows(kv_heads: int, window: int | None) -> None:
    prompts, rests, group = torch.tensor([5, 2]), torch.tensor([3, 0, 6]), torch.tensor([0, 1, 1])
    rows = share_prompts(prompts, rests, group, CPU)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, 16, 8) for heads in (4, kv_heads, kv_heads))

    def kernel(
        query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
        *, scale: float | None = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        assert (max_q, max_k) == (int(cu_seq_q.diff().max()), int(cu_seq_k.diff().max()))
        parts: list[Tensor] = []
        stretches = (
            states.split(at.diff().tolist()) for states, at in ((query, cu_seq_q), (key, cu_seq_k), (value, cu_seq_k))
        )
        for one, its_key, its_value in zip(*stretches, strict=True):
            at = torch.arange(len(its_key))
            distance = at[len(its_key) - len(one) :, None] - at
            mask = (distance >= 0) & (distance <= (window_size[0] if window_size[0] >= 0 else len(at)))
            q, k, v = (part.transpose(0, 1) for part in (one, its_key, its_value))
            out = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)
            parts.append(out.transpose(0, 1))
        return torch.cat(parts)

    keys, values = (states.index_select(2, rows.key_places) for states in (k, v))
    bounds = Bounds(rows.offsets, rows.key_offsets, *rows.longest)
    out = _flash(kernel, q, keys, values, bounds, 0.3, window)
    assert out is not None
    assert torch.allclose(out, attend_shared(q, k, v, rows, 0.0, 0.3, window)[0], atol=1e-6)


def test_a_table_with_padding_has_the_gradients_of_its_tokens() -> None:
    block = shared_prompts._block(torch.tensor([3, 1, 0, 2]), CPU)
    tokens = torch.randn(6, 2, 4, dtype=torch.float64, requires_grad=True)

    def there_and_back(states: Tensor) -> Tensor:
        return shared_prompts._tokens(shared_prompts._table(states, block) ** 2, block)

    assert torch.equal(there_and_back(tokens), tokens**2)
    assert torch.autograd.gradcheck(there_and_back, (tokens,))


def test_jagged_rows_of_a_batch_keep_their_order() -> None:
    batch = recorded(None)
    shuffled = batch.take([5, 2, 7, 0, 1, 6, 3, 4])
    found: list[Jagged] = []
    for one in (batch, shuffled):
        engine = TrainEngine(load_model(TINY), optim=None, parallel=ParallelConfig(micro_batch_tokens=40), device=CPU)
        compute = lambda micro, one=one, engine=engine: {"x": score_tokens(engine.model, one, micro).logprobs}  # noqa: E731
        found.append(engine.evaluate(one, compute, ("x",))["x"])
    rows = found[0].unbind()
    for row, other in zip([5, 2, 7, 0, 1, 6, 3, 4], found[1].unbind(), strict=True):
        assert torch.allclose(rows[row], other, atol=1e-5)
