"""How far the long parts of a run are. They are counted where the work is done, and read by whoever shows them.

    code that does many things   count.done += 1          an addition: no event, no message, no lock
    a worker's process           read_counts()            answers a question of the controller
    the controller               Progressing(counts)      a few events a second, of its own counts and all answers

A part that is over is not counted any more. ``podium.runtime.calls.progress`` asks and emits.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from types import TracebackType
from typing import Final, Self, TypeVar
from weakref import WeakValueDictionary

from podium.telemetry.events import Count
from podium.telemetry.formatting import clock_duration, compact

T = TypeVar("T")

TOKENS: Final = "tokens"
"""The unit of which the speed is shown, and not the number."""


class Counting:
    """Counts things while it is open. One thread changes it, and any thread may read it.

    Args:
        unit: What is counted, as a plural: "micro-batches". A stage of a step that counts nothing has "".
        total: How many there are; 0 if that is not known.
        stage: The stage of a step whose begin and end this is; "" for a part of one.
        whole: Whether other countings of this unit are parts of this one, to whose ``done`` theirs is added.
        role: The worker that counts.
        rank: Its rank.

    Attributes:
        done: How many are done.

    >>> with Counting("rows", 2) as count:
    ...     for row in count.over(["a", "b"]):
    ...         print(row, describe_counts(read_counts()))
    a 0 of 2 rows
    b 1 of 2 rows
    """

    __slots__ = ("__weakref__", "_began_ns", "_labels", "done", "total")

    def __init__(
        self, unit: str, total: int = 0, *, stage: str = "", whole: bool = False, role: str = "", rank: int = 0
    ) -> None:
        self.done, self.total = 0, total
        self._labels = unit, stage, whole, role, rank
        self._began_ns = 0

    def over(self, things: Iterable[T]) -> Iterator[T]:
        """Yield each of ``things``, and count it once the next one is asked for."""
        for thing in things:
            yield thing
            self.done += 1

    def open(self, done: int = 0) -> None:
        """Begin to count, from ``done`` on."""
        self.done, self._began_ns = done, time.monotonic_ns()
        _OPEN[id(self)] = self

    def close(self) -> None:
        """End. A second call does nothing."""
        _OPEN.pop(id(self), None)

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def read(self) -> Count:
        """Return the state of this moment."""
        unit, stage, whole, role, rank = self._labels
        seconds = (time.monotonic_ns() - self._began_ns) / 1e9
        return Count(unit, self.done, self.total, seconds, stage, whole, role, rank)


_OPEN: Final[MutableMapping[int, Counting]] = WeakValueDictionary()  # without those that nobody has any more


def read_counts(after_s: float = 0.0) -> tuple[Count, ...]:
    """Return what is counted in this process, and has been for ``after_s`` seconds, in the order of its begin."""
    counts = (counting.read() for counting in list(_OPEN.values()))
    return tuple(count for count in counts if count.seconds >= after_s)


def describe_counts(counts: Sequence[Count], joint: str = " · ") -> str:
    """Say in one line how far things are: the stages that run, and the numbers by their units."""
    stages: dict[str, float] = {}
    units: dict[str, list[Count]] = {}
    for count in counts:
        if count.stage:
            stages[count.stage] = max(count.seconds, stages.get(count.stage, 0.0))
        if count.unit:
            units.setdefault(count.unit, []).append(count)
    parts = [f"{stage} {clock_duration(seconds)}" for stage, seconds in stages.items()]
    for unit, (done, total) in ((unit, sum_counts(same)) for unit, same in units.items() if unit != TOKENS):
        parts += [f"{done:,} of {total:,} {unit}"] if total > 1 else []
    speed = sum(count.done / max(count.seconds, 1e-9) for count in units.get(TOKENS, ()))
    parts += [f"{compact(speed)} tok/s"] if speed else []
    return joint.join(parts)


def sum_counts(counts: Sequence[Count]) -> tuple[int, int]:
    """Add up counts of one unit: the things that are done, and all."""
    wholes = [count for count in counts if count.whole]
    done, total = sum(count.done for count in counts), sum(count.total for count in wholes or counts)
    return (min(done, total) if total else done), total
