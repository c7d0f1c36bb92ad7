"""Makes mutants of the example backend, tries the public suite on them, and writes the page that lists them.

``python -m tests.contract.mutation`` tries each mutant with the test that shall fail. Names of mutants choose among
them. ``--whole`` tries the whole suite until a test fails. ``--write`` writes docs/backend-mutants.md and tries none.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from tests.contract.broken_backend import FAULTS
from tests.contract.mutants import MUTANTS

__all__ = ["PAGE", "find_failures", "render_page", "write_mutant"]

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "backend-mutants.md"
EXAMPLE: Final = ROOT / "examples" / "backend_plugin" / "podium_streams"
PRELUDE: Final = """import itertools as _itertools, threading as _threading
_kept, _turns, _lock = [], _itertools.count(1), _threading.Lock()
"""
SKIPPED: Final = "skipped"
LIMIT_S: Final = 40.0
SUITE: Final = """
import json
import os
import pytest
from podium_testing import BackendContract, Target
from podium_testing import edges, ends, processes, scripts
from tests.contract.everyday import NIGHTLY
from tests.contract.mutants import MUTANTS

ASKED = dict(json.loads(os.environ["PODIUM_MUTANTS"]))
ends.LIMITS_S, ends.GONE_S = (2.0, 8.0), 10.0
edges.GONE_S = processes.GONE_S = scripts.GONE_S = 10.0

@pytest.fixture(scope="module", params=ASKED, ids=ASKED.get)
def target(request):
    mutant = ASKED[request.param]  # one that hangs is found by the limit, and the others by what they do
    TestMutants.limit_s = 240.0 if not mutant or MUTANTS[mutant].test in NIGHTLY else 40.0
    return Target(request.param, preload=("podium_testing.workers", "torch"))

class TestMutants(BackendContract):
    pass
"""
SELECTION: Final = """
import json
import os
import pytest
from tests.contract.mutants import MUTANTS

ASKED = dict(json.loads(os.environ["PODIUM_MUTANTS"]))
FOUND = set()

def pytest_collection_modifyitems(items):
    if not os.environ.get("PODIUM_WHOLE"):
        items[:] = [item for item in items if is_asked(item.originalname, ASKED[item.callspec.params["target"]])]

def pytest_runtest_setup(item):
    if ASKED[item.callspec.params["target"]] in FOUND:
        pytest.skip("the mutant is found")  # one that hangs would use up the limit with each of the test's parameters

def pytest_runtest_makereport(item, call):
    mutant = ASKED[item.callspec.params["target"]]
    if mutant and call.excinfo and not call.excinfo.errisinstance(pytest.skip.Exception):
        FOUND.add(mutant)

def is_asked(test, mutant):
    return test == MUTANTS[mutant].test if mutant else test in {MUTANTS[name].test for name in ASKED.values() if name}
"""
HEAD: Final = """# What the contract suite finds

[The suite](backends.md#testing-a-backend) is itself tested by backends that are wrong in one point. This page lists
them, with the test that fails for each of them. A mutant is the example backend of
[examples/backend_plugin](https://github.com/podium-rl/podium/tree/main/examples/backend_plugin) with a few words
replaced. A fault is a twin of `local` that does one thing wrong. `make test-all` tries all of them.
`python -m tests.contract.mutation` tries the mutants, and with `--write` it writes this page.
"""


def write_mutant(directory: Path, package: str, name: str) -> None:
    """Write the example as a backend called ``package``, with what the mutant ``name`` replaces; nothing for "".

    Raises:
        ValueError: A text that is replaced is not in the example exactly once.
    """
    folder = directory / package
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    edits = MUTANTS[name].edits if name else ()
    for path in folder.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        for file, old, new in edits:
            if file == path.name:
                if text.count(old) != 1:
                    raise ValueError(f"mutant {name!r}: {old!r} is {text.count(old)} times in {EXAMPLE.name}/{file}")
                text = text.replace(old, new)
        text = text.replace("podium_streams", package)
        path.write_text(PRELUDE + text if any(file == path.name for file, *_ in edits) else text, encoding="utf-8")
        compile(path.read_text(encoding="utf-8"), str(path), "exec")
    info = directory / f"{package}-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[podium.backends]\n{package} = {package}.backend:StreamsBackend\n")


def find_failures(directory: Path, names: Sequence[str], *, whole: bool = False) -> dict[str, list[str]]:
    """Try mutants ("" for the example itself), and return for each the tests that failed.

    SKIPPED stands for a mutant's test that the machine had no memory for.
    """
    packages = {f"mutant_{number}": name for number, name in enumerate(names)}
    for package, name in packages.items():
        write_mutant(directory, package, name)
    (directory / "test_mutants.py").write_text(SUITE)
    (directory / "conftest.py").write_text(SELECTION)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{directory}{os.pathsep}{ROOT}",
        "PODIUM_MUTANTS": json.dumps(list(packages.items())),
        "PODIUM_WHOLE": "1" if whole else "",
    }
    report = directory / "report.xml"
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--junitxml={report}", *(["-x"] if whole else [])]
    subprocess.run([sys.executable, "-m", "pytest", *options], cwd=directory, env=environment, check=False)
    failures: dict[str, list[str]] = {name: [] for name in names}
    for case in ElementTree.parse(report).iter("testcase"):
        failed = case.find("failure") is not None or case.find("error") is not None
        if failed or case.find("skipped") is not None:
            test, parameters = re.fullmatch(r"(\w+)\[(.*)\]", case.attrib["name"], re.DOTALL).groups()  # type: ignore[union-attr] - pytest's own form
            name = max((name for name in names if parameters.startswith(name)), key=len)
            if failed or (name and test == MUTANTS[name].test):
                failures[name].append(test if failed else SKIPPED)
    return failures


def render_page() -> str:
    """Return the text of the page."""
    lines = [HEAD, "## Mutants of the example backend\n", "| sentence | mutant | test that fails |", "|---|---|---|"]
    by_sentence = sorted(MUTANTS.items(), key=lambda item: item[1].sentence)
    for sentence, mutants in groupby(by_sentence, key=lambda item: item[1].sentence):
        for number, (name, mutant) in enumerate(mutants):
            lines.append(f"| {sentence if not number else ''} | {name} | `{mutant.test}` |")
    lines += ["", "## Faults of a twin of `local`\n", "| fault | test that fails |", "|---|---|"]
    lines += [f"| {fault} | `{test}` |" for fault, test in FAULTS.items()]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Do what the command line asks for, and return 1 if a mutant was not found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *MUTANTS], metavar="NAME")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    if arguments.write:
        PAGE.write_text(render_page(), encoding="utf-8")
        return 0
    missed = 0
    for name in arguments.names or MUTANTS:
        with tempfile.TemporaryDirectory(prefix="podium-") as directory:
            tests = find_failures(Path(directory), [name], whole=arguments.whole)[name]
        missed += not tests
        outcome = "found" if {*tests} - {SKIPPED} else SKIPPED if tests else "MISSED"
        print(f"{outcome}: {name}: {', '.join(sorted({*tests}))}", flush=True)  # noqa: T201 - a command
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
