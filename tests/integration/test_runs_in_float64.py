"""Whole runs computed once more in float64, from what was sampled and the papers' formulas: each loss of a policy.

A run of three steps records which tokens were sampled and what they earned. From these and the initial weights alone
the same training is computed again: log-probabilities by plain forward passes of whole rows in float64, advantages,
losses and slopes by the NumPy oracles, AdamW by torch's own. Losses, norms of gradients and final weights must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from podium.algorithms import LOSSES, AlgorithmConfig
from podium.data import Batch
from podium.models import load_model
from podium.telemetry import metrics
from podium.trainer import GRPOConfig, PPOTrainer
from podium.trainer.prompts import row_order
from tests.integration.training import metrics_rows, tiny
from tests.unit.algorithms import loss_oracles, oracles
from tests.unit.algorithms.oracles import LossRow
from tests.unit.algorithms.test_loss_formulas import CASES

STEPS, KL = 3, 0.1
EVERYDAY = {"gspo"}
KEPT = ("tokens", "loss_mask", "rollout_logprobs", "rewards", "group")
LOSSES_HERE = [name for name in LOSSES if not LOSSES.declaration(name).needs_teacher]  # see test_distillation.py
Oracle = Callable[[list[LossRow]], loss_oracles.Losses]


class Recording(PPOTrainer):
    """A trainer that keeps the rows of each step, in their order."""

    rows: list[Batch]

    def update(self, batch: Batch, step: int, *others: Any, **named: Any) -> list[Mapping[str, float]]:
        self.rows = [*getattr(self, "rows", []), batch.select(*KEPT).fetch()]
        return super().update(batch, step, *others, **named)


def by_letters(completion: str, row: Mapping[str, Any]) -> float:
    return sum(map(ord, completion)) % 7 / 7


def oracle_of(name: str, updates: int) -> Oracle:
    """That of the tests of formulas. A loss that draws does so by the number of earlier optimizer steps."""
    if name == "cross_entropy":
        return lambda rows: loss_oracles.by_token(rows, lambda logp, _old, _advantage: (-logp, -1.0))
    if name != "clip_cov":
        return CASES[name][1]

    def draw(count: int) -> list[int]:
        return torch.randperm(count, generator=torch.Generator().manual_seed(updates)).tolist()

    return lambda rows: oracles.clip_cov(rows, 0.2, 0.0, 0.5, draw, clip=(0.1, 0.2))


def score(model: torch.nn.Module, rows: Batch) -> list[Tensor]:
    """The log-probability of each sampled token, row by row, without packing, padding or chunks."""
    scores: list[Tensor] = []
    for tokens, mask in zip(rows.jagged("tokens").unbind(), rows.jagged("loss_mask").unbind(), strict=True):
        log_p = model(input_ids=tokens[None].long()).logits[0, :-1].log_softmax(-1)
        scores.append(log_p.gather(1, tokens[1:, None].long())[:, 0][mask[1:].bool()])
    return scores


def advantages_of(rows: Batch) -> list[float]:
    """GRPO: the rewards of a group, centered and divided by their deviation."""
    rewards, groups = rows.dense("rewards").double().numpy(), rows.dense("group").numpy()
    peers = [rewards[groups == group] for group in groups]
    return [
        0.0 if np.ptp(other) == 0 else float((reward - other.mean()) / (other.std(ddof=1) + 1e-6))
        for reward, other in zip(rewards, peers, strict=True)
    ]


class Again:
    """The training of a run, in float64."""

    def __init__(self, config: GRPOConfig, loss: str) -> None:
        self.config, self.loss, self.updates = config, loss, 0
        self.algorithm: AlgorithmConfig = config.resolved_algorithm
        self.model, self.reference = (load_model(config.model).double().eval() for _ in range(2))
        optim = config.optim
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=0.0
        )

    def learn(self, rows: Batch, step: int) -> dict[str, float]:
        """Train on the rows of a step, and return the means of its optimizer steps' losses and norms."""
        with torch.no_grad():
            old, ref = score(self.model, rows), score(self.reference, rows)
        mask = [row.bool() for row in rows.jagged("loss_mask").unbind()]
        rollout = [row[m].double() for row, m in zip(rows.jagged("rollout_logprobs").unbind(), mask, strict=True)]
        advantages, parts = advantages_of(rows), self.algorithm.minibatches
        before = rollout if self.algorithm.ratio_to == "rollout" else old
        found: list[tuple[float, float]] = []
        for epoch in range(self.algorithm.epoch_choice.count):
            order = row_order(self.config.run.seed, step, epoch, len(rows)).tolist()
            for part in range(parts):
                chosen = order[len(rows) * part // parts : len(rows) * (part + 1) // parts]
                found.append(self.step(rows.take(chosen), [before[row] for row in chosen], [ref[row] for row in chosen],
                                       [advantages[row] for row in chosen]))  # fmt: skip
        losses, norms = zip(*found, strict=True)
        return {metrics.LOSS: float(np.mean(losses)), metrics.GRAD_NORM: float(np.mean(norms))}

    def step(self, rows: Batch, old: list[Tensor], ref: list[Tensor], advantages: list[float]) -> tuple[float, float]:
        scores = score(self.model, rows)
        named = [
            LossRow(new.detach().numpy(), before.numpy(), np.full(len(new), advantage))
            for new, before, advantage in zip(scores, old, advantages, strict=True)
        ]
        losses, slopes = (np.concatenate(columns) for columns in oracle_of(self.loss, self.updates)(named))
        new_N, ref_N = torch.cat(scores), torch.cat(ref)
        gap = (new_N.detach() - ref_N).numpy()
        losses, slopes = losses + KL * (np.exp(-gap) - 1 + gap), slopes + KL * (1 - np.exp(-gap))
        ones = [np.ones(len(row.logprobs), dtype=np.bool_) for row in named]
        mode, constant = self.algorithm.aggregation_mode, float(self.config.sampling.max_new_tokens)
        weights = oracles.loss_weights(ones, mode, constant)
        self.optimizer.zero_grad()
        (torch.from_numpy(weights * slopes) * new_N).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optim.grad_clip)
        self.optimizer.step()
        self.updates += 1
        return float((weights * losses).sum()), float(norm)


