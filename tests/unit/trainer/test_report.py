"""The final report: its statistics against reference values, its drawings by rendering them."""

from __future__ import annotations

import io
import json
import math
import random
from pathlib import Path

import pytest
from rich.console import Console

from podium.telemetry import EvalFinished, PhaseStarted, StepFinished, emit, metrics
from podium.telemetry.sinks import JsonlSink
from podium.trainer.report import (
    Accuracy,
    Comparison,
    Curve,
    Report,
    draw_curve,
    gain_interval,
    plot_curve,
    read_curve,
    render,
    smoothed,
)


def grpo_curve(metric: str = metrics.ACCURACY, evaluations: bool = True) -> Curve:
    draw = random.Random(0)
    steps = list(range(1, 161))
    values = [0.4 + 0.4 * (1 - math.exp(-step / 60)) + draw.gauss(0, 0.03) for step in steps]
    held_out = [(0, Accuracy(211, 500)), (80, Accuracy(350, 500)), (160, Accuracy(396, 500))]
    return Curve(metric=metric, steps=steps, values=values, evaluations=held_out if evaluations else ())


def rendered(report: Report, width: int = 100) -> str:
    out = io.StringIO()
    render(report, Console(file=out, width=width, force_terminal=False, highlight=False))
    return out.getvalue()


# Statistics


@pytest.mark.parametrize(
    ("correct", "items", "low", "high"),
    [
        # Newcombe 1998, Statistics in Medicine 17:857, table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_the_interval_of_a_share_is_the_published_one(correct: int, items: int, low: float, high: float) -> None:
    assert Accuracy(correct, items).interval() == pytest.approx((low, high), abs=5e-5)


def test_the_interval_holds_the_share_at_both_ends() -> None:
    for items in (1, 7, 500):
        for correct in (0, items):
            low, high = Accuracy(correct, items).interval()
            assert 0 <= low <= correct / items <= high <= 1


@pytest.mark.parametrize(
    ("one", "other", "low", "high"),
    [
        # Newcombe 1998, Statistics in Medicine 17:873, table II, method 10: p1 - p2.
        ((56, 70), (48, 80), 0.0524, 0.3339),
        ((9, 10), (3, 10), 0.1705, 0.8090),
        ((10, 10), (0, 10), 0.6075, 1.0),
    ],
)
def test_the_interval_of_a_gain_is_the_published_one(
    one: tuple[int, int], other: tuple[int, int], low: float, high: float
) -> None:
    assert gain_interval(Accuracy(*other), Accuracy(*one)) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(("correct", "items"), [(-1, 5), (6, 5), (0, 0)])
def test_an_impossible_accuracy_is_refused(correct: int, items: int) -> None:
    with pytest.raises(ValueError, match="expected 0 <= correct <= items"):
        Accuracy(correct, items)


def test_smoothing_keeps_a_constant_and_averages_neighbours() -> None:
    assert smoothed([2.0] * 30) == [2.0] * 30
    assert smoothed([0.0, 3.0, 6.0, 0.0], window=3) == [1.5, 3.0, 3.0, 3.0]
    assert smoothed([1.0]) == [1.0]


# Reading


def test_the_curve_is_that_of_the_last_phase(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonlSink(path):
        emit(PhaseStarted("sft", 2))
        emit(StepFinished(1, {metrics.LOSS: 2.0}))
        emit(StepFinished(2, {metrics.LOSS: 1.0}))
        emit(PhaseStarted("grpo", 3))
        emit(EvalFinished(0, 0.422, 500, 0.5))
        for step, accuracy in ((1, 0.4), (2, math.nan), (3, 0.6)):
            emit(StepFinished(step, {metrics.LOSS: 0.0, metrics.REWARD_MEAN: 0.5, metrics.ACCURACY: accuracy}))
        emit(EvalFinished(3, 0.612, 500, 0.5))
    with path.open("a") as file:
        file.write('{"kind": "st')
    curve = read_curve(path)
    assert curve == Curve(
        metric=metrics.ACCURACY,
        steps=[1, 3],
        values=[0.4, 0.6],
        evaluations=[(0, Accuracy(211, 500)), (3, Accuracy(306, 500))],
    )
    warm_up = read_curve(path, phase="sft")
    assert warm_up == Curve(metric=metrics.LOSS, steps=[1, 2], values=[2.0, 1.0])


def test_without_steps_there_is_no_curve(tmp_path: Path) -> None:
    assert read_curve(tmp_path / "metrics.jsonl") is None
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"kind": "step", "phase": None, "step": 1, "time": 0.0, "users/own": 1.0}) + "\n")
    assert read_curve(path) is None


