"""The final report: its drawings, by rendering them."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from podium.runs import curves
from podium.runs.curves import CurveText
from podium.runs.evaluation import Evaluation
from podium.runs.report import render, report
from podium.runs.run_writer import RunDirectory, Summary
from podium.telemetry import Note, Sample, StepFinished, emit, metrics, subscribe
from podium.telemetry.held_out import Metric
from podium.telemetry.sinks import JsonlSink

ACCURACY = Metric("accuracy")


def evaluation(step: int, correct: int, items: int = 100, samples: tuple[Sample, ...] = ()) -> Evaluation:
    return Evaluation(step=step, items=items, figures={"accuracy": correct / items}, samples=samples)


def draw_line(width: int) -> CurveText:
    return CurveText(metrics.LOSS, Text("the loss"), Text("~" * width))


class Drawer:
    """Stands for what a package draws."""

    def plot(self, rows: Sequence[Mapping[str, Any]], title: str) -> bytes:
        return f"{len(rows)} rows of {title}".encode()

    def draw(self, rows: Sequence[Mapping[str, Any]], width: int) -> CurveText:
        return draw_line(width)


BROKEN = DRAWER = Drawer()


def rendered(
    first: Evaluation | None = None,
    last: Evaluation | None = None,
    steps: int = 160,
    draw: Callable[[int], CurveText | None] | None = None,
    paths: Mapping[str, Path | str] | None = None,
    width: int = 100,
    judge: Metric = ACCURACY,
    **amounts: Any,
) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=False, highlight=False)
    summary = Summary(task="sums", seed=0, steps=steps, wall_s=231.4, **amounts)
    render("grpo: sums", summary, judge, first, last, draw, paths or {}, console)
    return out.getvalue()


# Reading


# Drawing


# The whole


FIRST = evaluation(0, 211, 500, (Sample("12 + 30?", "52", 0.2, "42"), Sample("1 + 1?", "", 0.0)))
LAST = evaluation(160, 396, 500, (Sample("12 + 30?", "42", 1.0, "42"), Sample("1 + 1?", "[b]2[/b]\x1b[2J", 1.0)))


def test_the_report_says_what_was_gained_and_how_surely() -> None:
    text = rendered(FIRST, LAST, draw=draw_line)
    assert "grpo: sums  160 steps in 3m51s" in text
    before, after, gain = (line for line in text.splitlines() if line.split()[:1] in (["before"], ["after"], ["gain"]))
    assert "42.2%" in before
    assert "37.9% to 46.6%, n = 500" in before
    assert "79.2%" in after
    assert before.count("█") < after.count("█")
    assert gain.split() == ["gain", "+37.0", "points", "(+31.2", "to", "+42.4)"]
    assert "\x1b" not in text


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_bars_are_drawn_in_what_stdout_can_write(encoding: str) -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding, errors="backslashreplace")
    first, last = (replace(one, figures={**one.figures, "reward": 0.5 + one.step}) for one in (FIRST, LAST))
    console = Console(file=out, width=100, force_terminal=False, highlight=False)
    curve = CurveText("loss", Text("loss    ● held-out"), Text("0.5┤⠤⠒●"))
    summary = Summary(task="sums", seed=0, steps=160, wall_s=1.0)
    render("grpo: sums", summary, ACCURACY, first, last, lambda width: curve, {}, console)
    out.flush()
    text = raw.getvalue().decode(encoding)
    before = next(line for line in text.splitlines() if line.split()[:1] == ["before"])
    assert "\\u" not in before
    assert re.search("█+▒+·+" if encoding == "utf-8" else "#+=+[.]+", before)
    assert ("0.5┤⠤⠒●" if encoding == "utf-8" else "0.5+**o") in text
    assert re.search(rf"reward 0.500 {'→' if encoding == 'utf-8' else '->'} 160", text)


def test_completions_stand_side_by_side_as_they_are() -> None:
    text = rendered(FIRST, LAST)
    (answers,) = [line for line in text.splitlines() if "12 + 30?" in line]
    assert answers.split() == ["12", "+", "30?", "52", "42"]
    (rewards,) = [line for line in text.splitlines() if "expected 42" in line]
    assert rewards.split() == ["expected", "42", "reward", "0.200", "reward", "1.000"]
    assert "(nothing)" in text
    assert "[b]2[/b]\\x1b[2J" in text


def test_an_answer_of_white_space_is_spelled_out_and_is_not_called_nothing() -> None:
    blank = replace(LAST, samples=tuple(replace(sample, completion="\n\n ") for sample in LAST.samples))
    assert r"'\n\n '" in rendered(FIRST, blank)


def test_a_completion_stands_beside_that_of_the_same_prompt_where_sessions_failed() -> None:
    before = [Sample(f"task {place}", f"old {place}", 0.0, place=place) for place in (0, 1, 2)]
    after = [Sample(f"task {place}", f"new {place}", 1.0, place=place) for place in (1, 2, 4)]
    text = rendered(evaluation(0, 0, 9, tuple(before)), evaluation(5, 3, 9, tuple(after)))
    assert [line.split() for line in text.splitlines() if "task" in line] == [
        ["task", "1", "old", "1", "new", "1"],
        ["task", "2", "old", "2", "new", "2"],
    ]
    assert "task" not in rendered(evaluation(0, 0, 9, tuple(before)), evaluation(5, 0, 9, ()))


def test_completions_that_changed_come_first_and_those_cut_off_are_marked() -> None:
    rewards = {0: (0.0, 0.0), 1: (1.0, 1.0), 2: (0.0, 0.0), 3: (0.0, 1.0), 4: (0.0, 1.0)}
    before = [Sample(f"task {place}", f"old {place}", was, place=place) for place, (was, _) in rewards.items()]
    after = [
        Sample(f"task {place}", f"{'old' if place < 2 else 'new'} {place}", now, place=place, cut_off=place == 4)
        for place, (_, now) in rewards.items()
    ]
    text = rendered(evaluation(0, 1, 5, tuple(before)), evaluation(5, 3, 5, tuple(after)))
    assert [line.split()[1] for line in text.splitlines() if "task" in line] == ["3", "4", "2"]
    (cut,) = [line for line in text.splitlines() if "cut off" in line]
    assert cut.split() == ["reward", "0", "reward", "1.000,", "cut", "off"]


@pytest.mark.parametrize(
    ("trained", "examples", "says"),
    [(240, 178, "on 240 prompts (1.3 epochs of 178) in"), (178, 178, "on 178 prompts in"), (9, 0, "on 9 prompts in")],
)
def test_prompts_that_were_seen_more_than_once_are_told_as_epochs(trained: int, examples: int, says: str) -> None:
    assert says in rendered(FIRST, LAST, prompts={"trained": trained}, examples=examples)


def test_paths_are_whole_however_narrow_the_terminal_is() -> None:
    paths = {"model": "runs/" + "x" * 120, "trace": Path("runs/a/trace.json")}
    text = rendered(FIRST, LAST, draw=draw_line, paths=paths, width=60)
    assert "  model  runs/" + "x" * 120 + "\n" in text
    assert "  trace  runs/a/trace.json\n" in text
    assert max(len(line) for line in text.splitlines() if "xxx" not in line) <= 60


def test_a_gain_within_chance_is_called_so() -> None:
    assert "may be chance" in rendered(evaluation(0, 50), evaluation(1, 52))
    assert "may be chance" not in rendered(FIRST, LAST)


def test_a_run_that_was_stopped_says_what_was_measured_and_when() -> None:
    only = evaluation(0, 50)
    assert [line.split()[0] for line in rendered(only, only).splitlines() if "%" in line] == ["held-out", "before"]
    assert "last measured after step 5" in rendered(only, evaluation(5, 80), steps=7)
    assert "last measured" not in rendered(FIRST, LAST)


def write_report(folder: Path) -> tuple[list[str], str, bytes]:
    """The notes of the report of a run of two steps, its text, and the picture, empty if there is none."""
    notes: list[str] = []
    unsubscribe = subscribe(lambda event: notes.append(event.text) if isinstance(event, Note) else None)
    out = io.StringIO()
    try:
        with closing(RunDirectory(folder / "run")) as directory:
            with JsonlSink(directory.metrics_path):
                for step in (1, 2):
                    emit(StepFinished(step, {metrics.LOSS: 1.0 / step}))
            summary = Summary(task="sums", seed=0, steps=2, wall_s=1.0)
            path = report(summary, ACCURACY, None, None, directory, "sft: sums", Console(file=out, width=100))
            assert directory.curve_path.exists() == (path is not None)
            picture = b"" if path is None else path.read_bytes()
    finally:
        unsubscribe()
    return notes, out.getvalue(), picture


@pytest.mark.parametrize("absent", ["matplotlib", "plotext"])
def test_without_the_plotting_libraries_the_report_has_no_curve_and_a_note_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: str
) -> None:
    monkeypatch.setitem(sys.modules, absent, None)
    monkeypatch.delitem(sys.modules, "podium_curves", raising=False)
    notes, text, picture = write_report(tmp_path)
    assert re.fullmatch(
        rf"the learning curve is not drawn without {absent}: pip install '{absent}>=[\d.]+'", "".join(notes)
    )
    assert "sft: sums" in text and not picture


@pytest.mark.parametrize(
    ("value", "note"),
    [
        ("", "because no installed package draws it; .* podium.curves, .* pip install ./plugins/podium-NAME"),
        (f"{__name__}:BROKEN.drawer", "AttributeError: .*drawer"),
    ],
)
def test_a_report_without_a_drawer_says_why_there_is_no_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, note: str
) -> None:
    entries = [EntryPoint("x", value, "podium.curves")] if value else []
    monkeypatch.setattr(curves, "list_entry_points", lambda group: entries)
    notes, text, picture = write_report(tmp_path)
    assert len(notes) == 1 and re.search(note, notes[0]), notes
    assert "sft: sums" in text and not picture


def test_the_curve_of_a_package_is_in_the_report_and_in_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curves, "list_entry_points", lambda group: [EntryPoint("x", f"{__name__}:DRAWER", group)])
    notes, text, picture = write_report(tmp_path)
    assert notes == []
    assert picture == b"2 rows of sft: sums"
    assert "  the loss" in text and "~" * 96 in text


def test_a_run_without_evaluation_has_a_report_too() -> None:
    text = rendered(paths={"metrics": "m.jsonl"})
    assert "held-out" not in text
    assert text.splitlines()[-1] == "  metrics  m.jsonl"


def test_the_set_that_judges_the_run_is_named() -> None:
    first, last = (replace(evaluation(step, 50), set_name="hard") for step in (0, 160))
    assert "held-out accuracy of hard  with" in rendered(first, last)
    assert "held-out accuracy  with" in rendered(evaluation(0, 50), evaluation(160, 50))
