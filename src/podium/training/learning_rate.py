"""The learning rate of each optimizer step: a linear warm-up, and the course after it."""

import math
from typing import Literal


def compute_learning_rate(
    peak: float,
    schedule: Literal["constant", "linear", "cosine"],
    step: int,
    warmup: int,
    end: int,
    warmed: int | None = None,
) -> float:
    """Return the learning rate of optimizer step ``step``, counted from 0.

    Args:
        peak: The learning rate at the end of the warm-up.
        schedule: The course of the learning rate after the warm-up.
        warmup: Steps over which the learning rate rises linearly to ``peak``.
        end: The step at which a learning rate that falls is 0. It is larger than ``warmup``.
        warmed: The steps of the warm-up so far, if they are not ``step``.
    """
    warmed = step if warmed is None else warmed
    if warmed < warmup:
        return peak * (warmed + 1) / warmup
    if schedule == "constant":
        return peak
    done = min(1.0, max(0, step - warmup) / (end - warmup))
    return peak * (1.0 - done if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done)))