@pytest.mark.parametrize(
    "loss", [name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.exhaustive) for name in LOSSES_HERE]
)
def test_a_run_is_what_the_formulas_say(loss: str, tmp_path: Path) -> None:
    settings = {**(CASES[loss][0] if loss in CASES else {}), "loss": loss}
    algorithm = {**settings, "minibatches": 2, "epochs": 2, "kl_in": "loss", "kl_coef": KL, "correction": "none"}
    config = tiny(
        GRPOConfig, tmp_path, algorithm=algorithm, run={"steps": STEPS}, eval={"items": 0}, batch={"prompts": 6},
        reward={"name": f"{__name__}:by_letters", "processes": 1}, sampling={"max_new_tokens": 5, "n": 4},
        optim={"lr": 1e-2, "eps": 1e-3},
    )  # fmt: skip
    trainer = Recording(config, cluster="inline", show=False)
    trainer.fit()
    again = Again(config, loss)
    for step, (rows, row) in enumerate(zip(trainer.rows, metrics_rows(tmp_path / "runs" / "run"), strict=True), 1):
        expected = again.learn(rows, step)
        assert row[metrics.LOSS] == pytest.approx(expected[metrics.LOSS], rel=1e-4, abs=2e-6)
        assert row[metrics.GRAD_NORM] == pytest.approx(expected[metrics.GRAD_NORM], rel=1e-3)
    assert again.updates == 4 * STEPS
    trained = load_model(config.model.__class__(path=str(tmp_path / "runs" / "run" / "model"))).state_dict()
    start = load_model(config.model).state_dict()
    for name, tensor in again.model.state_dict().items():
        torch.testing.assert_close(trained[name].double(), tensor, atol=2e-5, rtol=1e-4)
        assert not torch.equal(trained[name], start[name]) or "norm" in name
