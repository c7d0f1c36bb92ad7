"""A run's directory: what is written where, and how it stays whole when the run is killed.

    runs/2026-11-21-grpo/
      config.yaml                       as resolved; config.1.yaml, … are those from before a resume
      metrics.jsonl                     a row a step and a row an evaluation
      completions/step-000012.parquet   what the policy wrote, and what it got for it
      trace.json                        for https://ui.perfetto.dev; trace-1.json, … after a resume
      logs/                             controller.log and one file a worker
      checkpoints/step-000012/          complete, or not there
      checkpoints/latest                a link to the newest
      summary.json                      written last

A file that is replaced is written aside and renamed over the old one.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from podium.errors import ConfigError
from podium.trainer.checkpoints import Checkpoints
from podium.trainer.files import DirectoryLock, free_name, step_of, write_atomically

__all__ = ["RunDirectory", "Summary", "library_versions"]

_LIBRARIES: Final = ("podium", "torch", "transformers", "datasets", "peft", "tokenizers", "numpy", "ray", "vllm")
_OURS: Final = re.compile(r"config(\.\d+)?\.yaml|trace(-\d+)?\.json|metrics\.jsonl|completions|logs|checkpoints|\..*")


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
    """The result of a run. Accuracies are held-out, in 0..1, over ``items`` prompts; None was never measured.

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
        self._check(resume)
        for folder in (self.completions, self.logs):
            folder.mkdir(parents=True, exist_ok=True)
        self._lock = DirectoryLock(self.path)
        self.checkpoints = Checkpoints(self.path / "checkpoints")
        self.trace_path = free_name(self.path, "trace", "-", ".json")

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

    def write_config(self, text: str) -> None:
        """Keep the resolved configuration. A different one from before a resume stays, as config.1.yaml and so on."""
        if self.config_path.exists():
            if self.config_path.read_text() == text:
                return
            self.config_path.rename(free_name(self.path, "config", ".", ".yaml", first=1))
        write_atomically(self.config_path, text)

    def write_summary(self, summary: Summary) -> None:
        """Write summary.json; what is not finite becomes null."""
        write_atomically(self.summary_path, json.dumps(_json(asdict(summary)), indent=2, allow_nan=False) + "\n")

    @contextmanager
    def controller_log(self) -> Iterator[Path]:
        """Keep this process's log records in logs/controller.log during the block."""
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

    def rewind(self, step: int) -> None:
        """Forget what came after ``step``, the step of the checkpoint that a resumed run goes on from.

        Rows of metrics.jsonl and files of completions that belong to later steps would otherwise be there twice.
        """
        if self.metrics_path.exists():
            kept = list(_rows_through(self.metrics_path.read_text().splitlines(), step))
            write_atomically(self.metrics_path, "".join(line + "\n" for line in kept))
        for file in self.completions.glob("step-*.parquet"):
            if (step_of(file.stem) or 0) > step:
                file.unlink()

    def close(self) -> None:
        """Let another process write here."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _rows_through(lines: Sequence[str], step: int) -> Iterator[str]:
    for line in lines:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue  # the half line that a killed run left
        if row.get("step", 0) > step:
            return
        yield line


def _json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _json(entry) for name, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
