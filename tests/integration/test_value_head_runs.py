"""Runs of PPO whose critic is a value head on the policy, computed once more in float64: see test_runs_in_float64."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from podium.data import Batch
from podium.models import ModelConfig, load_model
from podium.runtime import Cluster
from podium.telemetry import metrics
from podium.trainer import PPOConfig, PPOTrainer
from podium.trainer.prompts import row_order
from tests.integration.training import MODEL, metrics_rows, tiny, train
from tests.unit.algorithms import oracles
from tests.unit.algorithms.oracles import LossRow, Row

STEPS, KL, COEF, VALUE_LR = 3, 0.05, 0.5, 0.02
KEPT = ("tokens", "loss_mask", "rewards", "finish_reason")


class Recording(PPOTrainer):
    """A trainer that keeps the rows of each step, in their order."""

    rows: list[Batch]

    def update(self, batch: Batch, step: int, *others: Any, **named: Any) -> list[Mapping[str, float]]:
        self.rows = [*getattr(self, "rows", []), batch.select(*KEPT).fetch()]
        return super().update(batch, step, *others, **named)


def by_letters(completion: str, row: Mapping[str, Any]) -> float:
    return sum(map(ord, completion)) % 7 / 7


class Again:
    """The training of a run, in float64, by one forward pass of each row for logits and values."""

    def __init__(self, config: PPOConfig) -> None:
        self.config, self.algorithm = config, config.resolved_algorithm
        self.model, self.reference = (load_model(config.model).double().eval() for _ in range(2))
        width = int(config.model.config["hidden_size"])
        self.head = nn.Linear(width, 1, dtype=torch.float64)
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        groups = [{"params": self.trained}, {"params": [*self.head.parameters()], "lr": VALUE_LR}]
        optim = config.optim
        self.optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=0.0)

    def score(self, model: nn.Module, rows: Batch) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Of each row the log-probabilities of the sampled tokens, the values before them, and that after the last."""
        scores: list[tuple[Tensor, Tensor, Tensor]] = []
        for tokens, mask in zip(rows.jagged("tokens").unbind(), rows.jagged("loss_mask").unbind(), strict=True):
            output, chosen = model(input_ids=tokens[None].long(), output_hidden_states=True), mask[1:].bool()
            log_p, hidden = output.logits[0, :-1].log_softmax(-1), output.hidden_states[-1][0]
            values = self.head(hidden if self.algorithm.critic.critic_trunk == "shared" else hidden.detach())[:, 0]
            picked = log_p.gather(1, tokens[1:, None].long())[:, 0]
            scores.append((picked[chosen], values[:-1][chosen], values[-1].detach()))
        return scores

    def learn(self, rows: Batch, step: int) -> dict[str, float]:
        """Train on the rows of a step, and return the means of its optimizer steps' figures."""
        with torch.no_grad():
            before, ref = self.score(self.model, rows), self.score(self.reference, rows)
        cut = [reason == "length" for reason in rows.python("finish_reason")]
        columns: list[Row] = []
        for (old, values, after), (other, _, _), reward, is_cut in zip(
            before, ref, rows.dense("rewards").double().tolist(), cut, strict=True
        ):
            by_token = -KL * (old - other).numpy()  # k1
            count = len(old)
            columns.append(
                Row(
                    reward=reward,
                    group=0,
                    mask=np.ones(count, dtype=np.bool_),
                    token_rewards=by_token,
                    values=values.numpy(),
                    bootstrap=float(after) if is_cut else 0.0,
                )
            )
        advantages, returns = oracles.gae(columns, self.algorithm.gamma, self.algorithm.lam)
        every = np.ones(len(advantages), dtype=np.bool_)
        ends = np.cumsum([len(row.mask) for row in columns])[:-1]
        by_row = np.split(oracles.whitened(advantages, every), ends)
        targets, parts, updates = np.split(returns, ends), self.algorithm.minibatches, list[tuple[float, ...]]()
        for epoch in range(self.algorithm.epoch_choice.count):
            order = row_order(self.config.run.seed, step, epoch, len(rows)).tolist()
            for part in range(parts):
                chosen = order[len(rows) * part // parts : len(rows) * (part + 1) // parts]
                picked = [(before[row][0], before[row][1], by_row[row], targets[row]) for row in chosen]
                updates.append(self.step(rows.take(chosen), picked))
        names = (metrics.LOSS, metrics.VALUE_LOSS, metrics.GRAD_NORM)
        return dict(zip(names, np.mean(updates, axis=0).tolist(), strict=True))

    def step(self, rows: Batch, picked: list[tuple[Tensor, Tensor, Any, Any]]) -> tuple[float, ...]:
        scores, clip = self.score(self.model, rows), self.algorithm.value_clip
        assert clip is not None
        named = [
            LossRow(new.detach().numpy(), old.numpy(), advantage)
            for (new, _, _), (old, _, advantage, _) in zip(scores, picked, strict=True)
        ]
        losses, slopes = (np.concatenate(column) for column in oracles.ppo_clip(named, *self.algorithm.clip_bounds))
        weights = oracles.loss_weights([np.ones(len(row.logprobs), dtype=np.bool_) for row in named], "token-mean", 1.0)
        values, old = torch.cat([value for _, value, _ in scores]), torch.cat([value for _, value, _, _ in picked])
        target = torch.from_numpy(np.concatenate([target for _, _, _, target in picked]))
        near = old + (values - old).clamp(-clip, clip)
        value_loss = (torch.from_numpy(weights) * torch.maximum((values - target) ** 2, (near - target) ** 2) / 2).sum()
        self.optimizer.zero_grad()
        gradients = torch.from_numpy(weights * slopes) * torch.cat([new for new, _, _ in scores])
        (gradients.sum() + COEF * value_loss).backward()
        norm = nn.utils.clip_grad_norm_([*self.trained, *self.head.parameters()], self.config.optim.grad_clip)
        self.optimizer.step()
        return float((weights * losses).sum()), float(value_loss.detach()), float(norm)


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["replicate", "fsdp2"])
@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8.0}], ids=["whole", "adapters"])
def test_ranks_and_placements_change_nothing(
    preloaded: Cluster, tmp_path: Path, strategy: str, lora: dict[str, Any] | None
) -> None:
    """Two ranks that train, and a generator in a process of its own, beside one process that holds all."""
    rows: list[list[dict[str, Any]]] = []
    for name, cluster in (("alone", "inline"), ("ranks", preloaded)):
        settings: dict[str, Any] = {"algorithm": {"options": {"critic_trunk": "shared"}, "minibatches": 2}}
        if name == "ranks":
            settings |= {"placement": {"layout": "split", "ranks": 2}, "parallel": {"strategy": strategy}}
        (tmp_path / name).mkdir()
        config = tiny(PPOConfig, tmp_path / name, model={**MODEL, **({"lora": lora} if lora else {})},
                      run={"steps": 3}, eval={"items": 0}, batch={"prompts": 8},
                      critic={"lr": 1e-2}, **settings)  # fmt: skip
        rows.append(metrics_rows(train(config, cluster)))
    for alone, ranks in zip(*rows, strict=True):
        for figure in (metrics.LOSS, metrics.VALUE_LOSS, metrics.GRAD_NORM, metrics.EXPLAINED_VARIANCE):
            assert ranks[figure] == pytest.approx(alone[figure], rel=1e-3, abs=1e-5), figure


