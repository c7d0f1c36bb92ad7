"""Of a grid of tests a few cases run every day, and none of them is lost to ``make test-all``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.everyday import select_each_value

ROOT = Path(__file__).parents[2]
CONFTEST = """
from tests.everyday import mark_other_cases

def pytest_configure(config):
    for mark in ("everyday", "each_value", "exhaustive", "ray"):
        config.addinivalue_line("markers", mark)

def pytest_collection_modifyitems(items):
    mark_other_cases(items)
"""
TESTS = """
import pytest

@pytest.mark.everyday("b")
@pytest.mark.parametrize("letter", "abc")
def test_named(letter): pass

@pytest.mark.each_value
@pytest.mark.parametrize("letter", "xyz")
@pytest.mark.parametrize("number", [1, 2])
def test_product(letter, number): pass

@pytest.mark.everyday("local")
@pytest.mark.parametrize("backend", [
    "inline", "local", pytest.param("other", marks=pytest.mark.ray),
    pytest.param("slow", marks=pytest.mark.exhaustive),
])
def test_backends(backend): pass

def test_plain(): pass
"""


def collect(directory: Path, *arguments: str, tests: str = TESTS) -> str:
    """Return what pytest prints of the tests that do not have the mark ``exhaustive``."""
    (directory / "conftest.py").write_text(CONFTEST)
    (directory / "test_grid.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
    return done.stdout + done.stderr


def list_tests(output: str) -> list[str]:
    return [line.partition("::test_")[2] for line in output.splitlines() if "::test_" in line]


def test_cases_that_are_not_chosen_are_exhaustive_and_those_of_ray_are_left_to_its_proof(tmp_path: Path) -> None:
    everyday = list_tests(collect(tmp_path, "-m", "not exhaustive"))
    assert everyday == [
        "named[b]", "product[1-x]", "product[1-z]", "product[2-y]", "backends[local]", "backends[other]", "plain",
    ]  # fmt: skip
    others = list_tests(collect(tmp_path, "-m", "exhaustive"))
    assert sorted(everyday + others) == sorted(list_tests(collect(tmp_path)))


def test_a_case_that_is_asked_for_by_its_name_runs(tmp_path: Path) -> None:
    for names in (["named[a]"], ["named[a]", "named[c]"], ["product[1-x]", "product[2-x]", "product[2-z]"]):
        arguments = [f"test_grid.py::test_{name}" for name in names]
        assert list_tests(collect(tmp_path, "-m", "not exhaustive", *arguments)) == names


def test_cases_that_failed_run_again(tmp_path: Path) -> None:
    """As the second run of .ci/run asks for them: of a function whose everyday cases passed, or of a few."""
    failing = TESTS.replace("(letter): pass", "(letter): assert letter == 'b'").replace(
        "(letter, number): pass", "(letter, number): assert letter == 'y'"
    )
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_grid.py").write_text(failing)
    for option in ((), ("--lf",)):
        command = [sys.executable, "-m", "pytest", "-q", *option]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
        assert "6 failed" in done.stdout, done.stdout


def test_a_name_that_no_case_has_is_an_error(tmp_path: Path) -> None:
    output = collect(tmp_path, tests=TESTS.replace('everyday("b")', 'everyday("b", "d")'))
    assert "test_grid.py::test_named has no case 'd'; its cases are 'a', 'b', 'c'" in output


@pytest.mark.parametrize(
    "cases",
    [
        [{"a": a, "b": b, "c": c} for a in range(7) for b in "xyz" for c in (False, True)],
        [{"a": name, "b": number} for name, number in [("x", 1), ("x", 2), ("y", 1), ("z", 3)]],
        [{"a": [number]} for number in range(3)],
        [{}],
    ],
)
def test_each_value_occurs_in_a_selected_case(cases: list[dict[str, object]]) -> None:
    selected = [cases[index] for index in select_each_value(cases)]
    for case in cases:
        for name, value in case.items():
            assert any(other[name] is value for other in selected)


def test_a_product_needs_as_many_cases_as_its_longest_list() -> None:
    cases = [{"a": a, "b": b, "c": c} for a in range(7) for b in "xyz" for c in (False, True)]
    assert len(select_each_value(cases)) == 7
