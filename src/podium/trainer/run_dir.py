"""A run's directory: what is written where, and how it stays whole when the run is killed.

    runs/2026-11-21-grpo/
      config.yaml                       as resolved; config.1.yaml, … are those of before a resume
      metrics.jsonl                     a row a step and a row an evaluation
      completions/step-000012.parquet   what the policy wrote, and what it got for it
      trace.json                        for https://ui.perfetto.dev; trace-1.json, … after a resume
      logs/                             controller.log and one file a worker
      checkpoints/step-000012/          complete, or not there
      checkpoints/latest                a link to the newest
      summary.json                      written last

Everything that is replaced is written aside and renamed over the old, so a reader finds the old or the new and never
half of either.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from podium.errors import CheckpointError, ConfigError
from podium.telemetry import CheckpointSaved, emit

__all__ = [
    "Checkpoint",
    "CompletionRecord",
    "CompletionsWriter",
    "RunDirectory",
    "Summary",
    "commit_checkpoint",
    "library_versions",
    "write_atomically",
]

_LIBRARIES: Final = ("podium", "torch", "transformers", "datasets", "peft", "tokenizers", "numpy", "ray", "vllm")
_FOLDERS: Final = ("completions", "logs", "checkpoints")
_STEP: Final = re.compile(r"step-(\d+)")
_OURS: Final = re.compile(r"config(\.\d+)?\.yaml|trace(-\d+)?\.json|metrics\.jsonl|completions|logs|checkpoints|\..*")
_logger = logging.getLogger(__name__)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace the file at ``path``: whoever reads it finds the old content or the new, also after a power cut."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    data = content.encode() if isinstance(content, str) else content
    try:
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    _sync_folder(path.parent)


def library_versions() -> dict[str, str]:
    """Versions of Python and of the installed libraries that shape a run's result."""
    import platform

    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a run came to. Accuracies are held-out, in 0..1, over ``items`` prompts; None: never measured.

    ``tokens_per_s`` is by stage, over the whole run. ``finished`` is False when somebody stopped the run early.
    """

    task: str
    seed: int
    steps: int
    wall_s: float
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    items: int = 0
    tokens_per_s: Mapping[str, float] = field(default_factory=dict[str, float])
    finished: bool = True
    model_path: str | None = None  # in Hugging Face format
    versions: Mapping[str, str] = field(default_factory=library_versions)


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint of ``step`` at ``path``."""

    step: int
    path: Path


@dataclass(frozen=True, kw_only=True)
class CompletionRecord:
    """One completion of a training step.

    ``tokens`` are the sampled ids, ``parts`` what the reward is made of, ``advantage`` the mean over the tokens,
    ``version`` that of the weights which sampled it. Rows of one prompt share ``group``.
    """

    group: int
    prompt: str
    completion: str
    reward: float
    finish_reason: str
    version: int
    tokens: Sequence[int] | npt.NDArray[np.int64] = ()
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    advantage: float | None = None
    correct: bool | None = None
    expected: str | None = None


