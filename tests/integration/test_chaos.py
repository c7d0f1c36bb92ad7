"""Faults of `make chaos` over the three schedules, each once: what is promised of it, and books that balance.

Every outcome is among them, and the ends of each process that holds something. `make chaos` strikes with all kinds.
Every day tests/integration/test_losses_in_pairs.py kills processes of runs and checks the same books.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from bench.chaos.campaign import Campaign
from bench.chaos.faults import FAULTS
from bench.chaos.pairs import PAIRS
from bench.chaos.victim import Victim

STRIKES = {
    "sync": ("controller", "files_end", "grading"),
    "one_step_off": ("policy", "save"),
    "asynchronous": ("generator", "pause"),
}
LEFT_OUT = {  # where the suite tries what `make chaos` alone does to a run
    "stop": "test_train_backends.py",
    "fork_server": "test_faults_calls.py",
    "half_closed": "test_faults_sockets.py",
    "rollout": "test_environments.py",
    "policy_raises": "test_train_grpo.py",
    "generator_raises": "test_train_grpo.py",
    "dispatcher": "../unit/rewards/test_grader.py",
    "slow": "test_faults_calls.py",
    "clock": "",  # for time: `make chaos` alone
    "memory": "",
    "disk_full": "",  # it needs a disk of its own, so root
    **dict.fromkeys(PAIRS, "test_losses_in_pairs.py"),
}


def test_every_fault_is_tried_or_left_out() -> None:
    tried = [fault for faults in STRIKES.values() for fault in faults]
    assert sorted([*tried, *LEFT_OUT]) == sorted(FAULTS)
    assert {FAULTS[fault].outcome for fault in tried} == {fault.outcome for fault in FAULTS.values()}
    assert all((Path(__file__).parent / name).exists() for name in LEFT_OUT.values())


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("schedule", "faults"), STRIKES.items())
def test_a_disturbed_run_balances(
    tmp_path: Path, schedule: str, faults: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.chaos.campaign.TWIN_STEPS", 2)  # there is one run to compare with the undisturbed one
    victim = partial(_victim, tmp_path, schedule)
    campaign = Campaign(tmp_path, schedule, faults, kills=1, seed=1, victim=victim)
    assert campaign.run(campaign.plan()) == []


def _victim(folder: Path, schedule: str, name: str) -> Victim:
    return Victim(folder, name, schedule)
