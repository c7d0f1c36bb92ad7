"""The report at the end of a run has accuracies, completions before and after, the learning curve and paths."""

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.console import Console, Group
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from podium.extras import install_command
from podium.runs.directory import RunDirectory, Summary
from podium.runs.evaluation import Evaluation, gain_interval
from podium.runs.records import RunRecord
from podium.telemetry import Note, Sample, emit, metrics
from podium.telemetry.formatting import duration, percent, plain, visible

__all__ = ["Curve", "build_curve", "draw_curve", "plot_curve", "render", "report", "smooth"]

_CURVES: Final = {
    metrics.ACCURACY: "accuracy on the training prompts",
    metrics.REWARD_MEAN: "reward on the training prompts",
    metrics.LOSS: "loss",
}
_BLUE, _ORANGE, _GREY = "#2563a8", "#d9730d", "#8a8f98"
_CELL_CHARACTERS: Final = 400
_INDENT: Final = (0, 0, 0, 2)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A metric over steps, and the held-out evaluations."""

    metric: str
    steps: Sequence[int]
    values: Sequence[float]
    evaluations: Sequence[Evaluation] = ()

    @property
    def is_share(self) -> bool:
        """Whether the values are shares of 0..1, as the held-out accuracy is."""
        return self.metric == metrics.ACCURACY


def report(
    summary: Summary,
    first: Evaluation | None,
    last: Evaluation | None,
    directory: RunDirectory,
    title: str,
    console: Console | None,
) -> Path | None:
    """Draw the curve of a run into its directory, and print the report on ``console`` if there is one.

    ``first`` and ``last`` are the run's evaluations, which may be the same one. Returns the picture, if there is one.
    """
    paths: dict[str, Path | str] = {"run": directory.path, "metrics": directory.metrics_path}
    curve = build_curve(RunRecord(directory.path).rows)
    if missing := [name for name in ("matplotlib", "plotext") if find_spec(name) is None]:
        curve = None
        emit(Note(f"the learning curve is not drawn without {missing[0]}: {install_command('plot')}"))
    if curve is not None:
        paths["curve"] = plot_curve(curve, directory.curve_path, title)
    paths |= {"model": summary.model_path} if summary.model_path else {}
    paths["trace"] = directory.trace_path
    if console is not None:
        render(title, summary, first, last, curve, paths, console)
        as_text = io.StringIO()
        # Not a notebook's: there, rich shows in the cell what is printed on any console.
        text_console = Console(file=as_text, width=100, color_system=None, force_jupyter=False)
        render(title, summary, first, last, curve, paths, text_console)
        directory.log(as_text.getvalue())
    return None if curve is None else directory.curve_path


def build_curve(rows: Sequence[Mapping[str, Any]]) -> Curve | None:
    """Return the learning curve in the rows of a run: accuracy if it is there, else reward, else loss; else None."""
    steps = [row for row in rows if row["kind"] == "step"]
    metric = next((name for name in _CURVES if any(row.get(name) is not None for row in steps)), None)
    if metric is None:
        return None
    evaluations: list[Evaluation] = []
    for row in rows if metric != metrics.LOSS else ():
        if row["kind"] == "eval" and row["accuracy"] is not None and (items := row["items"]):
            correct = round(row["accuracy"] * items)
            evaluations.append(
                Evaluation(step=row["step"], correct=correct, items=items, reward_mean=row["reward_mean"])
            )
    points = {row["step"]: row[metric] for row in steps if row.get(metric) is not None}
    return Curve(metric=metric, steps=[*points], values=[*points.values()], evaluations=evaluations)


def smooth(values: Sequence[float], window: int | None = None) -> list[float]:
    """The mean of the ``window`` values around each (n/10, at least 5), or of as many as both sides have, so that a
    rising curve ends where it ends."""
    half, last = (window or max(5, len(values) // 10)) // 2, len(values) - 1
    reach = [min(half, at, last - at) for at in range(len(values))]
    around = [values[at - side : at + side + 1] for at, side in enumerate(reach)]
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
    axes.margins(x=0.02)
    axes.plot(curve.steps, curve.values, color=_BLUE, linewidth=0.7, alpha=0.3)
    axes.plot(curve.steps, smooth(curve.values), color=_BLUE, linewidth=2, label=_CURVES[curve.metric])
    if curve.evaluations:
        # Beside a reward, whose scale is another, the accuracy has an axis of its own.
        held_out = axes if curve.is_share else axes.twinx()
        if not curve.is_share:
            axes.tick_params(axis="y", labelcolor=_BLUE)
            held_out.tick_params(axis="y", labelcolor=_ORANGE)
        below = [evaluation.accuracy - evaluation.interval()[0] for evaluation in curve.evaluations]
        above = [evaluation.interval()[1] - evaluation.accuracy for evaluation in curve.evaluations]
        held_out.errorbar(
            [evaluation.step for evaluation in curve.evaluations],
            [evaluation.accuracy for evaluation in curve.evaluations], yerr=[below, above],
            color=_ORANGE, marker="o", markersize=5.5, linewidth=1.2, linestyle=":", capsize=3,
            label="held-out accuracy, 95% interval", zorder=5,
        )  # fmt: skip
    top = _top_share(curve)
    for shares in figure.axes if curve.is_share else figure.axes[1:]:
        shares.set_ylim(-0.02 * top, 1.04 * top)
        shares.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0 if top >= 0.05 else 1))
    axes.set_xlabel("step", color=_GREY)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
    for axis in figure.axes:
        axis.spines[["top", "left", "right"]].set_visible(False)
        axis.tick_params(length=0)
    figure.suptitle(title or _CURVES[curve.metric], x=0.02, ha="left", fontsize=13, fontweight="bold", color="#22262b")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9, labelcolor="#444a52")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _top_share(curve: Curve) -> float:
    """The largest share among the values and the evaluations' intervals: at least 1 %."""
    shares = curve.values if curve.is_share else ()
    return max([0.01, *shares, *(evaluation.interval()[1] for evaluation in curve.evaluations)])


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
        if curve.evaluations and curve.is_share:
            steps = [evaluation.step for evaluation in curve.evaluations]
            shares = [evaluation.accuracy for evaluation in curve.evaluations]
            figure.draw(figure.signal(steps, shares, marker=plotext.marker("●", "orange")))
            low, high = min(low, *shares), max(high, *shares)
        ticks = _ticks(low, high)
        figure.ruler("y").lim(ticks[0], ticks[-1])
        figure.ruler("y").ticks(ticks, [f"{100 * tick:g}%" if curve.is_share else f"{tick:g}" for tick in ticks])
        first, last = min([curve.steps[0], *(evaluation.step for evaluation in curve.evaluations)]), curve.steps[-1]
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


