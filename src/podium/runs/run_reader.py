"""The one reader of a run's directory. It reads the run's settings, summary, rows and prompts, and decides its state.

`podium runs`, `view`, `changes`, `export`, the report and a resume use it, so all of them say the same about a run.
Links in the directory are not followed, and a damaged file counts as a missing one. The module imports no torch.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NotRequired, Self, cast

from pydantic import AfterValidator, with_config
from typing_extensions import TypedDict

from podium.config import find_mistyped, read_values
from podium.errors import CheckpointError, ConfigError, DataError
from podium.functions import OF_SCRIPT
from podium.rollout.tasks.config import show_sources
from podium.runs.files import LOCK, step_of
from podium.runs.ledger import States, read_ledger
from podium.runs.named_files import PLACES, as_given, list_contents, read_objects
from podium.runs.run_files import RunFiles
from podium.runs.run_json import Amount, Count, Number, read_json, read_lines
from podium.secrecy import mask
from podium.telemetry.formatting import visible
from podium.telemetry.held_out import ACCURACY, Metric
from podium.telemetry.metrics import TIME_PREFIX

CONFIG, LEDGER, METRICS, SUMMARY = "config.yaml", "ledger.jsonl", "metrics.jsonl", "summary.json"
UNCOMPARED: Final = frozenset({"run.name", "run.dir", "run.resume", "run.trackers", "run.show_samples"})
"""Settings that say nothing of how runs compare."""
_TIME_OF_STEP: Final = f"{TIME_PREFIX}step"
_ITEMS: Final = "items/"
_MOST_SETTINGS: Final = 10_000
_LARGEST: Final = 1e300  # larger values overflow in sums
_logger = logging.getLogger(__name__)

RunState = Literal["running", "finished", "stopped", "unfinished", "unknown"]


@dataclass(frozen=True)
class RunRecord:
    """The run in the directory ``path``. Each file is read once, when it is first needed."""

    path: Path
    complaints: list[str] = field(default_factory=list[str], compare=False, repr=False)
    """What is wrong with the files that were read so far."""

    @classmethod
    def of(cls, files: RunFiles) -> Self:
        """Return the run in the directory of ``files``, wherever its path leads by now."""
        record = cls(files.path)
        vars(record)["files"] = files
        return record

    @cached_property
    def files(self) -> RunFiles:
        return RunFiles(self.path)

    @cached_property
    def summary(self) -> Mapping[str, Any]:
        """summary.json; empty where there is none that can be read."""
        with suppress(FileNotFoundError), self._warning():
            return cast("Mapping[str, Any]", read_json(_Summary, self.files.read_small(SUMMARY), self.path / SUMMARY))
        return {}

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl. Warnings name those that are damaged, and they are left out, or say that the last
        ones are missing."""
        parsed = self.parse_rows()
        for row in parsed:
            if isinstance(row, DataError):
                self._complain(str(row))
        rows = [row for row in parsed if not isinstance(row, DataError)]
        if missing := self.explain_missing(max((row["step"] for row in rows), default=0)):
            self._complain(missing)
        return rows

    def explain_missing(self, last: int) -> str:
        """Say so where the run reached a later step than ``last``, that of the last row of its metrics; else ""."""
        reached = max([self.end or 0, *self.checkpoints])
        if last >= reached:
            return ""
        file, what = self.path / METRICS, f"the run reached step {reached}"
        if not self.files.kind(METRICS):
            return f"{file} is missing, and {what}: put the run's own file back"
        return f"{file} ends at step {last}, and {what}: rows are missing; put the run's own file back"

    def parse_rows(self) -> list[dict[str, Any] | DataError]:
        """Return the rows of metrics.jsonl, and in the place of a damaged one its error."""
        with suppress(FileNotFoundError), self._warning():
            lines = self.files.read(METRICS)
            if lines[-1:] not in (b"", b"\n") and not self.files.is_locked():
                self._complain(describe_cut_line(self.path / METRICS))
            return list(parse_rows(lines, self.path / METRICS))
        return []

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The values of config.yaml by the dotted names of their keys. Paths are as the user wrote them.

        What the script of the run passed beside them has names such as ``script.policy``.
        """
        with suppress(FileNotFoundError), self._warning():
            text = self.files.read_small(CONFIG)
            values = read_values(object, self.path / CONFIG, content=text)
            for name, settings in values.items():
                if not isinstance(settings, Mapping | None):
                    raise DataError(
                        f"{self.path / CONFIG}: {name} is {type(settings).__name__}; expected a section of keys"
                    )
            for mistake in _find_mistyped(values):
                self._complain(f"{self.path / CONFIG}: {mistake}")
            settings = flatten(mask(as_given(values, self.path)))
            objects = read_objects(text.decode(errors="replace"))
            shown = dict(islice(settings, _MOST_SETTINGS)) | {f"script.{role}": name for role, name in objects.items()}
            return {visible(key): visible(value) if isinstance(value, str) else value for key, value in shown.items()}
        return {}

    @cached_property
    def contents(self) -> dict[tuple[str, str], str]:
        """What the files hold that config.yaml names, as :func:`.list_contents` returns it; empty where that is not
        known. What is wrong with the files, :attr:`settings` says."""
        with suppress(OSError, DataError, ConfigError):
            values = read_values(object, self.path / CONFIG, content=self.files.read_small(CONFIG))
            contents = list_contents(values, self.path)
            return {(visible(key), visible(path)): content for (key, path), content in contents.items()}
        return {}

    @property
    def replay_of(self) -> str:
        """The run whose completions this run trained on again; "" for a run that sampled its own."""
        replays = self.settings.get("engine.name") == "replay"
        return str(self.settings.get("engine.options.run", "")) if replays else ""

    @property
    def of_script(self) -> dict[str, str]:
        """The settings that stand for objects which the script of the run passed."""
        texts = {
            key: value if isinstance(value, str) else json.dumps(value, default=str)
            for key, value in self.settings.items()
        }
        return {key: text for key, text in texts.items() if OF_SCRIPT in text or key.startswith("script.")}

    @cached_property
    def prompts(self) -> States | None:
        """The states of the run's prompts, by its ledger; None where the ledger cannot be read."""
        states = States()
        with suppress(FileNotFoundError):
            try:
                states = read_ledger(self.path / LEDGER)
            except (OSError, DataError, CheckpointError) as error:
                if isinstance(error, FileNotFoundError):
                    raise
                self._complain(str(error))
                return None
        trained, expected = (counts.get("trained", 0) for counts in (states.counts(), self.summary.get("prompts", {})))
        if trained < expected:
            lines = f"is missing, and {SUMMARY} has {expected:,} prompts that were trained"
            if self.files.kind(LEDGER):
                lines = f"has {trained:,} prompts that were trained, and {SUMMARY} {expected:,}: lines are missing"
            self._complain(f"{self.path / LEDGER} {lines}; put the run's own file back")
        return states

    def result(self, name: str) -> Path | None:
        """Where the ``model_path`` or the ``best_checkpoint`` of the summary is in the directory of the run, which may
        have moved; None if it is unset, or the run was resumed after the summary and has no new one."""
        if not isinstance(value := self.summary.get(name), str) or self.is_past_end(self.step):
            return None
        return self.path / ("model" if name == "model_path" else f"checkpoints/{Path(value).name}")

    @property
    def state(self) -> RunState:
        return self.state_after(self.step)

    def state_after(self, step: int) -> RunState:
        """Return the state of the run if the last row of its metrics is of ``step``.

        Running: a process writes to the directory. Stopped: somebody ended the run early, and it was saved.
        Unfinished: it was killed or has failed. Unknown: it has a summary that cannot be read.
        """
        if self.files.is_locked():
            return "running"
        if not self.summary and self.files.kind(SUMMARY):
            return "unknown"
        if not self.summary or self.is_past_end(step) or self._goes_on:
            return "unfinished"
        return "finished" if self.summary.get("finished") else "stopped"

    @property
    def _goes_on(self) -> bool:
        """Whether a run that had finished was resumed with more steps, and was killed before the first of them."""
        values, steps = self.settings, self.settings.get("run.steps")
        if not isinstance(steps, int) or not self.summary.get("finished") or steps <= (self.end or 0):
            return False
        ends_early = values.get("eval.stop_at") is not None or bool(values.get("eval.patience"))
        return values.get("run.epochs") is None and not ends_early

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
        """Whether the run ended before it had a step, a checkpoint or a result, and nothing of it is damaged."""
        kept = bool(self.checkpoints) or bool(self.files.kind(SUMMARY)) or self._has_trained
        return not kept and self.step == 0 and not any(isinstance(row, DataError) for row in self.parse_rows())

    @property
    def has_results(self) -> bool:
        """Whether the run has a trained step, a checkpoint or an evaluation, which would be lost with its directory.

        Completions of a step that was not trained, for example because the reward failed, are no result.
        """
        ended = self.files.kind(SUMMARY) != 0 and self.end != 0
        kept = bool(self.checkpoints) or any(name.endswith(".parquet") for name in self.files.walk("evaluations"))
        return ended or kept or bool(self.rows) or self._has_trained

    @property
    def _has_trained(self) -> bool:
        """Whether the ledger has a trained prompt. If the ledger cannot be read, completions count as trained."""
        if self.files.kind(LEDGER) and (states := self.prompts) is not None:
            return "trained" in states.counts()
        return any(name.endswith(".parquet") for name in self.files.names("completions"))

    @property
    def is_own(self) -> bool:
        """Whether everything in the directory belongs to this run. Other directories may have a config.yaml too, or
        hold runs."""
        made = not {LOCK, PLACES, METRICS}.isdisjoint(self.files.names())
        return made and not any(self.files.kind(name, CONFIG) for name in self.files.names())

    @cached_property
    def step(self) -> int:
        """The last step of which there is a row."""
        return max((row["step"] for row in self.rows), default=0)

    @property
    def judged(self) -> tuple[Metric, float] | None:
        """The metric that judges the run, and its value when it was measured last; None without an evaluation."""
        metric = metric_of(self._last_evaluation)
        value = figure_of(self._last_evaluation, metric.name, self.judging_set)
        return None if value is None else (metric, value)

    @property
    def judging_set(self) -> str:
        """The name of the evaluation set by which the run is judged; "" for a set without a name, and for none."""
        return set_of(self._last_evaluation)

    @property
    def _last_evaluation(self) -> Mapping[str, Any]:
        return next((row for row in reversed(self.rows) if row["kind"] == "eval"), {})

    def scores_by_set(self, names: Sequence[str], done: int) -> dict[str, dict[str, Any]]:
        """The figures of the evaluation sets ``names`` before the first step and after step ``done``."""
        rows = {row["step"]: row for row in self.rows if row["kind"] == "eval"}
        before, after = rows.get(0, {}), rows.get(done if done else -1, {})

        def select(row: Mapping[str, Any], name: str) -> dict[str, Any]:
            of_first = {key for key in row if f"{key}/{set_of(row)}" in row}  # that set has figures without a name, too
            others = tuple(f"/{other}" for other in names if other != name and other.endswith(f"/{name}"))
            own_keys = (key for key in row if key not in of_first and not (others and key.endswith(others)))
            figures = {key.removesuffix(f"/{name}"): row[key] for key in own_keys if key.endswith(f"/{name}")}
            return {key: value for key, value in figures.items() if key != "items"}

        return {
            name: {
                "before": select(before, name),
                "after": select(after, name),
                "items": after.get(f"items/{name}", before.get(f"items/{name}")),
            }
            for name in names
        }

    def last(self, metric: str) -> float | None:
        """The last value of a metric of steps; of evaluations where steps do not have it. It may be infinite or NaN."""
        values = {row["kind"]: value for row in self.rows if (value := value_of(row, metric)) is not None}
        return values.get("step", values.get("eval"))

    @property
    def seconds(self) -> float:
        """How long the run trained: by its summary, or else the times of its steps and evaluations. The time between a
        kill and a resume does not count, nor does what a clock that was set adds."""
        wall = self.summary.get("wall_s")
        if isinstance(wall, int | float) and not self.is_past_end(self.step):
            return float(wall)
        total = before = evaluated_s = 0.0  # evaluated_s: since the last step
        for row in self.rows:
            spent_s, now = row.get(_TIME_OF_STEP) or 0.0, row.get("time", before)
            if row["kind"] == "eval":
                spent_s = max(0.0, now - before) if before else 0.0
                evaluated_s += spent_s
            else:  # a step that was drawn during the evaluation has its time, too
                spent_s -= min(evaluated_s, max(0.0, spent_s - max(0.0, now - before)))
                evaluated_s = 0.0
            total, before = total + spent_s, now
        return total

    def _complain(self, complaint: str) -> None:
        self.complaints.append(complaint)
        _logger.warning("%s", complaint)

    @contextmanager
    def _warning(self) -> Iterator[None]:
        """Turn the error of a file that cannot be read into a warning, after which the file counts as missing."""
        try:
            yield
        except FileNotFoundError:
            raise
        except (OSError, DataError, ConfigError) as error:
            self._complain(str(error))

    @property
    def modified(self) -> float:
        """The time of the last write: that of metrics.jsonl, or else of the directory."""
        return (self.files.signature(METRICS)[1] or self.path.stat().st_mtime_ns) / 1e9


