"""A run whose filter drops prompts without a signal: what it trains on, its ledger, and its resume."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from podium.data import Batch, fields
from podium.runs.ledger import read_ledger
from podium.runtime import Cluster
from podium.telemetry import metrics
from podium.trainer import GRPOConfig, PPOTrainer
from podium.trainer.prompts import Prompt
from tests.integration.training import metrics_rows, tiny, train

FILTERED = {"prompts": {"count": 3, "refills": 4}}


def some_are_solved(completion: str, row: Mapping[str, Any]) -> float:
    """Two of three prompts are solved by every completion; those of others differ."""
    return 1.0 if int(row["answer"]) % 3 else len(set(completion)) + 0.1 * sum(map(ord, completion))


def settings_of(folder: Path, steps: int = 4, **sections: Any) -> GRPOConfig:
    reward = {"name": "tests.integration.test_group_filter:some_are_solved", "processes": 1}
    run = {"steps": steps} | sections.pop("run", {})
    values: dict[str, Any] = {"reward": reward, "batch": FILTERED, "eval": {"items": 0}, "save": {"every": 1}}
    return tiny(GRPOConfig, folder, **(values | sections), run=run)


def check_run(run: Path, steps: int) -> None:
    """Check that only groups whose rewards differ were trained, and that the ledger has each prompt once."""
    states, rows, trained = read_ledger(run / "ledger.jsonl"), metrics_rows(run), 0
    for step, row in enumerate(rows, 1):
        groups: dict[int, set[float]] = {}  # two rows of the data may have the same prompt
        for completion in pq.read_table(run / "completions" / f"step-{step:06d}.parquet").to_pylist():
            groups.setdefault(completion["group"], set()).add(completion["reward"])
        assert all(len(rewards) > 1 for rewards in groups.values()), "a group without a signal was trained"
        assert len(groups) + row[metrics.FILTER_MISSING] == 3
        assert row[metrics.FILTER_REFILLS] <= 4
        assert row[metrics.FLAT_GROUPS] == 0.0
        trained += len(groups)
    assert len(rows) == steps
    lines = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()[1:]]
    first_taken = dict[int, None]()
    for line in lines:
        first_taken.update(dict.fromkeys(line["prompts"] if line["state"] == "taken" else ()))
    counts = states.counts()
    assert counts.keys() <= {"trained", "dropped"}
    assert counts["trained"] == trained
    assert counts["dropped"] == sum(states.reasons.values()) >= states.reasons["all rewards are equal"] > 0
    assert sorted(first_taken) == [*range(trained + counts["dropped"])], "no prompt is left out"
    refilled = Counter(line["step"] for line in lines if line["state"] == "taken")
    assert max(refilled.values()) > 1, "no step drew again"


@pytest.mark.parametrize(
    ("schedule", "placement"),
    [
        ("sync", {"cpus": 1}),
        pytest.param("sync", {"ranks": 2}, marks=pytest.mark.exhaustive),
        pytest.param("asynchronous", {"layout": "split"}, marks=pytest.mark.exhaustive),
        pytest.param("one_step_off", {"layout": "split"}, marks=pytest.mark.exhaustive),
    ],
)
def test_a_filtered_run_trains_on_groups_that_differ_and_its_ledger_adds_up(
    preloaded: Cluster, tmp_path: Path, schedule: str, placement: dict[str, Any]
) -> None:
    """The run is also resumed: with the schedule asynchronous, steps take prompts out of turn."""
    sections = {"placement": placement}
    cluster = "inline" if placement == {"cpus": 1} else preloaded
    run = train(settings_of(tmp_path, 4, run={"schedule": schedule}, **sections), cluster)
    resumed = settings_of(tmp_path, 7, run={"schedule": schedule, "resume": str(run)}, **sections)
    train(resumed, cluster)
    check_run(run, 7)


class CountingTrainer(PPOTrainer):
    """Notes how many tokens each step has sampled, in all of its draws."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.counts = Counter[int]()

    def generate(self, prompts: Sequence[Prompt], step: int) -> Batch:
        batch = super().generate(prompts, step)
        self.counts[step] += int(batch.select(fields.LOSS_MASK).fetch().jagged(fields.LOSS_MASK).values.sum())
        return batch


def test_the_speed_of_generating_counts_the_completions_of_prompts_that_are_dropped(tmp_path: Path) -> None:
    """It was the tokens of batch.prompts x sampling.n completions over the time of all draws."""
    trainer = CountingTrainer(settings_of(tmp_path, 3), cluster="inline", show=False)
    summary, total = trainer.fit(), 0.0
    rows = metrics_rows(tmp_path / "runs" / "run")
    assert [row[metrics.SAMPLED] for row in rows] == [trainer.counts[step] for step in (1, 2, 3)]
    for row in rows:
        total += row["time/generate"]
        assert row["tokens_per_s/generate"] == pytest.approx(row[metrics.SAMPLED] / row["time/generate"])
    assert any(row[metrics.SAMPLED] > 3 * row[metrics.LENGTH_MAX] * 4 for row in rows), "no step drew again"
    assert summary.tokens_per_s["generate"] == pytest.approx(trainer.counts.total() / total)


def test_a_filtered_run_resumes_bit_by_bit(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole, parts = (train(settings_of(tmp_path / name, 4 if name == "whole" else 2)) for name in ("whole", "parts"))
    train(settings_of(tmp_path / "parts", 4, run={"resume": str(parts)}))
    for step in range(1, 5):
        name = f"completions/step-{step:06d}.parquet"
        assert pq.read_table(whole / name).equals(pq.read_table(parts / name)), step
    assert (whole / "ledger.jsonl").read_bytes() == (parts / "ledger.jsonl").read_bytes()
    epochs = [[row[metrics.EPOCH] for row in metrics_rows(run)] for run in (whole, parts)]
    assert epochs[0] == epochs[1]
    prompts = read_ledger(whole / "ledger.jsonl").counts()
    rows = sum(1 for line in (tmp_path / "whole" / "copy.jsonl").read_text().splitlines())
    assert rows * 0.7 < sum(prompts.values()) / epochs[0][-1] < rows, "an epoch counts what the filter dropped, too"


@pytest.mark.everyday("gdpo")
@pytest.mark.parametrize("advantage", ["gdpo", "grpo"])
def test_groups_whose_parts_alone_differ_are_trained_by_an_estimator_of_parts(tmp_path: Path, advantage: str) -> None:
    options = {"options": {"part_weights": {"odd": 1.0, "even": 0.2}}} if advantage == "gdpo" else {}
    rewards = {"name": [f"{__name__}:odd", f"{__name__}:even"], "processes": 1}
    run = train(settings_of(tmp_path, 2, reward=rewards, algorithm={"advantage": advantage, **options}))
    for row in metrics_rows(run):
        assert (row[metrics.GRAD_NORM] > 0) == (advantage == "gdpo")
        assert (row[metrics.FILTER_DROPPED] == 1.0) == (row[metrics.FLAT_GROUPS] == 1.0) == (advantage == "grpo")


def odd(completion: str) -> float:
    return float(sum(map(ord, completion)) % 2)


def even(completion: str) -> float:
    """Together with the other part always 1."""
    return 1.0 - odd(completion)
