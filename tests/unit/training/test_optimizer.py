"""Parameters of bfloat16 learn as those of float32 do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from podium.algorithms import TokenLoss
from podium.errors import ConfigError
from podium.models import load_model
from podium.trainer import GRPOConfig, PPOConfig
from podium.training import OptimConfig, ParallelConfig, TrainEngine
from podium.training.micro_batches import MicroBatch, cut
from podium.training.optimizer import round_stochastically
from podium.training.scoring import score_tokens
from podium.workers import Policy
from podium_dryrun.memory import ModelSize, memory_gib
from tests.integration.training import tiny
from tests.unit.workers.tiny import TINY, recorded

HALF = replace(TINY, dtype="bfloat16")
CPU = torch.device("cpu")


def engine_of(model: Any, optim: OptimConfig, **parallel: Any) -> TrainEngine:
    return TrainEngine(model, optim=optim, parallel=ParallelConfig(**parallel), device=CPU)


def learn(engine: TrainEngine, steps: int = 1) -> None:
    batch = recorded()

    def compute(micro: MicroBatch) -> TokenLoss:
        return TokenLoss(-score_tokens(engine.model, batch, micro).logprobs)

    for _ in range(steps):
        engine.step(batch, compute)


def vector(tensors: Any) -> torch.Tensor:
    parts = [part.full_tensor() if hasattr(part, "full_tensor") else part for part in tensors]
    return torch.cat([part.detach().float().flatten() for part in parts])


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.everyday("False-replicate")
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("master", "strategy"),
    list(product((True, False), ("replicate", "fsdp2"))),
)
def test_small_updates_add_up_as_in_float32(master: bool, strategy: str) -> None:
    optim = OptimConfig(lr=1e-5, master_weights=master)
    half = load_model(HALF)
    full = load_model(TINY)
    full.load_state_dict({name: tensor.float() for name, tensor in half.state_dict().items()})
    start = vector(half.parameters())
    engine = engine_of(half, optim, strategy=strategy)
    learn(engine, 30)
    expected = engine_of(full, optim)
    learn(expected, 30)
    away = vector(expected.model.parameters()) - start
    assert engine.optimizer is not None
    states = [engine.optimizer.state[parameter] for parameter in engine.model.parameters()]
    assert all(state["exp_avg_sq"].dtype == torch.float32 for state in states)
    reached = vector(state["master"] for state in states) if master else vector(engine.model.parameters())
    assert float((reached - start) @ away / (away @ away)) == pytest.approx(1.0, abs=0.1 if master else 0.3)
    if master:
        held = vector(engine.model.parameters())
        assert torch.equal(held, reached.bfloat16().float())


def test_gradients_of_micro_batches_add_up_in_float32() -> None:
    engine = engine_of(load_model(HALF), OptimConfig(lr=0.0, grad_clip=0.0), micro_batch_tokens=20)
    learn(engine)
    twin, batch = load_model(HALF), recorded()
    parameters = list(twin.parameters())
    total = torch.zeros(sum(p.numel() for p in parameters))
    for micro in cut(batch, 20, packed=False, columns=("loss_weights",)):
        loss = -(micro.columns["loss_weights"] * score_tokens(twin, batch, micro).logprobs).sum()
        total += vector(torch.autograd.grad(loss, parameters))
    (gradient,) = engine.parallel.gradients()
    assert gradient.dtype == torch.float32
    assert torch.equal(gradient, total)


@pytest.mark.parametrize("master", [True, False], ids=["masters", "stochastic"])
def test_a_run_in_bfloat16_goes_on_from_a_checkpoint_to_the_bit(tmp_path: Path, master: bool) -> None:
    optim, batch = OptimConfig(lr=1e-3, master_weights=master), recorded()
    whole = Policy(HALF, optim)
    whole.update(batch)
    whole.save(str(tmp_path / "at1"))
    expected = [whole.update(batch) for _ in range(2)]
    resumed = Policy(replace(HALF, seed=77), optim)
    resumed.load(str(tmp_path / "at1"))
    assert [resumed.update(batch) for _ in range(2)] == expected
    assert all(map(torch.equal, resumed.model.parameters(), whole.model.parameters()))


def test_rounding_at_random_keeps_the_mean_and_what_is_exact() -> None:
    values = torch.tensor([1.0, -1.0, 1.001, -1.001, 3e-5, 0.0])
    rounded = torch.stack([round_stochastically(values, seed).float() for seed in range(4000)])
    assert torch.equal(rounded[:, :2], values[:2].expand(4000, 2))
    assert torch.equal(rounded[:, 5], torch.zeros(4000))
    assert torch.allclose(rounded.mean(0), values, rtol=3e-4)
    assert set(rounded[:, 2].tolist()) == {1.0, 1.0078125}
    assert torch.equal(round_stochastically(values, 3), round_stochastically(values, 3))


def test_float16_is_no_type_of_parameters(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.dtype = 'float16': expected .*bfloat16"):
        tiny(GRPOConfig, tmp_path, model={"dtype": "float16"})


def test_a_dry_run_counts_copies_and_sums_in_float32(tmp_path: Path) -> None:
    size = ModelSize(parameters=2**28, trained=2**28, layers=1, hidden=1, key_value_width=1, vocabulary=1)

    def parts(**sections: Any) -> dict[str, float]:
        config = tiny(PPOConfig, tmp_path, parallel={"micro_batch_tokens": 1}, **sections)
        found = memory_gib(config, size, ("policy", "critic"))
        return {name: round(gib, 3) for name, gib in found.items()}

    half = {"weights": 0.5, "optimizer (AdamW)": 2.0, "gradients": 1.0, "critic's gradients": 1.0}
    copied = {"float32 copies": 1.0, "critic with optimizer": 3.5, "copy for a checkpoint": 7.0}
    assert parts(model={"dtype": "bfloat16"}) == {**half, **copied}
    rounded = parts(model={"dtype": "bfloat16"}, optim={"master_weights": False})
    assert rounded == {**half, "critic with optimizer": 2.5, "copy for a checkpoint": 5.0}
