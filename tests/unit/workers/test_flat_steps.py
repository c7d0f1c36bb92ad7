"""Steps that teach nothing: all advantages are 0, or all rows are left out."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from podium.algorithms import AlgorithmConfig, LossInputs, TokenLoss
from podium.data import Batch
from podium.models import LoraConfig
from podium.training import OptimConfig, ParallelConfig, TrainEngine
from podium.workers import Critic, Policy
from tests.unit.workers.tiny import TINY, recorded

OPTIM = OptimConfig(lr=3e-3, weight_decay=0.1, grad_clip=0.5)
HERE = __name__


def fresh() -> Batch:
    """Completions of the policy itself, whose weights are those of one optimizer step a batch."""
    return recorded().drop("loss_weights").drop("old_logprobs")


def without_advantages(batch: Batch) -> Batch:
    advantages = batch.jagged("advantages")
    return batch.with_columns({"advantages": advantages.like(torch.zeros_like(advantages.values))})


def constant_loss(inputs: LossInputs, config: AlgorithmConfig) -> TokenLoss:
    return TokenLoss(-inputs.logprobs_N)


@pytest.mark.parametrize("kind", [Policy, Critic])
def test_rows_that_are_all_left_out_move_no_parameter(kind: type[Policy | Critic]) -> None:
    """AdamW would go on by the averages of earlier gradients, and by weight decay."""
    worker, batch = kind(TINY, OPTIM), recorded().drop("loss_weights")
    everything = {"left_out": torch.ones(8, dtype=torch.bool)}
    worker.update(batch)
    before, state = parameters_of(worker), {name: value.clone() for name, value in worker._state().items()}
    worker.update(batch.with_columns(everything))
    assert all(map(torch.equal, before, parameters_of(worker)))
    assert all(torch.equal(state[name], value) for name, value in worker._state().items() if name.startswith("optim"))
    assert worker.progress().steps == 2
    worker.update(batch)
    assert not any(map(torch.equal, before, parameters_of(worker)))


def parameters_of(worker: Policy | Critic) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in worker.model.parameters()]


class Passes:
    """Counts the passes over a worker's model."""

    def __init__(self, worker: Policy) -> None:
        self.rows = list[int]()
        worker.model.register_forward_hook(lambda *_: self.rows.append(0))


ONLY_ADVANTAGES: dict[str, dict[str, Any]] = {
    "ppo_clip": {},
    "gspo": {"loss": "gspo"},
    "clip_cov": {"loss": "clip_cov"},
    "gmpo": {"loss": "gmpo"},
    "dual": {"options": {"dual_clip": 3.0}},
    "of a module": {"loss": "podium.algorithms.losses:ppo_clip"},  # as anybody's own
}


@pytest.mark.everyday("ppo_clip-float32-float32", "ppo_clip-bfloat16-float16", "gspo-float32-float32")
@pytest.mark.parametrize(
    ("name", "dtype", "precision"),
    list(product(ONLY_ADVANTAGES, ("float32", "bfloat16"), ("float32", "float16"))),
)
def test_a_flat_step_leads_to_the_same_bits_without_passes(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: Any, precision: Any
) -> None:
    """All advantages are 0, so that AdamW moves by the averages of earlier gradients and by weight decay."""
    model, algorithm = replace(TINY, dtype=dtype), ONLY_ADVANTAGES[name]
    batch, parallel = fresh().drop("rollout_logprobs"), ParallelConfig(precision=precision)
    flat = without_advantages(batch)
    ends, passes = list[list[torch.Tensor]](), list[int]()
    for is_known in (True, False):
        if not is_known:
            monkeypatch.setattr(TrainEngine, "is_flat", lambda *_: False)
        policy = Policy(model, OPTIM, parallel, AlgorithmConfig(**algorithm))
        for rows in (flat, batch):
            policy.update(rows)
        counter = Passes(policy)
        row = policy.update(flat)
        passes.append(len(counter.rows))
        assert (row["loss"], row["policy/grad_norm"], row["policy/skipped_steps"]) == (0.0, 0.0, 0.0)
        for rows in (flat, batch):
            policy.update(rows)
        ends.append([*parameters_of(policy), *policy._state().values()])
    assert all(map(torch.equal, *ends))
    assert passes == [0, 2 if algorithm.get("loss") == "clip_cov" else 1]


def test_a_flat_step_compares_a_few_rows_with_the_generator_before_it_moves() -> None:
    batch, policy = without_advantages(fresh()), Policy(TINY, OPTIM)
    scores = policy.logprobs(batch).jagged("old_logprobs")
    for shift in (0.0, 0.25):
        rollout = scores.like(scores.values + shift)
        policy = Policy(TINY, OPTIM)
        counter = Passes(policy)
        row = policy.update(batch.with_columns({"rollout_logprobs": rollout}))
        assert row["mismatch/mean"] == pytest.approx(shift, abs=1e-6)
        assert row["mismatch/max"] == pytest.approx(shift, abs=1e-6)
        assert len(counter.rows) == 1
        assert "policy/entropy" not in row


@pytest.mark.parametrize(
    "algorithm",
    [
        {"entropy_coef": 0.01},
        {"kl_in": "loss", "kl_coef": 0.1},
        {"kl_in": "reward", "kl_coef": 0.1},
        {"loss": "cross_entropy"},
        {"loss": f"{HERE}:constant_loss"},
    ],
    ids=str,
)
def test_a_step_with_another_term_is_not_flat(algorithm: dict[str, Any]) -> None:
    policy = Policy(TINY, OPTIM, algorithm=AlgorithmConfig(**algorithm))
    assert "policy/entropy" in policy.update(without_advantages(recorded().drop("loss_weights")))


def test_a_step_measures_the_entropy_that_a_coefficient_of_zero_follows() -> None:
    policy = Policy(TINY, OPTIM, algorithm=AlgorithmConfig(entropy_coef={"target": 0.2}))
    batch = without_advantages(fresh()).with_meta(entropy_coef=0.0)
    assert policy.update(batch)["policy/entropy"] > 0


def test_a_step_that_draws_random_numbers_is_not_flat() -> None:
    adapted = replace(TINY, lora=LoraConfig(rank=4, alpha=8.0, dropout=0.5))
    assert "policy/entropy" in Policy(adapted, OPTIM).update(without_advantages(fresh()))
