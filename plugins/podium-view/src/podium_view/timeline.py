"""trace.json, a window of steps at a time.

A trace has up to 256 MiB. Its lines are read once to find the names of tracks, marks, failed calls, and where in the
file each step ends; other lines are not parsed then. The slices of a few steps are parsed when the page asks for them.
"""

import logging
import re
from bisect import bisect_left
from contextlib import closing
from itertools import islice
from typing import Any, Final, NotRequired, cast

from typing_extensions import TypedDict

from podium.errors import DataError
from podium.runs.run_files import RunFiles
from podium.runs.run_json import Amount, Count, read_json
from podium.spelling import write_count
from podium_view.growing_file import GrowingFile
from podium_view.numbers import number

__all__ = ["Timeline", "traces"]

_logger = logging.getLogger(__name__)
_NAME: Final = re.compile(r"trace(?:-(\d{1,9}))?\.json")
_RARE: Final = re.compile(rb'^\{"ph":"(?:[Mi]"|X"[^\n]*"ok":false)[^\n]*$', re.MULTILINE)
_STEP: Final = re.compile(r"step (\d{1,15}) finished")
_MOST_MARKS: Final = 20_000
_MOST_FAILED: Final = 1_000
_MOST_SLICES: Final = 20_000
_WINDOW_BYTES: Final = 8 << 20


def traces(files: RunFiles) -> list[str]:
    """Return the names of a run's traces in the order in which they were written: trace.json, then trace-1.json and so
    on, one for each resume."""
    numbers = {name: int(match[1] or 0) for name in files.names() if (match := _NAME.fullmatch(name))}
    return sorted(numbers, key=lambda name: numbers[name])


class _Line(TypedDict):
    """What the page reads of a line of a trace."""

    ph: str
    name: NotRequired[str]
    pid: NotRequired[Count]
    tid: NotRequired[Count]
    ts: NotRequired[Amount]
    dur: NotRequired[Amount]
    args: NotRequired[dict[str, Any]]


