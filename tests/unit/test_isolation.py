"""Test files in processes of their own, with their tests in random order: the order, and the record that continues."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.isolation import FileResult, IsolationRecord, list_test_files, run_files, shuffle

CONFTEST = """
from tests import isolation

def pytest_addoption(parser):
    parser.addoption("--shuffle", type=int)

def pytest_collection_modifyitems(config, items):
    isolation.shuffle(items, config.getoption("--shuffle"))
"""
TESTS = """
import pytest

state = []

@pytest.mark.parametrize("number", range(6))
def test_fill(number):
    state.append(number)

def test_state():
    assert len(state) == 6
"""


def make_items(*names: str) -> list[SimpleNamespace]:
    return [SimpleNamespace(nodeid=name, path=Path(name.partition("::")[0])) for name in names]


def order(names: list[str], seed: int) -> list[str]:
    shuffle(items := make_items(*names), seed)
    return [item.nodeid for item in items]


def test_files_stay_in_their_order_and_their_tests_do_not() -> None:
    names = [f"{file}.py::{number}" for file in ("b", "a") for number in range(20)]
    shuffled = order(names, 1)
    assert [name[0] for name in shuffled] == ["b"] * 20 + ["a"] * 20
    assert sorted(shuffled) == sorted(names) and shuffled != names
    assert order(names, 1) == shuffled != order(names, 2)
    assert [name[-1] for name in shuffled[:20]] != [name[-1] for name in shuffled[20:]], "each file has its own order"


def test_two_tests_keep_their_order_when_others_are_deselected() -> None:
    names = [f"a.py::{number}" for number in range(20)]
    subset = names[::3]
    assert order(subset, 7) == [name for name in order(names, 7) if name in subset]


def test_an_interrupted_run_continues_with_the_files_that_have_not_passed(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "record.json"
    calls: list[tuple[str, int]] = []

    def run(file: str, seed: int) -> FileResult:
        calls.append((file, seed))
        if file == "interrupted":
            raise KeyboardInterrupt
        return {"passed": file != "broken", "summary": "", "seconds": 0.0}

    first = IsolationRecord(path)
    with pytest.raises(KeyboardInterrupt):
        list(run_files(["passed", "broken", "interrupted", "waiting"], first, 1, run))
    record = IsolationRecord(path)
    assert record.seed == first.seed
    calls.clear()
    files = ["passed", "broken", "waiting"]
    assert {file for file, _ in run_files(files, record, 1, run)} == {"broken", "waiting"}
    assert calls == [("broken", record.seed), ("waiting", record.seed)]
    assert [record.has_passed(file) for file in files] == [True, False, True]
    assert IsolationRecord(path, again=True).files == {}
    assert IsolationRecord(path, seed=record.seed).files == record.files
    assert IsolationRecord(path, seed=record.seed + 1).files == {}, "another order proves nothing of this one"


def test_files_of_a_folder_are_those_with_tests_and_a_wrong_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "unit" / "data").mkdir(parents=True)
    for name in ("unit/test_a.py", "unit/data/test_b.py", "unit/conftest.py", "unit/helpers.py"):
        (tmp_path / name).touch()
    assert list_test_files(tmp_path, ["unit/test_a.py", "unit"]) == ["unit/test_a.py", "unit/data/test_b.py"]
    with pytest.raises(SystemExit, match="there is no unit/test_c"):
        list_test_files(tmp_path, ["unit/test_c.py"])


def test_a_test_that_needs_others_before_it_fails_in_another_order(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_state.py").write_text(TESTS)
    nodes = [f"test_state.py::test_fill[{number}]" for number in range(6)] + ["test_state.py::test_state"]
    seed = next(seed for seed in range(100) if order(nodes, seed)[-1] != "test_state.py::test_state")
    command = [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider"]
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin:/bin"}
    result = subprocess.run(
        [*command, f"--shuffle={seed}"], cwd=tmp_path, capture_output=True, text=True, env=environment
    )
    assert "1 failed, 6 passed" in result.stdout, result.stdout