def render(
    title: str,
    summary: Summary,
    first: Evaluation | None,
    last: Evaluation | None,
    curve: Curve | None,
    paths: Mapping[str, Path | str],
    console: Console,
) -> None:
    """Print the report. Completions are shown as text, whatever they contain, and ``paths`` in their order."""
    width = min(console.width, 120)
    console.print()
    trained = f" on {summary.prompts['trained']:,} prompts" if "trained" in summary.prompts else ""
    heading = Text.assemble((title, "bold"), f"  {summary.steps} steps{trained} in {duration(summary.wall_s)}")
    for reason, count in summary.dropped.items():
        heading.append(f", {count:,} dropped: {reason}", "yellow")
    console.print(Rule(heading, align="left", style="dim", characters="─"), width=width)
    console.print()
    if first is not None and last is not None:
        accuracies = Group(*_accuracies(first, last, summary.steps, width - 4), "")
        console.print(Padding(accuracies, _INDENT, expand=False), highlight=False)
        if first.step != last.step and (pairs := _pairs(first.samples, last.samples)):
            console.print(Padding(_comparisons(pairs), _INDENT, expand=False), width=width, highlight=False)
    if curve is not None and len(curve.steps) > 1:
        console.print(Padding(Group(*_curve(curve, width - 4), ""), _INDENT, expand=False), highlight=False)
    indent = max((len(name) for name in paths), default=0)
    for name, path in paths.items():
        # A path that is wrapped or cut cannot be copied.
        line = Text.assemble("  ", (name.ljust(indent), "dim"), "  ", str(path))
        console.print(line, soft_wrap=True, highlight=False)


