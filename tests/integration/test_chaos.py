"""Each fault of `make chaos` once, over the three schedules: what is promised of it, and books that balance."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from bench.chaos.campaign import Campaign
from bench.chaos.faults import FAULTS
from bench.chaos.victim import Victim

STRIKES = {
    "sync": ("policy_raises", "half_closed", "controller", "files_end", "grading"),
    "one_step_off": ("policy", "save", "generator_raises", "clock", "memory"),
    "asynchronous": ("generator", "stop", "fork_server", "dispatcher", "pause", "slow"),
}


def test_every_fault_is_tried() -> None:
    tried = [fault for faults in STRIKES.values() for fault in faults]
    assert sorted([*tried, "disk_full"]) == sorted(FAULTS), "a full disk needs a disk of its own, so root"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("schedule", STRIKES)
def test_a_disturbed_run_balances(tmp_path: Path, schedule: str) -> None:
    victim = partial(_victim, tmp_path, schedule)
    campaign = Campaign(tmp_path, schedule, STRIKES[schedule], kills=1, seed=1, victim=victim)
    assert campaign.run() == []


def _victim(folder: Path, schedule: str, name: str) -> Victim:
    return Victim(folder, name, schedule, seed=schedule)
