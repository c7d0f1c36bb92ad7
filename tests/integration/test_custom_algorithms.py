"""Losses and advantages of a user's own: one file and one key each, no class."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from podium.cli import main
from podium.data import Batch, Jagged, fields
from podium.errors import ConfigError, DataError
from podium.runtime import Cluster
from podium.telemetry import metrics
from podium.trainer import GRPOConfig, PPOTrainer
from podium.trainer.completions import ScoredBatch
from podium.trainer.prompts import Prompt
from tests.integration.rewards import two_parts
from tests.integration.training import metrics_rows, tiny

LOSS = """
from podium.algorithms import TokenLoss

def sequence_reinforce(inputs, config):
    log_ratio_B = inputs.row_means(inputs.logprobs_N - inputs.old_logprobs_N)
    ratio_N = log_ratio_B.exp()[inputs.row_N]
    loss_N = -ratio_N * inputs.advantages_N
    return TokenLoss(loss_N, {"policy/row_ratio": ratio_N.detach()})
"""
ADVANTAGES = """
import torch
from podium.algorithms import AdvantageOutputs, Declaration, group_statistics

def gdpo(inputs, config):
    total_B = torch.zeros(len(inputs.rewards_B))
    for name in ("digits", "length"):
        part_B = inputs.parts_B[name]
        stats = group_statistics(part_B, inputs.group_B)
        total_B += (part_B - stats.mean_G[stats.index_B]) / (stats.std_G[stats.index_B] + 1e-6)
    return AdvantageOutputs(advantages_N=inputs.spread(total_B))

@Declaration(data=("source",), columns=("entropy",))
def per_source(inputs, config):
    names = sorted(set(inputs.data["source"]))
    source_B = torch.tensor([names.index(name) for name in inputs.data["source"]])
    stats = group_statistics(inputs.rewards_B, source_B)
    advantages_B = torch.where(inputs.truncated_B, 0.0, inputs.rewards_B - stats.mean_G[source_B])
    assert (inputs.entropy_N[inputs.mask_N] > 0).all()
    return AdvantageOutputs(advantages_N=inputs.spread(advantages_B))

def with_places(inputs, config):
    stats = group_statistics(inputs.rewards_B, inputs.group_B)
    place_N = torch.arange(len(inputs.mask_N)) - inputs.offsets_B1[inputs.row_N]
    advantages_N = inputs.spread(inputs.rewards_B - stats.mean_G[stats.index_B])
    return AdvantageOutputs(advantages_N=advantages_N, columns={"place": place_N.float()})
"""
PLACES = """
from podium.algorithms import TokenLoss

def by_place(inputs, config):
    place_N = inputs.columns["place"]
    return TokenLoss(-inputs.advantages_N * inputs.logprobs_N * place_N, {"place": place_N})
