"""The rows of a run, in files that are whole after each row: a run that is stopped keeps what it measured."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.measure import Row
from bench.report import machine

ABOUT = "machine.json"  # beside the rows
SAME = ("processor", "cores", "python", "libraries", "commit", "quick")
"""What two parts of one run have in common."""


class Record:
    """The rows of one run by suite, kept in ``path`` (a list of rows) and in ``machine.json`` beside it.

    A record that lies there already is continued if its machine, versions, commit and thoroughness are this run's;
    otherwise it is replaced.

    Args:
        load_before: The load average before this part of the run. The record has that of the busiest part.
        again: Begin anew in any case.
        say: Is told whether a record is continued or replaced.

    Attributes:
        finished: Names of the suites all of whose rows are here.
    """

    def __init__(
        self, path: Path, *, quick: bool, load_before: float, again: bool = False, say: Callable[[str], None]
    ) -> None:
        self.path = path
        self.finished: list[str] = []
        self._rows: dict[str, list[Row]] = {}
        self._seconds: dict[str, float] = {}
        self._about: dict[str, Any] = {**machine(load_before), "commit": commit(), "quick": quick}
        self._absent: set[str] = set()
        if not again:
            self._continue(say)

    @property
    def rows(self) -> list[Row]:
        """All rows so far, by suite in the order measured."""
        return [row for rows in self._rows.values() for row in rows]

    @property
    def absent(self) -> set[str]:
        """Peers that were not installed when a suite asked for them."""
        return self._absent

    def begin(self, suite: str) -> None:
        """Forget the suite's rows, which are about to be measured."""
        self._rows.pop(suite, None)
        self.finished = [name for name in self.finished if name != suite]

    def add(self, suite: str, row: Row) -> None:
        """Keep a row, and write."""
        self._rows.setdefault(suite, []).append(row)
        self._write()

    def finish(self, suite: str, absent: set[str], seconds: float) -> None:
        """Note that the suite has no more rows after so many seconds, and write. ``absent`` are the peers that it or
        others lacked."""
        self.finished.append(suite)
        self._seconds[suite] = round(seconds, 1)
        self._absent |= absent
        self._write()

    def move(self, target: Path) -> None:
        """Make this record, which is complete, the one at ``target``, and leave nothing here."""
        about = self.path.with_name(ABOUT)
        for source, end in ((about, target.with_name(ABOUT)), (self.path, target)):
            shutil.copyfile(source, end.with_name(f"{end.name}.new"))
            os.replace(end.with_name(f"{end.name}.new"), end)
        about.unlink()
        self.path.unlink()

    def _continue(self, say: Callable[[str], None]) -> None:
        try:
            about = json.loads(self.path.with_name(ABOUT).read_text())
            written = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return
        if changed := [name for name in SAME if about.get(name) != self._about[name]]:
            say(f"the rows in {self.path} are replaced: they have another {', '.join(changed)}")
            return
        self.finished, self._absent = about["finished"], set(about["absent"])
        self._seconds = about.get("seconds", {})
        self._about["load_before"] = max(self._about["load_before"], about.get("load_before", 0.0))
        for row in written:
            self._rows.setdefault(row["suite"], []).append(Row.from_json(row))
        say(f"going on with {self.path}: {', '.join(self.finished) or 'no suite'} finished")

    def _write(self) -> None:
        rows = [{**row.as_json(), "suite": suite} for suite, rows in self._rows.items() for row in rows]
        about = {**self._about, "absent": sorted(self._absent), "finished": self.finished, "seconds": self._seconds}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, rows)
        write_whole(self.path.with_name(ABOUT), about)


def write_whole(path: Path, value: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
    """Write JSON so that a reader finds the file as it was before or as it is afterwards, whenever this stops."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(new, path)


def commit() -> str:
    """The commit of this checkout, or "" outside of one."""
    try:
        told = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return told.stdout.strip()
