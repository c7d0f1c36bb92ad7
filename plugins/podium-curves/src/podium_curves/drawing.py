"""The learning curve of a run: what its rows say, and how it is drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from rich.text import Text

from podium.runs.evaluation import accuracy_interval
from podium.runs.run_reader import figure_of, metric_of, set_of, value_of
from podium.spelling import write_count
from podium.telemetry import metrics
from podium.telemetry.held_out import ACCURACY, Metric

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Curve", "Point", "build_curve", "describe_curve", "draw_curve", "make_figure", "plot_curve", "smooth"]

_CURVES: Final = {
    metrics.ACCURACY: "accuracy on the training prompts",
    metrics.REWARD_MEAN: "reward on the training prompts",
    metrics.LOSS: "loss on the training data",
}
_BLUE, _ORANGE, _GREY = "#2563a8", "#d9730d", "#8a8f98"


@dataclass(frozen=True, kw_only=True)
class Point:
    """A held-out evaluation on the curve: its value, and its 95 % interval, or the value twice for an unknown one."""

    step: int
    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A metric over steps, and held-out evaluations by the metric ``judge``.

    Attributes:
        omitted: How many steps, and how many evaluations, have a value that is not finite, which is not drawn.
    """

    metric: str
    steps: Sequence[int]
    values: Sequence[float]
    judge: Metric = field(default_factory=lambda: Metric(ACCURACY))
    points: Sequence[Point] = ()
    omitted: tuple[int, int] = (0, 0)

    @property
    def remark(self) -> str:
        """What the curve leaves out, such as "not finite at 2 steps"; "" where it has all values."""
        counts = zip(self.omitted, ("step", "evaluation"), strict=True)
        parts = [write_count(count, noun) for count, noun in counts if count]
        return f"not finite at {' and '.join(parts)}" if parts else ""

    @property
    def is_share(self) -> bool:
        """Whether the values are shares of 0..1."""
        return self.metric == metrics.ACCURACY

    @property
    def shares_axis(self) -> bool:
        """Whether the evaluations have the unit of the values."""
        return self.metric == self.judge.of_steps

    @property
    def title(self) -> str:
        """The metric as people read it."""
        part = self.metric.removeprefix(metrics.REWARD_PART_PREFIX)
        return _CURVES.get(self.metric, f"reward part {part} on the training prompts")


def build_curve(rows: Sequence[Mapping[str, Any]]) -> Curve | None:
    """Return the learning curve in the rows of a run: of the metric that judges the run, else of accuracy, reward or
    loss, the first of these that steps have; else None."""
    steps = [row for row in rows if row["kind"] == "step"]
    evaluations = [row for row in rows if row["kind"] == "eval"]
    judge = metric_of(evaluations[-1]) if evaluations else Metric(ACCURACY)
    names = [name for name in (judge.of_steps, *_CURVES) if any(row.get(name) is not None for row in steps)]
    if not names:
        return None
    values = {row["step"]: value for row in steps if (value := value_of(row, names[0])) is not None}
    points = {step: value for step, value in values.items() if math.isfinite(value)}
    name = set_of(evaluations[-1]) if evaluations else ""
    held_out = [point for row in evaluations if (point := _point(row, judge, name)) is not None]
    measured = sum(figure_of(row, judge.name, name) is not None for row in evaluations)
    return Curve(
        metric=names[0],
        steps=[*points],
        values=[*points.values()],
        judge=judge,
        points=held_out,
        omitted=(len(values) - len(points), measured - len(held_out)),
    )


def _point(row: Mapping[str, Any], judge: Metric, set_name: str) -> Point | None:
    """An evaluation of the set that judges the run on the curve; None where the metric was not measured, and where its
    value is not finite."""
    value = figure_of(row, judge.name, set_name)
    if value is None or not math.isfinite(value):
        return None
    low, high, items = value, value, row.get(f"items/{set_name}" if set_name else "items")
    if row.get("metric") == judge.name and set_of(row) == set_name and row.get("low") is not None:
        low, high = row["low"], row["high"]
    elif judge.name == ACCURACY and items:
        low, high = accuracy_interval(value, items)
    return Point(step=row["step"], value=value, low=low, high=high)


