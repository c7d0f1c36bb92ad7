"""The failures of a run: lost workers, stalls, failed calls, metrics that are not finite, dropped prompts, errors."""

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from typing import Any, Final

from podium.errors import DataError
from podium.runs.ledger import Entry
from podium.runs.run_files import RunFiles
from podium.runs.run_json import read_json
from podium.runs.run_reader import LEDGER
from podium.spelling import write_count
from podium_view.curves import Curves
from podium_view.growing_file import GrowingFile
from podium_view.timeline import Timeline

__all__ = ["Failures"]

_LOG_BYTES: Final = 256 << 10  # the end of a log
_LOG_LINES: Final = 40  # the last of each log, as they are
_ENTRIES: Final = 200  # of each kind
_RECORD: Final = re.compile(
    r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:,\d+)? (WARNING|ERROR|CRITICAL) ([^\n]*)$", re.MULTILINE
)
_TRACEBACK: Final = re.compile(r"^Traceback \(most recent call last\):\n(?:[ \t][^\n]*\n|\n)*([^\n]+)", re.MULTILINE)
_LOST, _STALLED = "lost: ", "stalled: "


class Failures:
    """Collects the failures that the files of a run have recorded."""

    def __init__(self, files: RunFiles, curves: Curves) -> None:
        self._files = files
        self._curves = curves
        self._ledger = GrowingFile(files, LEDGER)
        self._dropped: Counter[tuple[str, int]] = Counter()

    def answer(self, timelines: Sequence[Timeline]) -> dict[str, Any]:
        """Return ``found``, at most 200 of each ``kind`` with what it ``says``, and the ends of all ``logs``.

        An entry has those of ``step``, ``trace``, ``at`` (ms in that trace), ``when`` and ``where`` that are known.
        """
        failures: list[dict[str, Any]] = []
        for number, timeline in enumerate(timelines):
            timeline.update()
            for failure in self._read_traced_failures(timeline):
                index, step = timeline.place_at(failure["at"])
                failures.append({"trace": number, "name": timeline.name, "place": index, "step": step, **failure})
        self._curves.update()
        failures += [
            {"kind": "not finite", "step": step, "says": f"{name} = {what}"}
            for step, name, what in self._curves.nonfinite
        ]
        self._read_ledger()
        failures += [
            {"kind": "dropped", "step": step, "says": f"{write_count(count, 'prompt')}: {reason}"}
            for (reason, step), count in self._dropped.items()
        ]
        logs = list(self._logs())
        for log in logs:
            failures += log.pop("found")
        kinds = Counter(failure["kind"] for failure in failures)
        shown: list[dict[str, Any]] = []
        for kind in kinds:
            shown += [failure for failure in failures if failure["kind"] == kind][:_ENTRIES]
        return {"found": shown, "counts": dict(kinds), "logs": logs}

    def _read_traced_failures(self, timeline: Timeline) -> Iterator[dict[str, Any]]:
        names = {(pid, tid): name for pid, tid, _, name in timeline.answer()["tracks"]}
        for mark in timeline.marks:
            name, where = mark["name"], names.get(tuple(mark["track"]), "")
            if name.startswith(_LOST):
                node = mark["facts"].get("node", "")
                yield {
                    "kind": "lost worker",
                    "at": mark["at"],
                    "where": where,
                    "says": name + f" on {node}" * bool(node),
                }
            elif name.startswith(_STALLED):
                facts = "; ".join(f"{key.replace('_', ' ')} {value}" for key, value in mark["facts"].items())
                yield {"kind": "stall", "at": mark["at"], "where": "", "says": f"{name} ({facts})"}
        for call in timeline.failed:
            where = names.get(tuple(call["track"]), "")
            says = f"{call['name']} raised an error after {call['ms']:,.0f} ms"
            yield {"kind": "failed call", "at": call["at"], "where": where, "says": says}

    def _read_ledger(self) -> None:
        with suppress(DataError):
            for lines in self._ledger.chunks(self._dropped.clear):
                for line in lines.splitlines():
                    if b'"dropped"' in line:
                        self._enter(line)

    def _enter(self, line: bytes) -> None:
        with suppress(DataError):  # `podium runs` names it
            entry = read_json(Entry, line, self._files.path / LEDGER)
            if entry["state"] == "dropped":
                self._dropped[entry.get("reason", "")[:300], entry.get("step", 0)] += len(entry["prompts"])

    def _logs(self) -> Iterator[dict[str, Any]]:
        try:
            names = [name for name in self._files.names("logs") if name.endswith(".log")]
        except (DataError, OSError) as error:
            yield {"name": "logs", "tail": str(error), "found": []}
            return
        for name in names[:_ENTRIES]:
            try:
                text = self._end_of(name)
            except (DataError, OSError) as error:
                yield {"name": name, "tail": str(error), "found": []}
                continue
            failures: list[dict[str, Any]] = []
            for match in _RECORD.finditer(text):
                kind = "warning" if match[2] == "WARNING" else "error"
                failures.append({"kind": kind, "when": match[1], "where": name, "says": match[3][:2000]})
            for match in _TRACEBACK.finditer(text):
                failures.append({"kind": "traceback", "where": name, "says": match[1][:2000], "more": match[0][-8000:]})
            yield {"name": name, "tail": "\n".join(text.splitlines()[-_LOG_LINES:])[-20_000:], "found": failures}

    def _end_of(self, name: str) -> str:
        with closing(self._files.open("logs", name)) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _LOG_BYTES))
            return file.read(_LOG_BYTES).decode("utf-8", "replace")
