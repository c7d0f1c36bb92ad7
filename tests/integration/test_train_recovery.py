"""A run that loses worker processes goes on, and its results are those of a run that lost none."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from podium.data import Batch
from podium.errors import PodiumError
from podium.runtime import endpoint, first, shard
from podium.telemetry import Event, Recovered, StageFinished, StepFinished, subscribe
from podium.trainer import GRPOConfig, PPOTrainer
from podium.trainer.ledger import read_ledger
from podium.workers import Policy
from tests.integration.processes import all_gone
from tests.integration.training import losses, tiny

SECTIONS: dict[str, Any] = {"eval": {"items": 0}, "save": {"every": 1, "model": False}}
SPLIT = {"layout": "split"}


def fit(config: GRPOConfig, on_event: Callable[[PPOTrainer, Event], None], **given: Any) -> list[str]:
    """Train; returns what was said of recoveries. ``on_event`` sees the trainer at each event."""
    trainer, said = PPOTrainer(config, cluster="local", show=False, **given), list[str]()

    def see(event: Event) -> None:
        if isinstance(event, Recovered):
            said.append(event.text)
        on_event(trainer, event)

    unsubscribe = subscribe(see)
    try:
        trainer.fit()
    finally:
        unsubscribe()
    return said


def killing(role: str, step: int, pids: list[int]) -> Callable[[PPOTrainer, Event], None]:
    """Kill the first process of ``role`` once, after ``step``."""

    def see(trainer: PPOTrainer, event: Event) -> None:
        if isinstance(event, StepFinished) and event.step == step and not pids:
            pids.append(trainer.roles.workers[role].group.pids[0])
            os.kill(pids[0], signal.SIGKILL)

    return see


def completions(run: Path) -> list[Any]:
    return [pq.read_table(file).to_pydict() for file in sorted((run / "completions").iterdir())]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    PPOTrainer(tiny(GRPOConfig, folder, run={"steps": 4}, **SECTIONS), cluster="inline", show=False).fit()
    return folder / "runs" / "run"


def same_as(run: Path, undisturbed: Path) -> None:
    assert losses(run) == losses(undisturbed)
    assert completions(run) == completions(undisturbed)
    assert read_ledger(run / "ledger.jsonl").counts() == {"trained": 16}


def test_a_generator_that_is_killed_draws_again_with_the_current_weights(tmp_path: Path, undisturbed: Path) -> None:
    pids: list[int] = []
    config = tiny(GRPOConfig, tmp_path, run={"steps": 4}, placement=SPLIT, **SECTIONS)
    (said,) = fit(config, killing("generator", 2, pids))
    assert (
        "signal SIGKILL) (loss 1 of at most 3 within an hour); it was restarted and has the weights of version 2"
        in said
    )
    same_as(tmp_path / "runs" / "run", undisturbed)
    assert not all_gone(pids, 10.0)


def test_a_run_that_loses_its_policy_goes_on_from_the_latest_checkpoint(tmp_path: Path, undisturbed: Path) -> None:
    config = tiny(GRPOConfig, tmp_path, run={"steps": 4}, **SECTIONS)
    (said,) = fit(config, killing("policy", 3, []))
    assert said.startswith("lost rank 0 of ")
    assert "policy" in said
    same_as(tmp_path / "runs" / "run", undisturbed)
    assert [file.name for file in (tmp_path / "runs" / "run").glob("config*.yaml")] == ["config.yaml"]


def test_with_the_asynchronous_schedule_no_prompt_is_lost_with_a_generator(tmp_path: Path) -> None:
    pids: list[int] = []

    def see(trainer: PPOTrainer, event: Event) -> None:
        if isinstance(event, StageFinished) and (event.name, event.step) == ("advantages", 3) and not pids:
            assert trainer.roles.generators
            pids.append(trainer.roles.generators[0].group.pids[0])
            os.kill(pids[0], signal.SIGKILL)  # while the steps after it are drawn, and before the weights are sent

    asked = {"steps": 7, "schedule": "asynchronous", "max_staleness": 2}
    said = fit(tiny(GRPOConfig, tmp_path, run=asked, placement=SPLIT, **SECTIONS), see)
    assert len(said) == 1
    ledger = tmp_path / "runs" / "run" / "ledger.jsonl"
    assert read_ledger(ledger).counts() == {"trained": 28}
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    drawn = {line["step"]: line["versions"] for line in lines if line.get("state") == "rolled_out"}
    assert all(step - 1 - low <= 2 for step, versions in drawn.items() for low, _ in versions)


class Suicidal(Policy):
    """It ends in its second step, whenever it gets there."""

    @endpoint(dispatch=shard(args=("batch",), balance="tokens"), collect=first(), readonly=True)
    def update(self, batch: Batch) -> dict[str, float]:
        if self.progress()[0] >= 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().update(batch)


def test_a_run_that_loses_workers_again_and_again_ends_with_the_causes(tmp_path: Path) -> None:
    config = tiny(GRPOConfig, tmp_path, run={"steps": 3, "max_restarts": 1}, **SECTIONS)
    with pytest.raises(
        PodiumError, match=r"lost workers 2 times within an hour, and run\.max_restarts = 1:\n"
    ) as caught:
        fit(config, lambda trainer, event: None, workers={"policy": Suicidal})
    assert str(caught.value).count("signal SIGKILL)") == 2
