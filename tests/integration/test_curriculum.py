"""Runs that pass over solved prompts: the ledger, and a resume."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from podium.runs.ledger import read_ledger
from podium.runtime import Cluster
from podium.trainer import GRPOConfig
from tests.integration.training import timeless, tiny, train

ENTRIES = {"count": 8, "filter": "none", "skip_solved": 1.0, "curriculum": "variance"}


def half_are_solved(completion: str, row: Mapping[str, Any]) -> float:
    """Even answers are always right."""
    return float(int(row["answer"]) % 2 == 0 or len(set(completion)) > 2)


def settings_of(folder: Path, **sections: Any) -> GRPOConfig:
    folder.mkdir(exist_ok=True)
    reward = {"name": "tests.integration.test_curriculum:half_are_solved", "processes": 1}
    values: dict[str, Any] = {"reward": reward, "batch": {"prompts": ENTRIES}, "eval": {"items": 0}}
    return tiny(GRPOConfig, folder, **(values | sections))


def check_run(run: Path, first_unsolved: int) -> None:
    """Check the ledger, and that later steps train no prompt that is solved."""
    states = read_ledger(run / "ledger.jsonl")
    assert states.counts().keys() <= {"trained", "dropped"}
    assert states.reasons["solved (batch.prompts.skip_solved)"] > 0
    for step in range(first_unsolved, 15):
        file = run / "completions" / f"step-{step:06d}.parquet"
        answers = {int(answer) for answer in pq.read_table(file)["expected"].to_pylist()}
        assert all(answer % 2 for answer in answers), step


def test_solved_prompts_are_passed_over_and_a_resumed_run_goes_on_bit_by_bit(tmp_path: Path) -> None:
    whole = train(settings_of(tmp_path / "whole", run={"steps": 14}))
    check_run(whole, 8)  # after an epoch of 48 prompts
    run = train(settings_of(tmp_path / "parts", run={"steps": 9}))
    train(settings_of(tmp_path / "parts", run={"steps": 14, "resume": str(run)}))
    assert timeless(run) == timeless(whole)
    counts = [read_ledger(path / "ledger.jsonl").reasons for path in (run, whole)]
    assert counts[0] == counts[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["one_step_off", "asynchronous"])
def test_other_schedules_pass_over_solved_prompts_too(preloaded: Cluster, tmp_path: Path, schedule: str) -> None:
    run = train(
        settings_of(tmp_path, run={"steps": 14, "schedule": schedule}, placement={"layout": "split"}), preloaded
    )
    check_run(run, 11)
