"""The order of the tests under `make test`: the files that take longest start first, and one process runs Ray.

The seconds of each file are recorded in tests/seconds.json by `make test-seconds`, and those of each unit test that is
not quick. `make check` leaves these out, but for those of the files that the change touches. A file or test that has
no record counts as short, so that a new one needs no entry.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

__all__ = [
    "RECORD",
    "LongTests",
    "SecondsRecorder",
    "Unit",
    "cut_units",
    "list_changes",
    "make_scheduler",
    "read_seconds",
    "select_quick",
]

RECORD: Final = Path(__file__).with_name("seconds.json")
ROOT: Final = RECORD.parents[1]
FAST_FOLDERS: Final = ("plugins/", "tests/unit/")
"""Where the tests of `make check` are."""
QUICK_S: Final = 0.05
"""What a test of `make check` may take on a quiet machine."""
LONG_S: Final = 20.0
"""What an everyday test may take on a quiet machine; a longer one is marked ``slow`` or ``exhaustive``."""


def read_seconds() -> dict[str, float]:
    """Return the recorded seconds of files, by their paths from the root of the repository, and of tests, by ids."""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}


class SecondsRecorder:
    """Adds up the seconds of each file's tests, and writes them when the session ends.

    Files that did not run keep their former records. Of the tests of `make check` each one that is not quick has an
    entry of its own: the seconds of its body, because what a fixture of several tests takes would fall to the next one.
    """

    def __init__(self) -> None:
        self.seconds = defaultdict[str, float](float)
        self.long_tests: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.partition("::")[0]] += report.duration
        is_long = report.when == "call" and report.duration > QUICK_S
        if is_long and report.nodeid.startswith(FAST_FOLDERS) and "slow" not in report.keywords:
            self.long_tests[report.nodeid] = report.duration

    def pytest_sessionfinish(self) -> None:
        seconds = {
            name: total
            for name, total in read_seconds().items()
            if (file := name.partition("::")[0]) not in self.seconds and (ROOT / file).exists()
        }
        seconds |= {name: round(total, 1) for name, total in (self.seconds | self.long_tests).items()}
        RECORD.write_text(json.dumps(dict(sorted(seconds.items())), indent=1) + "\n", encoding="utf-8")


def list_changes(root: Path = ROOT) -> list[str]:
    """Return the files that differ from the branch main, or from the last commit where that is main's."""
    git = ["git", "-C", str(root)]

    def read_lines(*words: str) -> list[str]:
        return subprocess.run([*git, *words], capture_output=True, text=True, check=False).stdout.splitlines()

    base = read_lines("merge-base", "HEAD", "main") or read_lines("merge-base", "HEAD", "origin/main") or ["HEAD"]
    return read_lines("diff", "--name-only", base[0]) + read_lines("ls-files", "--others", "--exclude-standard")


def select_quick(tests: Sequence[str], seconds: Mapping[str, float], changes: Sequence[str]) -> set[str]:
    """Return those of ``tests`` that `make check` runs: the quick ones, and all where the ``changes`` are.

    A change of src/podium/A/B.py touches tests/unit/A/test_B.py, and one of a plugin's code all of its tests.
    """
    touched = set(changes)
    for path in map(Path, changes):
        if path.parts[:2] == ("src", "podium"):
            touched.add(Path("tests/unit", *path.parts[2:-1], f"test_{path.name}").as_posix())
        elif path.parts[:1] == ("plugins",) and path.suffix == ".py" and "src" in path.parts:
            touched.add("/".join(path.parts[:2]))
    return {
        test
        for test in tests
        if test not in seconds or touched & {test.partition("::")[0], "/".join(Path(test).parts[:2])}
    }


