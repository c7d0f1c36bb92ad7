"""What the directories of runs say about them: their state, what they were set to, and how several compare.

Nothing here starts anything, and torch is not imported.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import yaml

from podium.errors import ConfigError
from podium.runs.directory import read_rows
from podium.runs.files import is_locked, step_of
from podium.runs.named_files import PLACES, as_given

__all__ = ["RunRecord", "differing", "find_runs", "groups_of", "plot_runs"]

_APART: Final = frozenset({"run.name", "run.dir", "run.resume", "run.trackers", "run.show_samples"})
_SEEDS: Final = frozenset({"run.seed", "model.seed"})
_COLORS: Final = ("#2563a8", "#d9730d", "#2f9e63", "#a03a9b", "#c0392b", "#6b7280")


@dataclass(frozen=True)
class RunRecord:
    """A run's directory, as it is read."""

    path: Path

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        """summary.json; empty where there is none that can be read."""
        file = self.path / "summary.json"
        try:
            summary = json.loads(file.read_bytes()) if file.exists() else {}
        except (ValueError, RecursionError):
            return {}
        return summary if isinstance(summary, dict) else {}

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl."""
        return list(read_rows(self.path / "metrics.jsonl"))

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The values of config.yaml by the dotted paths of their keys, with paths as the user wrote them.

        Empty where it cannot be read.
        """
        try:
            values = yaml.safe_load((self.path / "config.yaml").read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError, RecursionError):
            return {}
        return dict(_flat(as_given(values, self.path) if isinstance(values, Mapping) else values))

    def result(self, name: str) -> Path | None:
        """The ``model_path`` or the ``best_checkpoint`` of the summary, also if the run has moved; None if unset."""
        if not isinstance(value := self.summary.get(name), str):
            return None
        local = self.path / ("model" if name == "model_path" else Path("checkpoints", Path(value).name))
        return local if local.exists() else Path(value)

    @property
    def state(self) -> str:
        """ "running", "finished", "stopped" by somebody, or "unfinished": it was killed or has failed."""
        if self.is_held():
            return "running"
        if not self.summary or self.went_on:
            return "unfinished"
        return "finished" if self.summary.get("finished") else "stopped"

    @property
    def went_on(self) -> bool:
        """Whether there are steps after the end that summary.json tells of: the run was resumed, and was killed."""
        steps = self.summary.get("steps")
        return isinstance(steps, int) and max([self.step, *self.checkpoints]) > steps

    @property
    def checkpoints(self) -> list[int]:
        """The steps of the checkpoints."""
        steps = (step_of(path.name) for path in (self.path / "checkpoints").glob("step-*"))
        return [step for step in steps if step is not None]

    @property
    def is_empty(self) -> bool:
        """Whether the run ended before it had a step, a checkpoint or a result."""
        return self.step == 0 and not self.summary and not self.checkpoints

    @property
    def is_own(self) -> bool:
        """Whether all in the directory is this run's. A directory with a config.yaml may be anybody's, or hold runs."""
        made = any((self.path / name).exists() for name in (".lock", PLACES, "metrics.jsonl"))
        return made and not any(self.path.glob("*/config.yaml"))

    def is_held(self) -> bool:
        """Whether a process writes to the run."""
        return is_locked(self.path)

    @property
    def step(self) -> int:
        """The last step of which there is a row."""
        return max((row["step"] for row in self.rows), default=0)

    @property
    def accuracy(self) -> float | None:
        """The held-out accuracy that was measured last."""
        return next((row.get("accuracy") for row in reversed(self.rows) if row["kind"] == "eval"), None)

    def last(self, metric: str) -> float | None:
        """The last value of a metric of steps."""
        return next((row[metric] for row in reversed(self.rows) if row.get(metric) is not None), None)

    @property
    def seconds(self) -> float:
        """How long the run took: by its summary, or from its first row to its last one."""
        if isinstance(wall := self.summary.get("wall_s"), int | float):
            return float(wall)
        times = [row["time"] for row in self.rows if isinstance(row.get("time"), int | float)]
        return max(times) - min(times) if times else 0.0

    @property
    def modified(self) -> float:
        """When something was last written: the time of metrics.jsonl, or of the directory."""
        file = self.path / "metrics.jsonl"
        return (file if file.exists() else self.path).stat().st_mtime


def find_runs(path: Path) -> Iterator[RunRecord]:
    """Give the run at ``path``, or those directly below. Raises ConfigError if there are none."""
    folders = [path, *sorted(path.iterdir())] if path.is_dir() else [path]
    runs = [folder for folder in folders if (folder / "config.yaml").exists()]
    if not runs:
        raise ConfigError(f"{path}: no run is here; give the directory of a run, or one of runs (run.dir)")
    yield from map(RunRecord, runs)


def differing(runs: Sequence[RunRecord]) -> dict[str, list[Any]]:
    """The keys in which runs differ, beside their names and places, each with the value of every run."""
    keys = dict.fromkeys(key for run in runs for key in run.settings if key not in _APART)
    values = {key: [run.settings.get(key) for run in runs] for key in keys}
    return {key: entries for key, entries in values.items() if any(value != entries[0] for value in entries)}


def groups_of(runs: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """Runs that differ in nothing but their seeds are a group."""
    runs_by_settings: dict[str, list[RunRecord]] = {}
    for run in runs:
        settings = {key: value for key, value in run.settings.items() if key not in _APART | _SEEDS}
        runs_by_settings.setdefault(json.dumps(settings, sort_keys=True, default=str), []).append(run)
    return list(runs_by_settings.values())


def plot_runs(groups: Sequence[Sequence[RunRecord]], names: Sequence[str], metric: str, path: Path) -> Path:
    """Draw ``metric`` of each group: the mean of its runs, in a band from the lowest to the highest of them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    from podium.runs.report import smooth

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
        label = f"{name} ({len(curves)} seeds)" if len(curves) > 1 else name
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
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _curve(run: RunRecord, metric: str) -> dict[int, float]:
    """The values of ``metric`` by step: of the steps, or of the evaluations where steps have no such metric."""
    kinds = {
        kind: {row["step"]: row[metric] for row in run.rows if row["kind"] == kind and row.get(metric) is not None}
        for kind in ("step", "eval")
    }
    return kinds["step"] or kinds["eval"]


def _flat(values: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Nested values by the dotted paths of their keys."""
    if not isinstance(values, Mapping) or not values:
        yield key, values
        return
    for name, value in values.items():
        yield from _flat(value, f"{key}.{name}" if key else str(name))
