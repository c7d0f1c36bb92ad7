"""A run's directory: its files, its sinks and its summary.

    runs/2026-11-21-grpo/
      config.yaml                       the resolved configuration; config.1.yaml, … are from before a resume
      places.json                       where the files that it names are, seen from here
      ledger.jsonl                      what became of each prompt
      metrics.jsonl                     a row for each step and each evaluation
      completions/step-000012.parquet   the completions of a step and their rewards
      evaluations/step-000012.parquet   the same of an evaluation's completions; of several sets, in set=NAME/
      trace.json                        for https://ui.perfetto.dev; trace-1.json, … after a resume
      logs/                             controller.log and one file for each worker
      checkpoints/step-000012/          complete, or not there
      checkpoints/latest                a link to the newest
      summary.json                      written last

A file that is replaced is written aside and renamed over the old one, so that it stays whole when the run is killed.
"""

import itertools
import json
import logging
import math
import platform
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote
from uuid import uuid4

from rich.console import Console

from podium.config import config_to_dict
from podium.errors import ConfigError
from podium.runs.checkpoints import Checkpoints
from podium.runs.config import PPOConfig, SFTConfig
from podium.runs.files import SET, free_name, lock_directory, remove, step_of, write_atomically
from podium.runs.named_files import PLACES
from podium.runs.records import CONFIG, LEDGER, METRICS, SUMMARY, RunRecord, check_run, flatten, is_run
from podium.telemetry import Event, Note, subscribe
from podium.telemetry.sinks import ConsoleSink, JsonlSink, Sink, TensorBoardSink, TraceSink, TrackioSink, WandbSink

__all__ = ["RunDirectory", "Summary", "library_versions"]

_LIBRARIES: Final = ("podium", "torch", "transformers", "datasets", "peft", "tokenizers", "numpy", "ray", "vllm")
CONTROLLER_LOG: Final = "controller.log"
_OURS: Final = re.compile(
    r"config(\.\d+)?\.yaml|trace(-\d+)?\.json|(metrics|ledger)\.jsonl|(places|summary)\.json|completions|evaluations|logs"
    r"|checkpoints|tensorboard|wandb|profile|\..*"
)
_OF_ONE_START: Final = ("trace*.json", METRICS, LEDGER, SUMMARY, "completions/*.parquet")


