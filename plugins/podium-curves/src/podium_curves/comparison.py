"""How several runs compare: the settings in which they differ, and their curves in one picture."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from itertools import starmap
from pathlib import Path
from typing import Any, Final

from podium.errors import ConfigError
from podium.runs.measures import name_content
from podium.runs.run_files import RunFiles
from podium.runs.run_reader import UNCOMPARED, RunRecord, value_of
from podium.spelling import write_count
from podium_curves.drawing import smooth

__all__ = ["RunCurve", "describe_omissions", "differing", "explain_groups", "group_curves", "plot_curves"]

_SHOWN_DIGITS: Final = 12
_SEEDS: Final = frozenset({"run.seed", "model.seed"})
_COLORS: Final = ("#2563a8", "#d9730d", "#2f9e63", "#a03a9b", "#c0392b", "#6b7280")


@dataclass(frozen=True)
class RunCurve:
    """A metric of the run called ``name``, by step: the ``values`` that are finite, and the steps of those that are
    not. ``contents`` is what the files hold that its settings name, as :attr:`.RunRecord.contents`."""

    name: str
    settings: Mapping[str, Any]
    values: Mapping[int, float]
    nonfinite_steps: Sequence[int] = ()
    contents: Mapping[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])

    @classmethod
    def of(cls, run: RunRecord, name: str, metric: str) -> RunCurve:
        """Read ``metric`` of the run's steps, or where steps do not have it, of its evaluations."""
        by_kind: dict[str, dict[int, float]] = {}
        for row in run.rows:
            if (value := value_of(row, metric)) is not None:
                by_kind.setdefault(row["kind"], {})[row["step"]] = value
        values = by_kind.get("step") or by_kind.get("eval", {})
        finite = {step: value for step, value in values.items() if math.isfinite(value)}
        return cls(name, run.settings, finite, [step for step in values if step not in finite], run.contents)


def differing(runs: Sequence[RunRecord]) -> dict[str, list[Any]]:
    """Return the keys in which runs differ, without their names and directories, and the files of which they had other
    contents. Each has the values of all runs, and of a content the beginning of its checksum."""
    keys = dict.fromkeys(key for run in runs for key in run.settings if key not in UNCOMPARED)
    values = {key: [run.settings.get(key) for run in runs] for key in keys}
    others = {key: entries for key, entries in values.items() if any(value != entries[0] for value in entries)}
    for file in _find_changed([run.contents for run in runs]):
        others[name_content(*file)] = [_show_content(run.contents.get(file, "-")) for run in runs]
    return others


def _show_content(content: str) -> str:
    return content if content.endswith("bytes") else content[:_SHOWN_DIGITS]


def group_curves(curves: Sequence[RunCurve]) -> list[list[RunCurve]]:
    """Return the curves in groups. The runs of a group differ only in their seeds, and the files that they name had the
    same contents. A run whose settings are not known is alone."""
    groups: dict[tuple[str, ...], list[RunCurve]] = {}
    for alike in _group_by_settings(curves):
        changed = _find_changed([curve.contents for curve in alike])
        for curve in alike:
            key = (alike[0].name, *(curve.contents.get(file, "") for file in changed))
            groups.setdefault(key, []).append(curve)
    return list(groups.values())


def explain_groups(curves: Sequence[RunCurve]) -> Iterator[str]:
    """Yield a sentence for runs that are in several groups although their settings differ only in seeds."""
    for alike in _group_by_settings(curves):
        if changed := _find_changed([curve.contents for curve in alike]):
            names, files = ", ".join(curve.name for curve in alike), ", ".join(starmap(name_content, changed))
            yield f"{names}: these runs are no seeds of one another where they differ in {files}"


def _group_by_settings(curves: Sequence[RunCurve]) -> list[list[RunCurve]]:
    groups: dict[str, list[RunCurve]] = {}
    for curve in curves:
        settings = {key: value for key, value in curve.settings.items() if key not in UNCOMPARED | _SEEDS}
        key = json.dumps(settings, sort_keys=True, default=str) if settings else curve.name
        groups.setdefault(key, []).append(curve)
    return list(groups.values())


def _find_changed(contents: Sequence[Mapping[tuple[str, str], str]]) -> list[tuple[str, str]]:
    """The files of which runs had different contents, among those that know what they had."""
    files = dict.fromkeys(file for run in contents for file in run)
    return [file for file in files if len({run[file] for run in contents if file in run}) > 1]


def describe_omissions(groups: Sequence[Sequence[RunCurve]], metric: str) -> Iterator[str]:
    """Yield a sentence for each run, and for each group, of which the picture does not show all."""
    for group in groups:
        curves = [curve for curve in group if curve.values]
        for curve in group:
            if curve.nonfinite_steps:
                steps = write_count(len(curve.nonfinite_steps), "step")
                first = min(curve.nonfinite_steps)
                yield f"{curve.name}: {metric} is not finite at {steps}, first at step {first}, and is not drawn there"
            if not curve.values:
                yield f"{curve.name} has no {'finite ' * bool(curve.nonfinite_steps)}{metric}, and is not drawn"
        common, steps = _find_common(curves), {step for curve in curves for step in curve.values}
        if len(common) < len(steps):
            lengths = ", ".join(f"{curve.name} {_describe_steps([*curve.values])}" for curve in curves)
            what = f"drawn at the {write_count(len(common), 'step')} that all of them have" if common else "not drawn"
            yield f"{_label(curves)}: {what}, of {lengths}"


def _find_common(curves: Sequence[RunCurve]) -> list[int]:
    """The steps that all curves have, in order."""
    return sorted(set.intersection(*(set(curve.values) for curve in curves))) if curves else []


def _describe_steps(steps: Sequence[int]) -> str:
    return f"{write_count(len(steps), 'step')} up to {max(steps)}"


def _label(curves: Sequence[RunCurve]) -> str:
    """The name of a group of curves: that of its first run, and how many there are."""
    seeds = {tuple(curve.settings.get(key) for key in sorted(_SEEDS)) for curve in curves}
    noun = "seed" if len(seeds) == len(curves) else "run"
    return f"{curves[0].name} ({write_count(len(curves), noun)})" if len(curves) > 1 else curves[0].name


def plot_curves(groups: Sequence[Sequence[RunCurve]], metric: str, path: Path) -> Path:
    """Draw ``metric`` of each group: the mean of its runs, and a band from the lowest run to the highest, at the steps
    that all of them have. Raises ConfigError where no group has such a step."""
    if not any(curve.values for group in groups for curve in group):
        raise ConfigError(f"--metric {metric}: no value of these runs is finite, so that nothing can be drawn")
    if not any(_find_common([curve for curve in group if curve.values]) for group in groups):
        raise ConfigError(
            f"--metric {metric}: runs that differ only in their seeds are drawn at the steps that all of them have, "
            "and there is no such step: name one of them, and a run with other settings"
        )
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=200, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, group in enumerate(groups):
        curves = [curve for curve in group if curve.values]
        if not (steps := _find_common(curves)):
            continue
        color = _COLORS[number % len(_COLORS)]
        rows = [smooth([curve.values[step] for step in steps]) for curve in curves]
        means = [sum(values) / len(values) for values in zip(*rows, strict=True)]
        axes.plot(steps, means, color=color, linewidth=2, label=_label(curves))
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
