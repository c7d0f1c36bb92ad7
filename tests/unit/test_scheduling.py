"""The order in which `make test` runs the files, and the record that it follows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.scheduling import SecondsRecorder, cut_units, list_changes, select_quick

CONFTEST = """
import pytest
from tests import scheduling

def pytest_configure(config):
    scheduling.read_seconds = lambda: {"a/test_ray.py": 5.0, "a/test_slow.py": 9.0}

def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: "ray" in item.name)

@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return scheduling.make_scheduler(config, log)
"""
LONG_CONFTEST = """
import pytest
from tests import scheduling

def pytest_addoption(parser):
    parser.addoption("--record", action="store_true")

def pytest_configure(config):
    for mark in ("slow", "exhaustive"):
        config.addinivalue_line("markers", mark)
    if not hasattr(config, "workerinput"):
        scheduling.os.getloadavg = lambda: (0.0, 0.0, 0.0)
        config.pluginmanager.register(scheduling.LongTests(strict=config.getoption("--record")))

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report):
    report.duration = 15.0 if "long" in report.nodeid and report.when != "teardown" else 0.1
"""
LONG_TESTS = """
import pytest

def test_short(): pass
def test_long(): pass

@pytest.mark.slow
def test_long_and_slow(): pass

@pytest.mark.exhaustive
class TestAll:
    def test_long(self): pass
"""
TESTS = """
import os, pathlib

def write(name):
    folder = pathlib.Path(os.environ["RECORD"])
    with (folder / os.environ["PYTEST_XDIST_WORKER"]).open("a") as file:
        print(name, file=file)