class Timeline:
    """The trace called ``name`` of a run. Times are in milliseconds since the first line with a time."""

    def __init__(self, files: RunFiles, name: str) -> None:
        self._files = files
        self.name = name
        self._file = GrowingFile(files, name)
        self._is_damaged = False
        self._forget()

    def _forget(self) -> None:
        self._start_us: float | None = None
        self._tracks: dict[tuple[int, int], str] = {}
        self._processes: dict[int, str] = {}
        self.steps: list[tuple[int, float, int]] = []  # number, ms, place in the file
        self.marks: list[dict[str, Any]] = []
        self.failed: list[dict[str, Any]] = []
        self.is_whole = False

    def update(self) -> None:
        """Read what is new."""
        for lines in self._file.chunks(self._forget):
            start = self._file.offset - len(lines)
            for match in _RARE.finditer(lines):
                self._enter(self._parse_line(match[0]), start + match.end())
            self.is_whole = lines.endswith(b"]\n")

    def _enter(self, line: dict[str, Any], place: int) -> None:
        kind, name, args = line.get("ph"), line.get("name", ""), line.get("args", {})
        track = (line.get("pid", 0), line.get("tid", 0))
        if kind == "M":
            if name == "thread_name":
                self._tracks[track] = str(args.get("name", ""))
            elif name == "process_name":
                self._processes[track[0]] = str(args.get("name", ""))
        elif kind == "X" and len(self.failed) < _MOST_FAILED:
            self.failed.append(self._slice(line, args))
        elif kind == "i":
            at = self._ms(line.get("ts"))
            if track[0] == 1 and (match := _STEP.fullmatch(name)):
                self.steps.append((int(match[1]), at, place))
            elif len(self.marks) < _MOST_MARKS:
                facts = {str(key): str(value)[:500] for key, value in args.items()}
                self.marks.append({"at": at, "name": name[:2000], "track": list(track), "facts": facts})

    def _parse_line(self, line: bytes) -> dict[str, Any]:
        """Return what a line says: nothing if it is damaged, of which the first one is named by a warning."""
        try:
            return cast("dict[str, Any]", read_json(_Line, line.rstrip().rstrip(b","), self._files.path / self.name))
        except DataError as error:
            if not self._is_damaged:
                _logger.warning("%s", error)
            self._is_damaged = True
            return {}

    def _ms(self, us: Any) -> float:
        figure = number(us) or 0.0
        if self._start_us is None:
            self._start_us = float(us) if figure else 0.0
        return round((float(us) - self._start_us) / 1000, 3) if figure else 0.0

    def _slice(self, line: dict[str, Any], args: dict[str, Any]) -> dict[str, Any]:
        """Return a slice for the page: its track, its begin and length in ms, and its call or its step."""
        track = [line.get("pid", 0), line.get("tid", 0)]
        length = round((number(line.get("dur")) or 0.0) / 1000, 3)
        entry = {"track": track, "at": self._ms(line.get("ts")), "ms": length, "name": line.get("name", "")[:200]}
        entry |= {key: args[key] for key in ("call", "step", "rank") if isinstance(args.get(key), int)}
        return entry if args.get("ok") is not False else entry | {"failed": True}

    def answer(self) -> dict[str, Any]:
        """Return what the page shows of the whole trace.

        Returns:
            ``tracks`` (``[pid, tid, name of the process, name]``), ``steps`` (``[number, end in ms]``), ``marks``,
            ``failed`` calls, and whether the trace ``ended``.
        """
        self.update()
        tracks = [[pid, tid, self._processes.get(pid, ""), name] for (pid, tid), name in sorted(self._tracks.items())]
        steps = [[step, at] for step, at, _ in self.steps]
        marks = {"marks": self.marks, "failed": self.failed, "ended": self.is_whole}
        return {"name": self.name, "tracks": tracks, "steps": steps, **marks}

    def slices(self, first: int, last: int) -> dict[str, Any]:
        """The slices of steps ``first`` to ``last``, places in ``answer()["steps"]``; at most 20,000.

        What follows the last whole step counts as a step of its own.

        Returns:
            ``from`` and ``until`` in ms (None: up to the last slice), ``slices``, and whether some were left out
            (``cut``).

        Raises:
            DataError: There are no such steps.
        """
        self.update()
        if not 0 <= first <= last <= len(self.steps):
            raise DataError(
                f"the trace has {write_count(len(self.steps), 'step')}; {first} to {last} are not among them"
            )
        begin = self.steps[first - 1][1] if first else 0.0
        until = self.steps[last][1] if last < len(self.steps) else None
        # What began in these steps may have ended, and so been written, in the next one.
        start = self.steps[first - 1][2] if first else 0
        stop = self.steps[last + 1][2] if last + 1 < len(self.steps) else self._file.offset
        try:
            with closing(self._files.open(self.name)) as file:
                file.seek(start)
                data = file.read(min(stop - start, _WINDOW_BYTES))
        except FileNotFoundError:
            raise DataError("the trace is gone") from None
        lines = (line for line in data.splitlines() if line.startswith(b'{"ph":"X"'))
        slices: list[dict[str, Any]] = []
        for line in islice(lines, 4 * _MOST_SLICES):
            parsed = self._parse_line(line)
            slice_ = self._slice(parsed, parsed.get("args", {}))
            if (until is None or slice_["at"] < until) and slice_["at"] + slice_["ms"] >= begin:
                slices.append(slice_)
        cut = stop - start > _WINDOW_BYTES or len(slices) > _MOST_SLICES
        return {"from": begin, "until": until, "slices": slices[:_MOST_SLICES], "cut": cut}

    def place_at(self, ms: float) -> tuple[int, int | None]:
        """Return the place in ``steps`` and the number of the step at a time; None after the last whole step."""
        index = bisect_left(self.steps, ms, key=lambda step: step[1])
        return index, self.steps[index][0] if index < len(self.steps) else None
