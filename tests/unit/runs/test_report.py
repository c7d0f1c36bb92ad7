"""The final report: its drawings, by rendering them."""

from __future__ import annotations

import io
import json
import math
import random
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from podium.extras import install_command
from podium.runs.directory import RunDirectory, Summary
from podium.runs.evaluation import Evaluation, accuracy_interval
from podium.runs.records import RunRecord
from podium.runs.report import Curve, Point, build_curve, draw_curve, plot_curve, render, report, smooth
from podium.telemetry import EvalFinished, Note, PhaseStarted, Sample, StepFinished, emit, metrics, subscribe
from podium.telemetry.held_out import Metric
from podium.telemetry.sinks import JsonlSink

ACCURACY = Metric("accuracy")


def evaluation(step: int, correct: int, items: int = 100, samples: tuple[Sample, ...] = ()) -> Evaluation:
    return Evaluation(step=step, items=items, figures={"accuracy": correct / items}, samples=samples)


def point(step: int, correct: int, items: int = 500) -> Point:
    low, high = accuracy_interval(correct / items, items)
    return Point(step=step, value=correct / items, low=low, high=high)


def grpo_curve(metric: str = metrics.ACCURACY, evaluations: bool = True) -> Curve:
    draw = random.Random(0)
    steps = list(range(1, 161))
    values = [0.4 + 0.4 * (1 - math.exp(-step / 60)) + draw.gauss(0, 0.03) for step in steps]
    held_out = [point(0, 211), point(80, 350), point(160, 396)]
    return Curve(metric=metric, steps=steps, values=values, points=held_out if evaluations else ())


def rendered(
    first: Evaluation | None = None,
    last: Evaluation | None = None,
    steps: int = 160,
    curve: Curve | None = None,
    paths: Mapping[str, Path | str] | None = None,
    width: int = 100,
    judge: Metric = ACCURACY,
    **amounts: Any,
) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=False, highlight=False)
    summary = Summary(task="sums", seed=0, steps=steps, wall_s=231.4, **amounts)
    render("grpo: sums", summary, judge, first, last, curve, paths or {}, console)
    return out.getvalue()


# Reading


def test_smoothing_keeps_a_constant_and_averages_neighbours() -> None:
    assert smooth([2.0] * 30) == [2.0] * 30
    assert smooth([0.0, 3.0, 6.0, 0.0], window=3) == [0.0, 3.0, 3.0, 0.0]  # as far as both sides reach
    assert smooth([float(step) for step in range(20)], window=5)[-1] == 19.0  # a rising curve ends where it ends
    assert smooth([1.0]) == [1.0]


def test_the_curve_is_read_from_the_metrics(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonlSink(path):
        emit(PhaseStarted("grpo", 3))
        emit(EvalFinished(0, 500, {"accuracy": 0.422, "reward_mean": 0.5}))
        for step, accuracy in ((1, 0.4), (2, math.nan), (3, 0.6)):
            emit(StepFinished(step, {metrics.LOSS: 0.0, metrics.REWARD_MEAN: 0.5, metrics.ACCURACY: accuracy}))
        emit(EvalFinished(3, 500, {"accuracy": 0.612, "reward_mean": 0.5}))
    with path.open("a") as file:
        file.write('{"kind": "st')
    curve = build_curve(RunRecord(tmp_path).rows)
    assert curve == Curve(
        metric=metrics.ACCURACY,
        steps=[1, 3],
        values=[0.4, 0.6],
        points=[point(0, 211), point(3, 306)],
    )


def test_without_steps_there_is_no_curve(tmp_path: Path) -> None:
    assert build_curve(RunRecord(tmp_path).rows) is None
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"kind": "step", "phase": None, "step": 1, "time": 0.0, "users/own": 1.0}) + "\n")
    assert build_curve(RunRecord(tmp_path).rows) is None


# Drawing


@pytest.mark.parametrize("metric", [metrics.ACCURACY, metrics.REWARD_MEAN, metrics.LOSS])
def test_the_picture_has_ink_where_the_curve_is(metric: str, tmp_path: Path) -> None:
    from matplotlib.image import imread

    path = tmp_path / "curve.png"
    plot_curve(grpo_curve(metric, evaluations=metric != metrics.LOSS), path, "grpo")
    pixels = imread(path)
    assert pixels.shape == (900, 1600, 4)
    red, green, blue = pixels[..., 0], pixels[..., 1], pixels[..., 2]
    line_columns = ((blue > 0.55) & (red < 0.25) & (green < 0.5)).any(axis=0)
    assert line_columns.sum() > 1200, "the curve spans the picture"
    assert bool(((red > 0.8) & (green < 0.5) & (blue < 0.15)).any()) == (metric != metrics.LOSS)


