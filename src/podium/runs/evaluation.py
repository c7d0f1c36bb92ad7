"""A held-out evaluation of a run, and the intervals of its figures."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from podium.telemetry import Sample

__all__ = ["Evaluation", "gain_interval"]

_Z95: Final = 1.959964  # of the normal distribution, two-sided


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One held-out evaluation: ``correct`` of ``items`` prompts after ``step`` steps, and a few completions."""

    step: int
    correct: int
    items: int
    reward_mean: float
    samples: tuple[Sample, ...] = ()

    @property
    def accuracy(self) -> float:
        """Share of correct prompts, in 0..1."""
        return self.correct / self.items

    def interval(self) -> tuple[float, float]:
        """The 95 % score interval of the accuracy (Wilson 1927, eq. 3), right also near 0 and 1."""
        n, p, z2 = self.items, self.accuracy, _Z95**2
        middle = (p + z2 / (2 * n)) / (1 + z2 / n)
        half = _Z95 * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
        # Rounding must not push a bound past the share itself, where the two meet at 0 and at 1.
        return min(p, max(0.0, middle - half)), max(p, min(1.0, middle + half))


def gain_interval(before: Evaluation, after: Evaluation) -> tuple[float, float]:
    """The 95 % interval of the gain in accuracy for independent samples (Newcombe 1998, method 10).

    If both were measured on the same prompts, the interval is wider than necessary.
    """
    (low_1, high_1), (low_2, high_2) = before.interval(), after.interval()
    p_1, p_2 = before.accuracy, after.accuracy
    gain = p_2 - p_1
    return gain - math.hypot(p_2 - low_2, high_1 - p_1), gain + math.hypot(high_2 - p_2, p_1 - low_1)
