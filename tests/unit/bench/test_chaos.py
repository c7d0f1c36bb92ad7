"""The checks of chaos find what is wrong: doctored ledgers, other completions, metrics or weights, and leftovers."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bench import recovery, soak
from bench.chaos import campaign as campaigns
from bench.chaos.__main__ import PAGE, RESULTS, ROOT
from bench.chaos.books import check_ledger, check_same, same_lengths
from bench.chaos.campaign import Campaign, Result
from bench.chaos.faults import Fault
from bench.chaos.leftovers import alive, leftovers, process, segments
from bench.chaos.report import MARK, collect, merge, section, write_campaigns
from bench.chaos.spares import SURROUNDINGS
from bench.report import machine, put_section

Line = dict[str, Any]


def step(number: int, prompts: Sequence[int], behind: int = 0) -> list[Line]:
    """The lines of a step whose prompts are trained, with tokens that are ``behind`` updates old."""
    base = {"step": number, "prompts": list(prompts)}
    versions = [[number - 1 - behind, number - 1]] * len(prompts)
    return [
        {"state": "taken", **base},
        {"state": "rolled_out", **base, "versions": versions},
        {"state": "graded", **base},
        {"state": "trained", **base},
    ]


def wrong(folder: Path, lines: Sequence[Line], prompts: int = 4, staleness: int = 1) -> list[str]:
    path = folder / "ledger.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [{"first": 0}, *lines]))
    return check_ledger(path, prompts=prompts, staleness=staleness)


def test_a_ledger_that_balances_is_not_wrong(tmp_path: Path) -> None:
    assert wrong(tmp_path, [*step(1, [0, 1]), *step(2, [2, 3], behind=1)]) == []
    returned = [{"state": "taken", "step": 2, "prompts": [2, 3]}, {"state": "returned", "prompts": [2, 3]}]
    assert wrong(tmp_path, [*step(1, [0, 1]), *returned, *step(2, [2, 3])]) == []


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([*step(1, [0, 1]), *step(2, [2, 1])], "prompt 1 was trained 2 times"),
        ([*step(1, [0, 1]), *step(2, [2, 3]), *step(3, [3])], "prompt 3 was trained 2 times"),
        ([*step(1, [0, 1]), *step(2, [3])], "1 prompts were not trained, the first of them [2]"),
        ([*step(1, [0, 1]), *step(2, [2, 3])[:3]], "2 prompts were not trained, the first of them [2, 3]"),
        ([*step(1, [0, 1]), *step(2, [2, 3]), *step(3, [4])], "prompts were trained that are none of the first 4: [4]"),
        ([*step(1, [0, 1]), *step(2, [2, 3])[1:]], "line 6: prompt 2 is rolled_out after it was None"),
        ([*step(1, [0, 1]), *step(2, [2, 3])[:2], step(2, [2, 3])[3]], "prompt 2 is trained after it was rolled_out"),
        ([*step(1, [0, 1]), *step(4, [2, 3], behind=2)], "step 4 has a token that is 2 versions old; allowed are 1"),
        (
            [*step(1, [0, 1]), *step(2, [2, 3])[:1], {**step(2, [2, 3])[1], "versions": [[1, 1]]}],
            "step 2 has 1 versions of 2 prompts",
        ),
    ],
)  # fmt: skip
def test_a_doctored_ledger_is_found_wrong(tmp_path: Path, lines: list[Line], found: str) -> None:
    said = wrong(tmp_path, lines)
    assert any(found in text for text in said), said


def run_directory(
    folder: Path, *, prompt: str = "1=", completion: str = "1", loss: float = 0.5, weight: int = 7
) -> Path:
    """A run of two steps with one completion each."""
    (folder / "completions").mkdir(parents=True)
    (folder / "checkpoints" / "latest" / "policy").mkdir(parents=True)
    for number in (1, 2):
        row = {"step": number, "prompt": prompt, "completion": completion, "tokens": [1] * len(completion)}
        row |= {"reward": 1.0, "advantage": 0.0, "version": number - 1}
        pq.write_table(pa.Table.from_pylist([row]), folder / "completions" / f"step-00000{number}.parquet")
    rows = [{"kind": "step", "step": number, "time": os.getpid(), "time/step": 1.0, "loss": loss} for number in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "checkpoints" / "latest" / "policy" / "model.safetensors").write_bytes(bytes([weight]))
    return folder


@pytest.mark.parametrize(
    ("other", "found"),
    [
        ({"prompt": "2="}, "the prompts that trained are others"),
        ({"completion": "2"}, "the completions of step 1 are not those"),
        ({"loss": 0.25}, "step 1: loss are not those"),
        ({"weight": 8}, "the weights of the last checkpoint"),
    ],
)
def test_a_run_that_differs_is_found_wrong(tmp_path: Path, other: dict[str, Any], found: str) -> None:
    first, same = run_directory(tmp_path / "first"), run_directory(tmp_path / "same")
    assert check_same(first, same, identical=True) == []
    said = check_same(run_directory(tmp_path / "other", **other), first, identical=True)
    assert len([text for text in said if found in text]) == 1, said


def test_a_run_that_lacks_a_row_of_metrics_is_found_wrong(tmp_path: Path) -> None:
    first, second = run_directory(tmp_path / "first"), run_directory(tmp_path / "second")
    path = second / "metrics.jsonl"
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    assert check_same(second, first, identical=True) == ["metrics.jsonl does not have one row for each step"]


def test_lengths_that_are_biased_are_other_lengths() -> None:
    """As where the longest tenth of the completions is lost."""
    lengths = [number % 25 for number in range(2500)]
    assert same_lengths(lengths, lengths[::-1]) == 1.0
    assert same_lengths(lengths, [length for length in lengths if length < 22]) < 0.001


def test_processes_and_files_that_are_left_are_named(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        one = process(child.pid)
        assert one is not None
        (said,) = leftovers([one], tmp_path, segments(), 0.1)
        assert said.startswith(f"process {child.pid} is left")
        assert "time.sleep(60)" in said
        assert not alive(one._replace(started=one.started - 1)), "another process has got the number of one that ended"
    finally:
        child.kill()
        child.wait()
    assert not alive(one)
    (tmp_path / "rest").touch()
    assert leftovers([one], tmp_path, segments(), 0.1) == [f"{tmp_path}/rest is left"]


def test_a_campaign_goes_on_with_the_faults_that_are_missing(tmp_path: Path) -> None:
    def campaign() -> Campaign:
        return Campaign(tmp_path, "sync", ("policy", "save"), 3, 0, lambda name: pytest.fail(name))

    assert Counter(campaign().plan) == {"policy": 3, "save": 3}
    results = [Result("sync", "save", "restarted", 1.0), Result("sync", "save", "restarted", 1.0)]
    (tmp_path / "sync.results.jsonl").write_text("".join(json.dumps(one._asdict()) + "\n" for one in results))
    assert Counter(campaign().plan) == {"policy": 3, "save": 1}


def test_a_spare_becomes_the_fork_server_that_it_is_shown_as(tmp_path: Path) -> None:
    code = f"""
