"""The example of a backend in a package of its own: installed as a user installs it, it passes the public suite."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from podium.runtime import backend
from tests.warm_python import run_python

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "examples" / "backend_plugin"
SUITE = """
import pytest
from podium_testing import BackendContract, Target

@pytest.fixture(scope="module", params=[Target("streams", preload=("podium_testing.workers", "torch"))], ids=str)
def target(request):
    return request.param

class TestStreams(BackendContract):
    pass
"""
SELECTION = """
from tests.contract.everyday import KINDS

EVERYDAY = {name for kind in KINDS for name in kind.everyday}

def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if {item.originalname, name_without_target(item)} & EVERYDAY]

def name_without_target(item):
    return f"{item.originalname}[{item.callspec.id.partition('-')[2]}]"
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the package installed, built from a copy so that nothing is left beside the source."""
    where = tmp_path_factory.mktemp("plugin")
    shutil.copytree(PLUGIN, where / "source", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-index"]
    command = [*pip, "--no-deps", "--no-build-isolation", "--target", str(where / "site"), str(where / "source")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return where / "site"


def run(site: Path, directory: Path, *arguments: str) -> str:
    """Standard output of ``python ARGUMENTS`` where the package is installed."""
    env = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}"}
    done = run_python(*arguments, cwd=directory, env=env, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_podium_lists_it_with_what_it_can_do(site: Path, tmp_path: Path) -> None:
    out = run(site, tmp_path, "-c", "from podium.cli import main; main(['backends'])")
    (line,) = [line for line in out.splitlines() if line.startswith("streams")]
    assert line.split(None, 1)[1].startswith(
        "can: processes, collectives, concurrent, exit_status, this_machine; cannot: detached"
    )
    assert "podium_streams.backend:StreamsBackend" in out


def test_it_refuses_another_version_of_the_contract_and_the_others_work(site: Path, tmp_path: Path) -> None:
    newer = "import podium.runtime.backend as contract; contract.CONTRACT_VERSION = 2; from podium.cli import main; "
    out = run(site, tmp_path, "-c", newer + "main(['backends'])")
    assert re.search(
        r"^streams +not usable here: podium-streams keeps version 1 of .* contract, which is at 2", out, re.M
    )
    assert re.search(r"^local +can: processes", out, re.M)


@pytest.mark.timeout(600)  # 60 s on an idle machine where it is whole
@pytest.mark.parametrize(
    ("selection", "least"),
    [
        pytest.param(SELECTION, 18, id="a few of each kind"),
        pytest.param("", 190, id="whole", marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
)
def test_it_passes_the_public_contract_suite(site: Path, tmp_path: Path, selection: str, least: int) -> None:
    (tmp_path / "test_streams.py").write_text(SUITE)
    (tmp_path / "conftest.py").write_text(selection)
    chosen = ("-k", "not 2_gib")  # tests/contract/test_mutation.py runs that one
    out = run(site, tmp_path, "-W", "error", "-m", "pytest", *chosen, "-q", "-p", "no:cacheprovider", "test_streams.py")
    passed = re.search(r"^(\d+) passed(?:, (\d+) skipped)?(?:, \d+ (?:warnings?|deselected))* in", out, re.MULTILINE)
    assert passed is not None, out
    assert int(passed[1]) >= least, out
    assert int(passed[2] or 0) <= 4, "what processes have not, collectives have not, and detached groups (2)"


def test_it_imports_only_what_the_docs_call_stable() -> None:
    page = (PLUGIN.parents[1] / "docs" / "backends.md").read_text()
    stable = page[page.index("### What stays as it is") : page.index("Everything else may change")]
    for path in PLUGIN.rglob("*.py"):
        for found in ast.walk(ast.parse(path.read_text())):
            if isinstance(found, ast.ImportFrom) and found.module and found.module.partition(".")[0] == "podium":
                assert f"`{found.module}`" in stable, found.module
                whole = found.module in ("podium.runtime.backend", "podium.errors")
                assert whole or [name.name for name in found.names if f"`{name.name}`" not in stable] == []


def test_it_is_as_small_as_is_said() -> None:
    lines = [len(path.read_text().splitlines()) for path in (*PLUGIN.rglob("*.py"), PLUGIN / "pyproject.toml")]
    assert len(lines) == 6
    assert sum(lines) <= 300
    assert len(Path(backend.__file__).read_text().splitlines()) < 150
