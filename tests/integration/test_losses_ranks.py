"""Losses and their gradients are those of the papers' formulas, however ranks and micro-batches cut a minibatch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from podium.algorithms import AlgorithmConfig, loss_weights
from podium.data import Batch
from podium.models import load_model
from podium.runtime import Cluster, endpoint, first, shard
from podium.training import OptimConfig, ParallelConfig
from podium.training.config import Strategy
from podium.training.micro_batches import plan
from podium.workers import Policy
from tests.integration.test_workers_ranks import started
from tests.unit.algorithms import loss_oracles, oracles, test_corrections
from tests.unit.algorithms.oracles import LossRow
from tests.unit.workers.tiny import LENGTHS, TINY, recorded

WHOLE, QUARTERS = 1000, 36  # token budgets that cut the recorded rows into 1 and 4 micro-batches on one rank
CUTS = [
    (1, WHOLE, "replicate"),
    (1, QUARTERS, "replicate"),
    (2, WHOLE, "replicate"),
    (2, QUARTERS, "replicate"),
    (2, QUARTERS, "fsdp2"),
]
Oracle = Callable[[list[LossRow]], tuple[list[oracles.Array], list[oracles.Array]]]


class Probe(Policy):
    """A policy that shows the gradient of its last update."""

    @endpoint(dispatch=shard(args=("batch",), balance="tokens"), collect=first())
    def loss_and_gradient(self, batch: Batch, algorithm: AlgorithmConfig) -> tuple[dict[str, float], Tensor]:
        self.algorithm = algorithm
        metrics = super().update(batch)
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        whole = [cast(Any, grad).full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads]
        return metrics, torch.cat([grad.flatten() for grad in whole]).clone()


def draw(count: int) -> list[int]:
    """The random numbers of the first optimizer step."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()


def m2po(rows: list[LossRow]) -> tuple[list[oracles.Array], list[oracles.Array]]:
    """``-r A`` but at the tokens that M2PO leaves out of the whole minibatch; the generator is the old policy."""
    named = [
        {"logprobs": row.logprobs, "old": row.old, "rollout": row.old, "advantages": row.advantages} for row in rows
    ]
    kept = test_corrections.m2po(0.004)(named)
    losses = [-np.exp(row.logprobs - row.old) * row.advantages * mask for row, mask in zip(rows, kept, strict=True)]
    return losses, losses


CASES: dict[str, tuple[AlgorithmConfig, Oracle, str]] = {
    "clip_cov": (  # the first, because it draws the random numbers of the first optimizer step
        AlgorithmConfig(
            loss="clip_cov", clip_low=0.1, clip_high=0.1, options={"cov_share": 0.2, "cov_low": 0.2, "cov_high": 3.0}
        ),
        lambda rows: oracles.clip_cov(rows, 0.2, 0.2, 3.0, draw, clip=(0.1, 0.1)),
        "policy/cov_fraction",
    ),
    "ppo_clip": (
        AlgorithmConfig(clip_low=0.05, clip_high=0.05),
        lambda rows: oracles.ppo_clip(rows, 0.05, 0.05),
        "policy/clip_fraction",
    ),
    "gspo": (
        AlgorithmConfig(loss="gspo", clip_low=0.02, clip_high=0.02, aggregation="sequence-mean"),
        lambda rows: oracles.gspo(rows, 0.02, 0.02),
        "policy/clip_fraction",
    ),
    "gmpo": (
        AlgorithmConfig(loss="gmpo", clip_low=0.05, clip_high=0.05),
        lambda rows: loss_oracles.gmpo(rows, 0.05, 0.05),
        "policy/clip_fraction",
    ),
    "kl_cov": (
        AlgorithmConfig(loss="kl_cov", options={"kl_cov_share": 0.2}),
        lambda rows: loss_oracles.kl_cov(rows, 0.2, 1.0),
        "policy/cov_fraction",
    ),
    "m2po": (
        AlgorithmConfig(correction=("bypass", "m2po"), clip_low=1.0, clip_high=1e9, options={"m2_budget": 0.004}),
        m2po,
        "mismatch/left_out",
    ),
    "dppo_kl": (
        AlgorithmConfig(loss="dppo_kl", clip_low=1e-4, clip_high=1e-4),
        lambda rows: loss_oracles.dppo(rows, 1e-4, 1e-4, "kl"),
        "policy/clip_fraction",
    ),
}


