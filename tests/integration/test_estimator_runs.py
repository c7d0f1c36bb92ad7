"""Runs with an estimator that needs more than rewards: greedy completions, or the squares of probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from podium.data import Batch
from podium.errors import ConfigError
from podium.models import load_model
from podium.models.tokenizers import load_tokenizer
from podium.runs.ledger import read_ledger
from podium.runtime import Cluster
from podium.telemetry import metrics
from podium.trainer import GRPOConfig, PPOTrainer
from podium.trainer.completions import ScoredBatch
from tests.integration.training import metrics_rows, tiny
from tests.unit.algorithms.test_advantage_formulas import otb


def by_letters(completion: str, row: Mapping[str, Any]) -> float:
    return sum(map(ord, completion)) / 100


def by_letters_that_differ(completion: str, row: Mapping[str, Any]) -> float | None:
    return by_letters(completion, row) if len(set(completion)) > 1 or int(row["answer"]) % 2 else None


class Recording(PPOTrainer):
    """A trainer that keeps what each step learned from."""

    scored: list[ScoredBatch]
    estimated: list[Batch]

    def advantages(self, batch: Batch) -> Batch:
        batch = super().advantages(batch)
        self.estimated = [*getattr(self, "estimated", []), batch.select("advantages", "loss_mask", "rewards").fetch()]
        return batch

    def learn(self, scored: ScoredBatch) -> Mapping[str, float]:
        self.scored = [*getattr(self, "scored", []), scored]
        return super().learn(scored)


def settings_of(folder: Path, advantage: str, reward: str = "by_letters", **sections: Any) -> GRPOConfig:
    values: dict[str, Any] = {"eval": {"items": 0}, "algorithm": {"advantage": advantage}}
    return tiny(GRPOConfig, folder, reward={"name": f"{__name__}:{reward}", "processes": 1}, **(values | sections))


def most_probable(config: GRPOConfig, prompt: torch.Tensor) -> str:
    """The greedy completion of the initial model, by whole forward passes."""
    model, tokenizer = load_model(config.model).eval(), load_tokenizer(config.model.tokenizer_source)
    tokens = prompt.tolist()
    for _ in range(config.sampling.max_new_tokens):
        with torch.no_grad():
            tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1, : len(tokenizer)].argmax()))
        if tokens[-1] == tokenizer.eos_token_id:
            break
    return str(tokenizer.decode(tokens[len(prompt) :], skip_special_tokens=True))


def estimates(trainer: Recording) -> list[list[float]]:
    """The advantages of the first step's sampled tokens."""
    batch = trainer.estimated[0]
    columns = (batch.jagged(name).unbind() for name in ("advantages", "loss_mask"))
    return [row[mask].tolist() for row, mask in zip(*columns, strict=True)]


def check_first_step(trainer: Recording, run: Path) -> None:
    scored = trainer.scored[0]
    baselines = scored.batch.dense("baseline").tolist()
    for group, baseline in zip(scored.groups, baselines, strict=True):
        greedy = most_probable(trainer.config, scored.prompts[group].token_ids)  # type: ignore[arg-type]  # a GRPOConfig
        assert baseline == pytest.approx(by_letters(greedy, {}))
    table = pq.read_table(run / "completions" / "step-000001.parquet")
    assert len(table) == len(baselines), "greedy completions are no rows of the step"
    for reward, baseline, advantages in zip(scored.rewards_B.tolist(), baselines, estimates(trainer), strict=True):
        assert advantages == pytest.approx([reward - baseline] * len(advantages), abs=1e-6)
    assert metrics_rows(run)[0][metrics.BASELINE_MEAN] == pytest.approx(sum(baselines) / len(baselines))


@pytest.mark.parametrize("n", [1, 3])
def test_remax_compares_with_the_greedy_completion(tmp_path: Path, n: int) -> None:
    config = settings_of(tmp_path, "remax", sampling={"n": n, "top_p": 0.9}, batch={"prompts": 4})
    trainer = Recording(config, cluster="inline", show=False)
    trainer.fit()
    check_first_step(trainer, tmp_path / "runs" / "run")
    assert read_ledger(tmp_path / "runs" / "run" / "ledger.jsonl").counts() == {"trained": 8}


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["one_step_off", "asynchronous"])
def test_remax_on_other_schedules_and_with_a_filter(tmp_path: Path, preloaded: Cluster, schedule: str) -> None:
    batch = {"prompts": {"count": 3, "refills": 2}}
    placement = {"layout": "split"}
    config = settings_of(tmp_path, "remax", batch=batch, placement=placement, run={"schedule": schedule, "steps": 3})
    trainer = Recording(config, cluster=preloaded, show=False)
    trainer.fit()
    check_first_step(trainer, tmp_path / "runs" / "run")
    assert all("baseline" in scored.batch for scored in trainer.scored)


def test_a_prompt_whose_greedy_completion_is_not_scored_is_dropped(tmp_path: Path) -> None:
    config = settings_of(tmp_path, "remax", "by_letters_that_differ", batch={"prompts": 12}, run={"steps": 1})
    Recording(config, cluster="inline", show=False).fit()
    states = read_ledger(tmp_path / "runs" / "run" / "ledger.jsonl")
    assert states.reasons["the reward scored no greedy completion"] > 0
    assert states.counts()["trained"] > 0


def test_remax_in_sessions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"environment.name = '.*:by_letters' with algorithm.advantage = 'remax'"):
        settings_of(tmp_path, "remax", environment={"name": f"{__name__}:by_letters"})


def test_remax_of_a_replay_is_refused(tmp_path: Path) -> None:
    engine = {"name": "replay", "options": {"run": str(tmp_path / "runs" / "run")}}
    with pytest.raises(ConfigError, match=r"engine\.name = 'replay' with algorithm\.advantage = 'remax'"):
        settings_of(tmp_path, "remax", engine=engine)


def test_the_optimal_token_baseline_reads_the_policy(tmp_path: Path) -> None:
    config = settings_of(tmp_path, "otb", run={"steps": 1}, sampling={"max_new_tokens": 6, "n": 4})
    trainer = Recording(config, cluster="inline", show=False)
    trainer.fit()
    model, scored = load_model(config.model).double().eval(), trainer.scored[0]
    batch, rows = scored.batch.fetch(), list[dict[str, Any]]()
    for tokens, mask in zip(batch.jagged("tokens").unbind(), batch.jagged("loss_mask").unbind(), strict=True):
        with torch.no_grad():
            log_p = model(input_ids=tokens[None].long()).logits[0, :-1].log_softmax(-1)
        chosen = log_p.gather(1, tokens[1:, None].long())[:, 0]
        squares = log_p.exp().square().sum(-1)
        rows.append({name: column[mask[1:]].numpy() for name, column in (("logprobs", chosen), ("squares", squares))})
    rewards = scored.rewards_B.tolist()
    for row, reward in zip(rows, rewards, strict=True):
        row["rewards"] = 0 * row["logprobs"]
        row["rewards"][-1] = reward
    expected = otb(rows, rewards, scored.groups)
    for ours, theirs in zip(estimates(trainer), expected, strict=True):
        assert ours == pytest.approx(theirs.tolist(), abs=1e-5)
