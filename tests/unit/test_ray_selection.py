"""Tests with Ray are left out while what they prove has not changed since all of them passed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import ray_selection

ROOT = Path(__file__).parents[2]
CONFTEST = """
from tests import ray_selection

def pytest_addoption(parser):
    parser.addoption("--all", action="store_true")

def pytest_configure(config):
    config.addinivalue_line("markers", "ray: needs Ray")
    ray_selection.SMOKE_TESTS = ("tests/integration/test_a.py::test_NAME",)
    ray_selection.find_changes = lambda: CHANGES
    config.pluginmanager.register(ray_selection.RaySelection(config))
"""
TESTS = """
import pytest

@pytest.mark.ray
def test_smoke(): pass

@pytest.mark.ray
def test_more(): pass

def test_other(): pass
"""


def run(directory: Path, *arguments: str, changes: str = "[]", smoke: str = "smoke") -> str:
    """Run six tests with Ray, of which one is a smoke test, and three without."""
    for folder, name in (("integration", "a"), ("integration", "b"), ("contract", "c")):
        (directory / "tests" / folder).mkdir(parents=True, exist_ok=True)
        (directory / "tests" / folder / f"test_{name}.py").write_text(TESTS)
    (directory / "conftest.py").write_text(CONFTEST.replace("CHANGES", changes).replace("NAME", smoke))
    command = [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
    return done.stdout + done.stderr


@pytest.mark.everyday("processes1")
@pytest.mark.parametrize("processes", [(), ("-n", "2", "--dist", "loadscope")])
def test_all_but_the_smoke_test_are_left_out_aloud(tmp_path: Path, processes: tuple[str, ...]) -> None:
    said = run(tmp_path, *processes)
    assert "4 passed" in said
    assert "5 tests with Ray were left out" in said
    assert "plugins/podium-ray, src/podium/runtime, src/podium/data, plugins/podium-testing/src" in said


@pytest.mark.parametrize(
    ("arguments", "changes", "passed"),
    [
        (["--all"], "[]", 9),
        ([], "['src/podium/runtime']", 9),
        ([], "['tests/integration/test_b.py', 'src/podium/runtime']", 9),
        (["tests/integration/test_b.py"], "[]", 3),
        (["tests/integration/test_a.py::test_more"], "[]", 1),
    ],
)
def test_all_run_after_a_change_and_where_they_are_asked_for(
    tmp_path: Path, arguments: list[str], changes: str, passed: int
) -> None:
    said = run(tmp_path, *arguments, changes=changes)
    assert f"{passed} passed" in said
    assert "left out" not in said


def test_of_changed_files_of_tests_all_run(tmp_path: Path) -> None:
    output = run(tmp_path, changes="['tests/integration/test_b.py']")
    assert "6 passed" in output
    assert "3 tests with Ray were left out" in output


def test_a_smoke_test_that_is_gone_is_an_error(tmp_path: Path) -> None:
    assert "there is no test tests/integration/test_a.py::test_gone" in run(tmp_path, smoke="gone")


@pytest.mark.parametrize(
    ("file", "part"),
    [
        ("plugins/podium-ray/src/podium_ray/wire.py", "plugins/podium-ray"),
        ("plugins/podium-ray/tests/test_x.py", "plugins/podium-ray"),
        ("src/podium/backends/process.py", "src/podium/backends/*.py"),
        ("src/podium/runtime/calls/call.py", "src/podium/runtime"),
        ("src/podium/data/new.py", "src/podium/data"),
        ("plugins/podium-testing/src/podium_testing/ends.py", "plugins/podium-testing/src"),
        ("tests/contract/test_x.py", "tests/contract/test_x.py"),
        ("tests/integration/ray_workers.py", "what tests with Ray share"),
        ("tests/integration/test_x.py", "tests/integration/test_x.py"),
        ("docs/ray.md", "what tests with Ray share"),
        ("src/podium/backends/local/wire.py", None),
        ("tests/integration/test_y.py", None),
    ],
)
def test_a_change_is_named(tmp_path: Path, file: str, part: str | None) -> None:
    for name, text in (
        ("docs/ray.md", ""),
        ("src/podium/backends/process.py", ""),
        ("src/podium/runtime/calls/call.py", ""),
        ("tests/contract/test_x.py", "mark.ray"),
        ("tests/integration/test_x.py", "mark.ray"),
        ("tests/integration/test_y.py", ""),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    before = ray_selection.compute_digests(tmp_path)
    assert ray_selection.compute_digests(tmp_path) == before
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    with (tmp_path / file).open("a") as changed:
        changed.write("# changed; mark.ray\n" if file.endswith("test_x.py") else "# changed\n")
    after = ray_selection.compute_digests(tmp_path)
    assert [name for name in before if before[name] != after[name]] == ([part] if part else [])
