from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from podium.algorithms import TokenLoss
from podium.data import Batch
from podium.models import ModelConfig
from podium.training import OptimConfig, ParallelConfig, StepResult, TrainEngine
from podium.training.optimizer import LossScale
from podium.training.scoring import score_tokens
from podium.workers import Critic, Policy
from tests.unit.training.test_train_engine import make_engine
from tests.unit.workers.tiny import ADAPTED, TINY, recorded

MILLION = 1e-6  # the weight of a token in a step of a million tokens
STILL = OptimConfig(lr=0.0, grad_clip=0.0)


def weigh(batch: Batch, weight: float) -> Batch:
    mask = batch.jagged("loss_mask")
    return batch.with_columns({"loss_weights": mask.like(mask.values * weight)})


def step(engine: TrainEngine, batch: Batch, added: float = 0.0, factor: float = 1.0) -> StepResult:
    def compute(micro: object) -> TokenLoss:
        logprobs = score_tokens(engine.model, batch, micro).logprobs  # type: ignore[arg-type]
        logprobs.register_hook(lambda gradient: gradient * factor)
        return TokenLoss(added - logprobs)

    return engine.step(batch, compute)


def gradient(engine: TrainEngine) -> Tensor:
    return torch.cat([part.flatten() for part in engine.parallel.gradients()])


@pytest.mark.everyday("model0-1e-06-padded", "model1-1e-06-packed")
@pytest.mark.parametrize(
    ("model", "weight", "batching"),
    [(TINY, MILLION, "padded"), (TINY, MILLION, "packed"), (ADAPTED, MILLION, "padded"), (TINY, 1e3, "padded")],
)
def test_gradients_of_float16_are_those_of_float32(model: ModelConfig, weight: float, batching: str) -> None:
    exact, half = (
        make_engine(STILL, model, precision=precision, batching=batching) for precision in ("float32", "float16")
    )
    batch = weigh(recorded(), weight)
    expected, result = step(exact, batch), step(half, batch)
    assert torch.cosine_similarity(gradient(exact), gradient(half), dim=0) > 0.999
    lost = (gradient(half) == 0) & (gradient(exact) != 0)
    assert float(lost.float().mean()) < 0.001
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=0.01)
    assert (result.skipped, half.skipped_count) == (False, 0)


def test_gradients_are_clipped_by_their_own_norm() -> None:
    engine = make_engine(OptimConfig(lr=0.0, grad_clip=0.5), precision="float16")
    assert step(engine, recorded()).grad_norm > 0.5
    assert float(gradient(engine).norm()) == pytest.approx(0.5, rel=1e-3)


def test_an_overflow_lowers_the_scale_and_loses_no_step() -> None:
    engine, batch = make_engine(precision="float16"), weigh(recorded(), 1e3)
    assert not step(engine, batch).skipped
    assert 1.0 < engine.loss_scale.value < 2.0**16
    assert (engine.step_count, engine.skipped_count) == (1, 0)


@pytest.mark.parametrize(("added", "factor"), [(math.nan, 1.0), (0.0, math.inf), (0.0, math.nan)])
def test_what_is_not_finite_by_itself_is_skipped_and_counted(added: float, factor: float) -> None:
    engine = make_engine(precision="float16")
    before = [parameter.detach().clone() for parameter in engine.model.parameters()]
    assert step(engine, recorded(), added, factor).skipped
    assert (engine.step_count, engine.skipped_count, engine.loss_scale.value) == (1, 1, 2.0**16)
    assert all(torch.equal(a, b) for a, b in zip(before, engine.model.parameters(), strict=True))


def test_a_scale_grows_after_many_steps_and_is_one_in_other_precisions() -> None:
    scale = LossScale(torch.float16)
    assert scale.lower()
    for _ in range(50):
        scale.count_step()
    assert (scale.value, scale.steps) == (2.0**15, 0)
    for _ in range(2000):
        scale.count_step()
    assert scale.value == 2.0**24
    plain = LossScale(torch.bfloat16)
    plain.count_step()
    assert (plain.value, plain.lower(), plain.is_used) == (1.0, False, False)


@pytest.mark.parametrize("kind", [Policy, Critic])
def test_a_checkpoint_keeps_the_scale(tmp_path: Path, kind: type[Policy | Critic]) -> None:
    half, optim, batch = ParallelConfig(precision="float16"), OptimConfig(lr=3e-3), recorded()
    worker = kind(TINY, optim, half)
    worker.update(weigh(batch, 1e3))
    scale = worker.engine.loss_scale.value
    assert scale < 2.0**16
    worker.save(str(tmp_path))
    expected = [worker.update(batch) for _ in range(2)]
    resumed = kind(TINY, optim, half)
    resumed.load(str(tmp_path))
    assert (resumed.engine.loss_scale.value, resumed.engine.loss_scale.steps) == (scale, 1)
    assert [resumed.update(batch) for _ in range(2)] == expected
    assert expected[0]["policy/loss_scale" if kind is Policy else "value/loss_scale"] == scale
    exact = kind(TINY, optim)
    exact.load(str(tmp_path))  # a run may go on in another precision
    exact.save(str(tmp_path / "exact"))
    half_again = kind(TINY, optim, half)
    half_again.load(str(tmp_path / "exact"))
    assert half_again.engine.loss_scale.value == 2.0**16