def smooth(values: Sequence[float], window: int | None = None) -> list[float]:
    """The mean of the ``window`` values around each (n/10, at least 5), or of as many as both sides have, so that a
    rising curve ends where it ends."""
    half, last = (window or max(5, len(values) // 10)) // 2, len(values) - 1
    reach = [min(half, at, last - at) for at in range(len(values))]
    around = [values[at - side : at + side + 1] for at, side in enumerate(reach)]
    return [math.fsum(near) / len(near) for near in around]


# The curve as a picture


def plot_curve(curve: Curve, path: Path | IO[bytes], title: str = "") -> None:
    """Draw the curve as a PNG of 1600 x 900 pixels at ``path``, or into an open file."""
    make_figure(curve, title).savefig(path)


def make_figure(curve: Curve, title: str = "") -> Figure:
    """Return the curve as a figure of matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    # No pyplot: it would keep global state and, on a desktop, open a window.
    figure = Figure(figsize=(8, 4.5), dpi=200)
    FigureCanvasAgg(figure)
    # Fixed margins, wide enough for six digits: a layout that measures all texts takes as long as the drawing.
    axes = figure.add_axes((0.095, 0.2, 0.83, 0.66))
    axes.margins(x=0.02)
    axes.plot(curve.steps, curve.values, color=_BLUE, linewidth=0.7, alpha=0.3)
    axes.plot(curve.steps, smooth(curve.values), color=_BLUE, linewidth=2, label=curve.title)
    shares = [axes] if curve.is_share else []
    if curve.points:
        # Beside a metric with another unit, the evaluations have an axis of their own.
        held_out = axes if curve.shares_axis else axes.twinx()
        if not curve.shares_axis:
            axes.tick_params(axis="y", labelcolor=_BLUE)
            held_out.tick_params(axis="y", labelcolor=_ORANGE)
            shares += [held_out] if curve.judge.is_share else []
        below = [point.value - point.low for point in curve.points]
        above = [point.high - point.value for point in curve.points]
        held_out.errorbar(
            [point.step for point in curve.points],
            [point.value for point in curve.points], yerr=[below, above],
            color=_ORANGE, marker="o", markersize=5.5, linewidth=1.2, linestyle=":", capsize=3,
            label=f"held-out {curve.judge.title}, 95% interval", zorder=5,
        )  # fmt: skip
    top = _top_share(curve)
    for share_axes in shares:
        share_axes.set_ylim(-0.02 * top, 1.04 * top)
        share_axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0 if top >= 0.05 else 1))
    axes.set_xlabel("step", color=_GREY)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
    for axis in figure.axes:
        axis.spines[["top", "left", "right"]].set_visible(False)
        axis.tick_params(length=0)
    if curve.remark:
        axes.set_title(curve.remark, loc="right", fontsize=9, color=_ORANGE)
    figure.suptitle(title or curve.title, x=0.02, ha="left", fontsize=13, fontweight="bold", color="#22262b")
    figure.legend(loc="lower center", ncols=2, frameon=False, fontsize=9, labelcolor="#444a52")
    return figure


def _top_share(curve: Curve) -> float:
    """The largest share among the values and the evaluations' intervals: at least 1 %."""
    points = [point.high for point in curve.points] if curve.judge.is_share else []
    return max([0.01, *points, *(curve.values if curve.is_share else ())])


# The curve in the terminal


def draw_curve(curve: Curve, width: int = 80, height: int = 16) -> Text:
    """Draw the curve with characters, ``width`` by ``height``: a line, and a dot for each held-out evaluation."""
    import plotext

    figure = plotext.figure
    figure.clear()
    try:
        figure.plot_size(width, height)
        figure.theme("colorless")
        means = smooth(curve.values)
        figure.draw(figure.signal(list(curve.steps), means, marker=plotext.marker("braille", "cyan")).lines())
        low, high = min(means), max(means)
        points = curve.points if curve.shares_axis else ()
        if points:
            values = [point.value for point in points]
            figure.draw(figure.signal([point.step for point in points], values, marker=plotext.marker("●", "orange")))
            low, high = min(low, *values), max(high, *values)
        ticks = _ticks(low, high)
        figure.ruler("y").lim(ticks[0], ticks[-1])
        figure.ruler("y").ticks(ticks, [f"{100 * tick:g}%" if curve.is_share else f"{tick:g}" for tick in ticks])
        first, last = min([curve.steps[0], *(point.step for point in points)]), curve.steps[-1]
        marks = [round(tick) for tick in _ticks(first, last) if first <= tick <= last and tick == round(tick)]
        figure.ruler("x").ticks(marks, [str(mark) for mark in marks])
        return Text.from_ansi(figure.build().string())
    finally:
        figure.clear()


def _ticks(low: float, high: float) -> list[float]:
    """Four to six round numbers that enclose both."""
    span = max(high - low, abs(high) * 1e-6) or 1.0
    unit = 10 ** math.floor(math.log10(span / 4))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if span / (unit * factor) <= 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * tick, 12) for tick in range(first, max(last, first + 1) + 1)]


def describe_curve(curve: Curve) -> Text:
    """Return the metric as people read it, what the curve leaves out, and the mark of evaluations."""
    heading = Text.assemble((curve.title, "bold"))
    if curve.remark:
        heading.append(f" ({curve.remark})", "yellow")
    if curve.points and curve.shares_axis:
        heading.append("    ● ", "orange1").append("held-out", "dim")
    return heading
