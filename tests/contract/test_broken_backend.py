"""The public suite finds whatever a backend does wrong: a twin of ``local`` with one fault at a time fails it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.contract.broken_backend import FAULTS

ROOT = Path(__file__).parents[2]
METADATA = "Metadata-Version: 2.1\nName: podium-broken\nVersion: 0\n"
ENTRY_POINTS = "[podium.backends]\nbroken = tests.contract.broken_backend:BrokenBackend\n"
SUITE = """
import podium
import pytest
from podium.testing import BackendContract, Target, processes, scripts
from podium.runtime.calls import ProcessCalls
from tests.contract.broken_backend import FAULTS

LOADED = ("podium.testing.workers", "torch")
kill = ProcessCalls.kill

@pytest.fixture(scope="module", params=["", *FAULTS], ids=lambda fault: fault or "no fault")
def target(request):
    fault = request.param  # a test that waits for what a fault prevents waits as short as this machine allows
    processes.START_S = 1.0
    processes.SOON_S = scripts.GONE_S = 2.0 if fault else 20.0
    TestBroken.limit_s = 4.0 if fault else 60.0
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
from tests.contract.broken_backend import FAULTS

def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if asked(item.originalname, item.callspec.params["target"])]

def asked(test, fault):
    return FAULTS[fault] == test if fault else test in FAULTS.values()
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_fault_is_found(tmp_path: Path) -> None:
    """Without a fault the twin passes the same tests."""
    info = tmp_path / "podium_broken-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (tmp_path / "test_broken.py").write_text(SUITE)
    (tmp_path / "conftest.py").write_text(SELECTION)
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--junitxml={report}"]
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    ended = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 1, ended.stdout[-5000:] + ended.stderr[-5000:]
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case.attrib["name"] for case in cases if case.find("failure") is not None]
    missed = [at for at, test in FAULTS.items() if not any(name.startswith(f"{test}[{at}") for name in failed)]
    healthy = [case for case in cases if "[no fault" in case.attrib["name"]]
    others = [
        case.attrib["name"] for case in healthy if {child.tag for child in case} & {"failure", "error", "skipped"}
    ]
    assert (missed, others) == ([], []), ended.stdout[-8000:]
    assert len(healthy) >= len({*FAULTS.values()})
