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

import io
import itertools
import json
import logging
import math
import os
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
from podium.errors import ConfigError, DataError
from podium.rollout.tasks.config import show_sources
from podium.runs.checkpoint_folders import Checkpoints, TrainerState
from podium.runs.config import PPOConfig, SFTConfig
from podium.runs.files import SET, check_path, free_name, step_of
from podium.runs.ledger import States
from podium.runs.named_files import PLACES, as_given
from podium.runs.run_files import RunFiles, count_configs
from podium.runs.run_reader import CONFIG, METRICS, SUMMARY, RunRecord, check_run, flatten, is_run
from podium.runs.trackers import load_tracker
from podium.secrecy import mask_command, mask_text
from podium.telemetry import Event, Note, subscribe
from podium.telemetry.sinks import ConsoleSink, JsonlSink, Sink, TraceSink, TrackedRun

_LIBRARIES: Final = ("podium", "torch", "transformers", "datasets", "peft", "tokenizers", "numpy", "ray", "vllm")
CONTROLLER_LOG: Final = "controller.log"
_JOURNALS, _TRACKER_ID = ".in_flight", ".tracker_id"
_OURS: Final = re.compile(
    r"config(\.\d+)?\.yaml|trace(-\d+)?\.json|(metrics|ledger)\.jsonl|(places|summary)\.json|completions|evaluations|logs"
    r"|checkpoints|tensorboard|wandb|profile|\..*"
)
_OF_ONE_START: Final = re.compile(r"trace(-\d+)?\.json|(metrics|ledger)\.jsonl|summary\.json")
_WRITTEN_BY_LIBRARIES: Final = ("profile", "tensorboard")
_WITH_LINKS: Final = ("checkpoints", "wandb")  # `latest`, and what wandb links to what it has written


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
    examples: int = 0  # in the training data, which is an epoch
    versions: Mapping[str, str] = field(default_factory=library_versions)

    def figures(self) -> dict[str, float | str | None]:
        """Numbers and texts by their names for trackers, such as ``tokens_per_s/generate``."""
        return {key: value for key, value in flatten(asdict(self), "/") if value != {}}


class _MaskedFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return mask_text(super().format(record))


