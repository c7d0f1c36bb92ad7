from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from podium.algorithms import TokenLoss
from podium.data import Batch
from podium.errors import ConfigError, DataError, PodiumError
from podium.models import load_model
from podium.models.config import ModelConfig
from podium.training import OptimConfig, ParallelConfig, StepResult, TrainEngine
from podium.training.micro_batches import MicroBatch
from podium.training.row_isolation import choose_batching
from podium.training.scoring import score_tokens
from tests.unit.workers.tiny import ADAPTED, TINY, oracle_logprobs, recorded


def make_engine(optim: OptimConfig | None = None, model: ModelConfig = TINY, **parallel: Any) -> TrainEngine:
    return TrainEngine(
        load_model(model),
        optim=optim or OptimConfig(lr=1e-2),
        parallel=ParallelConfig(**parallel),
        device=torch.device("cpu"),
    )


def sft_step(engine: TrainEngine, batch: Batch, scale: float = 1.0) -> StepResult:
    def compute(micro: MicroBatch) -> TokenLoss:
        return TokenLoss(-scale * score_tokens(engine.model, batch, micro).logprobs)

    return engine.step(batch, compute)


def nll(engine: TrainEngine, batch: Batch) -> Any:
    return lambda micro: TokenLoss(-score_tokens(engine.model, batch, micro).logprobs)


def flat_gradient(engine: TrainEngine) -> Tensor:
    return torch.cat([part.flatten().float() for part in engine.parallel.gradients()])


@pytest.mark.each_value
@pytest.mark.parametrize("model", [TINY, ADAPTED], ids=["full", "adapted"])
@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_gradients_of_several_minibatches_add_up(precision: str, model: ModelConfig) -> None:
    still, batch = OptimConfig(lr=0.0, grad_clip=0.0), recorded()
    parts = [batch.take(range(3)), batch.take(range(3, 5)), batch.take(range(5, 8))]
    whole, apart = (make_engine(still, model, precision=precision) for _ in range(2))
    result = sft_step(whole, batch)
    accumulated = [apart.accumulate(part, nll(apart, part)) for part in parts]
    assert apart.waiting_count == 3
    applied = apart.apply()
    assert sum(one.loss for one in accumulated) == pytest.approx(result.loss, rel=1e-5)
    exact = precision == "float32"
    assert applied.grad_norm == pytest.approx(result.grad_norm, rel=1e-5 if exact else 1e-2)
    assert torch.allclose(flat_gradient(apart), flat_gradient(whole), atol=1e-6 if exact else 1e-3)
    assert (apart.step_count, apart.waiting_count) == (1, 0)


def test_the_same_minibatch_twice_is_twice_its_gradient_and_a_weight_is_a_factor() -> None:
    still, batch = OptimConfig(lr=0.0, grad_clip=0.0), recorded()
    norms: list[float] = []
    for weights in ((1.0,), (1.0, 1.0), (0.5, 1.5), (2.0,), (1.0, -1.0)):
        engine = make_engine(still)
        for weight in weights:
            engine.accumulate(batch, nll(engine, batch), weight=weight)
        norms.append(engine.apply().grad_norm)
    assert norms == pytest.approx([norms[0], *[2 * norms[0]] * 3, 0.0], rel=1e-5, abs=1e-6)


def test_an_overflow_computes_all_minibatches_again() -> None:
    still, batch = OptimConfig(lr=0.0, grad_clip=0.0), recorded()
    exact, half = make_engine(still), make_engine(still, precision="float16")
    for engine in (exact, half):
        for weight in (1.0, 1e3):
            engine.accumulate(batch, nll(engine, batch), weight=weight)
    norms = [engine.apply().grad_norm for engine in (exact, half)]
    assert norms[1] == pytest.approx(norms[0], rel=0.01)
    assert half.loss_scale.value < 2.0**16


def test_what_waits_is_dropped_with_a_minibatch_that_fails_and_survives_a_rest() -> None:
    batch = recorded()
    expected = make_engine()
    sft_step(expected, batch)
    engine = make_engine(offload="all")
    engine.accumulate(batch, nll(engine, batch))
    with pytest.raises(ZeroDivisionError):
        engine.accumulate(batch, lambda micro: TokenLoss(torch.ones(1) / (1 // 0)))
    assert engine.waiting_count == 0
    with pytest.raises(PodiumError, match="no gradient waits"):
        engine.apply()
    engine.accumulate(batch, nll(engine, batch))
    engine.rest()
    engine.evaluate(batch, lambda micro: {"logprobs": score_tokens(engine.model, batch, micro).logprobs}, ["logprobs"])
    engine.apply()
    engine.wake()
    for mine, theirs in zip(engine.model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    "parallel",
    [{"micro_batch_tokens": 30}, {"batching": "packed"}, {"batching": "packed", "micro_batch_tokens": 30}],
    ids=["padded-30", "packed", "packed-30"],
)
def test_steps_do_not_depend_on_how_the_batch_is_cut(parallel: dict[str, Any]) -> None:
    whole, parts, batch = make_engine(), make_engine(**parallel), recorded()
    for _ in range(5):
        one, other = sft_step(whole, batch), sft_step(parts, batch)
        assert other.loss == pytest.approx(one.loss, abs=1e-5)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)


def test_a_step_is_adamw_on_the_weighted_sum() -> None:
    engine, batch, oracle = make_engine(OptimConfig(lr=1e-2, grad_clip=0.5)), recorded(), load_model(TINY)
    optimizer = torch.optim.AdamW(oracle.parameters(), lr=1e-2, weight_decay=0.0)
    weights = batch.jagged("loss_weights")
    for _ in range(3):
        terms: list[Tensor] = []
        for row, weight in zip(batch.jagged("tokens").unbind(), weights.unbind(), strict=True):
            logits = oracle(row[None]).logits[0, :-1]
            terms.append((weight[1:] * torch.nn.functional.cross_entropy(logits, row[1:], reduction="none")).sum())
        loss = torch.stack(terms).sum()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(oracle.parameters(), 0.5)
        optimizer.step()
        result = sft_step(engine, batch)
        assert result.loss == pytest.approx(float(loss.detach()), abs=1e-5)
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-4)
        assert result.grad_norm > 0.5  # so that clipping took part


@pytest.mark.each_value
@pytest.mark.parametrize("batching", ["padded", "packed"])
@pytest.mark.parametrize("model", [TINY, ADAPTED], ids=["plain", "lora"])
def test_gradient_checkpointing_changes_nothing(model: ModelConfig, batching: str) -> None:
    plain = make_engine(model=model)
    checkpointed = make_engine(model=replace(model, gradient_checkpointing=True), batching=batching)
    for _ in range(3):
        assert sft_step(checkpointed, recorded()).loss == pytest.approx(sft_step(plain, recorded()).loss, abs=1e-6)


def test_a_gradient_that_is_not_finite_skips_the_step_and_is_counted() -> None:
    engine = make_engine()
    before = [p.detach().clone() for p in engine.model.parameters()]
    result = sft_step(engine, recorded(), scale=math.inf)
    assert result.skipped
    assert not math.isfinite(result.grad_norm)
    assert (engine.step_count, engine.skipped_count) == (1, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, engine.model.parameters(), strict=True))
    assert not sft_step(engine, recorded()).skipped  # and the next step is a good one
    assert engine.skipped_count == 1


