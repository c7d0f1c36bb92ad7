"""A run of the bench keeps its rows as they come, and a run that was stopped goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from bench import __main__ as bench
from bench.context import Context
from bench.measure import Row, compare
from bench.record import Record


def row(name: str, podium: float = 2.0) -> Row:
    return compare(name, {"podium": [podium], "pipe": [1.0]}, unit="us", floor="pipe: a byte and back")


class Suites:
    """Two suites, of which the second may be stopped after its first row."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.stops: BaseException | None = None

    def named(self) -> Mapping[str, bench.Suite]:
        return {"calls": self.calls, "bytes": self.bytes}

    def calls(self, context: Context) -> Iterator[Row]:
        self.begun.append("calls")
        yield row("noop")

    def bytes(self, context: Context) -> Iterator[Row]:
        self.begun.append("bytes")
        yield row("echo")
        if self.stops is not None:
            raise self.stops
        context.absent.add("trl")
        yield row("hop")


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the rows of a whole run go; those of a part lie beside it."""
    for name in ("RESULTS", "ROWS", "QUICK_ROWS"):
        monkeypatch.setattr(bench, name, tmp_path / name / "results.json")
        (tmp_path / name).mkdir()
    monkeypatch.setattr(os, "getloadavg", lambda: (0.25, 4.0, 4.0))
    return bench.RESULTS


def names(path: Path) -> list[str]:
    return [written["name"] for written in json.loads(path.read_text())]


@pytest.mark.parametrize("stops", [KeyboardInterrupt(), RuntimeError("no memory")])
def test_a_run_that_is_stopped_keeps_its_rows_and_the_next_one_goes_on(results: Path, stops: BaseException) -> None:
    suites = Suites()
    suites.stops = stops
    assert bench.main([], suites.named()) == 1
    assert names(bench.ROWS) == ["noop", "echo"]
    first = json.loads(bench.ROWS.read_text())[0]
    assert first["ratio"] == {"pipe": 0.5}
    assert first["floor"] == "pipe: a byte and back"
    assert not results.exists()

    suites.stops = None
    assert bench.main([], suites.named()) == 0
    assert suites.begun == ["calls", "bytes", "bytes"], "a suite that finished is not measured again"
    assert names(results) == ["noop", "echo", "hop"]
    about = json.loads(results.with_name("machine.json").read_text())
    assert about["absent"] == ["trl"]
    assert not bench.ROWS.exists(), "the next run begins anew"


def test_a_busy_machine_is_refused_unless_the_command_allows_it(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    suites = Suites()
    monkeypatch.setattr(os, "getloadavg", lambda: (1.25, 0.0, 0.0))
    for arguments in ([], ["--quick"], ["--only", "calls"]):
        assert bench.main(arguments, suites.named()) == 2
    assert "1.2" in capsys.readouterr().out
    assert suites.begun == []
    assert not results.exists() and not bench.ROWS.exists()

    assert bench.main(["--busy"], suites.named()) == 0
    assert json.loads(results.with_name("machine.json").read_text())["load_before"] == 1.25


def test_a_run_in_parts_has_the_load_of_its_busiest_part(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suites = Suites()
    monkeypatch.setattr(os, "getloadavg", lambda: (7.5, 0.0, 0.0))
    assert bench.main(["--busy", "--only", "bytes"], suites.named()) == 0
    monkeypatch.setattr(os, "getloadavg", lambda: (0.25, 0.0, 0.0))
    assert bench.main([], suites.named()) == 0
    about = json.loads(results.with_name("machine.json").read_text())
    assert about["load_before"] == 7.5
    assert sorted(about["seconds"]) == ["bytes", "calls"]


def test_a_process_that_is_killed_leaves_the_rows_that_it_had(tmp_path: Path) -> None:
    record = Record(tmp_path / "rows.json", quick=False, load_before=0.0, say=lambda text: None)
    for number in range(3):
        record.add("calls", row(f"noop_{number}"))
        assert names(tmp_path / "rows.json") == [f"noop_{at}" for at in range(number + 1)]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["machine.json", "rows.json"]


def test_suites_that_are_named_are_measured_anew_and_the_others_kept(results: Path) -> None:
    suites = Suites()
    bench.main(["--only", "bytes"], suites.named())
    bench.main(["--only", "calls"], suites.named())
    assert suites.begun == ["bytes", "calls"]
    assert sorted(names(results)) == ["echo", "hop", "noop"]
    assert bench.main(["--only", "nothing"], suites.named()) == 2


@pytest.mark.parametrize("change", ["commit", "processor", "again"])
def test_rows_of_another_machine_or_commit_are_replaced(tmp_path: Path, change: str) -> None:
    path = tmp_path / "rows.json"
    said: list[str] = []
    record = Record(path, quick=False, load_before=0.0, say=said.append)
    record.add("calls", row("noop"))
    record.finish("calls", set(), 1.0)
    if change != "again":
        about = json.loads((tmp_path / "machine.json").read_text())
        (tmp_path / "machine.json").write_text(json.dumps({**about, change: "another"}))
    after = Record(path, quick=False, load_before=0.0, again=change == "again", say=said.append)
    assert (after.rows, after.finished) == ([], [])
    assert change == "again" or f"they have another {change}" in said[0]
    assert Record(path, quick=True, load_before=0.0, say=said.append).rows == [], "a short look is another run"


def test_a_row_is_read_as_it_was_written() -> None:
    written = row("noop", podium=3.0)
    assert Row.from_json(json.loads(json.dumps(written.as_json()))) == written
