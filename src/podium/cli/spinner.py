"""The status of a command that takes seconds, on stderr: a spinner on a terminal, and else a line for each task."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from podium.telemetry.events import Event, Note, Progressing, Waiting
from podium.telemetry.formatting import visible
from podium.telemetry.progress import describe_counts
from podium.telemetry.sinks.base import Sink

if TYPE_CHECKING:
    from rich.status import Status


class StatusSink(Sink):
    """Shows ``what`` at once, then what the program waits for and what it counts, until the block ends. Notes stay, but
    for that of the placement.

    Attributes:
        activity: What the program does now, with its counts.
    """

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = self.activity = what
        self._status: Status | None = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.text import Text

            self._status = Console(stderr=True).status(Text(visible(what)))
            self._status.start()
        else:
            _write(what)

    def handle(self, event: Event) -> None:
        if isinstance(event, Note) and not event.text.startswith("placement "):  # which is of interest to training
            if self._status is not None:
                self._status.console.print(visible(event.text), markup=False, highlight=False, soft_wrap=True)
            else:
                write_note(event)
        # What is loaded is said already, and workers have another name for it: that of a copy.
        if isinstance(event, Waiting) and not event.what.startswith("loading ") and event.what != self._what:
            self._what = self.activity = event.what
            if self._status is None:
                _write(event.what)
        counts = describe_counts(event.counts, ", ") if isinstance(event, Progressing) else ""
        if counts:
            self.activity = f"{self._what} ({counts})"
        if self._status is not None and isinstance(event, Waiting | Progressing):
            from rich.text import Text

            self._status.update(Text.assemble(visible(self._what), (f"  {counts}", "dim")))

    def finish(self) -> None:
        if self._status is not None:
            self._status.stop()


def write_note(event: Event) -> None:
    """Write the text of a note to stderr. Other events have none."""
    if isinstance(event, Note):
        _write(event.text)


def _write(text: str) -> None:
    with suppress(OSError):  # of a full disk, on which the results may yet have room
        sys.stderr.write(f"{visible(text)}\n")
        sys.stderr.flush()