def metric_of(row: Mapping[str, Any]) -> Metric:
    """The metric that judges a run, by a row of an evaluation. Runs of before ``eval.metric`` had accuracies."""
    name = row.get("metric")
    return Metric(name if isinstance(name, str) else ACCURACY)


def set_of(row: Mapping[str, Any]) -> str:
    """The name of the set that judges a run, which is the first one in the row of an evaluation; "" for a set without a
    name."""
    return next((key.removeprefix(_ITEMS) for key in row if key.startswith(_ITEMS)), "")


def figure_of(row: Mapping[str, Any], name: str, set_name: str) -> float | None:
    """The figure of a set in a row of an evaluation, which may be infinite or NaN; None where the row has none."""
    if not set_name and set_of(row):  # what has no set's name behind it is then the first one's
        return None
    return value_of(row, f"{name}/{set_name}" if set_name else name)


def value_of(row: Mapping[str, Any], key: str) -> float | None:
    """The number of a key in a row, which may be infinite or NaN; None where the row has none."""
    value = row.get(key)
    if value is None and (text := row.get("nonfinite", {}).get(key)):
        value = {"inf": math.inf, "-inf": -math.inf}.get(text, math.nan)
    return float(value) if isinstance(value, int | float) else None


def is_run(path: Path) -> bool:
    """Whether ``path`` is the directory of a run."""
    return RunFiles(path).is_file(CONFIG)