class RunDirectory:
    """Creates the directory at ``path``, or opens the existing one if ``resume`` is True. The directory is locked until
    ``close()``, which removes it again if the start failed.

    Raises:
        ConfigError: ``path`` holds another run (and ``resume`` is False), no run (and ``resume`` is True), other files,
            or a run that another process is writing to.
        DataError: It holds links, through which the run would write elsewhere, or no regular files.
    """

    def __init__(self, path: str | Path, *, resume: bool = False) -> None:
        self.path = check_path(Path(path), "the directory of a run")
        self.files = RunFiles(path)
        self.config_path = self.path / CONFIG
        self.metrics_path = self.path / METRICS
        self.summary_path = self.path / SUMMARY
        self.curve_path = self.path / "curve.png"
        self.completions = self.files.folder("completions")
        self.logs = self.path / "logs"
        self._log: Callable[[str], None] | None = None
        try:
            self._check(resume)
            self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
            for folder in ("completions", "logs"):
                self.files.make_folder(folder)
            self._lock = self.files.lock()
            if not resume and is_run(self.path) and RunRecord(self.path).is_own:
                self._forget()
            self.checkpoints = Checkpoints(self.files.folder("checkpoints"))
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
            for name in filter(_OURS.fullmatch, self.files.names()):  # what this run will write, before it has trained
                if not self.files.is_folder(name):
                    self.files.open(name).close()
                elif name not in _WITH_LINKS:
                    self.files.check(name, is_written=name in _WRITTEN_BY_LIBRARIES)
                elif links := self._find_links_out(name):
                    raise DataError(f"{self.path}/{name}/{links[0]} is a link out of its folder: remove it")
            return
        if is_run(self.path):
            self.files.lock().close()  # for a run that is still running, the error names its process
            if (run := RunRecord(self.path)).has_results:
                raise ConfigError(
                    f"{self.path} holds a run ({run.progress}): resume it (--resume {self.path}), or choose another "
                    "run.name"
                )
        # A start that failed leaves files with these names, and a config.yaml if it failed after the start.
        foreign = [name for name in self.files.names() if not _OURS.fullmatch(name)] if self.path.exists() else []
        if foreign:
            raise ConfigError(f"{self.path} holds other files ({foreign[0]}): choose an empty or a new directory")

    def _find_links_out(self, folder: str) -> list[str]:
        """The links in a folder that do not lead to an entry beside them. No path of a checkpoint comes from a link."""
        texts = {name: self.files.read_link(folder, name) or "" for name in self.files.names(folder)}
        return (
            []
            if folder == "checkpoints"
            else [name for name, text in texts.items() if os.path.isabs(text) or ".." in Path(text).parts]
        )

    def _forget(self) -> None:
        """Remove the files of a run without results, whose name the new run takes. The old run's logs and configuration
        stay."""
        for name in filter(_OF_ONE_START.fullmatch, self.files.names()):
            self.files.remove(name)
        self.files.renew_folder("completions")

    def log(self, text: str) -> None:
        """Write a line to logs/controller.log while :meth:`controller_log` is open."""
        if self._log is not None:
            self._log(text)

    def write_config(self, text: str, places: str = "{}") -> None:
        """Write the resolved configuration, and the places of the files that it names.

        If the configuration was another one before a resume, the old file is kept as config.1.yaml, and so on.
        """
        self.files.write(places, PLACES)
        if self.files.kind(CONFIG):
            if self.files.read_small(CONFIG) == text.encode():
                return
            self.files.rename(CONFIG, free_name(self.config_path, ".").name)
        self.files.write(text, CONFIG)

    def count_configs(self) -> int:
        """Return how many configurations the run had before its present one: config.1.yaml is the first of them."""
        return count_configs(self.files)

    def evaluations_of(self, name: str) -> RunFiles:
        """Return the directory of the completions of an evaluation set. It is called ``set=NAME``, so that readers get
        a column ``set``."""
        return self.files.folder("evaluations", *([f"{SET}{quote(name, safe='')}"] if name else []))

    def write_summary(self, summary: Summary) -> None:
        """Write summary.json; what is not finite becomes null."""
        self.files.write(json.dumps(_json(asdict(summary)), indent=2, allow_nan=False) + "\n", SUMMARY)

    def summarize(
        self,
        config: PPOConfig | SFTConfig,
        state: TrainerState,
        prompts: States,
        *,
        examples: int,
        tokens_per_s: Mapping[str, float],
        finished: bool,
        model: Path | None,
    ) -> Summary:
        """Write and return the summary of a run whose last state is ``state``.

        Args:
            prompts: The states of its prompts.
            examples: Number of examples in the training data.
            tokens_per_s: The speed of each stage over the whole run.
            finished: Whether it reached its end.
            model: The directory of its model, if that was written.
        """
        first, last, best, done = state.first, state.last, state.best, state.step
        metric, sets = state.judge.name, [name for name in config.eval_sets if name]
        best_checkpoint = self.checkpoints.best()
        summary = Summary(
            task=show_sources(as_given(config_to_dict(config), self.path)["data"]["train"]),
            seed=config.run.seed,
            steps=done,
            wall_s=state.wall_s,
            metric=metric if last else None,
            before=first.figures if first and first.step == 0 else {},
            after=last.figures if last and last.step == done else {},
            items=last.items if last else 0,
            tokens_per_s=tokens_per_s,
            best_step=best.step if best else None,
            best=best.value(metric) if best else None,
            best_checkpoint=str(best_checkpoint) if best_checkpoint else None,
            prompts=prompts.counts(),
            dropped=dict(prompts.reasons),  # of a Counter, asdict() would count the pairs
            examples=examples,
            sets=RunRecord.of(self.files).scores_by_set(sets, done),
            finished=finished,
            model_path=str(model) if model else None,
        )
        self.write_summary(summary)
        return summary

    def journals(self) -> Path:
        """Make an empty directory for the tokens of unfinished completions. ``close()`` removes it."""
        return self.files.renew_folder(_JOURNALS)

    @contextmanager
    def controller_log(self) -> Iterator[Path]:
        """Write this process's log records, the notes of the run and the lines of :meth:`log` to logs/controller.log.

        The first line is the command that started this process.
        """
        file = io.TextIOWrapper(self.files.append("logs", CONTROLLER_LOG), encoding="utf-8", errors="backslashreplace")
        handler = logging.StreamHandler(file)
        handler.setFormatter(_MaskedFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
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
        log(f"command: {shlex.join(mask_command(sys.orig_argv))}")
        try:
            yield self.logs / CONTROLLER_LOG
        finally:
            unsubscribe()
            self._log = None
            root.removeHandler(handler)
            with suppress(OSError):  # a full disk, which takes no last record either
                file.close()
            podium.setLevel(level)

    def sinks(self, config: PPOConfig | SFTConfig, console: Console | None) -> Iterator[Sink]:
        """Make the sinks of a run, except that of :meth:`open_metrics`: its trace, ``console`` if there is one, and the
        trackers of ``config``.

        Raises:
            ConfigError: A tracker is not installed, or cannot work here.
        """
        yield TraceSink(self.trace_path, file=self.files.create(self.trace_path.name))
        if console is not None:
            yield ConsoleSink(console=console, log=self.log)
        for name, options in config.run.tracking.items():
            run = TrackedRun(
                name=self.path.name,
                path=self.path,
                config=config_to_dict(config),
                options={**config_to_dict(options), "tags": list(options.tags)},
                is_resumed=bool(self.files.kind(CONFIG)),
                make_folder=self.files.make_folder,
                read_id=self._read_tracker_id,
            )
            yield load_tracker(name).of_run(run)

    def _read_tracker_id(self) -> str:
        """Return the tracker's id of this run, which stays the same when the run is resumed."""
        if not self.files.kind(_TRACKER_ID):
            self.files.write(uuid4().hex, _TRACKER_ID)
        return self.files.read_small(_TRACKER_ID).decode("ascii", "replace").strip()

    def open_metrics(self, after: int | None, *, again: bool = False) -> JsonlSink:
        """Return the sink of metrics.jsonl, which goes on after the step ``after``; None for a run that begins.
        ``again`` is that of :meth:`rewind`.

        What is later is removed only here, once nothing refuses the resume any more.
        """
        if after is not None:
            self.rewind(after or None, again=again)
        return JsonlSink(self.metrics_path, self.files.append(METRICS))

    def rows_until(self, step: int) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl up to ``step``. Damaged rows are left out."""
        rows = [row for row in RunRecord.of(self.files).parse_rows() if not isinstance(row, DataError)]
        return [row for row in rows if row["step"] <= step]

    def check_rewind(self, step: int | None) -> None:
        """Check that :meth:`rewind` removes no results.

        Raises:
            ConfigError: The run ended after a later step than ``step``, so its results would be lost. Or its summary
                cannot be read.
            DataError: metrics.jsonl is damaged.
        """
        record = RunRecord.of(self.files)
        if record.end is None and self.files.kind(SUMMARY):
            raise ConfigError(f"{self.summary_path} is not the summary of a run: move it away to resume")
        if (record.end or 0) > (step or 0):
            state = "no checkpoint is left" if step is None else f"its latest checkpoint is of step {step}"
            raise ConfigError(
                f"{self.path} ended after step {record.end}, and {state}: resuming there would delete the metrics and "
                f"completions of later steps. Choose another run.name, or first move {self.summary_path} away if they "
                "may be deleted"
            )
        rows = record.parse_rows() if self.files.kind(METRICS) else ()
        if damage := next((row for row in rows if isinstance(row, DataError)), None):
            raise damage

    def rewind(self, step: int | None, *, again: bool = False) -> None:
        """Remove what is later than ``step``, the step of the checkpoint from which a run resumes. None removes
        everything. With ``again`` the evaluation after ``step`` itself is removed, too: the run was killed behind it,
        and makes it again.

        Otherwise rows of metrics.jsonl and files of completions of later steps would be there twice. It raises what
        :meth:`check_rewind` does.
        """
        self.check_rewind(step)
        step = -1 if step is None else step
        if self.files.kind(METRICS):
            kept = itertools.takewhile(lambda row: row["step"] <= step, RunRecord.of(self.files).rows)
            rows = [row for row in kept if row["kind"] != "eval" or row["step"] < step or not again]
            self.files.write("".join(json.dumps(row) + "\n" for row in rows), METRICS)
        elif step > 0:
            logging.getLogger(__name__).warning(
                "%s is missing: the rows up to step %d are not in the new one; put the run's own file back before a "
                "resume",
                self.metrics_path,
                step,
            )
        for folder in (self.completions, self.files.folder("evaluations")):
            for name in folder.walk():
                if name.endswith(".parquet") and (step_of(Path(name).stem) or 0) > step:
                    folder.remove(name)

    def describe_latest(self) -> str:
        """Say from which checkpoint this run can be resumed."""
        latest = self.checkpoints.latest()
        return f"the latest checkpoint is {latest}" if latest else "it has no checkpoint yet"

    def tidy(self) -> None:
        """Remove journals and what was being written: a checkpoint of which a rank went on to write after another one
        had failed, or a model."""
        with suppress(OSError):  # a later start tries again
            self.checkpoints.tidy()
            for name in self.files.names():
                if name == _JOURNALS or (name.startswith(".") and name.endswith(".tmp")):
                    self.files.remove(name)

    def close(self) -> None:
        """Release the lock, so that another process may write here. A second call does nothing.

        If the start failed, the directory and the parents that were created for it are removed, unless a worker has
        written to its log.
        """
        self.tidy()
        if self._made and not self.files.kind(CONFIG) and not any(self._find_written_logs()):
            self.files.remove_run()
            with suppress(OSError):  # one of these directories has other files now
                for folder in self._made[1:]:
                    folder.rmdir()
        self._lock.close()

    def _find_written_logs(self) -> Iterator[str]:
        """The logs in which a worker has written something."""
        logs = self.files.folder("logs")
        return (name for name in logs.names() if name != CONTROLLER_LOG and logs.signature(name)[0])


def _json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _json(entry) for name, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
