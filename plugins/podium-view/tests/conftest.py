"""Runs to look at, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.made_runs import write_run


@pytest.fixture(scope="session")
def run_with_trouble(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with trouble, that nobody may change."""
    return write_run(tmp_path_factory.mktemp("runs") / "made", trouble=True)
