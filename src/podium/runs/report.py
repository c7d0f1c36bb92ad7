"""The report at the end of a run: the figure that judges it, completions before and after, the curve, and paths."""

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Final

from rich import box
from rich.console import Console, Group
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from podium.extras import install_command
from podium.runs.directory import RunDirectory, Summary
from podium.runs.evaluation import Evaluation, Gain, Interval, accuracy_interval, gain
from podium.runs.records import RunRecord, metric_of
from podium.telemetry import Note, Sample, emit, metrics
from podium.telemetry.formatting import duration, plain, visible
from podium.telemetry.held_out import ACCURACY, Metric
from podium.telemetry.sinks.console import lose_output

__all__ = ["Curve", "Point", "build_curve", "draw_curve", "plot_curve", "render", "report", "smooth"]

_CURVES: Final = {
    metrics.ACCURACY: "accuracy on the training prompts",
    metrics.REWARD_MEAN: "reward on the training prompts",
    metrics.LOSS: "loss on the training data",
}
_BLUE, _ORANGE, _GREY = "#2563a8", "#d9730d", "#8a8f98"
_CELL_CHARACTERS: Final = 400
_PAIRS: Final = 3  # completions before and after, that are shown
_INDENT: Final = (0, 0, 0, 2)


@dataclass(frozen=True, kw_only=True)
class Point:
    """A held-out evaluation on the curve: its value, and its 95 % interval, or the value twice for an unknown one."""

    step: int
    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A metric over steps, and held-out evaluations by the metric ``judge``."""

    metric: str
    steps: Sequence[int]
    values: Sequence[float]
    judge: Metric = field(default_factory=lambda: Metric(ACCURACY))
    points: Sequence[Point] = ()

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


def report(
    summary: Summary,
    judge: Metric,
    first: Evaluation | None,
    last: Evaluation | None,
    directory: RunDirectory,
    title: str,
    console: Console | None,
) -> Path | None:
    """Draw the curve of a run into its directory, and print the report on ``console`` if there is one.

    ``judge`` is the metric that judges the run. ``first`` and ``last`` are its evaluations, which may be the same one.
    Returns the picture, if there is one.
    """
    paths: dict[str, Path | str] = {"run": directory.path, "metrics": directory.metrics_path}
    curve = build_curve(RunRecord(directory.path).rows)
    if missing := [name for name in ("matplotlib", "plotext") if find_spec(name) is None]:
        curve = None
        emit(Note(f"the learning curve is not drawn without {missing[0]}: {install_command('plot')}"))
    if curve is not None:
        paths["curve"] = directory.curve_path
        with directory.files.replace(directory.curve_path.name) as file:
            plot_curve(curve, file, title)
    paths |= {"model": summary.model_path} if summary.model_path else {}
    paths["trace"] = directory.trace_path
    record = RunRecord(directory.path)
    paths |= {"replay of": record.replay_of} if record.replay_of else {}
    paths |= record.of_script
    if console is not None:
        try:
            render(title, summary, judge, first, last, curve, paths, console)
        except OSError as error:
            lose_output(console, error)
        as_text = io.StringIO()
        # Not a notebook's: there, rich shows in the cell what is printed on any console.
        text_console = Console(file=as_text, width=100, color_system=None, force_jupyter=False)
        render(title, summary, judge, first, last, curve, paths, text_console)
        directory.log(as_text.getvalue())
    return None if curve is None else directory.curve_path


def build_curve(rows: Sequence[Mapping[str, Any]]) -> Curve | None:
    """Return the learning curve in the rows of a run: of the metric that judges the run, else of accuracy, reward or
    loss, the first of these that steps have; else None."""
    steps = [row for row in rows if row["kind"] == "step"]
    evaluations = [row for row in rows if row["kind"] == "eval"]
    judge = metric_of(evaluations[-1]) if evaluations else Metric(ACCURACY)
    names = [name for name in (judge.of_steps, *_CURVES) if any(row.get(name) is not None for row in steps)]
    if not names:
        return None
    points = {row["step"]: row[names[0]] for row in steps if row.get(names[0]) is not None}
    held_out = [point for row in evaluations if (point := _point(row, judge)) is not None]
    return Curve(metric=names[0], steps=[*points], values=[*points.values()], judge=judge, points=held_out)


def _point(row: Mapping[str, Any], judge: Metric) -> Point | None:
    """An evaluation on the curve; None where the metric was not measured."""
    if (value := row.get(judge.name)) is None:
        return None
    low, high = value, value
    if row.get("metric") == judge.name and row.get("low") is not None:
        low, high = row["low"], row["high"]
    elif judge.name == ACCURACY and row.get("items"):
        low, high = accuracy_interval(value, row["items"])
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
    figure.suptitle(title or curve.title, x=0.02, ha="left", fontsize=13, fontweight="bold", color="#22262b")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9, labelcolor="#444a52")
    figure.savefig(path)


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


# The report


def render(
    title: str,
    summary: Summary,
    judge: Metric,
    first: Evaluation | None,
    last: Evaluation | None,
    curve: Curve | None,
    paths: Mapping[str, Path | str],
    console: Console,
) -> None:
    """Print the report. Completions are shown as text, whatever they contain, and ``paths`` in their order."""
    width = min(console.width, 120)
    console.print()
    heading = Text.assemble((title, "bold"), f"  {summary.steps} steps{_amount(summary)} in {duration(summary.wall_s)}")
    for reason, count in summary.dropped.items():
        heading.append(f", {count:,} dropped: {reason}", "yellow")
    console.print(Rule(heading, align="left", style="dim", characters="─"), width=width)
    console.print()
    if first is not None and last is not None:
        results = Group(*_results(judge, first, last, summary.steps, width - 4), "")
        console.print(Padding(results, _INDENT, expand=False), highlight=False)
        if first.step != last.step and (pairs := _pairs(first.samples, last.samples)):
            console.print(Padding(_comparisons(pairs), _INDENT, expand=False), width=width, highlight=False)
    if curve is not None and len(curve.steps) > 1:
        console.print(Padding(Group(*_curve(curve, width - 4), ""), _INDENT, expand=False), highlight=False)
    indent = max((len(name) for name in paths), default=0)
    for name, path in paths.items():
        # A path that is wrapped or cut cannot be copied.
        line = Text.assemble("  ", (name.ljust(indent), "dim"), "  ", str(path))
        console.print(line, soft_wrap=True, highlight=False)


def _amount(summary: Summary) -> str:
    """What the run trained on: prompts, and where it saw some more than once, in how many epochs of how many."""
    if "trained" not in summary.prompts:
        return ""
    trained, examples = summary.prompts["trained"], summary.examples
    epochs = f" ({trained / examples:.1f} epochs of {examples:,})" if 0 < examples < trained else ""
    return f" on {trained:,} prompts{epochs}"


def _results(judge: Metric, first: Evaluation, last: Evaluation, steps: int, width: int) -> Iterator[Text]:
    """The metric that judges the run before and after, the gain, and the other figures in a line."""
    before = first if first.step < last.step or first.step == 0 else None
    after = last if last.step > 0 else None
    measured = [evaluation for evaluation in (before, after) if evaluation is not None]
    heading = Text.assemble((f"held-out {judge.title}", "bold"), ("  with the 95% interval", "dim"))
    if not judge.higher_is_better:
        heading.append(", lower is better", "dim")
    if after is not None and after.step != steps:
        heading.append(f", last measured after step {after.step}", "dim")
    yield heading
    bounds = [_bounds(evaluation, judge) for evaluation in measured]
    low, high = min(0.0, *(low for low, _ in bounds)), max(high for _, high in bounds)
    scale = low, high if high > 1.0 or not judge.higher_is_better else 1.0
    bar = max(10, min(40, width - 50))
    for name, evaluation in (("before", before), ("after", after)):
        if evaluation is not None:
            yield _result(name, evaluation, judge, scale, bar)
    if before is not None and after is not None:
        yield _describe_gain(gain(before, after, judge.name), judge)
    if others := list(_other_figures(judge, measured)):
        yield Text("also".rjust(6) + "  " + ", ".join(others), "dim")


def _bounds(evaluation: Evaluation, judge: Metric) -> Interval:
    """The interval of the metric; where it is not known, the value twice, and 0 without a value."""
    value = evaluation.value(judge.name)
    return evaluation.interval(judge.name) or ((value, value) if math.isfinite(value) else (0.0, 0.0))


def _result(name: str, evaluation: Evaluation, judge: Metric, scale: Interval, width: int) -> Text:
    bounds = _bounds(evaluation, judge)
    span = scale[1] - scale[0] or 1.0
    # A cell is solid below the interval, half-toned within it, and empty above.
    solid, end = (min(width, max(0, round((bound - scale[0]) / span * width))) for bound in bounds)
    shaded = min(width - solid, max(1, end - solid))
    row = Text.assemble(name.rjust(6), "  ", (judge.write(evaluation.value(judge.name)).rjust(6), "bold"), "  ")
    row.append("█" * solid, "cyan").append("▒" * shaded, "cyan").append("·" * (width - solid - shaded), "dim")
    interval = "" if bounds[0] == bounds[1] else f"{judge.write(bounds[0])} to {judge.write(bounds[1])}, "
    return row.append(f"  {interval}n = {evaluation.count(judge.name)}", "dim")


def _describe_gain(found: Gain, judge: Metric) -> Text:
    better = judge.rank(found.value)
    style = "bold" if found.may_be_chance else "bold green" if better > 0 else "bold red"
    name = "gain" if judge.higher_is_better else "change"
    text = Text.assemble(name.rjust(6), "  ", (judge.write_change(found.value), style))
    if found.interval is not None:
        low, high = (100 * bound if judge.is_share else bound for bound in found.interval)
        write = "{:+.1f}".format if judge.is_share else "{:+.3g}".format
        text.append(f"  ({write(low)} to {write(high)})", "dim")
    if not found.may_be_chance:
        return text
    text.append("  may be chance", "yellow")
    few = found.interval is not None and not found.interval[0] <= 0 <= found.interval[1]
    return text.append(f": {found.changed} items changed", "dim") if few else text


def _other_figures(judge: Metric, measured: Sequence[Evaluation]) -> Iterator[str]:
    """The other figures of evaluations, before and after, unless they say the same."""
    for name in dict.fromkeys(name for evaluation in measured for name in evaluation.figures):
        values = [evaluation.value(name) for evaluation in measured]
        if not any(map(math.isnan, values)) and values != [evaluation.value(judge.name) for evaluation in measured]:
            yield f"{Metric(name).title} {' → '.join(map(Metric(name).write, values))}"


def _pairs(before: Sequence[Sample], after: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    """A few samples of the same prompts: those with another reward first, then those with another text.

    A prompt whose session failed has none.
    """
    later = {(sample.place, sample.prompt): sample for sample in after}
    pairs = [(old, later[key]) for old in before if (key := (old.place, old.prompt)) in later]
    pairs.sort(key=lambda pair: (pair[0].reward == pair[1].reward, pair[0].completion == pair[1].completion))
    return pairs[:_PAIRS]


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
    text.append(f"\nreward {plain(sample.reward)}", style)
    return text.append(", cut off", "yellow") if sample.cut_off else text


def _curve(curve: Curve, width: int) -> Iterator[Text]:
    heading = Text.assemble((curve.title, "bold"))
    if curve.points and curve.shares_axis:
        heading.append("    ● ", "orange1").append("held-out", "dim")
    yield heading
    yield draw_curve(curve, width=min(width, 100))