import os
from pathlib import Path
from bench.chaos import spares
from podium.backends.local import backend
spares.make_spares(["bench.chaos.reward"])
private = Path({str(tmp_path / "private")!r})
private.mkdir()
server = backend.WorkerServer(["bench.chaos.reward"], private)
ended = []
nothing = os.open(os.devnull, os.O_RDONLY)
server.fork(1, ({{}}, ["true"], {str(tmp_path / "log")!r}), nothing, on_end=ended.append)
server.read_ends()
process = Path(f"/proc/{{server.process.pid}}")
print(ended, (process / "cmdline").read_bytes().split(bytes(1))[0].decode())
print(f"PODIUM_LAUNCHED={{server._mark}}".encode() in (process / "environ").read_bytes())
server.close()
print(server.process.returncode, private.exists())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **SURROUNDINGS}, cwd=ROOT, capture_output=True, text=True
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["[0] podium.backends.local.server", "True", "0 False"]


def test_a_plan_strikes_with_all_kinds_in_turn(tmp_path: Path) -> None:
    faults = ("policy", "save", "controller")
    campaign = Campaign(tmp_path, "sync", faults, 4, 0, lambda name: pytest.fail(name))
    rounds = [campaign.plan[number : number + 3] for number in range(0, 12, 3)]
    assert all(Counter(kinds) == Counter(faults) for kinds in rounds)
    assert len({tuple(kinds) for kinds in rounds}) > 1, "every round has the same order"


