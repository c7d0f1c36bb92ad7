"""One run, for the page: each answer has a path."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import RLock
from typing import Any

from podium.errors import ConfigError, DataError
from podium.runs.named_files import PLACES
from podium.runs.run_files import RunFiles
from podium.runs.run_reader import (
    CONFIG,
    LEDGER,
    METRICS,
    SUMMARY,
    UNCOMPARED,
    RunRecord,
    describe_cut_line,
    explain_start,
    is_run,
    name_data,
)
from podium.telemetry.held_out import ACCURACY
from podium_view.completions import Completions
from podium_view.curves import Curves
from podium_view.evaluations import Evaluations
from podium_view.failures import Failures
from podium_view.numbers import number
from podium_view.timeline import Timeline, traces

__all__ = ["Run", "is_shown"]


def is_shown(path: Path) -> bool:
    """Whether ``path`` is the directory of a run, or has a metrics.jsonl that a user's own script has written."""
    return is_run(path) or RunFiles(path).is_file(METRICS)


class Run:
    """Answers the page's requests about the run in the directory ``path``.

    Raises:
        ConfigError: ``path`` is no directory of a run.
    """

    def __init__(self, path: Path, name: str) -> None:
        if not is_shown(path):
            absent = f"no run is here; give the directory of a run, which holds {CONFIG}"
            raise ConfigError(f"{path}: {explain_start(path) or absent}")
        self.name = name
        self._record = RunRecord(path)
        self._signature: list[tuple[int, int]] = []
        self.files = self._record.files
        self._curves = Curves(self.files)
        self._completions = Completions(self.files)
        self._evaluations = Evaluations(self.files)
        self._timelines: dict[str, Timeline] = {}
        self._failures = Failures(self.files, self._curves)
        self._refusal = ""  # why metrics.jsonl cannot be read
        self._lock = RLock()
        self._answers: dict[str, Callable[..., Any]] = {
            "about": self._about,
            "curves": self._curves.answer,
            "steps": self._completions.steps,
            "groups": self._completions.groups,
            "group": self._completions.group,
            "evaluations": self._evaluations.sets,
            "evaluation": self._evaluation,
            "evaluated": self._evaluations.answer,
            "settings": self._settings,
            "timeline": lambda place=-1: self._timeline(place).answer() | {"traces": traces(self.files)},
            "slices": lambda place, first, last: self._timeline(place).slices(first, last),
            "failures": lambda: self._failures.answer([self._timeline(n) for n in range(len(traces(self.files)))]),
        }

    def answer(self, path: str) -> Any:
        """Return the answer to ``path``, which is the name of an answer and whole numbers, such as ``group/12/3/0``.

        Raises:
            DataError: The files cannot be read, or there is no such step, group or trace.
            LookupError: There is no answer of this name, or it takes other numbers.
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
        """Return values that change when the run continues or ends: sizes of files, the number of completions, and the
        lock."""
        size, changed = self.files.signature("completions")
        names = traces(self.files)
        trace = self.files.signature(names[-1])[0] if names else 0
        parts = [self.files.signature(name)[0] for name in (METRICS, LEDGER, SUMMARY)]
        return [*parts, size, changed, len(names), trace, self._record.files.is_locked()]

    def _timeline(self, place: int) -> Timeline:
        names = traces(self.files)
        if not -1 <= place < len(names) or not names:
            raise DataError("the run has no trace" if not names else f"the run has {len(names)} traces")
        return self._timelines.setdefault(names[place], Timeline(self.files, names[place]))

    def _about(self) -> dict[str, Any]:
        """The run in a few facts."""
        record = self._read_record()
        self._update_curves()
        state = record.state_after(self._curves.last_step)
        judge, before, after = self._curves.judged
        last = self._curves.last_time
        return {
            "name": self.name,
            "path": str(self.files.absolute),
            "phase": self._curves.phase,
            "step": self._curves.last_step,
            "steps": _shorten(record.settings.get("run.steps")),
            "model": _shorten(record.settings.get("model.path")),
            "data": _shorten(name_data(record.settings) or None),
            "schedule": _shorten(record.settings.get("run.schedule")),
            "state": state,
            "quiet_s": None if last is None else max(0, round(time.time() - last)),
            "before": None if before is None else judge.write(before),
            "after": None if after is None else judge.write(after),
            "metric": judge.title,
            "complaints": [*dict.fromkeys(filter(None, self._list_complaints(record)))],
        }

    def _update_curves(self) -> None:
        try:
            self._curves.update()
            self._refusal = ""
        except DataError as error:
            self._refusal = str(error)

    def _list_complaints(self, record: RunRecord) -> Iterator[str]:
        """What is wrong with the files that the page reads at once. The settings were read before."""
        is_running = self.files.is_locked()
        if not is_running:
            _ = record.prompts  # of which it may complain
        yield from record.complaints
        yield self._refusal or self._curves.complaint or record.explain_missing(self._curves.last_step)
        yield describe_cut_line(self.files.path / METRICS) if self._curves.is_cut and not is_running else ""

    def _evaluation(self, place: int, step: int) -> dict[str, Any]:
        """Return the prompts of an evaluation, and the ``accuracy`` that the run has reported of it, in which sessions
        that failed count; None where there is none."""
        answer, name = self._evaluations.prompts(place, step), self._evaluations.sets()[place]["name"]
        self._update_curves()
        return answer | {"accuracy": self._curves.evaluated(step, f"{ACCURACY}/{name}" if name else ACCURACY)}

    def _settings(self) -> dict[str, Any]:
        """Return the ``values`` of the settings, in the form in which they are typed, and the keys that are not
        compared with other runs (``uncompared``)."""
        settings = self._read_record().settings.items()
        values = {
            key[:200]: value if value and isinstance(value, str) else json.dumps(value, default=str)
            for key, value in settings
        }
        return {"values": {key: value[:2000] for key, value in values.items()}, "uncompared": sorted(UNCOMPARED)}

    def _read_record(self) -> RunRecord:
        """Return the run with its current small files. A record keeps what it has read, so a new one is made after a
        change."""
        ledger = () if self.files.is_locked() else (LEDGER,)
        signature = [self.files.signature(name) for name in (CONFIG, PLACES, SUMMARY, *ledger)]
        if signature != self._signature:
            self._record, self._signature = RunRecord(self.files.path), signature
        return self._record


def _shorten(value: Any) -> str | float | None:
    return value[:500] if isinstance(value, str) else number(value)
