"""The metrics of a step from those of its optimizer steps."""

from collections.abc import Mapping, Sequence
from typing import Final

from podium.telemetry import metrics as names

__all__ = ["join_updates"]

_LARGEST: Final = frozenset({names.RATIO_MAX, names.MISMATCH_MAX, names.SKIPPED_STEPS})


def join_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Join the metrics of a step's optimizer steps: means, and for maxima and counts the largest value."""
    joined: dict[str, float] = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        values = [update[name] for update in updates if name in update]
        joined[name] = max(values) if name in _LARGEST else sum(values) / len(values)
    return joined
