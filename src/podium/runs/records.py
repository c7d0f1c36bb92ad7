"""What a run's directory says about it: its state, its settings, and what it has reached.

Nothing here starts anything, and torch is not imported.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from podium.errors import ConfigError
from podium.runs.directory import read_rows
from podium.runs.files import is_locked, step_of
from podium.runs.named_files import PLACES, as_given

__all__ = ["RunRecord", "find_runs"]


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


def _flat(values: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Nested values by the dotted paths of their keys."""
    if not isinstance(values, Mapping) or not values:
        yield key, values
        return
    for name, value in values.items():
        yield from _flat(value, f"{key}.{name}" if key else str(name))