# Drawing


@pytest.mark.parametrize("metric", [metrics.ACCURACY, metrics.REWARD_MEAN, metrics.LOSS])
def test_the_picture_has_ink_where_the_curve_is(metric: str, tmp_path: Path) -> None:
    from matplotlib.image import imread

    path = plot_curve(grpo_curve(metric, evaluations=metric != metrics.LOSS), tmp_path / "new" / "curve.png", "grpo")
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


def full_report() -> Report:
    return Report(
        title="grpo on reasoning_gym:basic_arithmetic",
        steps=160,
        wall_s=231.4,
        before=Accuracy(211, 500),
        after=Accuracy(396, 500),
        comparisons=[
            Comparison(prompt="12 + 30?", before="52", after="42", reward_before=0.2, reward_after=1.0, expected="42"),
            Comparison(prompt="1 + 1?", before="", after="[b]2[/b]\x1b[2J", reward_before=0.0, reward_after=1.0),
        ],
        curve=grpo_curve(),
        paths={"model": "runs/" + "x" * 120, "trace": Path("runs/a/trace.json")},
    )


def test_the_report_says_what_was_gained_and_how_surely() -> None:
    text = rendered(full_report())
    assert "grpo on reasoning_gym:basic_arithmetic  160 steps in 3m51s" in text
    before, after, gain = (line for line in text.splitlines() if line.split()[:1] in (["before"], ["after"], ["gain"]))
    assert "42.2%" in before
    assert "37.9% to 46.6%, n = 500" in before
    assert "79.2%" in after
    assert before.count("█") < after.count("█")
    assert gain.split() == ["gain", "+37.0", "points", "(+31.2", "to", "+42.4)"]
    assert "\x1b" not in text


def test_completions_stand_side_by_side_as_they_are() -> None:
    text = rendered(full_report())
    (answers,) = [line for line in text.splitlines() if "12 + 30?" in line]
    assert answers.split() == ["12", "+", "30?", "52", "42"]
    (rewards,) = [line for line in text.splitlines() if "expected 42" in line]
    assert rewards.split() == ["expected", "42", "reward", "0.200", "reward", "1.000"]
    assert "(nothing)" in text
    assert "[b]2[/b]\\x1b[2J" in text


def test_paths_are_whole_however_narrow_the_terminal_is() -> None:
    text = rendered(full_report(), width=60)
    assert "  model  runs/" + "x" * 120 + "\n" in text
    assert "  trace  runs/a/trace.json\n" in text
    assert max(len(line) for line in text.splitlines() if "xxx" not in line) <= 60


def test_a_gain_within_chance_is_called_so() -> None:
    report = Report(title="t", steps=1, wall_s=1.0, before=Accuracy(50, 100), after=Accuracy(52, 100))
    assert "may be chance" in rendered(report)
    assert "may be chance" not in rendered(full_report())


def test_a_run_that_was_stopped_says_what_was_measured_and_when() -> None:
    stopped = Report(title="t", steps=7, wall_s=1.0, before=Accuracy(50, 100))
    assert [line.split()[0] for line in rendered(stopped).splitlines() if "%" in line] == ["held-out", "before"]
    later = Report(title="t", steps=7, wall_s=1.0, before=Accuracy(50, 100), after=Accuracy(80, 100), after_step=5)
    assert "last measured after step 5" in rendered(later)
    assert "last measured" not in rendered(full_report())


@pytest.mark.parametrize("level", [0.0, 0.5])
def test_a_curve_that_does_not_move_has_round_ticks(level: float) -> None:
    text = draw_curve(Curve(metric=metrics.ACCURACY, steps=[1, 2, 3], values=[level] * 3), width=60, height=12).plain
    assert {line.split("%")[0].strip() for line in text.splitlines() if "%" in line} <= {"0", "20", "50", "60"}


def test_a_run_without_evaluation_has_a_report_too() -> None:
    text = rendered(Report(title="sft", steps=3, wall_s=0.5, paths={"metrics": "m.jsonl"}))
    assert "held-out" not in text
    assert text.splitlines()[-1] == "  metrics  m.jsonl"
