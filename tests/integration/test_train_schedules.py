"""The schedule that is one step off, Podium's own and as docs/schedules.md prints it, run for real."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from podium.cli import main
from podium.data import Batch
from podium.errors import ConfigError, PodiumError
from podium.rollout.sampling import SamplingParams
from podium.runs.ledger import read_ledger
from podium.runtime import Cluster, concat, endpoint, first, shard
from podium.telemetry import Event, StageFinished, metrics, subscribe
from podium.trainer import GRPOConfig, PPOTrainer
from podium.trainer.completions import ScoredBatch
from podium.trainer.prompts import Prompt
from podium.workers import Generator, Policy
from tests.integration.rewards import sevens
from tests.integration.training import metrics_rows, tiny
from tests.waits import wait_until

PAGE = Path(__file__).parents[2] / "docs" / "schedules.md"


@pytest.fixture
def schedule(tmp_path: Path) -> str:
    """The schedule of the documentation, as ``run.schedule`` names it."""
    codes = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (code,) = [code for code in codes if code.startswith("# mine.py")]
    (tmp_path / "mine.py").write_text(code)
    return f"{tmp_path}/mine.py:one_step_off"


def versions(run: Path) -> list[set[int]]:
    return [set(pq.read_table(file)["version"].to_pylist()) for file in sorted((run / "completions").iterdir())]


def make_waiting_policy(folder: Path, ahead: int, *lasts: int) -> type[Policy]:
    """Return a policy whose update waits for the completions of a later step, so that they are of one version.

    Args:
        folder: :func:`mark_generated_steps` leaves a file here for each step whose completions are there.
        ahead: How many steps later.
        lasts: The last step of each run that goes on from the one before it.
    """

    class Waiting(Policy):
        @endpoint(dispatch=shard(args=("batch",), balance="tokens"), collect=first(), readonly=True)
        def update(self, batch: Batch) -> dict[str, float]:
            step = self.engine.step_count + 1
            if step + ahead <= min(last for last in lasts if step <= last):
                assert wait_until((folder / f"generated-{step + ahead}").exists)
            return super().update(batch)

    return Waiting


@contextmanager
def mark_generated_steps(folder: Path) -> Iterator[list[StageFinished]]:
    """Leave a file in ``folder`` for each step whose completions are there. Gives the stages that have ended."""
    stages: list[StageFinished] = []

    def see(event: Event) -> None:
        if isinstance(event, StageFinished):
            stages.append(event)
            if event.name == "generate":
                (folder / f"generated-{event.step}").touch()

    unsubscribe = subscribe(see)
    try:
        yield stages
    finally:
        unsubscribe()


def test_rollouts_of_the_next_step_run_while_a_step_is_learned(
    preloaded: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = make_waiting_policy(tmp_path, 1, 4, 5)
    config = tiny(
        GRPOConfig, tmp_path, run={"steps": 4, "schedule": "one_step_off"}, placement={"layout": "split"},
        save={"every": 1}, eval={"items": 0},
    )  # fmt: skip
    with mark_generated_steps(tmp_path) as stages:
        PPOTrainer(config, cluster=preloaded, workers={"policy": policy}, show=False).fit()
    run = tmp_path / "runs" / "run"
    assert versions(run) == [{0}, {0}, {1}, {2}]  # synchronous runs have 0, 1, 2, 3
    generate = {stage.step: stage for stage in stages if stage.name == "generate"}
    update = {stage.step: stage for stage in stages if stage.name == "update"}
    for step, following in pairwise(sorted(generate)):
        assert generate[following].started_ns < update[step].ended_ns
        assert generate[following].ended_ns < update[following].started_ns
    lines = [json.loads(line.rstrip(",")) for line in (run / "trace.json").read_text().splitlines()[1:-1]]
    tracks = {line["tid"]: line["args"]["name"] for line in lines if line["name"] == "thread_name" and line["pid"] == 1}
    shown = [
        (tracks[line["tid"]], line["args"]["step"])
        for line in lines
        if line["name"] in ("generate", "update") and line["ph"] == "X" and line["pid"] == 1
    ]
    assert {half: sorted(step for own, step in shown if own == half) for half in ("collect", "learn")} == {
        "collect": [1, 2, 3, 4],
        "learn": [1, 2, 3, 4],
    }
    resumed = tiny(
        GRPOConfig, tmp_path, run={"steps": 5, "schedule": "one_step_off", "resume": str(run)},
        placement={"layout": "split"}, eval={"items": 0},
    )  # fmt: skip
    PPOTrainer(resumed, cluster=preloaded, workers={"policy": policy}, show=False).fit()
    assert [row["step"] for row in metrics_rows(run)] == [1, 2, 3, 4, 5]
    prompts = [pq.read_table(file)["prompt"].to_pylist()[::4] for file in sorted((run / "completions").iterdir())]
    taken = [prompt for step in prompts for prompt in step]
    assert len(set(taken)) == len(taken) == 20  # of one epoch: none twice, and the resumed run left none out
    lines = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    drawn = {
        line["step"]: {tuple(own) for own in line["versions"]} for line in lines if line.get("state") == "rolled_out"
    }
    assert drawn == {1: {(0, 0)}, 2: {(0, 0)}, 3: {(1, 1)}, 4: {(2, 2)}, 5: {(4, 4)}}
    assert read_ledger(run / "ledger.jsonl").counts() == {"trained": 20}
    assert main(["runs", str(run)]) == 0
    assert capsys.readouterr().out.startswith(f"{run}: finished at step 5, 20 prompts trained, took ")


def test_asynchronous_steps_are_drawn_side_by_side_within_the_bound(preloaded: Cluster, tmp_path: Path) -> None:
    sections: dict[str, Any] = {"placement": {"layout": "split"}, "eval": {"items": 0}, "save": {"every": 1}}
    asked = {"schedule": "asynchronous", "max_staleness": 2}
    config = tiny(GRPOConfig, tmp_path, run={"steps": 5, **asked}, **sections)
    run, policy = tmp_path / "runs" / "run", make_waiting_policy(tmp_path, 2, 5, 8)
    resumed = tiny(GRPOConfig, tmp_path, run={"steps": 8, "resume": str(run), **asked}, **sections)
    with mark_generated_steps(tmp_path):
        for settings in (config, resumed):
            PPOTrainer(settings, cluster=preloaded, workers={"policy": policy}, show=False).fit()
    lines = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    drawn = {line["step"]: [low for low, _ in line["versions"]] for line in lines if line.get("state") == "rolled_out"}
    behind = {step: step - 1 - min(versions) for step, versions in drawn.items()}
    assert sorted(behind) == list(range(1, 9))
    assert max(behind.values()) == 2
    assert behind[6] == 0, "a resumed run begins with the newest weights"
    assert read_ledger(run / "ledger.jsonl").counts() == {"trained": 32}
    weights = [row["mismatch/weight_mean"] for row in metrics_rows(run) if "mismatch/weight_mean" in row]
    assert weights and min(weights) > 0, "corrected for the older weights, but in steps without a gradient"


class Stuck(Generator):
    """It says that it took new weights and keeps the first ones."""

    @endpoint(dispatch=shard(args=("prompts",)), collect=concat(), returns="ref")
    def generate(self, prompts: Batch, sampling: SamplingParams) -> Batch:
        batch = super().generate(prompts, sampling)
        return batch.with_columns(version_range=torch.zeros_like(batch.dense("version_range")))


class Bare(Stuck):
    """It says so of its tokens alone."""

    @endpoint(dispatch=shard(args=("prompts",)), collect=concat(), returns="ref")
    def generate(self, prompts: Batch, sampling: SamplingParams) -> Batch:
        batch = super().generate(prompts, sampling).drop("version_range")
        return batch.with_columns(versions=batch.jagged("versions").map_tensors(torch.zeros_like))


@pytest.mark.parametrize("generator", [Stuck, Bare])
def test_a_generator_that_keeps_old_weights_ends_the_run(tmp_path: Path, generator: type[Generator]) -> None:
    config = tiny(GRPOConfig, tmp_path, run={"steps": 3}, eval={"items": 0})
    with pytest.raises(PodiumError, match=r"step 2: a token was drawn by version 0 .* more than the 0 updates behind"):
        PPOTrainer(config, cluster="inline", workers={"generator": generator}, show=False).fit()


def test_it_learns(preloaded: Cluster, tmp_path: Path, schedule: str) -> None:
    config = tiny(
        GRPOConfig, tmp_path, run={"steps": 25, "schedule": schedule}, placement={"layout": "split"},
        eval={"items": 0}, save={"model": False},
    )  # fmt: skip
    PPOTrainer(config, cluster=preloaded, reward=sevens, show=False).fit()
    rewards = [row[metrics.REWARD_MEAN] for row in metrics_rows(tmp_path / "runs" / "run")]
    assert rewards[0] < 0.2
    assert rewards[-1] > 0.6
    for step, found in enumerate(versions(tmp_path / "runs" / "run"), 1):
        assert found <= {max(0, step - 2), step - 1}


def test_colocated_it_is_refused(preloaded: Cluster, tmp_path: Path, schedule: str) -> None:
    config = tiny(GRPOConfig, tmp_path, run={"schedule": schedule}, eval={"items": 0})
    with pytest.raises(ConfigError, match=r"beside each other, but with placement\.layout = colocated .*to split"):
        PPOTrainer(config, cluster=preloaded, show=False).fit()


class Counting(PPOTrainer):
    """It looks at the whole batch of a step before it is graded."""

    def score(self, batch: Batch, prompts: Sequence[Prompt], step: int) -> ScoredBatch:
        assert len(batch) == len(prompts) * self.run.data.sampling.n, "score gets a part of the step"
        return super().score(batch, prompts, step)


def test_a_stage_of_a_subclass_gets_the_whole_step_with_the_asynchronous_schedule(
    preloaded: Cluster, tmp_path: Path
) -> None:
    config = tiny(
        GRPOConfig, tmp_path, run={"steps": 3, "schedule": "asynchronous"}, placement={"layout": "split"},
        engine={"max_sequences": 4}, eval={"items": 0},
    )  # fmt: skip
    Counting(config, cluster=preloaded, show=False).fit()
    assert read_ledger(tmp_path / "runs" / "run" / "ledger.jsonl").counts() == {"trained": 12}
