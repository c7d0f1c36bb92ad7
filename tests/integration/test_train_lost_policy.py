"""What a run does at once, and what it does not do again, when it has lost its policy."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from podium.data import Batch
from podium.runs.ledger import read_ledger
from podium.runtime import Cluster, concat, endpoint, shard
from podium.telemetry import Event, Note, Recovered, StepFinished, subscribe
from podium.trainer import GRPOConfig, PPOTrainer
from podium.workers import Generator
from tests.integration.training import losses, tiny

LONG_S = 300.0


@pytest.fixture(scope="module")
def cluster(preloaded: Cluster) -> Cluster:
    return preloaded


def test_a_lost_policy_ends_the_wait_for_completions(cluster: Cluster, tmp_path: Path) -> None:
    class Deadly(Generator):
        """It kills the process whose id is in the file ``victim``, and then draws for very long."""

        @endpoint(dispatch=shard(args=("prompts",)), collect=concat(), returns="ref")
        def generate(self, prompts: Batch, sampling: Any) -> Batch:
            if (tmp_path / "victim").exists():
                (tmp_path / "victim").rename(tmp_path / "killed")
                os.kill(int((tmp_path / "killed").read_text()), signal.SIGKILL)
                time.sleep(LONG_S)
                (tmp_path / "drew").touch()
            return super().generate(prompts, sampling)

    settings: dict[str, Any] = {"eval": {"items": 0}, "save": {"every": 1, "model": False}}
    config = tiny(GRPOConfig, tmp_path, run={"steps": 4}, placement={"layout": "split"}, **settings)
    trainer = PPOTrainer(config, cluster=cluster, workers={"generator": Deadly}, show=False)
    said: list[str] = []

    def see(event: Event) -> None:
        if isinstance(event, StepFinished) and event.step == 2 and not (tmp_path / "killed").exists():
            (tmp_path / "victim").write_text(str(trainer.run.roles.policy.group.pids[0]))
        if isinstance(event, Recovered):
            said.append(event.text)

    unsubscribe = subscribe(see)
    try:
        trainer.fit()
    finally:
        unsubscribe()
    assert len(said) == 1
    assert said[0].startswith("lost rank 0 of estimator, policy (signal SIGKILL)")
    assert len(losses(tmp_path / "runs" / "run")) == 4
    assert not (tmp_path / "drew").exists(), "the run waited for completions that it could not use"


def test_a_policy_that_is_lost_again_while_the_run_resumes_is_a_further_loss(cluster: Cluster, tmp_path: Path) -> None:
    config = tiny(GRPOConfig, tmp_path, run={"steps": 3}, eval={"items": 0}, save={"every": 1, "model": False})
    trainer = PPOTrainer(config, cluster=cluster, show=False)
    said: list[str] = []

    def see(event: Event) -> None:
        ended = isinstance(event, StepFinished) and event.step == 2 and not said
        # Step 1 may not be written yet when the policy is killed: then the run begins anew.
        begins = isinstance(event, Note) and ("resuming after" in event.text or "no checkpoint yet" in event.text)
        resumed = begins and len(said) == 1
        if ended or resumed:
            os.kill(trainer.run.roles.policy.group.pids[0], signal.SIGKILL)
        if isinstance(event, Recovered):
            said.append(event.text)

    unsubscribe = subscribe(see)
    try:
        assert trainer.fit().finished
    finally:
        unsubscribe()
    assert ["loss 1 of" in said[0], "loss 2 of" in said[1], len(said)] == [True, True, 2]
    assert read_ledger(tmp_path / "runs" / "run" / "ledger.jsonl").counts() == {"trained": 12}


def test_a_resume_after_a_loss_has_heard_the_signal_and_reads_no_data_again(cluster: Cluster, tmp_path: Path) -> None:
    def reward(completion: str, row: Any) -> float:
        with (tmp_path / "graders").open("a") as file:
            file.write(f"{os.getppid()}\n")  # the process that has imported the reward
        return 1.0

    config = tiny(GRPOConfig, tmp_path, run={"steps": 4}, save={"every": 1, "model": False})
    trainer = PPOTrainer(config, cluster=cluster, reward=reward, show=False)
    said: list[str] = []

    def see(event: Event) -> None:
        if isinstance(event, StepFinished) and not any("SIGINT" in text for text in said):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(trainer.run.roles.policy.group.pids[0], signal.SIGKILL)
        if isinstance(event, Note | Recovered):
            said.append(event.text)

    unsubscribe = subscribe(see)
    try:
        summary = trainer.fit()
    finally:
        unsubscribe()
    assert (summary.steps, summary.finished) == (1, False)
    assert sum("has no checkpoint yet: starting at step 1" in text for text in said) == 1
    assert sum("held out" in text for text in said) == 1
    assert len(set((tmp_path / "graders").read_text().splitlines())) == 1