"""


def places(batch: Batch) -> Jagged:
    """The place of each token in its row."""
    mask = batch.jagged(fields.LOSS_MASK).fetch()
    return mask.like(torch.cat([torch.arange(float(len(row))) for row in mask.unbind()]))


class PlacesInGenerate(PPOTrainer):
    def generate(self, prompts: Sequence[Prompt], step: int) -> Batch:
        batch = super().generate(prompts, step)
        return batch.with_columns(place=places(batch))


class PlacesInAdvantages(PPOTrainer):
    def advantages(self, batch: Batch) -> Batch:
        return super().advantages(batch).with_columns(place=places(batch))


class RewardsInScore(PPOTrainer):
    def score(self, batch: Batch, prompts: Sequence[Prompt], step: int) -> ScoredBatch:
        scored = super().score(batch, prompts, step)
        return replace(scored, batch=scored.batch.with_columns(rewards=scored.rewards_B * 3 + 1))


class RewardsInAdvantages(PPOTrainer):
    def advantages(self, batch: Batch) -> Batch:
        return super().advantages(batch.with_columns(rewards=batch.dense(fields.REWARDS) * 3 + 1))


class RewardsOfTokens(PPOTrainer):
    def advantages(self, batch: Batch) -> Batch:
        mask = batch.jagged(fields.LOSS_MASK).fetch()
        lengths = mask.lengths.float().repeat_interleave(mask.lengths)
        return super().advantages(batch.with_columns(token_rewards=mask.like(lengths)))


class Weights(PPOTrainer):
    factor = 0.0

    def advantages(self, batch: Batch) -> Batch:
        mask = batch.jagged(fields.LOSS_MASK).fetch()
        weights = mask.values.float() * self.factor / mask.values.sum()
        return super().advantages(batch).with_columns(loss_weights=mask.like(weights))


class TwiceTheWeights(Weights):
    factor = 2.0


class FewPrompts(PPOTrainer):
    def generate(self, prompts: Sequence[Prompt], step: int) -> Batch:
        return super().generate(prompts[:3], step)

    def score(self, batch: Batch, prompts: Sequence[Prompt], step: int) -> ScoredBatch:
        return super().score(batch, prompts, step).with_rows(range(4, 12))  # without the first prompt


class FewRows(PPOTrainer):
    def advantages(self, batch: Batch) -> Batch:
        return super().advantages(batch).take([0, 1])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(LOSS + ADVANTAGES)
    (tmp_path / "places.py").write_text(PLACES)
    rows = [{"prompt": f"{n:02d}=", "answer": f"{n:02d}", "source": "ab"[n % 2] * (n % 2 + 1)} for n in range(60)]
    (tmp_path / "sources.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def config_of(folder: Path, ranks: int = 1, **algorithm: Any) -> GRPOConfig:
    sections = {
        "data": {"train": str(folder / "sources.jsonl"), "holdout": 0.2},
        "sampling": {"n": 4, "max_new_tokens": 10},
        "placement": {"ranks": ranks},
        "eval": {"items": 0},
    }
    return tiny(GRPOConfig, folder, algorithm=algorithm, **sections)


@pytest.mark.everyday("inline-1")
@pytest.mark.parametrize(("cluster", "ranks"), [("inline", 1), ("local", 2)])
def test_a_loss_of_ones_own_by_one_key(preloaded: Cluster, folder: Path, cluster: str, ranks: int) -> None:
    config = config_of(folder, ranks, loss=f"{folder}/mine.py:sequence_reinforce", minibatches=2)
    PPOTrainer(config, cluster=preloaded if cluster == "local" else cluster, show=False).fit()
    rows = metrics_rows(folder / "runs" / "run")
    assert [row["policy/row_ratio"] for row in rows] == pytest.approx([1.0, 1.0], abs=0.1)
    assert metrics.CLIP_FRACTION not in rows[0]  # no other loss was computed beside it
    assert {metrics.RATIO_MEAN, metrics.ENTROPY, metrics.MISMATCH_MEAN, metrics.GRAD_NORM} <= rows[0].keys()
    assert rows[0][metrics.GRAD_NORM] > 0


def completions(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    table = pq.read_table(folder / "runs" / "run" / "completions" / "step-000001.parquet").to_pydict()
    return {name: np.array(column) for name, column in table.items() if not name.startswith("token")}


@pytest.mark.everyday("advantages")
@pytest.mark.parametrize(
    ("trainer", "advantage"),
    [(PPOTrainer, "with_places"), (PlacesInGenerate, "grpo"), (PlacesInAdvantages, "grpo")],
    ids=["estimator", "generate", "advantages"],
)
def test_a_loss_reads_token_columns_of_ones_own(
    preloaded: Cluster, folder: Path, trainer: type[PPOTrainer], advantage: str
) -> None:
    mine = f"{folder}/mine.py:with_places" if advantage == "with_places" else advantage
    config = config_of(folder, 2, loss=f"{folder}/places.py:by_place", advantage=mine)
    trainer(config, cluster=preloaded, reward=two_parts, show=False).fit()
    table = pq.read_table(folder / "runs" / "run" / "completions" / "step-000001.parquet").to_pydict()
    prompts, columns = table["prompt_tokens"], ("token_logprobs", "token_advantages")
    logprobs, advantages = (np.concatenate(table[name]) for name in columns)
    positions = np.concatenate([len(p) + np.arange(len(t)) for p, t in zip(prompts, table["tokens"], strict=True)])
    row = metrics_rows(folder / "runs" / "run")[0]
    assert row["place"] == pytest.approx(positions.mean())
    assert row[metrics.LOSS] == pytest.approx((-advantages * logprobs * positions).mean(), rel=0.02)


@pytest.mark.parametrize("trainer", [RewardsInScore, RewardsInAdvantages, RewardsOfTokens])
def test_rewards_that_a_stage_of_ones_own_changes_are_recorded(folder: Path, trainer: type[PPOTrainer]) -> None:
    config = config_of(folder, advantage="dr_grpo")
    trainer(config, cluster="inline", reward=two_parts, show=False).fit()
    table, row = completions(folder), metrics_rows(folder / "runs" / "run")[0]
    assert table["reward"].mean() == pytest.approx(row[metrics.REWARD_MEAN])
    means = {group: table["reward"][table["group"] == group].mean() for group in table["group"]}
    expected = table["reward"] - [means[group] for group in table["group"]]
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(table["advantage"], expected, atol=1e-5)


def test_weights_of_ones_own_weigh_the_loss(folder: Path) -> None:
    losses: dict[type[PPOTrainer], float] = {}
    for trainer in (PPOTrainer, Weights, TwiceTheWeights):
        config = config_of(folder)
        config = replace(config, run=replace(config.run, name=trainer.__name__, steps=1))
        trainer(config, cluster="inline", reward=two_parts, show=False).fit()
        losses[trainer] = metrics_rows(folder / "runs" / trainer.__name__)[0][metrics.LOSS]
    assert losses[PPOTrainer] != 0
    assert losses[Weights] == 0
    assert losses[TwiceTheWeights] == pytest.approx(2 * losses[PPOTrainer])


def test_prompts_of_which_a_stage_returns_no_completion_are_dropped_in_the_ledger(folder: Path) -> None:
    run = folder / "runs" / "run"
    FewPrompts(config_of(folder), cluster="inline", reward=two_parts, show=False).fit()
    lines = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    entries = [(line["state"], line["prompts"]) for line in lines if line.get("step") == 1]
    assert entries[-2:] == [("dropped", [0, 3]), ("trained", [1, 2])]
    assert set(completions(folder)["group"]) == {1, 2}


def test_a_stage_that_leaves_rows_out_is_told_how(folder: Path) -> None:
    with pytest.raises(DataError, match=r"step 1: a stage returned 2 rows of 16: keep all rows.*left_out"):
        FewRows(config_of(folder), cluster="inline", reward=two_parts, show=False).fit()


def test_an_advantage_sees_the_parts_of_the_reward(folder: Path) -> None:
    config = config_of(folder, advantage=f"{folder}/mine.py:gdpo")
    PPOTrainer(config, cluster="inline", reward=two_parts, show=False).fit()
    table = completions(folder)
    expected = np.zeros(len(table["group"]))
    for group in set(table["group"]):
        for part in ("reward_digits", "reward_length"):
            values = table[part][table["group"] == group]
            expected[table["group"] == group] += (values - values.mean()) / (values.std(ddof=1) + 1e-6)
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(table["advantage"], expected, atol=1e-5)


def test_an_advantage_sees_columns_of_the_data_finish_reasons_and_entropies(preloaded: Cluster, folder: Path) -> None:
    config = config_of(folder, advantage=f"{folder}/mine.py:per_source")
    PPOTrainer(config, cluster=preloaded, reward=two_parts, show=False).fit()
    table = completions(folder)
    odd = np.array([int(prompt[:2]) % 2 for prompt in table["prompt"]])
    means = np.where(odd, table["reward"][odd == 1].mean(), table["reward"][odd == 0].mean())
    cut = table["finish_reason"] == "length"
    assert 0 < cut.sum() < len(cut)
    np.testing.assert_allclose(table["advantage"], np.where(cut, 0.0, table["reward"] - means), atol=1e-5)


def test_what_is_wrong_is_told_before_anything_starts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny(GRPOConfig, folder, algorithm={"advantage": f"{folder}/mine.py:per_source"})
    with pytest.raises(ConfigError, match=r"reads the column 'source' of the data, and a training prompt has .*answer"):
        PPOTrainer(config, cluster="inline", show=False).fit()
    common = ["train", "grpo", "--dry-run", "--data.train", str(folder / "sources.jsonl"), "--reward.name", "exact"]
    for arguments, message in [
        (["--algorithm.loss", f"{folder}/mine.py:sequence_reinfroce"], "did you mean sequence_reinforce?"),
        (["--algorithm.loss", "gsop"], "did you mean gspo?"),
        (
            ["--algorithm.loss", "clip_cov", "--algorithm.options.cov_shar", "0.1"],
            "did you mean algorithm.options.cov_share?",
        ),
    ]:
        assert main([*common, *arguments]) == 2
        assert message in capsys.readouterr().err