def check_run(path: Path) -> None:
    """Raise ConfigError if ``path`` is no directory of a run."""
    if RunFiles(path).kind(CONFIG):
        RunFiles(path).open(CONFIG).close()  # an error says what else it is
    elif text := explain_start(path):
        raise ConfigError(f"{path}: {text}")
    else:
        raise ConfigError(f"no run at {path}: it has no {CONFIG}; give the directory of a run, such as runs/NAME")


def explain_start(path: Path) -> str:
    """Say so if a run at ``path`` has not begun to train, so that it has no config.yaml yet; else ""."""
    files = RunFiles(path)
    if files.is_locked():
        return f"a run starts here; it has a {CONFIG} once its models are loaded: try again then"
    if files.is_file(LOCK) and files.is_folder("logs"):
        return (
            f"a run ended here while it started, before it had a {CONFIG}; logs/ may say why: begin it again by the "
            "same run.name, or remove the directory"
        )
    return ""


def describe_cut_line(file: Path) -> str:
    """Say that the last line of a file is not complete."""
    return f"{file}: its last line is incomplete, as in a run that was killed, and is left out"


def parse_rows(lines: bytes, file: Path, first: int = 1) -> Iterator[dict[str, Any] | DataError]:
    """Yield the rows in lines of metrics.jsonl, in order, and in the place of a damaged one its error. An incomplete
    last line, which a killed run leaves, is skipped. ``first`` is the number of the first line."""
    for row in read_lines(cast("type[_Fields]", _Row), lines[: lines.rfind(b"\n") + 1], file, first):
        yield row if isinstance(row, DataError) else cast("dict[str, Any]", row)


