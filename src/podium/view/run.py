"""One run as the page sees it: a path for each answer."""

import json
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from threading import RLock
from typing import Any, Final

from podium.errors import ConfigError, DataError
from podium.telemetry import metrics
from podium.view.completions import Completions
from podium.view.curves import Curves
from podium.view.failures import Failures
from podium.view.files import RunFiles, number
from podium.view.timeline import Timeline, traces

__all__ = ["Run", "is_run"]

_SMALL_FILE: Final = 1 << 16  # config.yaml and summary.json have a few thousand bytes


def is_run(path: Path) -> bool:
    """Whether ``path`` is the directory of a run that has begun."""
    return (path / "config.yaml").is_file() or (path / "metrics.jsonl").is_file()


class Run:
    """Answers what the page asks of the run in the directory ``path``.

    Raises:
        ConfigError: ``path`` is no directory of a run.
    """

    def __init__(self, path: Path, name: str) -> None:
        if not is_run(path):
            raise ConfigError(f"{path}: no run is here; give the directory of a run, which holds config.yaml")
        self.name = name
        self.files = RunFiles(path)
        self._curves = Curves(self.files)
        self._completions = Completions(self.files)
        self._timelines: dict[str, Timeline] = {}
        self._failures = Failures(self.files, self._curves)
        self._lock = RLock()
        self._config: tuple[tuple[int, int], Any] = ((0, 0), {})
        self._answers: dict[str, Callable[..., Any]] = {
            "about": self._about,
            "curves": self._curves.answer,
            "steps": self._completions.steps,
            "groups": self._completions.groups,
            "group": self._completions.group,
            "timeline": lambda place=-1: self._timeline(place).answer() | {"traces": traces(self.files)},
            "slices": lambda place, first, last: self._timeline(place).slices(first, last),
            "failures": lambda: self._failures.answer([self._timeline(n) for n in range(len(traces(self.files)))]),
        }

    def answer(self, path: str) -> Any:
        """Return what ``path`` asks for: the name of an answer, then whole numbers, such as ``group/12/3/0``.

        Raises:
            DataError: The files cannot be read, or there is no such step, group or trace.
            LookupError: No answer has this name, or it takes other numbers.
        """
        name, *words = path.split("/")
        answer = self._answers[name]
        if len(words) > 3 or not all(word.isascii() and word.isdigit() and len(word) < 13 for word in words):
            raise LookupError(path)
        with self._lock:
            try:
                return answer(*map(int, words))
            except TypeError as error:
                if "argument" not in str(error):
                    raise
                raise LookupError(path) from None
            except OSError as error:
                raise DataError(f"{error.filename or 'a file'} cannot be read: {error.strerror}") from None

    def signature(self) -> list[Any]:
        """What changes when the run goes on: sizes of files and the number of completions."""
        size, changed = self.files.signature("completions")
        names = traces(self.files)
        trace = self.files.signature(names[-1])[0] if names else 0
        parts = [self.files.signature(name)[0] for name in ("metrics.jsonl", "ledger.jsonl", "summary.json")]
        return [*parts, size, changed, len(names), trace]

    def _timeline(self, place: int) -> Timeline:
        names = traces(self.files)
        if not -1 <= place < len(names) or not names:
            raise DataError("the run has no trace" if not names else f"the run has {len(names)} traces")
        return self._timelines.setdefault(names[place], Timeline(self.files, names[place]))

    def _about(self) -> dict[str, Any]:
        """The run in a few facts. ``state`` is "finished", "stopped" or "running", which a run is without a summary."""
        config, summary = self._read_config(), self._summary()
        try:
            self._curves.update()
            complaint = ""
        except DataError as error:
            complaint = str(error)
        before, after = self._curves.accuracies
        last = self._curves.last_time
        return {
            "name": self.name,
            "path": str(self.files.path),
            "phase": self._curves.phase,
            "step": self._curves.last_step,
            "steps": _plain(config, "run", "steps"),
            "model": self._read_settings(_plain(config, "model", "path")),
            "data": self._read_settings(_plain(config, "data", "train")),
            "schedule": _plain(config, "run", "schedule"),
            "state": "running" if not summary else "finished" if summary.get("finished") else "stopped",
            "quiet_s": None if last is None else max(0, round(time.time() - last)),
            "before": before,
            "after": after,
            "metric": metrics.ACCURACY,
            "complaint": complaint,
        }

    def _read_config(self) -> Any:
        import yaml

        signature, settings = self.files.signature("config.yaml"), {}
        if signature != self._config[0]:
            with suppress(yaml.YAMLError, RecursionError, ValueError):
                settings = yaml.safe_load(self._small("config.yaml"))
            self._config = signature, settings
        return self._config[1]

    def _read_settings(self, path: str | float | None) -> Any:
        """A path of config.yaml, which is absolute there, as the user wrote it."""
        try:
            return json.loads(self._small("places.json"))[path]["given"][:500]
        except (ValueError, RecursionError, LookupError, TypeError):
            return path

    def _summary(self) -> dict[str, Any]:
        try:
            summary = json.loads(self._small("summary.json") or b"{}")
        except (ValueError, RecursionError):
            return {}
        return summary if isinstance(summary, dict) else {}

    def _small(self, name: str) -> bytes:
        try:
            with closing(self.files.open(name)) as file:
                return file.read(_SMALL_FILE)
        except (OSError, DataError):
            return b""


def _plain(config: Any, *keys: str) -> str | float | None:
    for key in keys:
        config = config.get(key) if isinstance(config, dict) else None
    return config[:500] if isinstance(config, str) else number(config)
