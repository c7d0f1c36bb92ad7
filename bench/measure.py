"""Samples, taken in turns: whatever disturbs the machine for a while disturbs every subject alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

Better = Literal["lower", "higher"]
Figure = TypeVar("Figure")
Subjects = Mapping[str, Callable[[], float]]  # each measures itself once and returns its figure


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure of Podium's, with the same figure of everything measured beside it, in the same unit."""

    name: str
    unit: str
    median: float
    quartiles: tuple[float, float]
    better: Better
    floor: str  # what the figure cannot beat, in words; "NAME: WORDS" where it was measured as others[NAME]
    others: Mapping[str, float] = field(default_factory=dict[str, float])

    @classmethod
    def from_json(cls, written: Mapping[str, Any]) -> Row:
        """The row that :meth:`as_json` wrote, with as many digits."""
        low, high = written["quartiles"]
        names = ("name", "unit", "median", "better", "floor", "others")
        return cls(quartiles=(low, high), **{name: written[name] for name in names})

    @property
    def ratio(self) -> dict[str, float]:
        """How many times better Podium is than each other: over 1 is in Podium's favor, whatever the unit."""
        if self.better == "lower":
            return {name: other / self.median for name, other in self.others.items()}
        return {name: self.median / other for name, other in self.others.items()}

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "median": round_to(self.median),
            "unit": self.unit,
            "ratio": {name: round(ratio, 3) for name, ratio in self.ratio.items()},
            "quartiles": [round_to(value) for value in self.quartiles],
            "better": self.better,
            "floor": self.floor,
            "others": {name: round_to(value) for name, value in self.others.items()},
        }


def round_to(value: float, digits: int = 4) -> float:
    """`value` with `digits` significant digits: a row is read by people."""
    return float(f"{value:.{digits}g}")


def alternate(
    subjects: Mapping[str, Callable[[], Figure]], *, repetitions: int, warmups: int = 1
) -> dict[str, list[Figure]]:
    """Call each subject once a repetition, in an order that rotates, and return each one's figures.

    A subject measures itself and returns its figure, since what belongs to a figure and what prepares it only it
    knows. The first `warmups` rounds are not kept.
    """
    figures: dict[str, list[Figure]] = {name: [] for name in subjects}
    order = list(subjects)
    for repetition in range(-warmups, repetitions):
        shift = repetition % len(order)
        for name in order[shift:] + order[:shift]:
            figure = subjects[name]()
            if repetition >= 0:
                figures[name].append(figure)
    return figures


def compare(
    name: str,
    figures: Mapping[str, list[float]],
    *,
    unit: str,
    floor: str,
    scale: float = 1.0,
    better: Better = "lower",
) -> Row:
    """The row `name` from samples in which Podium's own are called "podium"; `scale` turns them into `unit`, and
    `floor` says what Podium's figure cannot beat."""
    podium = [value * scale for value in figures["podium"]]
    quartiles = statistics.quantiles(podium, n=4) if len(podium) > 1 else [podium[0]] * 3
    return Row(
        name=name,
        unit=unit,
        median=statistics.median(podium),
        quartiles=(quartiles[0], quartiles[2]),
        better=better,
        floor=floor,
        others={other: statistics.median(values) * scale for other, values in figures.items() if other != "podium"},
    )


def median_call_s(call: Callable[[], object], calls: int) -> float:
    """The median seconds of `calls` calls, each timed alone."""
    times: list[float] = []
    for _ in range(calls):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def covered(spans: Iterable[tuple[float, float]], began: float, ended: float) -> float:
    """How much of ``began`` to ``ended`` the union of ``spans`` covers."""
    total, reached = 0.0, began
    for start, end in sorted(spans):
        start, end = max(start, reached), min(end, ended)
        if end > start:
            total += end - start
            reached = end
    return total
