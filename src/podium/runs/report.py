"""The report at the end of a run: the figure that judges it, completions before and after, the curve, and paths.

An installed package draws the curve.
"""

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from rich import box
from rich.console import Console, Group
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from podium.runs.curves import CurveText, load_drawer
from podium.runs.evaluation import Evaluation, Gain, Interval, gain
from podium.runs.run_reader import RunRecord
from podium.runs.run_writer import RunDirectory, Summary
from podium.spelling import write_count
from podium.telemetry import Note, Sample, emit
from podium.telemetry.formatting import duration, plain, visible
from podium.telemetry.held_out import Metric
from podium.telemetry.sinks.console import lose_output

_CELL_CHARACTERS: Final = 400
_PAIRS: Final = 3  # completions before and after, that are shown
_INDENT: Final = (0, 0, 0, 2)


class _Symbols(NamedTuple):
    """What a figure is drawn with: cells below an interval, within it and above it, and what leads to a later value."""

    solid: str
    shaded: str
    empty: str
    arrow: str


_UNICODE: Final = _Symbols("█", "▒", "·", "→")
_ASCII: Final = _Symbols("#", "=", ".", "->")  # for a stdout whose encoding has no others, as under LC_ALL=C


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
    record = RunRecord.of(directory.files)
    drawer, reason = load_drawer()
    if drawer is None:
        emit(Note(f"the learning curve is not drawn{reason}"))
    elif (picture := drawer.plot(record.rows, title)) is not None:
        paths["curve"] = directory.curve_path
        with directory.files.replace(directory.curve_path.name) as file:
            file.write(picture)
    paths |= {"model": summary.model_path} if summary.model_path else {}
    paths["trace"] = directory.trace_path
    paths |= {"replay of": record.replay_of} if record.replay_of else {}
    paths |= record.of_script
    if console is not None:
        draw = partial(drawer.draw, record.rows) if drawer is not None else None
        try:
            render(title, summary, judge, first, last, draw, paths, console)
        except OSError as error:
            lose_output(console, error)
        as_text = io.StringIO()
        # Not a notebook's: there, rich shows in the cell what is printed on any console.
        text_console = Console(file=as_text, width=100, color_system=None, force_jupyter=False)
        render(title, summary, judge, first, last, draw, paths, text_console)
        directory.log(as_text.getvalue())
    return directory.curve_path if "curve" in paths else None


# The report


def render(
    title: str,
    summary: Summary,
    judge: Metric,
    first: Evaluation | None,
    last: Evaluation | None,
    draw: Callable[[int], CurveText | None] | None,
    paths: Mapping[str, Path | str],
    console: Console,
) -> None:
    """Print the report. Completions are shown as text, whatever they contain, and ``paths`` in their order. ``draw``
    draws the learning curve for a width."""
    width = min(console.width, 120)
    console.print()
    heading = Text.assemble(
        (title, "bold"), f"  {write_count(summary.steps, 'step')}{_amount(summary)} in {duration(summary.wall_s)}"
    )
    for reason, count in summary.dropped.items():
        heading.append(f", {count:,} dropped: {reason}", "yellow")
    console.print(Rule(heading, align="left", style="dim", characters="─"), width=width)
    console.print()
    if first is not None and last is not None:
        symbols = _ASCII if console.options.ascii_only else _UNICODE
        results = Group(*_results(judge, first, last, summary.steps, width - 4, symbols), "")
        console.print(Padding(results, _INDENT, expand=False), highlight=False)
        if first.step != last.step and (pairs := _pairs(first.samples, last.samples)):
            console.print(Padding(_comparisons(pairs), _INDENT, expand=False), width=width, highlight=False)
    if draw is not None and (curve := draw(min(width - 4, 100))) is not None:
        curve = curve.in_ascii() if console.options.ascii_only else curve
        console.print(Padding(Group(curve.heading, curve.drawing, ""), _INDENT, expand=False), highlight=False)
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
    return f" on {write_count(trained, 'prompt')}{epochs}"


def _results(
    judge: Metric, first: Evaluation, last: Evaluation, steps: int, width: int, symbols: _Symbols
) -> Iterator[Text]:
    """The metric that judges the run before and after, the gain, and the other figures in a line."""
    before = first if first.step < last.step or first.step == 0 else None
    after = last if last.step > 0 else None
    measured = [evaluation for evaluation in (before, after) if evaluation is not None]
    of_set = f" of {set_name}" if (set_name := (last if after is None else after).set_name) else ""
    heading = Text.assemble((f"held-out {judge.title}{of_set}", "bold"), ("  with the 95% interval", "dim"))
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
            yield _result(name, evaluation, judge, scale, bar, symbols)
    if before is not None and after is not None:
        yield _describe_gain(gain(before, after, judge.name), judge)
    if others := list(_other_figures(judge, measured, symbols.arrow)):
        yield Text("also".rjust(6) + "  " + ", ".join(others), "dim")


def _bounds(evaluation: Evaluation, judge: Metric) -> Interval:
    """The interval of the metric; where it is not known, the value twice, and 0 without a value."""
    value = evaluation.value(judge.name)
    return evaluation.interval(judge.name) or ((value, value) if math.isfinite(value) else (0.0, 0.0))


def _result(name: str, evaluation: Evaluation, judge: Metric, scale: Interval, width: int, symbols: _Symbols) -> Text:
    bounds = _bounds(evaluation, judge)
    span = scale[1] - scale[0] or 1.0
    # A cell is solid below the interval, half-toned within it, and empty above.
    solid, end = (min(width, max(0, round((bound - scale[0]) / span * width))) for bound in bounds)
    shaded = min(width - solid, max(1, end - solid))
    row = Text.assemble(name.rjust(6), "  ", (judge.write(evaluation.value(judge.name)).rjust(6), "bold"), "  ")
    row.append(symbols.solid * solid, "cyan").append(symbols.shaded * shaded, "cyan")
    row.append(symbols.empty * (width - solid - shaded), "dim")
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
    return text.append(f": {write_count(found.changed or 0, 'item')} changed", "dim") if few else text


def _other_figures(judge: Metric, measured: Sequence[Evaluation], arrow: str) -> Iterator[str]:
    """The other figures of evaluations, before and after, unless they say the same."""
    for name in dict.fromkeys(name for evaluation in measured for name in evaluation.figures):
        values = [evaluation.value(name) for evaluation in measured]
        if not any(map(math.isnan, values)) and values != [evaluation.value(judge.name) for evaluation in measured]:
            yield f"{Metric(name).title} {f' {arrow} '.join(map(Metric(name).write, values))}"


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
    blank = visible(repr(sample.completion), _CELL_CHARACTERS) if sample.completion else "(nothing)"
    text = Text(answer) if answer else Text(blank, "dim italic")
    style = "green" if sample.reward >= 1 else "yellow" if sample.reward > 0 else "red"
    text.append(f"\nreward {plain(sample.reward)}", style)
    return text.append(", cut off", "yellow") if sample.cut_off else text