class CompletionsWriter:
    """Writes a Parquet file a step into ``folder``: CompletionRecord's fields, and a ``reward_NAME`` for each part."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, step: int, chunks: Iterable[Sequence[CompletionRecord]], parts: Collection[str]) -> Path:
        """Write the completions of ``step`` and return the file's path. A file of the same step is replaced.

        Args:
            chunks: the records, at least one sequence of them; no more than one need be held at a time.
            parts: names of the parts of all their rewards.
        """
        import pyarrow.parquet as pq  # a third of a second, which a dry run need not wait

        path = self.folder / f"{_step_name(step)}.parquet"
        aside = path.with_name(f".{path.name}.tmp")
        with ExitStack() as stack:
            file = None
            for records in chunks:
                table = _table(step, records, sorted(parts))
                if file is None:
                    file = stack.enter_context(pq.ParquetWriter(aside, table.schema, compression="zstd"))
                file.write_table(table)
        aside.replace(path)
        return path


def _table(step: int, records: Sequence[CompletionRecord], parts: Sequence[str]) -> Any:
    """A pyarrow.Table."""
    import pyarrow as pa

    columns: dict[str, pa.Array] = {
        "step": pa.array([step] * len(records), pa.int64()),
        "group": pa.array([record.group for record in records], pa.int64()),
        "prompt": pa.array([_utf8(record.prompt) for record in records], pa.string()),
        "completion": pa.array([_utf8(record.completion) for record in records], pa.string()),
        "expected": pa.array([_utf8(record.expected) for record in records], pa.string()),
        "correct": pa.array([record.correct for record in records], pa.bool_()),
        "reward": pa.array([float(record.reward) for record in records], pa.float64()),
        "advantage": pa.array([record.advantage for record in records], pa.float64()),
        "finish_reason": pa.array([record.finish_reason for record in records], pa.string()),
        "version": pa.array([record.version for record in records], pa.int64()),
        "tokens": pa.array([np.asarray(record.tokens, np.int32) for record in records], pa.list_(pa.int32())),
    }
    for name in parts:
        columns[f"reward_{name}"] = pa.array([record.parts.get(name) for record in records], pa.float64())
    return pa.table(columns)


class RunDirectory:
    """Creates the directory at ``path``, or with ``resume`` opens the one that is there; holds it until ``close()``.

    Raises:
        ConfigError: ``path`` holds another run (and ``resume`` is False), no run (and it is True), foreign files, or a
            run that another process is writing to.
    """

    def __init__(self, path: str | Path, *, resume: bool = False) -> None:
        self.path = Path(path)
        self.config_path = self.path / "config.yaml"
        self.metrics_path = self.path / "metrics.jsonl"
        self.summary_path = self.path / "summary.json"
        self.curve_path = self.path / "curve.png"
        self.completions = self.path / "completions"
        self.logs = self.path / "logs"
        self.checkpoints = self.path / "checkpoints"
        self._lock: int | None = None
        self._check(resume)
        for name in _FOLDERS:
            (self.path / name).mkdir(parents=True, exist_ok=True)
        self._acquire()
        self.trace_path = _free_name(self.path, "trace", "-", ".json")
        self._tidy()

    def _check(self, resume: bool) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"{self.path} is a file; a run needs a directory: choose another path")
        is_run = self.config_path.exists()
        if resume and not is_run:
            raise ConfigError(f"no run to resume at {self.path}: it has no config.yaml; give the directory of a run")
        if resume:
            return
        if is_run:
            state = "a finished run" if self.summary_path.exists() else "an unfinished run"
            raise ConfigError(
                f"{self.path} holds {state}: resume it (--resume {self.path}), or choose another run.name"
            )
        entries = sorted(entry.name for entry in self.path.iterdir()) if self.path.exists() else []
        # Names of ours without a config.yaml are what a start that failed left behind.
        foreign = [name for name in entries if not _OURS.fullmatch(name)]
        if foreign:
            raise ConfigError(f"{self.path} holds other files ({foreign[0]}): choose an empty or a new directory")

    def _acquire(self) -> None:
        descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            # The kernel lets go of it when the process ends, however it ends.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise ConfigError(
                f"{self.path} is being written to by process {holder or '?'}: wait for it, or choose another directory"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP):  # a file system that cannot lock
                raise
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._lock = descriptor

    def _tidy(self) -> None:
        """Clear away what a process that was killed in the middle of a checkpoint left."""
        for half in self.checkpoints.glob(".*.tmp"):
            _remove(half)
        for replaced in self.checkpoints.glob(".step-*.old"):
            final = replaced.with_name(replaced.name.removeprefix(".").removesuffix(".old"))
            if final.exists():
                _remove(replaced)
            else:
                replaced.rename(final)  # killed between the two renames: the old one is the newest complete one

    # What is written once

    def write_config(self, text: str) -> None:
        """Keep the resolved configuration. A different one of before a resume stays, as config.1.yaml and so on."""
        if self.config_path.exists():
            if self.config_path.read_text() == text:
                return
            self.config_path.rename(_free_name(self.path, "config", ".", ".yaml", first=1))
        write_atomically(self.config_path, text)

    def write_summary(self, summary: Summary) -> None:
        """Write summary.json; what is not finite becomes null."""
        write_atomically(self.summary_path, json.dumps(_json(asdict(summary)), indent=2, allow_nan=False) + "\n")

    def read_summary(self) -> dict[str, Any] | None:
        """What summary.json says, or None if the run has not ended."""
        return json.loads(self.summary_path.read_text()) if self.summary_path.exists() else None

    def completions_writer(self) -> CompletionsWriter:
        """Writes to ``completions/``."""
        return CompletionsWriter(self.completions)

    @contextmanager
    def controller_log(self) -> Iterator[Path]:
        """Keep this process's log records in logs/controller.log while the body runs."""
        path = self.logs / "controller.log"
        handler = logging.FileHandler(path, encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        podium, root = logging.getLogger("podium"), logging.getLogger()
        level = podium.level
        if level == logging.NOTSET:
            podium.setLevel(logging.INFO)
        root.addHandler(handler)
        try:
            yield path
        finally:
            root.removeHandler(handler)
            handler.close()
            podium.setLevel(level)

    # Checkpoints

    @contextmanager
    def checkpoint(self, step: int, *, keep: int = 0) -> Iterator[Path]:
        """A folder to write the checkpoint of ``step`` into; complete and ``latest`` once the body ended well.

        If the body raises, nothing remains of it. Afterwards only the ``keep`` newest remain (0: all).
        """
        aside = self.checkpoints / f".{_step_name(step)}.tmp"
        _remove(aside)
        aside.mkdir()
        try:
            yield aside
        except BaseException:
            _remove(aside)
            raise
        final = self.checkpoints / _step_name(step)
        commit_checkpoint(aside, final)
        emit(CheckpointSaved(step, str(final)))
        for old in self.list_checkpoints()[:-keep] if keep > 0 else []:
            if old.path != final:
                _remove(old.path)

    def list_checkpoints(self) -> list[Checkpoint]:
        """The complete checkpoints, oldest first."""
        found = [(match, entry) for entry in self.checkpoints.iterdir() if (match := _STEP.fullmatch(entry.name))]
        return sorted((Checkpoint(int(match[1]), entry) for match, entry in found), key=lambda one: one.step)

    def latest_checkpoint(self) -> Checkpoint | None:
        """What ``latest`` points at; if that was deleted, the newest that is there; None if there is none."""
        link = self.checkpoints / "latest"
        there = self.list_checkpoints()
        if link.is_symlink():
            named = Path(os.readlink(link)).name
            for one in there:
                if one.path.name == named:
                    return one
            _logger.warning("%s points at %s, which is gone; using %s", link, named, there[-1].path if there else None)
        return there[-1] if there else None

    def rewind(self, step: int, phase: str | None = None) -> None:
        """Forget what came after ``step``, the step of the checkpoint that a resumed run goes on from.

        Rows of metrics.jsonl and files of completions that belong to later steps would otherwise be there twice. With
        ``phase``, the file is cut at the first row beyond ``step`` in that phase; else at the first beyond ``step``.
        """
        if self.metrics_path.exists():
            kept = list(_rows_through(self.metrics_path.read_text().splitlines(), step, phase))
            write_atomically(self.metrics_path, "".join(line + "\n" for line in kept))
        for file in self.completions.glob("step-*.parquet"):
            match = _STEP.fullmatch(file.stem)
            if match and int(match[1]) > step:
                file.unlink()

    # The end

    def close(self) -> None:
        """Let another process write here."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def commit_checkpoint(aside: Path, final: Path) -> None:
    """Make the checkpoint written at ``aside`` the one at ``final``, then point ``latest`` beside it there.

    ``aside`` and ``final`` share a folder. Every file is on disk before the rename, and the rename before ``latest``
    moves: a crash at any moment leaves ``latest`` on a complete checkpoint. One that is there already is replaced.

    Raises:
        CheckpointError: nothing was written to ``aside``.
    """
    if not any(aside.iterdir()):
        raise CheckpointError(f"nothing was written to {aside}, so it is no checkpoint")
    for folder, _, files in os.walk(aside):
        for name in files:
            _sync_file(Path(folder) / name)
        _sync_folder(Path(folder))
    replaced = final.with_name(f".{final.name}.old")
    _remove(replaced)
    if final.exists():
        final.rename(replaced)
    aside.rename(final)
    _sync_folder(final.parent)
    link = final.with_name(".latest.tmp")
    link.unlink(missing_ok=True)
    link.symlink_to(final.name)
    link.replace(final.with_name("latest"))
    _sync_folder(final.parent)
    _remove(replaced)


def _rows_through(lines: Sequence[str], step: int, phase: str | None) -> Iterator[str]:
    for line in lines:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # the half line that a killed run left
        if row.get("step", 0) > step and phase in (None, row.get("phase")):
            return
        yield line


def _step_name(step: int) -> str:
    return f"step-{step:06d}"


def _free_name(folder: Path, stem: str, joint: str, suffix: str, first: int = 0) -> Path:
    """The first of stem.suffix, stem-1.suffix, stem-2.suffix, … that is not taken."""
    number = first
    while (path := folder / (f"{stem}{joint}{number}{suffix}" if number else f"{stem}{suffix}")).exists():
        number += 1
    return path


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _utf8(text: str | None) -> str | None:
    # Lone surrogates, which a tokenizer's bytes can decode to, have no UTF-8.
    return None if text is None else text.encode("utf-8", "replace").decode()


def _json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _json(entry) for name, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
