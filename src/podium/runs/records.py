"""The one reader of a run's directory. It reads the run's settings, summary, rows and prompts, and decides its state.

`podium runs`, `view`, `changes`, `export`, the report and a resume use it, so all of them say the same about a run.
Links in the directory are not followed, and a damaged file counts as a missing one. The module imports no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal

from podium.errors import CheckpointError, ConfigError, DataError
from podium.functions import OF_SCRIPT
from podium.runs.files import LOCK, is_locked, step_of
from podium.runs.ledger import States, read_ledger
from podium.runs.named_files import PLACES, as_given, read_objects
from podium.runs.reading import RunFiles
from podium.telemetry.held_out import ACCURACY, Metric

__all__ = ["CONFIG", "LEDGER", "METRICS", "SUMMARY", "RunRecord"]
__all__ += ["check_run", "find_runs", "flatten", "is_run", "metric_of", "parse_rows"]

CONFIG, LEDGER, METRICS, SUMMARY = "config.yaml", "ledger.jsonl", "metrics.jsonl", "summary.json"
_MOST_SETTINGS: Final = 10_000

RunState = Literal["running", "finished", "stopped", "unfinished"]


@dataclass(frozen=True)
class RunRecord:
    """The run in the directory ``path``. Each file is read once, when it is first needed."""

    path: Path

    @cached_property
    def files(self) -> RunFiles:
        return RunFiles(self.path)

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        """summary.json; empty where there is none that can be read."""
        try:
            summary = json.loads(self.files.read_small(SUMMARY))
        except (OSError, DataError, ValueError, RecursionError):
            return {}
        return summary if isinstance(summary, dict) else {}

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl."""
        try:
            with closing(self.files.open(METRICS)) as file:
                return list(parse_rows(file.read()))
        except (FileNotFoundError, DataError):
            return []

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The values of config.yaml by the dotted names of their keys. Paths are as the user wrote them.

        What the script of the run passed beside them has names such as ``script.policy``.
        """
        import yaml

        try:
            text = self.files.read_small(CONFIG)
            values = yaml.safe_load(text)
            settings = flatten(as_given(values, self.path)) if isinstance(values, dict) else ()
            objects = read_objects(text.decode(errors="replace"))
            return dict(islice(settings, _MOST_SETTINGS)) | {f"script.{role}": name for role, name in objects.items()}
        except (OSError, DataError, ValueError, yaml.YAMLError, RecursionError):
            return {}

    @property
    def of_script(self) -> dict[str, str]:
        """The settings that stand for objects which the script of the run passed."""
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in self.settings.items()}
        return {key: text for key, text in texts.items() if OF_SCRIPT in text or key.startswith("script.")}

    @property
    def prompts(self) -> States:
        """The states of the run's prompts, by its ledger. Raises CheckpointError where the ledger is damaged."""
        with suppress(FileNotFoundError):
            return read_ledger(self.path / LEDGER)
        return States()

    def result(self, name: str) -> Path | None:
        """The ``model_path`` or the ``best_checkpoint`` of the summary, also if the run has moved; None if unset."""
        if not isinstance(value := self.summary.get(name), str):
            return None
        local = self.path / ("model" if name == "model_path" else Path("checkpoints", Path(value).name))
        return local if local.exists() else Path(value)

    @property
    def state(self) -> RunState:
        return self.state_after(self.step)

    def state_after(self, step: int) -> RunState:
        """Return the state of the run if the last row of its metrics is of ``step``.

        Running: a process writes to the directory. Stopped: somebody ended the run early, and it was saved.
        Unfinished: it was killed or has failed.
        """
        if self.is_held():
            return "running"
        if not self.summary or self.is_past_end(step):
            return "unfinished"
        return "finished" if self.summary.get("finished") else "stopped"

    @property
    def progress(self) -> str:
        """The state and the step, such as "unfinished at step 3"."""
        return f"{self.state} at step {self.step}"

    @property
    def end(self) -> int | None:
        """The step after which the run ended, by its summary; None where no summary says so."""
        steps = self.summary.get("steps")
        return steps if isinstance(steps, int) else None

    def is_past_end(self, step: int) -> bool:
        """Whether ``step`` or a checkpoint is later than the summary's end: the run was resumed, and was killed."""
        return self.end is not None and max([step, *self.checkpoints]) > self.end

    @property
    def checkpoints(self) -> list[int]:
        """The steps of the checkpoints."""
        with suppress(DataError):
            return [step for name in self.files.names("checkpoints") if (step := step_of(name)) is not None]
        return []

    @property
    def is_empty(self) -> bool:
        """Whether the run ended before it had a step, a checkpoint or a result."""
        return self.step == 0 and not self.summary and not self.checkpoints

    @property
    def has_results(self) -> bool:
        """Whether the run has a trained step, a checkpoint or an evaluation, which would be lost with its directory.

        Completions of a step that was not trained, for example because the reward failed, are no result.
        """
        kept = ("checkpoints/step-*", "evaluations/**/*.parquet")
        ended = (self.path / SUMMARY).exists() and self.end != 0
        return ended or bool(self.rows) or any(any(self.path.glob(name)) for name in kept) or self._has_trained

    @property
    def _has_trained(self) -> bool:
        """Whether the ledger has a trained prompt. If the ledger cannot be read, completions count as trained."""
        with suppress(CheckpointError, DataError):
            if (self.path / LEDGER).exists():
                return "trained" in self.prompts.counts()
        return any(self.path.glob("completions/*.parquet"))

    @property
    def is_own(self) -> bool:
        """Whether everything in the directory belongs to this run. Other directories may have a config.yaml too, or
        hold runs."""
        made = not {LOCK, PLACES, METRICS}.isdisjoint(self.files.names())
        return made and not any(self.path.glob(f"*/{CONFIG}"))

    def is_held(self) -> bool:
        """Whether a process writes to the run."""
        with suppress(OSError, DataError), closing(self.files.open(LOCK)) as file:
            return is_locked(file)
        return False

    @cached_property
    def step(self) -> int:
        """The last step of which there is a row."""
        return max((row["step"] for row in self.rows), default=0)

    @property
    def judged(self) -> tuple[Metric, float] | None:
        """The metric that judges the run, and its value when it was measured last; None without an evaluation."""
        row = next((row for row in reversed(self.rows) if row["kind"] == "eval"), {})
        metric = metric_of(row)
        value = row.get(metric.name)
        return (metric, float(value)) if isinstance(value, int | float) else None

    def scores_by_set(self, names: Sequence[str], done: int) -> dict[str, dict[str, Any]]:
        """The figures of the evaluation sets ``names`` before the first step and after step ``done``."""
        rows = {row["step"]: row for row in self.rows if row["kind"] == "eval"}
        before, after = rows.get(0, {}), rows.get(done if done else -1, {})

        def select(row: Mapping[str, Any], name: str) -> dict[str, Any]:
            figures = {key.removesuffix(f"/{name}"): row[key] for key in row if key.endswith(f"/{name}")}
            return {key: value for key, value in figures.items() if key in row and key != "items"}

        return {
            name: {
                "before": select(before, name),
                "after": select(after, name),
                "items": after.get(f"items/{name}", before.get(f"items/{name}")),
            }
            for name in names
        }

    def last(self, metric: str) -> float | None:
        """The last value of a metric of steps."""
        return next((row[metric] for row in reversed(self.rows) if row.get(metric) is not None), None)

    @property
    def seconds(self) -> float:
        """The duration of the run: by its summary, or else from its first row to its last one."""
        if isinstance(wall := self.summary.get("wall_s"), int | float):
            return float(wall)
        times = [row["time"] for row in self.rows if isinstance(row.get("time"), int | float)]
        return max(times) - min(times) if times else 0.0

    @property
    def modified(self) -> float:
        """The time of the last write: that of metrics.jsonl, or else of the directory."""
        return (self.files.signature(METRICS)[1] or self.path.stat().st_mtime_ns) / 1e9