def _check_row(row: Any) -> Any:
    for name, value in row.items():
        if name in _Fields.__annotations__:
            continue
        if value is None:
            if name not in row.get("nonfinite", ()):
                raise ValueError(f"{name} is null: expected a number, or what it was under nonfinite")
            continue
        if visible(name) != name:
            raise ValueError(f"{name!r:.40} has control characters, which no name of a metric has")
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _LARGEST:
            raise ValueError(f"{name} = {value!r:.40}: expected a finite number")
        if row["kind"] == "eval" and Metric(name.partition("/")[0]).is_share and not 0 <= value <= 1:
            raise ValueError(f"{name} = {value!r}: expected a share from 0 to 1")
    low, value, high = (row.get(name) for name in ("low", row.get("metric"), "high"))
    if (low is None) != (high is None) or (low is not None and value is not None and not low <= value <= high):
        raise ValueError(f"low = {low}, high = {high}: expected two numbers with {row.get('metric')} = {value} between")
    return row


@with_config(extra="allow")
class _Fields(TypedDict):
    """The fields of a row of metrics.jsonl. All others are numbers."""

    kind: str
    step: Count
    time: NotRequired[Number]
    phase: NotRequired[str | None]
    metric: NotRequired[str | None]
    items: NotRequired[Count]
    nonfinite: NotRequired[dict[str, str]]