class LongTests:
    """Names each test without a mark that takes more than LONG_S. With ``--record-seconds`` it is an error.

    On a busy machine a test takes several times as long. So a run that records nothing only names them, and no test is
    named at the end of a run beside which others compute.
    """

    def __init__(self, *, strict: bool) -> None:
        self.strict = strict
        self.seconds = defaultdict[str, float](float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not {"slow", "exhaustive"} & report.keywords.keys():
            self.seconds[report.nodeid] += report.duration

    def list_tests(self) -> list[str]:
        """Return a line for each of the tests, the longest first."""
        longest = sorted(self.seconds.items(), key=lambda entry: -entry[1])
        return [f"{test} ({seconds:.0f} s)" for test, seconds in longest if seconds > LONG_S]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.strict and self.list_tests():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        is_quiet = os.getloadavg()[0] < 2 * (os.cpu_count() or 1)
        if (tests := self.list_tests()) and (self.strict or is_quiet):
            terminalreporter.write_line(
                f"These tests took longer than {LONG_S:.0f} s and are not marked. Make them shorter, or mark them "
                "exhaustive (or slow, where they prove what has to be proven every day):"
            )
            for test in tests:
                terminalreporter.write_line(f"  {test}")


@dataclass(frozen=True)
class Unit:
    """Consecutive tests of one file, which run in one process, so that what the file starts is started once."""

    name: str
    tests: tuple[str, ...]
    seconds: float
    with_ray: bool


def cut_units(collection: Sequence[str], seconds: Mapping[str, float]) -> list[Unit]:
    """Return the units of ``collection``, the longest first.

    conftest.py collects the tests that need Ray after all others, so they begin where the order of the files
    goes back.
    """
    stretches = [
        (file, tuple(tests)) for file, tests in itertools.groupby(collection, lambda test: test.split("::")[0])
    ]
    paths = [Path(file).parts for file, _ in stretches]
    begin = next((index for index in range(1, len(paths)) if paths[index] < paths[index - 1]), len(paths))
    counts = Counter(file for file, tests in stretches for _ in tests)
    units = [
        Unit(f"{index} {file}", tests, seconds.get(file, 0.0) * len(tests) / counts[file], index >= begin)
        for index, (file, tests) in enumerate(stretches)
    ]
    return sorted(units, key=lambda unit: -unit.seconds)


def make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return the scheduler of pytest-xdist that gives one unit after another to whichever process has time.

    Ray leaves threads, children and unclosed files in its process, which other tests count, and several clusters at a
    time are slow. So the first process alone runs the tests with Ray, after its tests without. It begins with them
    once they take as long as the others do that are left.
    """
    from xdist.scheduler import LoadScopeScheduling

    class LongestFirst(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if not hasattr(self, "units"):
                self.units = cut_units(self.collection or (), read_seconds())
                self.unit_of = {test: unit.name for unit in self.units for test in unit.tests}
                self.ray_node = self.nodes[0]
                self.ray_began = False
            return self.unit_of[nodeid]

        def _assign_work_unit(self, node: Any) -> None:
            if units := self._choose_units(node):
                self.workqueue.move_to_end(units[0].name, last=False)
                super()._assign_work_unit(node)

        def _reschedule(self, node: Any) -> None:
            if self.workqueue and not self._choose_units(node):
                node.shutdown()
            super()._reschedule(node)

        def _choose_units(self, node: Any) -> list[Unit]:
            """Return the units that are left for ``node``."""
            waiting = [unit for unit in self.units if unit.name in self.workqueue]
            ray, others = [unit for unit in waiting if unit.with_ray], [unit for unit in waiting if not unit.with_ray]
            if not ray or (len(self.nodes) > 1 and node is not self.ray_node):
                return [] if node is self.ray_node and self.ray_began else others
            seconds_ray, seconds_others = (sum(unit.seconds for unit in units) for units in (ray, others))
            self.ray_began = self.ray_began or not others or seconds_others <= seconds_ray
            return ray if self.ray_began else others

    config.option.loadscopereorder = False
    return LongestFirst(config, log)
