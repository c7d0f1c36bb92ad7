"""How tests wait: for a condition, with a deadline that only what hangs passes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from podium.rewards import Grade
from podium_testing import target

__all__ = ["LONG_S", "all_end", "grade_undisturbed", "wait_until"]

TRIALS = 10

LONG_S = 60.0  # what a test must meet, however busy the machine is


def wait_until(condition: Callable[[], object]) -> bool:
    """Wait until ``condition`` is true. Return False if it is still false after a minute."""
    return target.wait_for(lambda: bool(condition()), LONG_S)


def all_end(pids: Iterable[int]) -> bool:
    """Wait until none of the processes ``pids`` runs. Return False if one still runs after a minute."""
    return not target.all_gone(pids, LONG_S)


def grade_undisturbed(grade: Callable[[], Sequence[Grade]], late: Collection[int] = ()) -> Sequence[Grade]:
    """Return the grades in which no other items than ``late`` have run over a short limit.

    On a busy machine an item that takes no time waits for a core until its time is over. So all are graded again, up to
    ten times.
    """
    for _ in range(TRIALS):
        grades = grade()
        if {index for index, item in enumerate(grades) if item.timed_out} <= {*late}:
            return grades
    return grade()