_Row = Annotated[_Fields, AfterValidator(_check_row)]


class _Summary(TypedDict):
    """The fields of summary.json that readers use."""

    steps: Count
    finished: bool
    wall_s: NotRequired[Amount]
    model_path: NotRequired[str | None]
    best_checkpoint: NotRequired[str | None]
    prompts: NotRequired[dict[str, Count]]


def _find_mistyped(values: Mapping[str, Any]) -> list[str]:
    """A line for each setting of a run that is of another type than its recipe takes, if the recipe is installed."""
    from podium.runs.recipes import find_recipe, recipe_of

    with suppress(ConfigError):
        return find_mistyped(find_recipe(recipe_of(values)).config, values)
    return []


def name_data(settings: Mapping[str, Any]) -> str:
    """Return the training sources of a run, and their weights, as text for people.

    >>> name_data({"data.train.math.jsonl": 3, "data.train.code.jsonl": 1})
    'math.jsonl (weight 3), code.jsonl (weight 1)'
    """
    key = "data.train."
    weights = {name.removeprefix(key): weight for name, weight in settings.items() if name.startswith(key)}
    return show_sources(weights or settings.get("data.train"))


def flatten(values: Mapping[Any, Any], joint: str = ".", depth: int = 8) -> Iterator[tuple[str, Any]]:
    """Yield nested values by the dotted names of their keys, to a limited depth, because YAML can contain itself."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value and depth:
            yield from ((f"{name}{joint}{key}", leaf) for key, leaf in flatten(value, joint, depth - 1))
        else:
            yield str(name), value
