"""What a grader costs: processor time for each item, and how late it stops an item that never ends.

Processor time is that of all processes: the difference between a long and a short use, which leaves their start out.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Mapping
from typing import Any

from bench.context import Context
from bench.measure import Row, alternate, compare
from podium.rewards import Grader, RewardConfig

__all__ = ["grading"]

ITEMS = 5000
LIMIT_S = 1.0


def grading(context: Context) -> Iterator[Row]:
    """Rows `grade_item` and `grade_over_limit`."""
    repetitions = context.repetitions(5, 2)
    floor = "not measured: a pickle of the row, two messages and a call"
    figures = alternate({"podium": item_s}, repetitions=repetitions, warmups=0)
    yield compare("grade_item", figures, unit="us", scale=1e6, floor=floor)
    floor = "not measured: the kernel's own end of the process, and a turn on a core"
    with Grader(RewardConfig(time_limit_s=LIMIT_S, processes=1), reward=never_end) as grader:
        figures = alternate({"podium": lambda: late_s(grader)}, repetitions=repetitions)
    yield compare("grade_over_limit", figures, unit="ms", scale=1e3, floor=floor)


def item_s() -> float:
    """Return the processor seconds of a cheap item."""
    return (spent_s(3) - spent_s(1)) / (2 * ITEMS)


def spent_s(rounds: int) -> float:
    """Return the processor seconds of a grader that grades all items ``rounds`` times."""
    rows = [{"answer": str(number), "question": "x" * 200} for number in range(ITEMS)]
    answers = [row["answer"] for row in rows]
    before = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    with Grader(RewardConfig(processes=1)) as grader:
        for _ in range(rounds):
            grader.grade(answers, rows)
    after = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(b.ru_utime + b.ru_stime - a.ru_utime - a.ru_stime for a, b in zip(before, after, strict=True))


def late_s(grader: Grader) -> float:
    """Return the seconds between the limit of an item that never ends and its grade."""
    started = time.perf_counter()
    (grade,) = grader.grade([""], [{}])
    if not grade.timed_out:
        raise AssertionError("the item ended by itself")
    return time.perf_counter() - started - LIMIT_S


def never_end(completion: str, row: Mapping[str, Any]) -> float:
    """Wait until somebody ends the process."""
    while True:
        time.sleep(1.0)
