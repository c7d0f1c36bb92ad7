"""What a run came to, for a person: accuracy before and after, completions side by side, the curve, where it all is.

Records in, drawings out: nothing here reads a clock, a model or a terminal's state. `read_curve` alone reads a file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.console import Console, Group
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from podium.telemetry import metrics
from podium.telemetry.formatting import duration, percent, plain, visible

__all__ = [
    "Accuracy",
    "Comparison",
    "Curve",
    "Report",
    "draw_curve",
    "gain_interval",
    "plot_curve",
    "read_curve",
    "render",
    "smoothed",
]

_Z95: Final = 1.959964  # of the normal distribution, two-sided
_CURVES: Final = {
    metrics.ACCURACY: "accuracy on the training prompts",
    metrics.REWARD_MEAN: "reward on the training prompts",
    metrics.LOSS: "loss",
}
_BLUE, _ORANGE, _GREY = "#2563a8", "#d9730d", "#8a8f98"
_CELL_CHARACTERS: Final = 400


@dataclass(frozen=True)
class Accuracy:
    """``correct`` of ``items`` held-out prompts."""

    correct: int
    items: int

    def __post_init__(self) -> None:
        if not 0 <= self.correct <= self.items or self.items == 0:
            raise ValueError(f"{self.correct} correct of {self.items}: expected 0 <= correct <= items, and items > 0")

    @property
    def share(self) -> float:
        """In 0..1."""
        return self.correct / self.items

    def interval(self) -> tuple[float, float]:
        """The 95 % score interval of the share (Wilson 1927, eq. 3), right also near 0 and 1."""
        n, p, z2 = self.items, self.share, _Z95**2
        middle = (p + z2 / (2 * n)) / (1 + z2 / n)
        half = _Z95 * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
        # Rounding must not push a bound past the share itself, where the two meet at 0 and at 1.
        return min(p, max(0.0, middle - half)), max(p, min(1.0, middle + half))


def gain_interval(before: Accuracy, after: Accuracy) -> tuple[float, float]:
    """The 95 % interval of ``after.share - before.share`` for independent samples (Newcombe 1998, method 10).

    Where both were measured on the same prompts, this is wider than need be.
    """
    (low_1, high_1), (low_2, high_2) = before.interval(), after.interval()
    p_1, p_2 = before.share, after.share
    gain = p_2 - p_1
    return gain - math.hypot(p_2 - low_2, high_1 - p_1), gain + math.hypot(high_2 - p_2, p_1 - low_1)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What one held-out prompt was answered before and after training."""

    prompt: str
    before: str
    after: str
    reward_before: float
    reward_after: float
    expected: str | None = None


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A metric over steps, and the held-out evaluations as (step, accuracy) with their number of prompts."""

    metric: str
    steps: Sequence[int]
    values: Sequence[float]
    evaluations: Sequence[tuple[int, Accuracy]] = ()

    @property
    def title(self) -> str:
        """What is drawn, in words."""
        return _CURVES.get(self.metric, self.metric)

    @property
    def is_share(self) -> bool:
        """Whether the values are shares of 0..1, as the held-out accuracy is."""
        return self.metric == metrics.ACCURACY


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that `render` shows. ``paths`` are shown under their keys, in their order.

    ``after_step`` is the step after which ``after`` was measured, where that was not the last one.
    """

    title: str
    steps: int
    wall_s: float
    before: Accuracy | None = None
    after: Accuracy | None = None
    after_step: int | None = None
    comparisons: Sequence[Comparison] = ()
    curve: Curve | None = None
    paths: Mapping[str, Path | str] = field(default_factory=dict[str, Path | str])


def read_curve(metrics_path: Path, phase: str | None = None) -> Curve | None:
    """The learning curve in a run's metrics.jsonl: accuracy if it is there, else reward, else loss.

    Of several phases, the last one is taken unless ``phase`` names another. None if there is no such step.
    """
    rows = list(_rows(metrics_path))
    steps = [row for row in rows if row["kind"] == "step" and phase in (None, row["phase"])]
    if not steps:
        return None
    chosen = steps[-1]["phase"]
    steps = [row for row in steps if row["phase"] == chosen]
    metric = next((name for name in _CURVES if any(row.get(name) is not None for row in steps)), None)
    if metric is None:
        return None
    evaluations = [
        (row["step"], Accuracy(round(row["accuracy"] * row["items"]), row["items"]))
        for row in rows
        if row["kind"] == "eval" and row["phase"] == chosen and row["accuracy"] is not None and row["items"]
    ]
    points = [(row["step"], row[metric]) for row in steps if row.get(metric) is not None]
    return Curve(
        metric=metric,
        steps=[step for step, _ in points],
        values=[value for _, value in points],
        evaluations=evaluations if metric != metrics.LOSS else (),
    )


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # the half line of a killed run
        if isinstance(row, dict) and "kind" in row and "step" in row:
            yield {"phase": None, **row}