@pytest.fixture(scope="module")
def cluster(preloaded: Cluster) -> Cluster:
    return preloaded


def minibatch() -> Batch:
    """Rows with one advantage each, sampled by a policy that has moved since."""
    batch = recorded().select("tokens", "loss_mask")
    model, tokens, mask = load_model(TINY), batch.jagged("tokens"), batch.jagged("loss_mask")
    with torch.no_grad():
        logprobs = torch.cat([logprobs_of(model, row) for row in tokens.unbind()])
    generator = torch.Generator().manual_seed(5)
    old = logprobs + 0.1 * torch.randn(len(logprobs), generator=generator)
    advantages_B = torch.randn(len(batch), generator=generator)
    advantages = torch.repeat_interleave(advantages_B, tokens.lengths)
    return batch.with_columns(
        old_logprobs=tokens.like(old * mask.values),
        rollout_logprobs=tokens.like(old * mask.values),
        advantages=tokens.like(advantages * mask.values),
    )


def logprobs_of(model: torch.nn.Module, row: Tensor) -> Tensor:
    """Of each token given those before it, with gradient; 0 for the first."""
    distribution = torch.log_softmax(model(row[None]).logits[0, :-1].float(), -1)
    return torch.cat([torch.zeros(1), distribution.gather(1, row[1:, None])[:, 0]])


@functools.cache
def expected(name: str) -> tuple[float, Tensor]:
    """Loss and gradient of a case from the oracle's numbers; only the model itself is torch's."""
    algorithm, oracle, _ = CASES[name]
    batch = minibatch()
    model, mask = load_model(TINY), batch.jagged("loss_mask")
    columns = [batch.jagged(name).unbind() for name in ("tokens", "loss_mask", "old_logprobs", "advantages")]
    rows: list[LossRow] = []
    graphs: list[Tensor] = []
    for tokens, chosen, old, advantages in zip(*columns, strict=True):
        graphs.append(logprobs_of(model, tokens)[chosen])
        values = (column.detach().double().numpy() for column in (graphs[-1], old[chosen], advantages[chosen]))
        rows.append(LossRow(*values))
    losses, slopes = oracle(rows)
    weights = loss_weights(mask.values, mask.offsets, algorithm.aggregation_mode)[mask.values].double().numpy()
    slope = torch.from_numpy(weights * np.concatenate(slopes)).float()
    (torch.cat(graphs) * slope).sum().backward()
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return float((weights * np.concatenate(losses)).sum()), torch.cat(grads)


@pytest.mark.everyday("1-36-replicate", "2-36-replicate")
@pytest.mark.parametrize(("ranks", "budget", "strategy"), CUTS)
def test_losses_and_gradients_are_those_of_the_formulas(
    cluster: Cluster, ranks: int, budget: int, strategy: Strategy
) -> None:
    assert len(plan([length - 1 for length in LENGTHS], QUARTERS, packed=False)) == 4
    batch = minibatch()
    parallel = ParallelConfig(micro_batch_tokens=budget, strategy=strategy)
    probe = Probe.bind(TINY, OptimConfig(lr=0.0, grad_clip=0.0), parallel)  # whose weights stay as they are
    with started(cluster, ranks, policy=probe) as group:
        for name, (algorithm, _, share) in CASES.items():
            loss, gradient = expected(name)
            metrics, found = group.policy.loss_and_gradient(batch, algorithm)
            assert 0 < metrics[share] < 1, name  # both sides of what the loss decides take part
            assert metrics["loss"] == pytest.approx(loss, abs=1e-6), name
            assert float((found - gradient).abs().max()) < 1e-6 * max(1.0, float(gradient.abs().max())), name