def test_the_drawing_fits_and_rises_from_left_to_right() -> None:
    text = draw_curve(grpo_curve(), width=80, height=16)
    lines = text.plain.splitlines()
    assert len(lines) == 16
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert lines[-1].split() == ["0", "50", "100", "150"]
    assert [label for label in text.plain.replace("┤", " ").split() if label.endswith("%")] == [
        "80%", "70%", "60%", "50%", "40%",
    ]  # fmt: skip
    assert text.plain.count("●") == 3
    rows_with_ink = [
        next(row for row, line in enumerate(lines[1:-2]) if any("\u2800" < c <= "\u28ff" for c in line[part]))
        for part in (slice(6, 20), slice(65, 79))
    ]
    assert rows_with_ink[0] > rows_with_ink[1] + 5
    assert text.spans, "the drawing is coloured where the console is"


@pytest.mark.parametrize(
    "values",
    [[0.0, 0.0], [1.0, 1.0], [1e-9, 2e-9], [-5.0, 1e6], [0.1 + 0.2, 0.3]],
    ids=["0", "1", "tiny", "wide", "eps"],
)
def test_any_range_of_values_can_be_drawn(values: list[float], tmp_path: Path) -> None:
    curve = Curve(metric=metrics.REWARD_MEAN, steps=[3, 4], values=values)
    assert len(draw_curve(curve, width=60, height=12).plain.splitlines()) == 12
    plot_curve(curve, tmp_path / "curve.png")


# The whole


FIRST = evaluation(0, 211, 500, (Sample("12 + 30?", "52", 0.2, "42"), Sample("1 + 1?", "", 0.0)))
LAST = evaluation(160, 396, 500, (Sample("12 + 30?", "42", 1.0, "42"), Sample("1 + 1?", "[b]2[/b]\x1b[2J", 1.0)))


def test_the_report_says_what_was_gained_and_how_surely() -> None:
    text = rendered(FIRST, LAST, curve=grpo_curve())
    assert "grpo: sums  160 steps in 3m51s" in text
    before, after, gain = (line for line in text.splitlines() if line.split()[:1] in (["before"], ["after"], ["gain"]))
    assert "42.2%" in before
    assert "37.9% to 46.6%, n = 500" in before
    assert "79.2%" in after
    assert before.count("█") < after.count("█")
    assert gain.split() == ["gain", "+37.0", "points", "(+31.2", "to", "+42.4)"]
    assert "\x1b" not in text


def test_completions_stand_side_by_side_as_they_are() -> None:
    text = rendered(FIRST, LAST)
    (answers,) = [line for line in text.splitlines() if "12 + 30?" in line]
    assert answers.split() == ["12", "+", "30?", "52", "42"]
    (rewards,) = [line for line in text.splitlines() if "expected 42" in line]
    assert rewards.split() == ["expected", "42", "reward", "0.200", "reward", "1.000"]
    assert "(nothing)" in text
    assert "[b]2[/b]\\x1b[2J" in text


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
    text = rendered(FIRST, LAST, curve=grpo_curve(), paths=paths, width=60)
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


@pytest.mark.parametrize("absent", ["matplotlib", "plotext"])
def test_without_the_plotting_libraries_the_report_has_no_curve_and_a_note_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: str
) -> None:
    monkeypatch.setitem(sys.modules, absent, None)
    notes: list[str] = []
    unsubscribe = subscribe(lambda event: notes.append(event.text) if isinstance(event, Note) else None)
    out = io.StringIO()
    try:
        with closing(RunDirectory(tmp_path / "run")) as directory:
            with JsonlSink(directory.metrics_path):
                for step in (1, 2):
                    emit(StepFinished(step, {metrics.LOSS: 1.0 / step}))
            summary = Summary(task="sums", seed=0, steps=2, wall_s=1.0)
            report(summary, ACCURACY, None, None, directory, "sft: sums", Console(file=out, width=100))
            assert not directory.curve_path.exists()
    finally:
        unsubscribe()
    assert notes == [f"the learning curve is not drawn without {absent}: {install_command('plot')}"]
    assert "sft: sums" in out.getvalue()


@pytest.mark.parametrize("level", [0.0, 0.5])
def test_a_curve_that_does_not_move_has_round_ticks(level: float) -> None:
    text = draw_curve(Curve(metric=metrics.ACCURACY, steps=[1, 2, 3], values=[level] * 3), width=60, height=12).plain
    assert {line.split("%")[0].strip() for line in text.splitlines() if "%" in line} <= {"0", "20", "50", "60"}


def test_a_run_without_evaluation_has_a_report_too() -> None:
    text = rendered(paths={"metrics": "m.jsonl"})
    assert "held-out" not in text
    assert text.splitlines()[-1] == "  metrics  m.jsonl"
