"""How far calls are that take long, for whoever watches the run.

    podium-progress, twice a second
      ├─ read_counts()                              what is counted in this process
      ├─ ProcessCalls.read_counts() ──▶ each rank   what is counted in the processes of calls that take long
      └─ emit(Progressing(counts))                  if there is any

The thread of deadlines takes no part: a process that does not answer, and a listener that raises or never returns, stop
nothing but this. Nobody is asked while nobody listens.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from podium import telemetry
from podium.exceptions import format_error
from podium.runtime.backend import Backend
from podium.runtime.calls.in_flight import Ask
from podium.runtime.messages import Reply
from podium.telemetry.events import Count
from podium.telemetry.progress import read_counts

LOOK_S = 0.5
"""Between two looks, and how long something takes before it is looked at."""


class RankCounts:
    """The counts of the ranks of one set of processes, as they answered last."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._open: set[int] = set()  # the ranks that have yet to answer
        self._latest: Mapping[int, Sequence[Count]] = {}

    def read(
        self,
        name: str,
        ask: Ask,
        ranks: Collection[int],
        wait_until: Callable[[Callable[[], bool], float], object],
    ) -> list[Count]:
        """Have ``ask`` ask ``ranks``, and return what those count that answer soon. A rank that has yet to answer is
        not asked."""
        latest: dict[int, Sequence[Count]] = {}
        idle_ranks = {*ranks} - self._open

        def note_reply(rank: int, reply: Reply) -> None:
            if reply.status == "ok":
                latest[rank] = [
                    replace(count, role=count.role or name, rank=rank) for count in self._backend.unpack(reply.payload)
                ]
            self._open.discard(rank)

        self._open |= idle_ranks
        ask(sorted(idle_ranks), "counts", {}, note_reply)
        wait_until(lambda: self._open.isdisjoint(idle_ranks), LOOK_S)
        self._latest = latest.copy()
        return [count for rank in sorted(self._latest) for count in self._latest[rank]]

    def of(self, ranks: Collection[int]) -> tuple[tuple[int, str, int], ...]:
        """Return what ``ranks`` had counted when they were asked last. It changes while they go on."""
        if not self._backend.capabilities.processes:
            return tuple((0, count.unit, count.done) for count in read_counts())
        latest = self._latest
        return tuple((rank, count.unit, count.done) for rank in sorted(ranks) for count in latest.get(rank, ()))


class ProgressWatch:
    """The thread that asks and emits, for as long as the object is open.

    Args:
        read: Returns what workers count whose calls have taken so many seconds.
    """

    def __init__(self, read: Callable[[float], Sequence[Count]]) -> None:
        self._read = read
        self._shown = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="podium-progress", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, at the latest after the event that is being emitted."""
        self._closed.set()

    def look(self, after_s: float = LOOK_S) -> None:
        """Emit what is counted and has been for ``after_s`` seconds."""
        counts = (*self._read(after_s), *read_counts(after_s))  # its own last: a part that is over is in one of them
        if counts or self._shown:
            self._shown = bool(counts)
            telemetry.emit(telemetry.Progressing(counts))

    def _run(self) -> None:
        while not self._closed.wait(LOOK_S):
            if not telemetry.active():
                continue
            try:
                self.look()
            except Exception as error:  # noqa: BLE001 - the run goes on without it
                if not self._closed.is_set():  # else the processes may be gone
                    what = "progress is not shown any more; the run goes on"
                    logging.getLogger("podium").error("%s: %s", what, format_error(error))
                return
