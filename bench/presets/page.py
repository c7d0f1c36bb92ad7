"""The verdict on the runs, the page's tables, and the picture of the curves."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.presets.training import SEEDS, TRL, Arm, Run, list_arms

MARGIN: Final = 0.25
"""Each seed has to gain more than this: at least five standard errors of a difference of two scores on 200 prompts."""
MARK: Final = "<!-- begin: python -m bench.presets -->"
_COLOR, _PEER, _GREY, _DARK, _LINE = "#2563a8", "#d9730d", "#6b7280", "#22262b", "#e6e8eb"


def group_runs(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """The runs of each arm in the order of their seeds: presets, other recipes that sample, TRL, and the others."""
    arms = list_arms()
    groups: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        groups.setdefault(run.arm, []).append(run)
    first = [name for name, arm in arms.items() if arm.samples]
    names = [*first, TRL, *(name for name in arms if name not in first)]
    return {name: groups[name] for name in names if name in groups}


def find_missed(runs: Sequence[Run], arms: Iterable[str], seeds: Sequence[int] = SEEDS) -> list[str]:
    """Return a sentence for each arm and seed that was not run, or that gained no more than the margin."""
    by_name = {(run.arm, run.seed): run for run in runs}
    sentences: list[str] = []
    for name in arms:
        for seed in seeds:
            run = by_name.get((name, seed))
            if run is None:
                sentences.append(f"{name}, seed {seed}, was not run: python -m bench.presets --arms {name}")
            elif not run.gain > MARGIN:
                before, after = run.points[0][1], run.points[-1][1]
                sentences.append(
                    f"{name}, seed {seed}, goes from {before:.1%} to {after:.1%} on held-out rows: a gain of "
                    f"{100 * run.gain:.1f} points, which is not over {100 * MARGIN:.0f}"
                )
    return sentences


def make_tables(runs: Sequence[Run]) -> str:
    """Return the tables of the page: arms that sample beside TRL, and then those that learn from examples or pairs."""
    groups, arms = group_runs(runs), list_arms()
    sampled = [name for name in groups if name == TRL or arms[name].samples]
    others = [name for name in groups if name not in sampled]
    return "\n".join(
        _make_table(title, {name: groups[name] for name in names}, steps, arms)
        for title, names, steps in (("accuracy", sampled, (0, 10, 20, 30, 40)), ("score", others, (0, 5, 10, 20, 40)))
        if names
    )


def _make_table(title: str, groups: Mapping[str, Sequence[Run]], steps: Sequence[int], arms: Mapping[str, Arm]) -> str:
    head = ["", *(f"{title} at step {step}" if step == steps[0] else f"{step}" for step in steps)]
    head += ["least gain", f"seeds over {100 * MARGIN:.0f} points", "processor seconds a run"]
    lines = [head, ["---"] * len(head)]
    for name, some in groups.items():
        scores = ([dict(run.points)[step] for run in some] for step in steps)
        gains = [run.gain for run in some]
        cells = [_describe(values) for values in scores]
        cells += [f"{100 * min(gains):.1f} points", f"{sum(gain > MARGIN for gain in gains)} of {len(gains)}"]
        lines.append([_title(name, arms), *cells, f"{statistics.median(run.processor_s for run in some):.1f}"])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _title(name: str, arms: Mapping[str, Arm]) -> str:
    return "TRL, `GRPOTrainer`" if name == TRL else f"`{name}`" if arms[name].preset else f"`podium train {name}`"


def _describe(values: Sequence[float]) -> str:
    mean = 100 * statistics.fmean(values)
    return f"{mean:.1f} ± {100 * statistics.stdev(values):.1f} %" if len(values) > 1 else f"{mean:.1f} %"


def make_section(results: Mapping[str, Any], picture: str) -> str:
    """What stands on the page between the markers: who measured what where, the picture and the tables."""
    runs, machine = [Run.from_json(values) for values in results["runs"]], results["machine"]
    presets = [run for run in runs if run.arm != TRL]
    passed = sum(run.gain > MARGIN for run in presets)
    libraries = machine["libraries"]
    words = (
        f"{passed} of {len(presets)} runs of {len({run.arm for run in presets})} presets and recipes gained more than "
        f"{100 * MARGIN:.0f} points. Measured on {machine['when'][:10]} with torch {libraries['torch']} and TRL "
        f"{libraries.get(TRL, 'not installed')}, on "
        f"{machine['cores']} cores ({machine['processor']}) that other processes used too. ± is the standard deviation "
        "over the seeds."
    )
    return f"{words}\n\n![Held-out accuracy by step, for each preset and for TRL]({picture})\n\n{make_tables(runs)}"


def draw(runs: Sequence[Run], path: Path) -> None:
    """Write the picture to ``path``: a panel for each arm that samples, with all seeds, and the mean of TRL in each."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import PercentFormatter

    groups, arms = group_runs(runs), list_arms()
    peer = _mean_curve(groups[TRL]) if TRL in groups else None
    panels = {name: some for name, some in groups.items() if name != TRL and arms[name].samples}
    columns = 5
    rows = -(-len(panels) // columns)
    with matplotlib.rc_context({"svg.hashsalt": "podium", "font.size": 10}):
        figure = Figure(figsize=(11, 0.7 + 2.3 * rows), dpi=130, layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat
        for axes, (name, some) in zip(grid, panels.items(), strict=False):
            for run in some:
                axes.plot(*zip(*run.points, strict=True), color=_COLOR, linewidth=0.8, alpha=0.45)
            axes.plot(*zip(*_mean_curve(some), strict=True), color=_COLOR, linewidth=2.2, zorder=3)
            if peer is not None:
                axes.plot(*zip(*peer, strict=True), color=_PEER, linewidth=1.6, linestyle=(0, (3, 2)), zorder=4)
            axes.set_title(name if arms[name].preset else f"podium train {name}", fontsize=11, color=_DARK, loc="left")
            axes.set_ylim(0, 1)
            axes.set_xlim(left=0)
            axes.grid(color=_LINE, linewidth=0.8)
            axes.spines[["top", "right", "left"]].set_visible(False)
            axes.tick_params(length=0, labelcolor=_GREY)
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        for axes in list(figure.axes)[len(panels) :]:
            axes.set_visible(False)
        figure.supxlabel("step", fontsize=10, color=_GREY)
        figure.supylabel("held-out accuracy", fontsize=10, color=_GREY)
        keys = [
            Line2D([], [], color=_COLOR, linewidth=2.2, label="mean of the seeds"),
            Line2D([], [], color=_COLOR, linewidth=0.8, alpha=0.45, label="each seed"),
            *([Line2D([], [], color=_PEER, linewidth=1.6, ls=(0, (3, 2)), label="TRL, GRPO: mean")] if peer else []),
        ]
        figure.legend(handles=keys, loc="outside upper center", ncols=3, frameon=False, labelcolor=_DARK)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _mean_curve(runs: Sequence[Run]) -> list[tuple[int, float]]:
    return [(step, statistics.fmean(dict(run.points)[step] for run in runs)) for step, _ in runs[0].points]
