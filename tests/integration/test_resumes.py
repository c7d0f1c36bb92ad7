"""Runs with settings drawn at random are ended at random and resumed: a few cases of `python -m bench.resumes`.

Every case is in a fork of an interpreter of its own, which must not have computed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CASES = 12


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1000, 2000])
def test_runs_that_are_ended_at_random_and_resumed_are_those_that_were_not(seed: int) -> None:
    command = [sys.executable, "-m", "bench.resumes", "--seed", str(seed), "--cases", str(CASES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == CASES, done.stderr[-3000:]
    assert [result for result in results if result["differences"]] == []
    assert sum(result["ended"][-1] == "finished" for result in results) > CASES // 2, results
