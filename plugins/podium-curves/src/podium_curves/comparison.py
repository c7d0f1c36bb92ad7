"""How several runs compare: the settings in which they differ, and their curves in one picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, Final

from podium.runs.run_files import RunFiles
from podium.runs.run_reader import UNCOMPARED, RunRecord
from podium.spelling import write_count
from podium_curves.drawing import smooth

__all__ = ["differing", "groups_of", "plot_runs"]

_SEEDS: Final = frozenset({"run.seed", "model.seed"})
_COLORS: Final = ("#2563a8", "#d9730d", "#2f9e63", "#a03a9b", "#c0392b", "#6b7280")


def differing(runs: Sequence[RunRecord]) -> dict[str, list[Any]]:
    """Return the keys in which runs differ, without their names and directories. Each key has the values of all
    runs."""
    keys = dict.fromkeys(key for run in runs for key in run.settings if key not in UNCOMPARED)
    values = {key: [run.settings.get(key) for run in runs] for key in keys}
    return {key: entries for key, entries in values.items() if any(value != entries[0] for value in entries)}


def groups_of(runs: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """Return the runs in groups. The runs of a group differ only in their seeds."""
    runs_by_settings: dict[str, list[RunRecord]] = {}
    for run in runs:
        settings = {key: value for key, value in run.settings.items() if key not in UNCOMPARED | _SEEDS}
        runs_by_settings.setdefault(json.dumps(settings, sort_keys=True, default=str), []).append(run)
    return list(runs_by_settings.values())


def plot_runs(groups: Sequence[Sequence[RunRecord]], names: Sequence[str], metric: str, path: Path) -> Path:
    """Draw ``metric`` of each group: the mean of its runs, and a band from the lowest run to the highest."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=200, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, (runs, name) in enumerate(zip(groups, names, strict=True)):
        curves = [curve for run in runs if (curve := _curve(run, metric))]
        if not curves:
            continue
        color = _COLORS[number % len(_COLORS)]
        steps = sorted(set.intersection(*(set(curve) for curve in curves)))
        rows = [smooth([curve[step] for step in steps]) for curve in curves]
        means = [sum(values) / len(values) for values in zip(*rows, strict=True)]
        label = f"{name} ({write_count(len(curves), 'seed')})" if len(curves) > 1 else name
        axes.plot(steps, means, color=color, linewidth=2, label=label)
        if len(curves) > 1:
            low, high = ([pick(values) for values in zip(*rows, strict=True)] for pick in (min, max))
            axes.fill_between(steps, low, high, color=color, alpha=0.18, linewidth=0)
    axes.set_xlabel("step")
    axes.set_ylabel(metric)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    picture = BytesIO()
    figure.savefig(picture, format=path.suffix.removeprefix(".") or "png")
    files = RunFiles(path.parent)
    files.make_folder()
    files.write(picture.getvalue(), path.name)
    return path


def _curve(run: RunRecord, metric: str) -> dict[int, float]:
    """Return the values of ``metric`` by step. If the rows of steps do not have this metric, the values are those of
    evaluations."""
    kinds = {
        kind: {row["step"]: row[metric] for row in run.rows if row["kind"] == kind and row.get(metric) is not None}
        for kind in ("step", "eval")
    }
    return kinds["step"] or kinds["eval"]
