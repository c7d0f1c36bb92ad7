"""The few columns of a step that are worth a person's eyes, and how each is written."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from podium.telemetry import metrics
from podium.telemetry.formatting import compact, duration, percent, plain

__all__ = ["STEP_COLUMNS", "Column", "cells", "fitting", "headers"]


@dataclass(frozen=True, kw_only=True)
class Column:
    """``metric`` under ``header``, right-aligned in ``width`` characters.

    Columns of the highest ``rank`` are left out first where space is short. ``unless`` names a metric beside which this
    one is not shown: a GRPO step's loss, once there is a reward.
    """

    header: str
    metric: str
    write: Callable[[float], str]
    rank: int
    width: int = 7
    unless: str = ""


STEP_COLUMNS: Final[tuple[Column, ...]] = (
    Column(header="loss", metric=metrics.LOSS, write=plain, rank=0, unless=metrics.REWARD_MEAN),
    Column(header="reward", metric=metrics.REWARD_MEAN, write=plain, rank=0),
    Column(header="accuracy", metric=metrics.ACCURACY, write=percent, rank=0, width=8),
    Column(header="KL", metric=metrics.KL, write=plain, rank=3),
    Column(header="entropy", metric=metrics.ENTROPY, write=plain, rank=2),
    Column(header="clipped", metric=metrics.CLIP_FRACTION, write=percent, rank=4),
    Column(header="grad", metric=metrics.GRAD_NORM, write=plain, rank=3),
    Column(header="value", metric=metrics.VALUE_LOSS, write=plain, rank=5),
    Column(header="length", metric=metrics.LENGTH_MEAN, write=plain, rank=4, width=6),
    Column(header="tok/s", metric=metrics.TOKENS_PER_S, write=compact, rank=1, width=6),
    Column(header="time", metric=metrics.STEP_S, write=duration, rank=1, width=6),
)
_STEP_WIDTH: Final = 7
_GAP: Final = 2


def fitting(
    columns: Sequence[Column], seen: Collection[str], width: int, step_width: int = _STEP_WIDTH
) -> tuple[Column, ...]:
    """Those of `columns` whose metric was seen, as many as fit in `width` characters, least important left out first.

    The columns of rank 0 stay however narrow the terminal is.
    """
    present = [column for column in columns if column.metric in seen and column.unless not in seen]
    while step_width + sum(column.width + _GAP for column in present) > width:
        worst = max(reversed(present), key=lambda column: column.rank, default=None)  # the rightmost of equals
        if worst is None or worst.rank == 0:
            break
        present.remove(worst)
    return tuple(present)


def cells(columns: Sequence[Column], values: Mapping[str, float]) -> list[str]:
    """One text a column, padded to its width and gap; what is missing is a dash."""
    texts = [column.write(float(values[column.metric])) if column.metric in values else "-" for column in columns]
    return [text.rjust(column.width + _GAP) for text, column in zip(texts, columns, strict=True)]


def headers(columns: Sequence[Column]) -> list[str]:
    """The headers above `cells`."""
    return [column.header.rjust(column.width + _GAP) for column in columns]
