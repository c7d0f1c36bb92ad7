"""metrics.jsonl as columns."""

from collections.abc import Sequence
from typing import Any, Final

from podium.errors import DataError
from podium.runs.run_files import RunFiles
from podium.runs.run_reader import METRICS, figure_of, metric_of, parse_rows, set_of
from podium.telemetry.held_out import Metric
from podium_view.growing_file import GrowingFile
from podium_view.numbers import number

__all__ = ["Curves"]

_MOST_POINTS: Final = 5000  # points of a curve; with more steps, a point is the mean of several
_MOST_NAMES: Final = 1000  # of metrics, and of values that are not finite
_BESIDE: Final = ("items", "low", "high")  # of the figures of an evaluation
_OURS: Final = ("kind", "phase", "step", "time", "nonfinite")
Column = list[float | None]


class Curves:
    """The metrics of a run that are written so far."""

    def __init__(self, files: RunFiles) -> None:
        self._file, self._path = GrowingFile(files, METRICS), files.path / METRICS
        self._forget()

    def _forget(self) -> None:
        self.phase = ""
        self.complaint = ""  # what is wrong with the first damaged row
        self._line = 1
        self.last_step = 0
        self.last_time: float | None = None
        self.nonfinite: list[tuple[int, str, str]] = []
        self._steps = _Table()
        self._evaluations = _Table()
        self._evaluated: list[dict[str, Any]] = []  # the rows of evaluations

    def update(self) -> None:
        """Read what is new."""
        for lines in self._file.chunks(self._forget):
            for row in parse_rows(lines, self._path, self._line):
                if isinstance(row, DataError):
                    self.complaint = self.complaint or str(row)
                else:
                    self._enter(row)
            self._line += lines.count(b"\n")

    @property
    def is_cut(self) -> bool:
        """Whether the file ends with a line that is not complete."""
        return self._file.has_rest

    def _enter(self, row: dict[str, Any]) -> None:
        self.phase = row.get("phase") or self.phase
        self.last_step = max(self.last_step, row["step"])
        self.last_time = row.get("time") or self.last_time
        entries = [(row["step"], name[:200], what[:20]) for name, what in row.get("nonfinite", {}).items()]
        self.nonfinite += entries[: _MOST_NAMES - len(self.nonfinite)]
        if row["kind"] == "eval":
            self._evaluated.append(row)
        table = self._steps if row["kind"] == "step" else self._evaluations
        table.enter(row["step"], row.get("time") or 0.0, row)

    def answer(self) -> dict[str, Any]:
        """Return the columns of the steps and those of the evaluations.

        Returns:
            ``every``: how many steps a point stands for. ``held_out``: by the name of a chart, the figure of
            evaluations that it shows. ``steps`` and ``evaluations``: ``step``, ``minutes`` since the first row, and
            ``series``, a list for each metric with None where it has no value. Steps also have ``tokens``, the sum of
            the tokens so far.
        """
        self.update()
        start = min([*self._steps.times[:1], *self._evaluations.times[:1]], default=0.0)
        every = -(-len(self._steps.numbers) // _MOST_POINTS) or 1
        steps = self._steps.columns(start, every)
        tokens, total = list[float](), 0.0
        for value in self._steps.series.get("tokens", [None] * len(self._steps.numbers)):
            total += value or 0.0
            tokens.append(total)
        steps["tokens"] = tokens[every - 1 :: every] + (tokens[-1:] if len(tokens) % every else [])
        return {
            "every": every,
            "phase": self.phase,
            "steps": steps,
            "evaluations": self._evaluations.columns(start, 1),
            "held_out": self._held_out(),
            "nonfinite": self.nonfinite,
        }

    @property
    def judged(self) -> tuple[Metric, float | None, float | None]:
        """The metric that judges the run, and its first and last value on the held-out set that judges the run."""
        last = self._evaluated[-1] if self._evaluated else {}
        metric, name = metric_of(last), set_of(last)
        values = (figure_of(row, metric.name, name) for row in self._evaluated)
        return metric, next((value for value in values if value is not None), None), figure_of(last, metric.name, name)

    def evaluated(self, step: int, name: str) -> float | None:
        """The figure ``name`` of the evaluation after ``step``; None where it is not known."""
        columns = zip(self._evaluations.series.get(name, []), self._evaluations.numbers, strict=False)
        return next((value for value, number in columns if number == step and value is not None), None)

    def _held_out(self) -> dict[str, str]:
        """By the name of a chart, the figure of evaluations: the chart is of the metric of steps that has its unit."""
        series, count = self._evaluations.series, len(self._evaluations.numbers)
        figures = [name for name in series if len(series[name]) == count]  # those that the last evaluation has
        names = {Metric(name).of_steps or name: name for name in figures if "/" not in name or Metric(name).of_steps}
        return {chart: name for chart, name in names.items() if name not in _BESIDE}


class _Table:
    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.times: list[float] = []
        self.series: dict[str, Column] = {}

    def enter(self, step: int, time: float, row: dict[str, Any]) -> None:
        for name, value in row.items():
            is_known = name in self.series or len(self.series) < _MOST_NAMES
            if name not in _OURS and is_known and (figure := number(value)) is not None:
                column = self.series.setdefault(name, [])
                column += [None] * (len(self.numbers) - len(column))
                column.append(figure)
        self.numbers.append(step)
        self.times.append(time)

    def columns(self, start: float, every: int) -> dict[str, Any]:
        count = len(self.numbers)
        series = {name: column + [None] * (count - len(column)) for name, column in self.series.items()}
        ends = [min(first + every, count) - 1 for first in range(0, count, every)]
        return {
            "step": [self.numbers[end] for end in ends],
            "minutes": [round((self.times[end] - start) / 60, 4) for end in ends],
            "series": {name: column if every == 1 else _means(column, every) for name, column in series.items()},
        }


def _means(column: Sequence[float | None], every: int) -> Column:
    means: Column = []
    for first in range(0, len(column), every):
        present = [value for value in column[first : first + every] if value is not None]
        means.append(number(sum(present) / len(present)) if present else None)
    return means