"""


def test_the_longest_files_come_first() -> None:
    collection = ["a/fast.py::x", "a/slow.py::x", "a/slow.py::y", "b/long.py::x", "a/slow.py::ray", "b/rays.py::x"]
    units = cut_units(collection, {"a/slow.py": 90.0, "b/long.py": 50.0, "b/rays.py": 70.0})
    assert [(unit.tests[0], unit.seconds, unit.with_ray) for unit in units] == [
        ("b/rays.py::x", 70.0, True),
        ("a/slow.py::x", 60.0, False),
        ("b/long.py::x", 50.0, False),
        ("a/slow.py::ray", 30.0, True),
        ("a/fast.py::x", 0.0, False),
    ]


def test_one_process_runs_the_tests_with_ray_and_none_without_after_them(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name in ("fast", "ray", "slow", "zigzag"):
        body = f"\ndef test_plain():\n    write('{name}')\n" if name != "ray" else ""
        ray = f"\ndef test_ray():\n    write('ray {name}')\n" if name in ("ray", "slow") else ""
        (tmp_path / "a" / f"test_{name}.py").write_text(TESTS + body + ray)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadscope", "--import-mode=importlib"]
    root = str(Path(__file__).parents[2])
    (record := tmp_path / "record").mkdir()
    environment = {"PYTHONPATH": root, "RECORD": str(record), "PATH": "/usr/bin:/bin"}
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert "5 passed" in result.stdout, result.stdout
    lines = {file.name: file.read_text().split("\n")[:-1] for file in record.iterdir()}
    assert sum(map(len, lines.values())) == 5
    with_ray = [process for process, names in lines.items() if any("ray" in name for name in names)]
    assert len(with_ray) == 1
    names = lines[with_ray[0]]
    assert all("ray" in name for name in names[names.index(next(name for name in names if "ray" in name)) :])


def test_a_process_for_which_nothing_is_left_has_nothing_to_do(tmp_path: Path) -> None:
    """One of two processes takes the only tests without Ray, and then those with Ray."""
    for name in ("b", "a"):  # the order goes back, as where tests with Ray begin
        (tmp_path / f"test_{name}.py").write_text(f"def test_{name}(): pass\n")
    files = [str(tmp_path / f"test_{name}.py") for name in ("b", "a")]
    (tmp_path / "conftest.py").write_text(CONFTEST)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadscope", "--import-mode=importlib"]
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin:/bin"}
    result = subprocess.run([*command, *files], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert "2 passed" in result.stdout, result.stdout


def test_the_record_is_of_files_that_exist() -> None:
    from tests.scheduling import RECORD, read_seconds

    assert all((RECORD.parent.parent / name.partition("::")[0]).exists() for name in read_seconds())
    assert not RECORD.exists() or json.loads(RECORD.read_text()) == read_seconds()


def test_tests_that_are_not_quick_have_records_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, file, former = tmp_path / "seconds.json", "tests/unit/test_names.py", "tests/unit/test_clocks.py"
    record.write_text(
        json.dumps({f"{file}::gone": 3.0, former: 2.0, f"{former}::kept": 1.0, "tests/unit/gone.py": 1.0})
    )
    monkeypatch.setattr("tests.scheduling.RECORD", record)
    recorder = SecondsRecorder()

    def report(test: str, when: Any, seconds: float, *marks: str, path: str = file) -> None:
        keywords: Any = dict.fromkeys(marks, 1)
        recorder.pytest_runtest_logreport(
            pytest.TestReport(f"{path}::{test}", (path, 0, test), keywords, "passed", None, when, duration=seconds)
        )

    report("test_long", "call", 4.0)
    report("test_quick", "call", 0.05)
    report("test_first", "setup", 8.0)
    report("test_marked", "call", 30.0, "slow")
    report("test_train", "call", 5.0, path="tests/integration/test_train_sft.py")
    recorder.pytest_sessionfinish()
    assert json.loads(record.read_text()) == {
        former: 2.0,
        f"{former}::kept": 1.0,
        file: 42.0,
        f"{file}::test_long": 4.0,
        "tests/integration/test_train_sft.py": 5.0,
    }


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("docs/index.md", {"unit/rollout/test_tools.py::quick"}),
        ("tests/unit/rollout/test_tools.py", {"unit/rollout/test_tools.py::quick", "unit/rollout/test_tools.py::long"}),
        ("src/podium/rollout/tools.py", {"unit/rollout/test_tools.py::quick", "unit/rollout/test_tools.py::long"}),
        ("src/podium/tools.py", {"unit/rollout/test_tools.py::quick"}),
        ("plugins/podium-a/src/podium_a/x.py", {"unit/rollout/test_tools.py::quick", "a::long"}),
        ("plugins/podium-a/README.md", {"unit/rollout/test_tools.py::quick"}),
    ],
)
def test_quick_tests_and_all_where_the_changes_are(change: str, expected: set[str]) -> None:
    tools, plugin = "tests/unit/rollout/test_tools.py", "plugins/podium-a/tests/test_a.py"
    names = {
        f"{tools}::quick": "unit/rollout/test_tools.py::quick",
        f"{tools}::long[/a]": "unit/rollout/test_tools.py::long",
        f"{plugin}::long": "a::long",
    }
    seconds = {tools: 9.0, f"{tools}::long[/a]": 8.0, plugin: 5.0, f"{plugin}::long": 5.0}
    assert {names[test] for test in select_quick(list(names), seconds, [change])} == expected


def test_changes_are_those_since_main_committed_or_not(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True)

    assert list_changes(tmp_path) == []
    git("init", "-q", "-b", "main")
    for name in ("same", "edited", "committed"):
        (tmp_path / name).write_text("a")
    git("add", ".")
    git("commit", "-qm", "a")
    assert list_changes(tmp_path) == []
    git("checkout", "-qb", "change")
    (tmp_path / "committed").write_text("b")
    git("commit", "-qam", "b")
    (tmp_path / "edited").write_text("b")
    (tmp_path / "new").write_text("b")
    assert sorted(list_changes(tmp_path)) == ["committed", "edited", "new"]


@pytest.mark.parametrize(("record", "processes"), [(False, ("-n", "2")), (True, ())])
def test_a_long_test_without_a_mark_is_named(tmp_path: Path, record: bool, processes: tuple[str, ...]) -> None:
    (tmp_path / "conftest.py").write_text(LONG_CONFTEST)
    (tmp_path / "test_times.py").write_text(LONG_TESTS)
    options = ["-q", "--import-mode=importlib", "-p", "no:cacheprovider", *processes, *(["--record"] if record else [])]
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin:/bin"}
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options], cwd=tmp_path, capture_output=True, text=True, env=environment
    )
    assert "4 passed" in result.stdout
    assert [line for line in result.stdout.splitlines() if " s)" in line] == ["  test_times.py::test_long (30 s)"]
    assert result.returncode == record