def _accuracies(first: Evaluation, last: Evaluation, steps: int, width: int) -> Iterator[Text]:
    before = first if first.step < last.step or first.step == 0 else None
    after = last if last.step > 0 else None
    heading = Text.assemble(("held-out accuracy", "bold"), ("  with the 95% interval", "dim"))
    if after is not None and after.step != steps:
        heading.append(f", last measured after step {after.step}", "dim")
    yield heading
    bar = max(10, min(40, width - 46))
    yield from (
        _accuracy(name, evaluation, bar)
        for name, evaluation in (("before", before), ("after", after))
        if evaluation is not None
    )
    if before is not None and after is not None:
        low, high = gain_interval(before, after)
        points = 100 * (after.accuracy - before.accuracy)
        style = "bold green" if low > 0 else "bold red" if high < 0 else "bold"
        gain = Text.assemble("gain".rjust(6), "  ", (f"{points:+.1f} points", style))
        gain.append(f"  ({100 * low:+.1f} to {100 * high:+.1f})", "dim")
        yield gain.append("  may be chance", "yellow") if low <= 0 <= high else gain


def _accuracy(name: str, found: Evaluation, width: int) -> Text:
    low, high = found.interval()
    # A cell is solid below the interval, half-toned within it, and empty above.
    solid, shaded = round(low * width), max(1, round(high * width) - round(low * width))
    row = Text.assemble(name.rjust(6), "  ", (percent(found.accuracy).rjust(6), "bold"), "  ")
    row.append("█" * solid, "cyan").append("▒" * shaded, "cyan").append("·" * (width - solid - shaded), "dim")
    return row.append(f"  {percent(low)} to {percent(high)}, n = {found.items}", "dim")


def _pairs(before: Sequence[Sample], after: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    """The samples of the same prompts. A prompt whose session failed has none."""
    later = {(sample.place, sample.prompt): sample for sample in after}
    return [(old, later[key]) for old in before if (key := (old.place, old.prompt)) in later]


def _comparisons(pairs: Sequence[tuple[Sample, Sample]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_lines=True, pad_edge=False, header_style="bold")
    table.add_column("prompt", ratio=4, overflow="fold")
    table.add_column("before", ratio=5, overflow="fold")
    table.add_column("after", ratio=5, overflow="fold")
    for old, new in pairs:
        prompt = Text(visible(old.prompt.strip(), _CELL_CHARACTERS))
        if new.expected is not None:
            prompt.append(f"\nexpected {visible(new.expected, 80)}", "dim")
        table.add_row(prompt, _answer(old), _answer(new))
    return table


def _answer(sample: Sample) -> Text:
    answer = visible(sample.completion.strip(), _CELL_CHARACTERS)
    text = Text(answer) if answer else Text("(nothing)", "dim italic")
    style = "green" if sample.reward >= 1 else "yellow" if sample.reward > 0 else "red"
    return text.append(f"\nreward {plain(sample.reward)}", style)


def _curve(curve: Curve, width: int) -> Iterator[Text]:
    heading = Text.assemble((_CURVES[curve.metric], "bold"))
    if curve.evaluations and curve.is_share:
        heading.append("    ● ", "orange1").append("held-out", "dim")
    yield heading
    yield draw_curve(curve, width=min(width, 100))
