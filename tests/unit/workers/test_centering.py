"""The policy centers scores by what the generator recorded, however its micro-batches are cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from podium.algorithms import AlgorithmConfig
from podium.data import Batch
from podium.models import load_model
from podium.training import OptimConfig, ParallelConfig
from podium.workers import Policy

from .tiny import TINY, recorded

HEAD, CAP = 3, 1.5


def with_top(batch: Batch, seed: int = 5) -> Batch:
    """A generator whose distributions are others than the policy's."""
    tokens, mask = batch.jagged("tokens"), batch.jagged("loss_mask").values
    logq_NV = (2 * torch.randn(len(mask), 16, generator=torch.Generator().manual_seed(seed))).log_softmax(-1)
    best = logq_NV.topk(HEAD)
    logq_N = logq_NV.gather(1, tokens.values[:, None])[:, 0]
    top_N2J = torch.cat([best.values, best.indices.float()], -1) * mask[:, None]
    columns = {"rollout_logprobs": tokens.like(logq_N * mask), "rollout_top": tokens.like(top_N2J)}
    return batch.drop("old_logprobs").with_columns(columns)


def gradient_of(batch: Batch, head: int = HEAD, **parallel: Any) -> tuple[dict[str, float], list[torch.Tensor]]:
    algorithm = AlgorithmConfig(correction="truncate", options={"score_centering": head, "weight_cap": CAP})
    policy = Policy(TINY, OptimConfig(lr=1e-3, grad_clip=0.0), ParallelConfig(**parallel), algorithm)
    row = policy.accumulate(batch)
    return row, [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in policy.model.parameters()]


@pytest.mark.parametrize("lengths", [(5, 9, 30, 2, 17, 12, 23, 3), None], ids=["rows", "shared prompts"])
def test_a_policy_centers_the_scores_of_a_minibatch(lengths: tuple[int, ...] | None) -> None:
    batch = with_top(recorded(lengths))
    cuts = {
        "turned and cut": (batch.take(list(range(len(batch)))[::-1]), {"micro_batch_tokens": 40}),
        "packed": (batch, {"batching": "packed"}),
    }
    plain = gradient_of(batch, 0)[1]
    model = load_model(TINY).double()
    names = ("tokens", "loss_mask", "loss_weights", "advantages", "rollout_top")
    loss = torch.zeros((), dtype=torch.float64)
    for tokens, mask, weight, advantage, top in zip(*(batch.jagged(name).unbind() for name in names), strict=True):
        places = mask.bool().nonzero()[:, 0]
        logp_KV = model(input_ids=tokens[None]).logits[0][places - 1].log_softmax(-1)
        logq_KJ, ids_KJ = top[places].double().chunk(2, -1)
        p_KV, q_KJ = logp_KV.detach().exp(), logq_KJ.exp()
        p_KJ = p_KV.gather(1, ids_KJ.long())
        rho_K = (1 - q_KJ.sum(-1)) / (1 - p_KJ.sum(-1))
        others_KV = rho_K[:, None] * p_KV
        q_KV = others_KV.scatter(1, ids_KJ.long(), q_KJ)  # the whole of the modeled generator
        mass_KV = q_KV * (p_KV / q_KV).clamp(max=CAP)
        scores_K = (mass_KV * logp_KV).sum(-1)
        loss = loss + (weight[places] * advantage[places] * scores_K).sum()
    expected = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    for name, (rows, parallel) in cuts.items():
        row, gradients = gradient_of(rows, **parallel)
        assert 0 < row["mismatch/drift_rest"] < 1 and row["mismatch/drift"] > 0.01, name
        for before, after, right in zip(plain, gradients, expected, strict=True):
            right = torch.zeros_like(after) if right is None else right.float()
            torch.testing.assert_close(
                after - before, right, rtol=1e-3, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}"
            )