def library_versions() -> dict[str, str]:
    """Return the versions of Python and of the installed libraries that a run's result depends on."""
    versions = {"python": platform.python_version()}
    for name in _LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The result of a run.

    ``before`` and ``after`` are the figures of the evaluations before the first step and after the last one, over
    ``items`` held-out prompts or examples, by the names of :mod:`podium.telemetry.held_out`; empty where there was no
    such evaluation. ``metric`` is the name of the figure that judges the run; None without an evaluation.
    ``tokens_per_s`` is by stage, over the whole run. ``finished`` is False when somebody stopped the run early.
    """

    task: str
    seed: int
    steps: int
    wall_s: float
    metric: str | None = None
    before: Mapping[str, float] = field(default_factory=dict[str, float])
    after: Mapping[str, float] = field(default_factory=dict[str, float])
    items: int = 0
    tokens_per_s: Mapping[str, float] = field(default_factory=dict[str, float])
    sets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # the same of evaluation sets, by name
    finished: bool = True
    model_path: str | None = None  # in Hugging Face format
    best_step: int | None = None  # of the evaluation with the best value of the metric
    best: float | None = None  # that value
    best_checkpoint: str | None = None  # the best one of those that are kept
    prompts: Mapping[str, int] = field(default_factory=dict)  # number of prompts in each state of the ledger
    dropped: Mapping[str, int] = field(default_factory=dict)  # number of prompts that were dropped, by reason
    versions: Mapping[str, str] = field(default_factory=library_versions)

    def figures(self) -> dict[str, float | str | None]:
        """Numbers and texts by their names for trackers, such as ``tokens_per_s/generate``."""
        return {key: value for key, value in flatten(asdict(self), "/") if value != {}}


class RunDirectory:
    """Creates the directory at ``path``, or opens the existing one if ``resume`` is True. The directory is locked until
    ``close()``, which removes it again if the start failed.

    Raises:
        ConfigError: ``path`` holds another run (and ``resume`` is False), no run (and ``resume`` is True), other files,
            a run that another process is writing to, or links, through which the run would write elsewhere.
    """

    def __init__(self, path: str | Path, *, resume: bool = False) -> None:
        self.path = Path(path)
        self.config_path = self.path / CONFIG
        self.metrics_path = self.path / METRICS
        self.ledger_path = self.path / LEDGER
        self.summary_path = self.path / SUMMARY
        self.curve_path = self.path / "curve.png"
        self.completions = self.path / "completions"
        self.evaluations = self.path / "evaluations"
        self.logs = self.path / "logs"
        self._journals = self.path / ".in_flight"
        self._log: Callable[[str], None] | None = None
        try:
            self._check(resume)
            self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
            for folder in (self.completions, self.logs):
                folder.mkdir(parents=True, exist_ok=True)
            self._lock = lock_directory(self.path)
            if not resume and is_run(self.path) and RunRecord(self.path).is_own:
                self._forget()
            self.checkpoints = Checkpoints(self.path / "checkpoints")
        except OSError as error:
            raise ConfigError(
                f"the run's directory {str(self.path)[:100]} cannot be used: {error.strerror}"
                f"{f': {error.filename}' if error.filename != str(self.path) and error.filename else ''}; set run.dir "
                "and run.name to one that can be written"
            ) from error
        self.trace_path = free_name(self.path / "trace.json")

    def _check(self, resume: bool) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{self.path} is a file; a run needs a directory: choose another path")
        if resume:
            check_run(self.path)
            for file in (self.config_path, self.metrics_path, self.summary_path, *self.logs.glob("*")):
                if file.is_symlink() or not (file.is_file() or file.is_dir() or not file.exists()):
                    raise ConfigError(f"{file} is a link, or no regular file: remove it to resume")
            return
        if is_run(self.path):
            lock_directory(self.path).close()  # for a run that is still running, the error names its process
            if (run := RunRecord(self.path)).has_results:
                raise ConfigError(
                    f"{self.path} holds a run ({run.progress}): resume it (--resume {self.path}), or choose another "
                    "run.name"
                )
        # A start that failed leaves files with these names, and a config.yaml if it failed after the start.
        entries = sorted(entry.name for entry in self.path.glob("*"))
        foreign = [name for name in entries if not _OURS.fullmatch(name)]
        if foreign:
            raise ConfigError(f"{self.path} holds other files ({foreign[0]}): choose an empty or a new directory")

    def _forget(self) -> None:
        """Remove the files of a run without results, whose name the new run takes. The old run's logs and configuration
        stay."""
        for file in itertools.chain.from_iterable(self.path.glob(name) for name in _OF_ONE_START):
            file.unlink()

    def log(self, text: str) -> None:
        """Write a line to logs/controller.log while :meth:`controller_log` is open."""
        if self._log is not None:
            self._log(text)

    def write_config(self, text: str, places: str = "{}") -> None:
        """Write the resolved configuration, and the places of the files that it names.

        If the configuration was another one before a resume, the old file is kept as config.1.yaml, and so on.
        """
        write_atomically(self.path / PLACES, places)
        if self.config_path.exists():
            if self.config_path.read_text() == text:
                return
            self.config_path.rename(free_name(self.config_path, "."))
        write_atomically(self.config_path, text)

    def evaluations_of(self, name: str) -> Path:
        """Return the directory of the completions of an evaluation set. It is called ``set=NAME``, so that readers get
        a column ``set``."""
        return self.evaluations / f"{SET}{quote(name, safe='')}" if name else self.evaluations

    def write_summary(self, summary: Summary) -> None:
        """Write summary.json; what is not finite becomes null."""
        write_atomically(self.summary_path, json.dumps(_json(asdict(summary)), indent=2, allow_nan=False) + "\n")

    def journals(self) -> Path:
        """Make an empty directory for the tokens of unfinished completions. ``close()`` removes it."""
        remove(self._journals)
        self._journals.mkdir()
        return self._journals.absolute()

    @contextmanager
    def controller_log(self) -> Iterator[Path]:
        """Write this process's log records, the notes of the run and the lines of :meth:`log` to logs/controller.log.

        The first line is the command that started this process.
        """
        path = self.logs / CONTROLLER_LOG
        handler = logging.FileHandler(path, encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        podium, root = logging.getLogger("podium"), logging.getLogger()
        level = podium.level
        if level == logging.NOTSET:
            podium.setLevel(logging.INFO)
        root.addHandler(handler)

        def log(text: str) -> None:  # to the file alone: the terminal shows these lines itself
            handler.handle(podium.makeRecord(podium.name, logging.INFO, "", 0, "%s", (text,), None))

        def write(event: Event) -> None:
            if isinstance(event, Note):
                log(event.text)

        unsubscribe = subscribe(write)
        self._log = log
        log(f"command: {shlex.join(sys.orig_argv)}")
        try:
            yield path
        finally:
            unsubscribe()
            self._log = None
            root.removeHandler(handler)
            with suppress(OSError):  # a full disk, which takes no last record either
                handler.close()
            podium.setLevel(level)

    def sinks(self, config: PPOConfig | SFTConfig, console: Console | None) -> Iterator[Sink]:
        """Make the sinks of a run: its files, ``console`` if there is one, and the trackers of ``config``.

        Raises:
            ConfigError: A tracker is not installed.
        """
        yield JsonlSink(self.metrics_path)
        yield TraceSink(self.trace_path)
        if console is not None:
            yield ConsoleSink(console=console, log=self.log)
        arguments: dict[str, Any] = {"name": self.path.name, "config": config_to_dict(config)}
        for tracker, options in config.run.tracking.items():
            match tracker:
                case "tensorboard":
                    yield TensorBoardSink(self.path / "tensorboard", config=arguments["config"])
                case "wandb":
                    again = {"id": self._read_tracker_id(), "resume": "allow"}
                    yield WandbSink(folder=self.path, **arguments, **again, **options.for_wandb())
                case "trackio":
                    again = {"resume": "allow"} if self.config_path.exists() else {}
                    yield TrackioSink(**arguments, **again, **options.for_trackio())

    def _read_tracker_id(self) -> str:
        """Return the tracker's id of this run, which stays the same when the run is resumed."""
        file = self.path / ".tracker_id"
        if not file.exists():
            write_atomically(file, uuid4().hex)
        return file.read_text(encoding="ascii").strip()

    def rewind(self, step: int | None) -> None:
        """Remove what is later than ``step``, the step of the checkpoint from which a run resumes. None removes
        everything.

        Otherwise rows of metrics.jsonl and files of completions of later steps would be there twice.

        Raises:
            ConfigError: The run ended after a later step than ``step``, so its results would be lost. Or its summary
                cannot be read.
        """
        record = RunRecord(self.path)
        if record.end is None and self.summary_path.exists():
            raise ConfigError(f"{self.summary_path} is not the summary of a run: move it away to resume")
        if (record.end or 0) > (step or 0):
            state = "no checkpoint is left" if step is None else f"its latest checkpoint is of step {step}"
            raise ConfigError(
                f"{self.path} ended after step {record.end}, and {state}: resuming there would delete the metrics and "
                f"completions of later steps. Choose another run.name, or first move {self.summary_path} away if they "
                "may be deleted"
            )
        step = -1 if step is None else step
        if self.metrics_path.exists():
            kept = itertools.takewhile(lambda row: row["step"] <= step, record.rows)
            write_atomically(self.metrics_path, "".join(json.dumps(row) + "\n" for row in kept))
        for file in (*self.completions.glob("step-*.parquet"), *self.evaluations.rglob("step-*.parquet")):
            if (step_of(file.stem) or 0) > step:
                file.unlink()

    def describe_latest(self) -> str:
        """Say from which checkpoint this run can be resumed."""
        latest = self.checkpoints.latest()
        return f"the latest checkpoint is {latest}" if latest else "it has no checkpoint yet"

    def tidy(self) -> None:
        """Remove journals and what was being written: a checkpoint of which a rank went on to write after another one
        had failed, or a model."""
        with suppress(OSError):  # a later start tries again
            self.checkpoints.tidy()
            for left in (self._journals, *self.path.glob(".*.tmp")):
                remove(left)

    def close(self) -> None:
        """Release the lock, so that another process may write here. A second call does nothing.

        If the start failed, the directory and the parents that were created for it are removed, unless a worker has
        written to its log.
        """
        self.tidy()
        if self._made and not self.config_path.exists() and not any(self._find_written_logs()):
            remove(self.path)
            with suppress(OSError):  # one of these directories has other files now
                for folder in self._made[1:]:
                    folder.rmdir()
        self._lock.close()

    def _find_written_logs(self) -> Iterator[Path]:
        """The logs in which a worker has written something."""
        logs = (file for file in self.logs.glob("*") if file.name != CONTROLLER_LOG)
        return (file for file in logs if file.is_file() and file.stat().st_size)


def _json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _json(entry) for name, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
