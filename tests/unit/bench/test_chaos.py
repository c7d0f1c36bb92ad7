"""The checks of chaos find what is wrong: doctored ledgers, other completions, metrics or weights, and leftovers."""

from __future__ import annotations

import json
import math
import os
import random
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
from bench.chaos.books import check_ledger, check_same, check_so_far, same_lengths
from bench.chaos.campaign import Campaign, Result, Strike
from bench.chaos.faults import Fault
from bench.chaos.leftovers import alive, leftovers, process, segments
from bench.chaos.pairs import is_held, roles_of
from bench.chaos.report import MARK, collect, merge, section, write_campaigns
from bench.chaos.spares import SURROUNDINGS
from bench.chaos.training import PROMPTS
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
    (folder / "checkpoints" / "step-000002" / "policy").mkdir(parents=True)
    for number in (1, 2):
        row = {"step": number, "prompt": prompt, "completion": completion, "tokens": [1] * len(completion)}
        row |= {"reward": 1.0, "advantage": 0.0, "version": number - 1}
        pq.write_table(pa.Table.from_pylist([row]), folder / "completions" / f"step-00000{number}.parquet")
    rows = [{"kind": "step", "step": number, "time": os.getpid(), "time/step": 1.0, "loss": loss} for number in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "checkpoints" / "step-000002" / "policy" / "model.safetensors").write_bytes(bytes([weight]))
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
    assert check_same(first, same, steps=2, identical=True) == []
    said = check_same(run_directory(tmp_path / "other", **other), first, steps=2, identical=True)
    assert len([text for text in said if found in text]) == 1, said


def test_a_run_that_lacks_a_row_of_metrics_is_found_wrong(tmp_path: Path) -> None:
    first, second = run_directory(tmp_path / "first"), run_directory(tmp_path / "second")
    path = second / "metrics.jsonl"
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    assert check_same(second, first, steps=2, identical=True) == ["metrics.jsonl does not have one row for each step"]


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


def campaign(folder: Path, faults: Sequence[str], kills: int, **options: Any) -> Campaign:
    return Campaign(folder, "sync", faults, kills, 0, lambda name: pytest.fail(name), **options)


def write_results(folder: Path, *results: Result) -> None:
    lines = "".join(json.dumps(result._asdict()) + "\n" for result in results)
    (folder / "sync.results.jsonl").write_text(lines)


def test_a_campaign_goes_on_with_the_kinds_that_have_struck_least(tmp_path: Path) -> None:
    assert Counter(strike.fault for strike in campaign(tmp_path, ("policy", "save"), 3).plan()) == {
        "policy": 3,
        "save": 3,
    }
    write_results(tmp_path, *[Result("sync", "save", outcome, 1.0) for outcome in ("restarted", "restarted", "missed")])
    plan = campaign(tmp_path, ("policy", "save"), 3, faults_a_run=2).plan()
    assert sorted(plan) == [Strike("policy", 0), Strike("policy", 1)]
    plan = campaign(tmp_path, ("policy", "save"), 3).plan()
    assert Counter(strike.fault for strike in plan) == {"policy": 3, "save": 1}
    assert Strike("save", 3) in plan, "a fault that met nobody counts as a number, and not as a fault"
    write_results(tmp_path, *[Result("sync", "save", "missed", 0.0)] * 6)
    assert not campaign(tmp_path, ("save",), 3).plan(), "a kind that never meets anybody ends too"


@pytest.mark.exhaustive
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


def test_plans_strike_with_all_kinds_in_turn(tmp_path: Path) -> None:
    faults, rounds, results = ("policy", "save", "controller"), list[tuple[str, ...]](), list[Result]()
    for _ in range(4):
        plan = campaign(tmp_path, faults, 4, faults_a_run=3).plan()
        rounds.append(tuple(strike.fault for strike in plan))
        results += [Result("sync", strike.fault, "survived", 1.0, nth=strike.nth) for strike in plan]
        write_results(tmp_path, *results)
    assert all(Counter(kinds) == Counter(faults) for kinds in rounds)
    assert len(set(rounds)) > 1, "every run has the same order"
    assert not campaign(tmp_path, faults, 4).plan()


def test_a_strike_is_read_back_from_its_text() -> None:
    assert Strike.parse(str(Strike("policy, fork_server", 3))) == Strike("policy, fork_server", 3)
    for text in ("policy", "policy#", "police#1", "policy#-1"):
        with pytest.raises(ValueError, match="is no fault and its number"):
            Strike.parse(text)


class Unharmed:
    """A run that takes a step whenever it is looked at, and that nothing harms, with a ledger that balances."""

    def __init__(self, folder: Path, name: str, lines: Sequence[Line] = ()) -> None:
        self.name, self.starts, self.steps, self.random = name, list[int](), 0, random.Random()
        self.directory, self.home = folder / name, folder / f"{name}-home"
        self.directory.mkdir()
        self.lines = list(lines)

    def step(self) -> int:
        self.steps += 1
        return self.steps

    def start(self, steps: int = 0, keep: int = 2) -> None:
        self.starts.append(steps)
        (self.directory / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in self.lines))

    def __getattr__(self, name: str) -> Any:
        values: dict[str, Any] = {"running": True, "wait": 0, "errors": [], "leaves": []}
        return lambda *arguments: values.get(name)


@pytest.fixture
def booked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps of each check of a run's books, which are well. The one kind of fault does nothing."""
    steps_of_checks = list[int]()
    monkeypatch.setattr(campaigns, "FAULTS", {"nothing": Fault(lambda victim: None, at_once=True)})
    monkeypatch.setattr(
        campaigns, "check_books", lambda *runs, steps, **about: steps_of_checks.append(steps) or []
    )  # fmt: skip
    monkeypatch.setattr(campaigns, "check_ledger", lambda *arguments, **about: [])
    monkeypatch.setattr(campaigns, "LATE_S", 0.0)
    return steps_of_checks