def smoothed(values: Sequence[float], window: int | None = None) -> list[float]:
    """The mean of the ``window`` values around each (n/10, at least 5), fewer at both ends."""
    half = (window or max(5, len(values) // 10)) // 2
    around = [values[max(0, at - half) : at + half + 1] for at in range(len(values))]
    return [math.fsum(near) / len(near) for near in around]


# The curve as a picture


def plot_curve(curve: Curve, path: Path, title: str = "") -> Path:
    """Draw the curve as a PNG of 1600 x 900 pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    # No pyplot: it would keep global state and, on a desktop, open a window.
    figure = Figure(figsize=(8, 4.5), dpi=200, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.tick_params(labelcolor=_GREY)
    axes.margins(x=0.02)
    axes.plot(curve.steps, curve.values, color=_BLUE, linewidth=0.7, alpha=0.3)
    axes.plot(curve.steps, smoothed(curve.values), color=_BLUE, linewidth=2, label=curve.title)
    if curve.evaluations:
        # Beside a reward, whose scale is another, the accuracy has an axis of its own.
        held_out = axes if curve.is_share else axes.twinx()
        if not curve.is_share:
            axes.tick_params(axis="y", labelcolor=_BLUE)
            held_out.tick_params(axis="y", labelcolor=_ORANGE)
        shares = [accuracy.share for _, accuracy in curve.evaluations]
        bounds = [accuracy.interval() for _, accuracy in curve.evaluations]
        errors = [
            [share - low for share, (low, _) in zip(shares, bounds, strict=True)],
            [high - share for share, (_, high) in zip(shares, bounds, strict=True)],
        ]
        held_out.errorbar(
            [step for step, _ in curve.evaluations], shares, yerr=errors, color=_ORANGE, marker="o", markersize=5.5,
            linewidth=1.2, linestyle=":", capsize=3, label="held-out accuracy, 95% interval", zorder=5,
        )  # fmt: skip
        _style_shares(held_out, PercentFormatter(1.0, decimals=0))
    if curve.is_share:
        _style_shares(axes, PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("step", color=_GREY)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
    for each in figure.axes:
        each.spines[["top", "left", "right"]].set_visible(False)
        each.spines["bottom"].set_color("#c9ccd1")
        each.tick_params(color=_GREY, length=0)
    figure.suptitle(title or curve.title, x=0.02, ha="left", fontsize=13, fontweight="bold", color="#22262b")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9, labelcolor="#444a52")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _style_shares(axes: Any, formatter: Any) -> None:
    axes.set_ylim(-0.02, 1.02)
    axes.yaxis.set_major_formatter(formatter)


# The curve in the terminal


def draw_curve(curve: Curve, width: int = 80, height: int = 16) -> Text:
    """Draw the curve with characters, ``width`` by ``height``: a line, and a dot for each held-out evaluation."""
    import plotext

    figure = plotext.figure
    figure.clear()
    try:
        figure.plot_size(width, height)
        figure.theme("colorless")
        means = smoothed(curve.values)
        figure.draw(figure.signal(list(curve.steps), means, marker=plotext.marker("braille", "cyan")).lines())
        low, high = min(means), max(means)
        if curve.evaluations and curve.is_share:
            steps = [step for step, _ in curve.evaluations]
            shares = [accuracy.share for _, accuracy in curve.evaluations]
            figure.draw(figure.signal(steps, shares, marker=plotext.marker("●", "orange")))
            low, high = min(low, *shares), max(high, *shares)
        ticks = _ticks(low, high)
        figure.ruler("y").lim(ticks[0], ticks[-1])
        figure.ruler("y").ticks(ticks, [f"{100 * tick:g}%" if curve.is_share else f"{tick:g}" for tick in ticks])
        first, last = min([curve.steps[0], *(step for step, _ in curve.evaluations)]), curve.steps[-1]
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


# The report


def render(report: Report, console: Console) -> None:
    """Print the report. Completions are shown as text, whatever they contain."""
    width = min(console.width, 120)
    console.print()
    title = Text.assemble((report.title, "bold"), f"  {report.steps} steps in {duration(report.wall_s)}")
    console.print(Rule(title, align="left", style="dim", characters="─"), width=width)
    console.print()
    if report.before is not None or report.after is not None:
        console.print(Padding(_accuracies(report, width - 4), (0, 0, 0, 2), expand=False), highlight=False)
        console.print()
    if report.comparisons:
        console.print(
            Padding(_comparisons(report.comparisons), (0, 0, 0, 2), expand=False), width=width, highlight=False
        )
    if report.curve is not None and len(report.curve.steps) > 1:
        console.print(Padding(_curve(report.curve, width - 4), (0, 0, 0, 2), expand=False), highlight=False)
        console.print()
    _print_paths(report.paths, console)


def _accuracies(report: Report, width: int) -> Group:
    before, after = report.before, report.after
    bar = max(10, min(40, width - 46))
    rows = [_accuracy_row(name, one, bar) for name, one in (("before", before), ("after", after)) if one is not None]
    heading = Text.assemble(("held-out accuracy", "bold"), ("  with the 95% interval", "dim"))
    if after is not None and report.after_step is not None:
        heading.append(f", last measured after step {report.after_step}", "dim")
    lines = [heading, *rows]
    if before is not None and after is not None:
        low, high = gain_interval(before, after)
        points = 100 * (after.share - before.share)
        style = "bold green" if low > 0 else "bold red" if high < 0 else "bold"
        gain = Text.assemble("gain".rjust(6), "  ", (f"{points:+.1f} points", style))
        gain.append(f"  ({100 * low:+.1f} to {100 * high:+.1f})", "dim")
        if low <= 0 <= high:
            gain.append("  may be chance", "yellow")
        lines.append(gain)
    return Group(*lines)


def _accuracy_row(name: str, accuracy: Accuracy, width: int) -> Text:
    low, high = accuracy.interval()
    # A cell is solid below the interval, half-toned within it, and empty above.
    solid, shaded = round(low * width), max(1, round(high * width) - round(low * width))
    row = Text.assemble(name.rjust(6), "  ", (percent(accuracy.share).rjust(6), "bold"), "  ")
    row.append("█" * solid, "cyan").append("▒" * shaded, "cyan").append("·" * (width - solid - shaded), "dim")
    return row.append(f"  {percent(low)} to {percent(high)}, n = {accuracy.items}", "dim")


def _comparisons(comparisons: Sequence[Comparison]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_lines=True, pad_edge=False, header_style="bold")
    table.add_column("prompt", ratio=4, overflow="fold")
    table.add_column("before", ratio=5, overflow="fold")
    table.add_column("after", ratio=5, overflow="fold")
    for one in comparisons:
        prompt = Text(visible(one.prompt.strip(), _CELL_CHARACTERS))
        if one.expected is not None:
            prompt.append(f"\nexpected {visible(one.expected, 80)}", "dim")
        table.add_row(prompt, _answer(one.before, one.reward_before), _answer(one.after, one.reward_after))
    return table


def _answer(completion: str, reward: float) -> Text:
    said = visible(completion.strip(), _CELL_CHARACTERS)
    text = Text(said) if said else Text("(nothing)", "dim italic")
    return text.append(f"\nreward {plain(reward)}", "green" if reward >= 1 else "yellow" if reward > 0 else "red")


def _curve(curve: Curve, width: int) -> Group:
    heading = Text.assemble((curve.title, "bold"))
    if curve.evaluations and curve.is_share:
        heading.append("    ● ", "orange1").append("held-out", "dim")
    return Group(heading, draw_curve(curve, width=min(width, 100)))


def _print_paths(paths: Mapping[str, Path | str], console: Console) -> None:
    indent = max((len(name) for name in paths), default=0)
    for name, path in paths.items():
        # A path that is wrapped or cut cannot be copied.
        console.print(
            Text.assemble("  ", (name.ljust(indent), "dim"), "  ", str(path)), soft_wrap=True, highlight=False
        )
