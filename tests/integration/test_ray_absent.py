"""Where Ray cannot be imported, nothing but the backend ``ray`` is missing. Runs with and without Ray installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUITE = "(inline or local) and not ray and (broadcast_reaches or restart_makes or collectives_work_in)"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """One in which ``import ray`` raises ImportError, in every process."""
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'ray'\", name='ray')\n")
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def run(environment: dict[str, str], *arguments: str) -> str:
    """Python's output, in one; its exit must be 0."""
    command = [sys.executable, *arguments]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return ended.stdout + ended.stderr


@pytest.mark.exhaustive
def test_inline_and_local_keep_the_contract(environment: dict[str, str]) -> None:
    ways = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/contract", "-k", SUITE]
    summary = run(environment, *ways).splitlines()[-1]
    assert " passed" in summary
    assert "failed" not in summary


def test_the_backend_says_what_to_install(environment: dict[str, str]) -> None:
    out = run(
        environment,
        "-c",
        "import podium, podium.errors\n"
        "try:\n    podium.connect('ray')\nexcept podium.errors.ConfigError as error:\n    print(error)",
    )
    assert out == "backend 'ray' cannot be loaded: No module named 'ray'; try: pip install 'ray>=2.50'\n"


def test_it_is_listed_as_not_usable(environment: dict[str, str]) -> None:
    out = run(environment, "-c", "from podium.cli import main; main()", "backends")
    assert "ray        not usable here: No module named 'ray': pip install 'ray>=2.50'\n" in out
