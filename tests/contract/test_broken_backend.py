"""The public suite finds whatever a backend does wrong: a twin of ``local`` with one fault at a time fails it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.contract.broken_backend import FAULTS, HANGS, STAYS

ROOT = Path(__file__).parents[2]
METADATA = "Metadata-Version: 2.1\nName: podium-broken\nVersion: 0\n"
ENTRY_POINTS = "[podium.backends]\nbroken = tests.contract.broken_backend:BrokenBackend\n"
SUITE = """
import json
import os

import podium
import pytest
from podium_testing import BackendContract, Target, processes, scripts
from podium.runtime.calls.process_calls import ProcessCalls
from tests.contract.broken_backend import FAULTS, HANGS, PATIENCE_S, STAYS

LOADED = ("podium_testing.workers", "torch")
ASKED = json.loads(os.environ["PODIUM_FAULTS"])
kill = ProcessCalls.kill

@pytest.fixture(scope="module", params=["", *ASKED], ids=lambda fault: fault or "no fault")
def target(request):
    fault = request.param  # limits are short only where a fault lets them pass
    processes.START_S = 1.0
    processes.GONE_S = scripts.GONE_S = PATIENCE_S if fault in STAYS else 60.0
    scripts.SAID_S = PATIENCE_S if fault == "loses output" else 60.0
    ProcessCalls.kill = lambda calls, seconds: kill(calls, min(seconds, 0.5)) if fault else kill(calls, seconds)
    return Target("broken", fault=fault)

class TestBroken(BackendContract):
    @pytest.fixture(scope="class")
    @classmethod
    def cluster(cls, target):
        preload = () if target.options["fault"] == "leaves children" else LOADED
        with podium.connect("broken", preload=preload, **target.options) as cluster:
            yield cluster
"""
SELECTION = """
import json
import os

from tests.contract.broken_backend import FAULTS

ASKED = json.loads(os.environ["PODIUM_FAULTS"])

def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if asked(item.originalname, item.callspec.params["target"])]

def asked(test, fault):
    return FAULTS[fault] == test if fault else test in {FAULTS[fault] for fault in ASKED}
"""
SIDE_BY_SIDE = 4
EVERY_DAY = (
    "mixes up places",  # a wrong value
    "overtakes",  # a wrong order
    "closes once",  # an error
    "loses last words",  # an end
    "does not wake",  # a test that hangs
    "leaves children",  # a process that stays
    "gives output no name",  # the script
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(EVERY_DAY, id="one of each kind", marks=pytest.mark.slow),
        pytest.param(tuple(FAULTS), id="all", marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
)
def test_every_fault_is_found(tmp_path: Path, faults: Sequence[str]) -> None:
    """Without a fault the twin passes the same tests."""
    info = tmp_path / "podium_broken-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (tmp_path / "test_broken.py").write_text(SUITE)
    (tmp_path / "conftest.py").write_text(SELECTION)
    by_test = sorted(faults, key=lambda fault: FAULTS[fault])  # those that share a test, and a run without a fault
    count = SIDE_BY_SIDE if len(faults) > len(EVERY_DAY) else 1
    cuts = [len(by_test) * at // count for at in range(count + 1)]
    suites = [_start(tmp_path, number, by_test[slice(*cuts[number : number + 2])]) for number in range(count)]
    try:
        ends = [suite.wait() for suite in suites]
    finally:
        for suite in suites:
            suite.kill()
    said = "".join((tmp_path / f"{number}.txt").read_text()[-8000:] for number in range(count))
    assert ends == [1] * count, said
    cases = [case for number in range(count) for case in ElementTree.parse(tmp_path / f"{number}.xml").iter("testcase")]
    failures = {case.attrib["name"]: found for case in cases if (found := case.find("failure")) is not None}
    late = {name for name, failure in failures.items() if "the test took longer than" in failure.attrib["message"]}
    found = {fault: {name for name in failures if name.startswith(f"{FAULTS[fault]}[{fault}")} for fault in faults}
    assert [fault for fault, names in found.items() if not names] == [], said
    hung = {fault for fault, names in found.items() if names <= late}
    assert hung == {*HANGS} & {*faults}, said
    healthy = [case for case in cases if "[no fault" in case.attrib["name"]]
    others = [
        case.attrib["name"] for case in healthy if {child.tag for child in case} & {"failure", "error", "skipped"}
    ]
    assert others == [], said
    assert len(healthy) >= len({FAULTS[fault] for fault in faults})


def test_each_fault_has_one_way_to_be_found() -> None:
    assert {*HANGS, *STAYS, *EVERY_DAY} <= {*FAULTS}
    assert not {*HANGS} & {*STAYS}


def _start(directory: Path, number: int, faults: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start the suite for these faults, in a process of its own."""
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--junitxml={directory / f'{number}.xml'}"]
    env = {**os.environ, "PYTHONPATH": f"{directory}{os.pathsep}{ROOT}", "PODIUM_FAULTS": json.dumps(faults)}
    command = [sys.executable, "-m", "pytest", *options]
    with (directory / f"{number}.txt").open("w") as output:
        return subprocess.Popen(command, cwd=directory, env=env, stdout=output, stderr=subprocess.STDOUT)
