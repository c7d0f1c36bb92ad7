"""Learning curves, by drawing them."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

import podium_curves
from podium.runs.evaluation import accuracy_interval
from podium.runs.run_reader import RunRecord
from podium.telemetry import EvalFinished, PhaseStarted, StepFinished, emit, metrics
from podium.telemetry.sinks import JsonlSink
from podium_curves.drawing import Curve, Point, build_curve, draw_curve, make_figure, plot_curve, smooth


def point(step: int, correct: int, items: int = 500) -> Point:
    low, high = accuracy_interval(correct / items, items)
    return Point(step=step, value=correct / items, low=low, high=high)


def grpo_curve(metric: str = metrics.ACCURACY, evaluations: bool = True) -> Curve:
    draw = random.Random(0)
    steps = list(range(1, 161))
    values = [0.4 + 0.4 * (1 - math.exp(-step / 60)) + draw.gauss(0, 0.03) for step in steps]
    held_out = [point(0, 211), point(80, 350), point(160, 396)]
    return Curve(metric=metric, steps=steps, values=values, points=held_out if evaluations else ())


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
        omitted=(1, 0),
    )
    assert curve is not None and curve.remark == "not finite at 1 step"


def test_a_curve_counts_what_it_leaves_out() -> None:
    rows: list[dict[str, object]] = [{"kind": "step", "step": step, metrics.LOSS: 1 / step} for step in (1, 2)]
    text = podium_curves.draw(rows, 60)
    assert text is not None and text.remark == "" and "finite" not in text.heading.plain
    for step, kind in ((3, "step"), (4, "step"), (4, "eval")):
        rows.append({"kind": kind, "step": step, "metric": "loss", "loss": None, "nonfinite": {"loss": "inf"}})
    text = podium_curves.draw(rows, 60)
    assert text is not None and text.remark == "not finite at 2 steps and 1 evaluation"
    assert text.heading.plain == "loss on the training data (not finite at 2 steps and 1 evaluation)"
    for read, remark in ((rows, text.remark), (rows[:2], "")):
        curve = build_curve(read)
        assert curve is not None and make_figure(curve).axes[0].get_title(loc="right") == remark


def test_without_steps_there_is_no_curve(tmp_path: Path) -> None:
    assert build_curve(RunRecord(tmp_path).rows) is None
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"kind": "step", "phase": None, "step": 1, "time": 0.0, "users/own": 1.0}) + "\n")
    assert build_curve(RunRecord(tmp_path).rows) is None


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


@pytest.mark.parametrize("level", [0.0, 0.5])
def test_a_curve_that_does_not_move_has_round_ticks(level: float) -> None:
    text = draw_curve(Curve(metric=metrics.ACCURACY, steps=[1, 2, 3], values=[level] * 3), width=60, height=12).plain
    assert {line.split("%")[0].strip() for line in text.splitlines() if "%" in line} <= {"0", "20", "50", "60"}


def test_what_the_package_gives_to_podium_is_a_picture_and_lines() -> None:
    rows = [{"kind": "step", "step": step, metrics.LOSS: 1 / step} for step in (1, 2)]
    assert (podium_curves.plot(rows, "sft") or b"").startswith(b"\x89PNG")
    text = podium_curves.draw(rows, 60)
    assert text is not None and text.metric == metrics.LOSS
    assert text.heading.plain == "loss on the training data"
    assert len(text.drawing.plain.splitlines()) == 16
    held_out = {"kind": "eval", "step": 2, "metric": "loss", "loss": 0.7, "items": 4}
    evaluated = podium_curves.draw([*rows, held_out], 60)
    assert evaluated is not None and "●" in evaluated.heading.plain
    plain = evaluated.in_ascii()
    assert plain.heading.plain.isascii() and plain.drawing.plain.isascii()
    assert list(map(len, plain.drawing.plain.splitlines())) == list(map(len, evaluated.drawing.plain.splitlines()))
    assert {"*", "o", "|", "+", "-"} <= {*plain.drawing.plain}
    assert podium_curves.draw(rows[:1], 60) is None and podium_curves.plot(rows[:1], "sft") is not None
    assert podium_curves.draw([], 60) is None and podium_curves.plot([], "sft") is None
