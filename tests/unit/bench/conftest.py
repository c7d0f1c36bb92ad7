"""What is measured has the processes that a user has: fork servers of new interpreters, not of a warm one."""

from __future__ import annotations

import subprocess

import pytest

from tests.warm_python import NewPopen


@pytest.fixture(autouse=True)
def new_fork_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork of a warm process maps whatever that one has imported, which a census of memory reads again and again."""
    monkeypatch.setattr(subprocess, "Popen", NewPopen)