def unharmed(folder: Path, lines: Sequence[Line] = ()) -> tuple[Campaign, dict[str, Unharmed]]:
    runs = dict[str, Unharmed]()

    def victim(name: str) -> Any:
        return runs.get(name) or runs.setdefault(name, Unharmed(folder, name, lines))

    return Campaign(folder, "sync", ["nothing"], 3, 0, victim, faults_a_run=2), runs


def test_several_faults_strike_a_run_whose_books_are_checked_at_its_end(tmp_path: Path, booked: list[int]) -> None:
    running, runs = unharmed(tmp_path, step(1, [0, 1]))
    assert running.run(running.plan()) == []
    assert running.run(running.plan()) == []
    assert not running.plan()
    assert [run["faults"] for run in running.runs] == [["nothing#0", "nothing#1"], ["nothing#2"]]
    assert [run["steps"] for run in running.runs] == booked
    assert runs["sync-disturbed"].starts == [0, booked[0], 0, booked[1]], "each run begins anew"
    assert running.about()["prompts"] == sum(booked) * PROMPTS
    again = Campaign(tmp_path, "sync", ["nothing"], 3, 0, lambda name: pytest.fail(name))
    assert (again.results, again.runs) == (running.results, running.runs)


def test_a_campaign_whose_time_is_over_ends_its_run_after_a_fault(tmp_path: Path, booked: list[int]) -> None:
    running, _ = unharmed(tmp_path)
    assert running.run(running.plan(), until=-math.inf) == []
    assert [run["faults"] for run in running.runs] == [["nothing#0"]]
    assert len(booked) == 1


def test_a_ledger_that_does_not_balance_after_a_fault_ends_the_run_and_names_its_faults(
    tmp_path: Path, booked: list[int]
) -> None:
    running, _ = unharmed(tmp_path, [*step(1, [0, 1]), *step(2, [1, 3])])
    first, again = running.run(running.plan())
    assert "prompt 1 was trained 2 times; 1 prompts were not trained, the first of them [2]" in first
    assert again == 'of a run with --seed 0 --replay "nothing#0"'
    assert [result.outcome for result in running.results] == ["wrong"]
    assert (tmp_path / "wrong" / "sync-0" / "run" / "ledger.jsonl").exists(), "the run's files are kept"
    assert not booked


def test_a_fault_draws_the_same_wherever_it_strikes(tmp_path: Path, booked: list[int]) -> None:
    draws = list[float]()
    campaigns.FAULTS["nothing"] = Fault(lambda victim: draws.append(victim.random.random()), at_once=True)
    for number, strikes in enumerate(([Strike("nothing", 0), Strike("nothing", 1)], [Strike("nothing", 1)])):
        folder = tmp_path / str(number)
        folder.mkdir()
        running, _ = unharmed(folder)
        running.run(strikes)
    assert draws[0] != draws[1] == draws[2]


def test_a_role_that_nobody_holds_is_named(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    started = process(child.pid)
    assert started is not None
    pids = tmp_path / "pids"
    pids.write_text(f"policy+critic {started.pid} {started.started}\ngenerator {started.pid} {started.started - 1}\n")
    try:
        assert {role: is_held(pids, role) for role in roles_of(pids)} == {
            "policy": True,
            "critic": True,
            "generator": False,
        }
    finally:
        child.kill()
        child.wait()


def test_a_ledger_so_far_may_end_anywhere_and_must_have_every_prompt_before(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    lines = [json.dumps(line) + "\n" for line in [*step(1, [0, 1]), *step(2, [2, 3], behind=1), *step(3, [4, 5])[:2]]]
    for end in range(len(lines)):
        path.write_text("".join(lines[:end]) + lines[end][:9])
        assert check_so_far(path, staleness=1) == []
    assert check_so_far(path, staleness=0) == ["step 2 has a token that is 1 versions old; allowed are 0"]
    path.write_text("".join(lines[4:8]))
    assert check_so_far(path, staleness=1) == ["2 prompts were not trained, the first of them [0, 1]"]


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
    write_results(tmp_path, *results)
    summary = campaign(tmp_path, (), 0).summary()
    about = {"backend": "local", "schedule": "sync", "prompts": 4000, "wrong": [], "rows": summary}
    (tmp_path / "sync.summary.json").write_text(json.dumps({**about, "machine": machine(0.0)}))

    figures = collect([tmp_path])

    write_campaigns(tmp_path / "results.json", figures)
    assert json.loads((tmp_path / "results.json").read_text()) == figures
    text = section(figures)
    assert "On `local`, 4 faults, 1 to 2 of each in each schedule. Measured on " in text
    assert ", with a load of 0:" in text
    assert "| SIGKILL of the policy | 2 survived, 2.0 (3.0); 1 missed | - | - |" in text
    assert "1 surfaced after 0.5, 12.0" in text
    assert "with 4,000 prompts: 0 prompts skipped, 0 trained twice, nothing wrong." in text
    figures[0]["wrong"] = ["prompt 3 was trained 2 times"]
    assert "local, sync: prompt 3 was trained 2 times" in section(figures)
    older = {**figures[0], "machine": {**figures[0]["machine"], "when": "2026-01-01"}, "schedule": "sync"}
    assert merge([older, figures[0], {**older, "warm": True}], figures) == [
        older,
        {**older, "warm": True},
        *figures,
    ]
    with pytest.raises(FileNotFoundError, match="no campaign has ended there"):
        collect([tmp_path / "nowhere"])