def metric_of(row: Mapping[str, Any]) -> Metric:
    """The metric that judges a run, by a row of an evaluation. Runs of before ``eval.metric`` had accuracies."""
    name = row.get("metric")
    return Metric(name if isinstance(name, str) else ACCURACY)


def is_run(path: Path) -> bool:
    """Whether ``path`` is the directory of a run."""
    return os.path.isfile(path / CONFIG)  # Path.is_file() raises an error for a name that is too long


def check_run(path: Path) -> None:
    """Raise ConfigError if ``path`` is no directory of a run."""
    if not is_run(path):
        raise ConfigError(f"no run at {path}: it has no {CONFIG}; give the directory of a run, such as runs/NAME")


def find_runs(path: Path) -> Iterator[RunRecord]:
    """Yield the run at ``path``, or the runs directly below it. Raises ConfigError if there are none."""
    folders = [path, *sorted(path.iterdir())] if path.is_dir() else [path]
    runs = [folder for folder in folders if is_run(folder)]
    if not runs:
        raise ConfigError(f"{path}: no run is here; give the directory of a run, or one of runs (run.dir)")
    yield from map(RunRecord, runs)


def parse_rows(lines: bytes) -> Iterator[dict[str, Any]]:
    """Yield the rows in lines of metrics.jsonl, in order. An incomplete last line, which a killed run leaves, is
    skipped."""
    for line in lines.splitlines():
        with suppress(ValueError, RecursionError):
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("step"), int) and "kind" in row:
                yield row


def flatten(values: Mapping[Any, Any], joint: str = ".", depth: int = 8) -> Iterator[tuple[str, Any]]:
    """Yield nested values by the dotted names of their keys, to a limited depth, because YAML can contain itself."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value and depth:
            yield from ((f"{name}{joint}{key}", leaf) for key, leaf in flatten(value, joint, depth - 1))
        else:
            yield str(name), value