class Unharmed:
    """A run that takes a step whenever it is looked at, and that nothing harms."""

    steps = 0

    def __init__(self, name: str) -> None:
        self.name, self.directory, self.starts = name, Path(name), list[int]()

    def step(self) -> int:
        self.steps += 1
        return self.steps

    def start(self, steps: int = 0) -> None:
        self.starts.append(steps)

    def __getattr__(self, name: str) -> Any:
        values: dict[str, Any] = {"running": True, "wait": 0, "errors": [], "leaves": []}
        return lambda *arguments: values.get(name)


def test_a_campaign_that_ended_in_time_strikes_further_and_checks_its_books_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    booked, runs = list[int](), dict[str, Unharmed]()
    monkeypatch.setattr(campaigns, "FAULTS", {"nothing": Fault(lambda victim: None, at_once=True)})
    monkeypatch.setattr(campaigns, "check_books", lambda *runs, steps, **about: booked.append(steps) or [])

    def strike(until: float) -> int:
        campaign = Campaign(tmp_path, "sync", ["nothing"], 3, 0, lambda name: runs.setdefault(name, Unharmed(name)))  # type: ignore[arg-type, return-value]  # a run without processes
        assert campaign.run(until=until) == []
        return len(campaign.results)

    assert strike(-math.inf) == 0
    assert strike(math.inf) == 3
    assert strike(math.inf) == 3
    assert booked[0] < booked[1] == booked[2]
    assert runs["sync-disturbed"].starts == [0, booked[0], 0, booked[1], booked[1]]


def test_the_page_is_what_the_results_say() -> None:
    page = PAGE.read_text()
    assert put_section(page, section(json.loads(RESULTS.read_text())), MARK) == page
    assert put_section(page, soak.section(json.loads(soak.RESULTS.read_text())), soak.MARK) == page
    assert put_section(page, recovery.section(json.loads(recovery.RESULTS.read_text())), recovery.MARK) == page


def test_campaigns_become_a_table(tmp_path: Path) -> None:
    results = [
        Result("sync", "policy", "survived", 1.0),
        Result("sync", "policy", "survived", 3.0),
        Result("sync", "policy", "missed", 0.0),
        Result("sync", "memory", "surfaced", 12.0, 0.5, "MemoryError"),
    ]
    lines = "".join(json.dumps(result._asdict()) + "\n" for result in results)
    (tmp_path / "sync.results.jsonl").write_text(lines)
    campaign = Campaign(tmp_path, "sync", (), 0, 0, lambda name: pytest.fail(name))
    about = {"backend": "local", "schedule": "sync", "prompts": 4000, "wrong": [], "rows": campaign.summary()}
    (tmp_path / "sync.summary.json").write_text(json.dumps({**about, "machine": machine(0.0)}))

    campaigns = collect([tmp_path])

    write_campaigns(tmp_path / "results.json", campaigns)
    assert json.loads((tmp_path / "results.json").read_text()) == campaigns
    text = section(campaigns)
    assert "On `local`, 4 faults. Measured on " in text
    assert ", with a load of 0:" in text
    assert "| SIGKILL of the policy | 2 survived, 2.0 (3.0); 1 missed | - | - |" in text
    assert "1 surfaced after 0.5, 12.0" in text
    assert "with 4,000 prompts: 0 prompts skipped, 0 trained twice, nothing wrong." in text
    campaigns[0]["wrong"] = ["prompt 3 was trained 2 times"]
    assert "local, sync: prompt 3 was trained 2 times" in section(campaigns)
    older = {**campaigns[0], "machine": {**campaigns[0]["machine"], "when": "2026-01-01"}, "schedule": "sync"}
    assert merge([older, campaigns[0], {**older, "warm": True}], campaigns) == [
        older,
        {**older, "warm": True},
        *campaigns,
    ]
    with pytest.raises(FileNotFoundError, match="no campaign has ended there"):
        collect([tmp_path / "nowhere"])
