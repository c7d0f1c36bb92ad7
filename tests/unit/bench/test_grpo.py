"""The trainers of the suite of GRPO's step end when the bench is done with them."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from bench.context import Context
from bench.suites.grpo import podium_trainer
from bench.workload import StepLoad


@pytest.mark.exhaustive
def test_podiums_trainer_ends_by_itself_between_its_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    context = Context(quick=True, logs=tmp_path, say=lambda text: None)
    with podium_trainer(context, StepLoad(prompts=2, completions=2, new_tokens=2), 1) as turns:
        assert turns.tokens_per_s() > 0
    assert turns._peer._process.returncode == 0, "it was killed"
    assert not list(tmp_path.glob("podium-bench-*"))