def test_a_loss_that_is_not_finite_skips_the_step_although_its_gradient_is() -> None:
    engine, batch = make_engine(), recorded()
    before = [p.detach().clone() for p in engine.model.parameters()]
    lost = engine.step(batch, lambda micro: TokenLoss(math.nan - score_tokens(engine.model, batch, micro).logprobs))
    assert lost.skipped and math.isfinite(lost.grad_norm)
    assert engine.skipped_count == 1
    assert all(torch.equal(a, b) for a, b in zip(before, engine.model.parameters(), strict=True))


def test_parameters_that_are_not_finite_are_named_at_the_start() -> None:
    model = load_model(TINY)
    model.get_parameter("model.layers.1.mlp.up_proj.weight").data[0, 0] = math.nan
    with pytest.raises(ConfigError, match=r"its parameter model\.layers\.1\.mlp\.up_proj\.weight is not finite"):
        choose_batching(model, ParallelConfig(), torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("batching", ["padded", "packed"])
def test_half_precision_products_stay_near_full_ones(batching: str) -> None:
    full, half = make_engine(), make_engine(precision="bfloat16", batching=batching)
    for _ in range(3):
        assert sft_step(half, recorded()).loss == pytest.approx(sft_step(full, recorded()).loss, abs=0.05)
    assert all(p.dtype == torch.float32 for p in half.model.parameters())


def test_a_model_held_in_half_precision_learns() -> None:
    engine = make_engine(model=replace(TINY, dtype="bfloat16"))
    losses = [sft_step(engine, recorded()).loss for _ in range(5)]
    assert losses[-1] < losses[0] - 0.1


def test_the_learning_rate_follows_the_step() -> None:
    engine = make_engine(OptimConfig(lr=1.0, warmup_steps=2))
    assert [sft_step(engine, recorded()).learning_rate for _ in range(3)] == [0.5, 1.0, 1.0]


def test_an_empty_batch_is_a_step_of_loss_zero() -> None:
    engine = make_engine()
    before = [p.detach().clone() for p in engine.model.parameters()]
    result = sft_step(engine, recorded().slice(0, 0))
    assert (result.loss, result.grad_norm, result.metrics) == (0.0, 0.0, {})
    assert all(torch.equal(a, b) for a, b in zip(before, engine.model.parameters(), strict=True))


def test_metrics_that_come_and_go_between_micro_batches_are_refused() -> None:
    engine, batch = make_engine(micro_batch_tokens=30), recorded()

    def compute(micro: MicroBatch) -> TokenLoss:
        logprobs = score_tokens(engine.model, batch, micro).logprobs
        return TokenLoss(-logprobs, {f"rows/{len(micro.offsets) - 1}": logprobs.detach()})

    with pytest.raises(DataError, match=r"the loss reports rows/1, rows/.* in some micro-batches and not in others"):
        engine.step(batch, compute)


def test_evaluation_fills_token_columns_and_leaves_no_gradient() -> None:
    engine, batch = make_engine(micro_batch_tokens=30), recorded()

    def compute(micro: MicroBatch) -> dict[str, Tensor]:
        return {"logprobs": score_tokens(engine.model, batch, micro).logprobs}

    out = engine.evaluate(batch, compute, ("logprobs",))
    mask = batch.jagged("loss_mask").values
    alone = torch.cat([oracle_logprobs(engine.model, row) for row in batch.jagged("tokens").unbind()]) * mask
    assert torch.allclose(out["logprobs"].values, alone, atol=1e-5)
    assert all(p.grad is None for p in engine.model.parameters())


def test_wrong_settings() -> None:
    with pytest.raises(ConfigError, match=r"torch\.distributed"):
        make_engine(strategy="fsdp2")
    with pytest.raises(PodiumError, match="only evaluates"):
        engine = TrainEngine(load_model(TINY), optim=None, parallel=ParallelConfig(), device=torch.device("cpu"))
        sft_step(engine, recorded())
