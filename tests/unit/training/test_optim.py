from __future__ import annotations

import math

import pytest
import torch

from podium.errors import ConfigError
from podium.models import load_model
from podium.training import OptimConfig, ParallelConfig, TrainEngine
from podium.training.config import EndingOptim
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