@pytest.mark.parametrize("trunk", ["shared", pytest.param("detached", marks=pytest.mark.exhaustive)])
def test_a_run_is_what_the_formulas_say(trunk: str, tmp_path: Path) -> None:
    options = {"critic_trunk": trunk, "value_coef": COEF}
    algorithm = {"options": options, "kl_coef": KL, "minibatches": 2, "epochs": 2, "correction": "none"}
    config = tiny(
        PPOConfig, tmp_path, algorithm=algorithm, run={"steps": STEPS}, eval={"items": 0}, batch={"prompts": 12},
        reward={"name": f"{__name__}:by_letters", "processes": 1}, sampling={"max_new_tokens": 4},
        optim={"lr": 1e-2, "eps": 1e-3}, critic={"lr": VALUE_LR}, save={"every": STEPS},
    )  # fmt: skip
    trainer = Recording(config, cluster="inline", show=False)
    trainer.fit()
    run, again = tmp_path / "runs" / "run", Again(config)
    for step, (rows, row) in enumerate(zip(trainer.rows, metrics_rows(run), strict=True), 1):
        for name, value in again.learn(rows, step).items():
            assert row[name] == pytest.approx(value, rel=1e-3, abs=2e-6), name
    trained = load_model(ModelConfig(path=str(run / "model"))).state_dict()
    for name, tensor in again.model.state_dict().items():
        torch.testing.assert_close(trained[name].double(), tensor, atol=2e-5, rtol=1e-4)
    (folder,) = (run / "checkpoints").glob("step-*")
    stored = {
        name: t for file in (folder / "policy" / "resume").glob("*.safetensors") for name, t in load_file(file).items()
    }
    for name, parameter in again.head.named_parameters():
        kept = stored[f"model.podium_value_head.{name}"].double()
        torch.testing.assert_close(kept, parameter.detach(), atol=2e-5, rtol=1e-4)
        assert bool(kept.any())
