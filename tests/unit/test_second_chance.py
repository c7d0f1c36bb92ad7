"""The second run that `.ci/run` gives to failed tests, in a small project of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / ".ci" / "second_chance.py"

CONFTEST = """
def pytest_addoption(parser):
    parser.addoption("--all", action="store_true")
"""
TESTS = """
import pathlib
import pytest

def test_passes():
    pass

def test_passes_alone():
    marker = pathlib.Path("second")
    second, _ = marker.exists(), marker.touch()
    assert second, "beside others | it fails"

class TestBroken:
    @pytest.mark.parametrize("number", range(BROKEN))
    def test_always_fails(self, number):
        assert number < 0
"""


def run_twice(folder: Path, broken: int) -> tuple[int, str]:
    """Run a project with one flaky and ``broken`` broken tests, then the second chance, and return what that did."""
    (folder / "tests").mkdir()
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "tests" / "test_it.py").write_text(TESTS.replace("BROKEN", str(broken)))
    (folder / "tests" / "flaky.md").write_text("")
    (folder / "pytest.ini").write_text("[pytest]\n")
    first = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "--junitxml=report.xml"]
    assert subprocess.run(first, cwd=folder, capture_output=True).returncode == 1
    result = subprocess.run([sys.executable, str(SCRIPT), "report.xml"], cwd=folder, capture_output=True, text=True)
    return result.returncode, result.stdout


def test_a_test_that_passes_alone_is_named_and_becomes_a_debt(tmp_path: Path) -> None:
    code, output = run_twice(tmp_path, 0)
    assert code == 0
    assert output.splitlines()[-2] == "flaky: tests/test_it.py::test_passes_alone"
    assert "1 passed" in output.splitlines()[-1]
    (debt,) = (tmp_path / "tests" / "flaky.md").read_text().splitlines()
    assert "`tests/test_it.py::test_passes_alone` | AssertionError: beside others \\| it fails" in debt


def test_a_test_that_fails_again_fails_the_run(tmp_path: Path) -> None:
    code, output = run_twice(tmp_path, 2)
    assert code == 1
    assert "flaky: tests/test_it.py::test_passes_alone" in output
    assert "flaky: tests/test_it.py::TestBroken" not in output
    assert "2 failed, 1 passed" in output.splitlines()[-1]


def test_more_than_ten_failures_get_no_second_run(tmp_path: Path) -> None:
    code, output = run_twice(tmp_path, 10)
    assert code == 1
    assert output.startswith("no second run: 11 tests failed")
    assert not (tmp_path / "tests" / "flaky.md").read_text()


def test_a_run_without_failed_tests_gets_no_second_run(tmp_path: Path) -> None:
    result = subprocess.run([sys.executable, str(SCRIPT), "report.xml"], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stdout.startswith("no second run: the first one ended")
