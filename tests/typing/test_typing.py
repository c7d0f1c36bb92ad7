"""Editors complete endpoints across the wire, and a type checker finds wrong arguments before anything runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = Path(__file__).with_name("example.py")
WRONG = """
from podium import Batch, Handle, Worker, concat, connect, endpoint, first, per_rank, scatter
from collections.abc import Sequence
from podium.runtime import Collect, Split

class Spread(Collect[float, float]):
    def collect(self, method: str, results: Sequence[float], split: Split) -> float: ...

class Scorer(Worker):
    def __init__(self, bias: float) -> None:
        self.bias = bias
    @endpoint(collect=first())
    def score(self, batch: Batch, k: int = 1) -> Batch: ...
    @endpoint(dispatch=scatter())
    def seeded(self, seed: int) -> int: ...
    @endpoint(collect=concat())                  # error: reportArgumentType reportCallIssue
    def number(self) -> int: ...
    @endpoint(collect=concat())
    async def soon(self) -> dict[str, Batch]: ...
    @endpoint(collect=Spread())                  # error: reportArgumentType reportCallIssue
    def text(self) -> str: ...
    def helper(self, x: int) -> str:
        wrong: list[Batch] = self.soon()         # error: reportAssignmentType
        self.score(3)                            # error: reportArgumentType
        self.score.submit(Batch({}))             # error: reportFunctionMemberAccess
        self.group                               # error: reportAttributeAccessIssue
        self.ctx.declare_mesh("model", dp="one") # error: reportArgumentType
        return ""
    @property
    def size(self) -> int: ...

scorer = connect("inline").start(Scorer.bind(0.5))
Scorer.bind("much")                          # error: reportArgumentType
Scorer.bind()                                # error: reportCallIssue
Scorer.bind(0.5, biass=1)                    # error: reportCallIssue
scorer.score(3)                              # error: reportArgumentType
scorer.score()                               # error: reportCallIssue
scorer.score.pad()(3)                        # error: reportArgumentType
scorer.score.pad("yes")                      # error: reportArgumentType
scorer.group.env["A"] = "b"                  # error: reportIndexIssue
scorer.score.submit(Batch({}), k="many")     # error: reportArgumentType
scorer.score(Batch({}), wrong=1)             # error: reportCallIssue
scorer.scored(Batch({}))                     # error: reportAttributeAccessIssue
scorer.seeded(per_rank(["a", "b"]))          # error: reportArgumentType
scorer.seeded(scorer.score.submit(Batch({})).arg())  # error: reportArgumentType
wrong: int = scorer.score(Batch({}))         # error: reportAssignmentType
scorer.helper(3)                             # error: reportCallIssue
print(scorer.size + 1)                       # error: reportOperatorIssue
scorer.bias                                  # error: reportAttributeAccessIssue
scorer.ctx                                   # error: reportAttributeAccessIssue
scorer.restart()                             # error: reportAttributeAccessIssue
own: Handle[Scorer] = Scorer(0.5)            # error: reportAssignmentType
made: Scorer = scorer                        # error: reportAssignmentType
"""


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What pyright finds by this repository's settings in the example and in the text WRONG, by names of files."""
    wrong = tmp_path_factory.mktemp("typing") / "wrong.py"
    wrong.write_text(WRONG)
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, EXAMPLE, wrong]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    findings: dict[str, list[dict[str, Any]]] = {EXAMPLE.name: [], wrong.name: []}
    for finding in json.loads(done.stdout)["generalDiagnostics"]:
        findings[Path(finding["file"]).name].append(finding)
    return findings


def test_an_editor_sees_the_types_that_stand_behind_each_line_of_the_example(
    findings: dict[str, list[dict[str, Any]]],
) -> None:
    lines = EXAMPLE.read_text().splitlines()
    expected = {
        at: line.rpartition("  # ")[2] for at, line in enumerate(lines) if line.strip().startswith("reveal_type(")
    }
    assert not [finding for finding in findings["example.py"] if finding["severity"] == "error"]
    revealed: dict[int, str] = {}
    for finding in findings["example.py"]:
        found = re.search(r'^Type of ".*" is "(.*)"$', finding["message"], re.DOTALL)
        if found is not None:
            revealed[finding["range"]["start"]["line"]] = found[1]
    assert len(expected) >= 25
    assert revealed == expected


def test_wrong_arguments_and_results_are_reported_where_they_stand(
    findings: dict[str, list[dict[str, Any]]],
) -> None:
    expected = {
        (at, rule)
        for at, line in enumerate(WRONG.splitlines())
        if (found := re.search("# error: (.*)", line))
        for rule in found[1].split()
    }
    reported = {
        (finding["range"]["start"]["line"], finding.get("rule"))
        for finding in findings["wrong.py"]
        if finding["severity"] != "information" and finding.get("rule") != "reportReturnType"  # the empty bodies
    }
    assert reported == expected
