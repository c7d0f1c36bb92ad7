"""A second signal ends a run whatever it does, and leaves nothing. See ``python -m bench.stops``."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from bench.stops import STAGES, StuckRun
from tests.warm_python import WarmPopen

EVERYDAY = [("local", "generate"), ("local", "save"), ("inline", "update")]
CASES = [
    pytest.param(backend, stage, marks=() if (backend, stage) in EVERYDAY else pytest.mark.exhaustive)
    for backend in ("local", "inline")
    for stage in STAGES
]


@pytest.mark.everyday("local-generate")
@pytest.mark.parametrize(("backend", "stage"), CASES)
def test_a_second_signal_ends_a_run_that_is_stuck(tmp_path: Path, backend: str, stage: str) -> None:
    """In C, where no handler of Python's runs; with ``local`` in a worker, with ``inline`` in the script itself."""
    number = signal.SIGTERM if stage == "save" else signal.SIGINT
    run = StuckRun(tmp_path / "run", backend, stage, WarmPopen)
    try:
        if stage != "start":  # where the first signal ends the run
            run.ask(number)
        run.end(number)
    finally:
        run.kill()
    assert run.process.returncode == 128 + number
    assert run.find_leftovers() == []
    *_, last = run.output.splitlines()
    assert last == f"{number.name}: the run ends now; it has no checkpoint yet"
    assert "Traceback" not in run.output
