"""What the package promises as a whole: a light import, one version, pins for everything it depends on."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

import podium

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "ray", "pydantic", "rich", "datasets")
LIGHT_MODULES = ("podium", "podium.errors", "podium.telemetry", "podium.runtime", "podium.backends.local")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def canonical(requirement: str) -> str:
    """The distribution's name in a requirement, as package indexes compare it."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name is not None
    return re.sub(r"[-_.]+", "-", name.group()).lower()


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_what_the_controller_imports_loads_nothing_heavy(module: str) -> None:
    script = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"


@pytest.mark.parametrize("package", ["podium", "podium.trainer"])
def test_a_script_says_that_it_imports_torch_before_it_does(package: str) -> None:
    script = f"import sys; sys.modules['torch'] = None; from {package} import GRPOConfig, PPOTrainer"
    script = script.replace("GRPOConfig, ", "") if package == "podium" else script
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == ""
    assert done.stderr.splitlines()[0] == "podium: importing torch and transformers"


def test_the_version_is_written_alike(project: dict[str, Any]) -> None:
    assert podium.__version__ == project["version"]


def test_the_backends_that_are_registered_load(project: dict[str, Any]) -> None:
    registered = {entry.name: entry for entry in entry_points(group="podium.backends")}
    for name in project["entry-points"]["podium.backends"]:
        if name in project["optional-dependencies"] and importlib.util.find_spec(name) is None:
            continue  # its extra is not installed here; its own tests are skipped, and counted
        assert isinstance(registered[name].load(), type)


def test_everything_that_is_installed_for_development_is_pinned(project: dict[str, Any]) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {canonical(line) for line in lines if line and not line.startswith("#")}
    extras = project["optional-dependencies"]
    wanted = {canonical(item) for name in ("dev", "tasks") for item in extras[name]}
    wanted |= {canonical(item) for item in project["dependencies"]}
    assert wanted - {"podium"} <= pinned  # "dev" names Podium with its extras


@pytest.mark.parametrize(("target", "tools"), [("quickstart", False), ("smoke", False), ("env", True), ("test", True)])
def test_only_targets_for_developers_install_development_tools(target: str, tools: bool) -> None:
    words = ["make", "--dry-run", "--always-make", target, "PYTHON=python3"]
    commands = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "-e . -e plugins/podium-agents -e plugins/podium-algorithms -e plugins/podium-curves" in commands
    assert ("-e '.[dev]'" in commands) == tools
    example = (ROOT / "examples" / "quickstart.py").read_text()
    assert "reasoning_gym" not in example, "it needs a C compiler"


def test_the_core_names_no_plugin() -> None:
    packages = [path.parent.name for path in (ROOT / "plugins").glob("*/pyproject.toml")]
    assert len(packages) >= 8
    words = {
        "agents",
        "algorithms",
        "changes",
        "completion",
        "curves",
        "dryrun",
        "inference",
        "migration",
        "native",
        "preferences",
        "ray",
        "rewards",
        "serve",
        "suites",
        "testing",
        "trackers",
        "view",
        "vllm",
    }
    names = {name.removeprefix("podium-") for name in packages} - words
    names |= {f"podium{mark}{word}" for word in words for mark in "-_"}
    for path in (ROOT / "src" / "podium").rglob("*"):
        if path.suffix in (".py", ".yaml", ".js", ".html", ".css"):
            text = path.read_text(encoding="utf-8").lower()
            assert {name for name in names if name in text} == set(), path
