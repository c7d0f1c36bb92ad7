"""Converts numbers of files for the page."""

from typing import Any

__all__ = ["finite", "number"]


def finite(value: Any) -> float | None:
    """Return ``value`` if it is a finite number, else None."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300 else None


def number(value: Any) -> float | None:
    """Return ``value`` with six digits, which is enough for a picture, if it is a finite number; else None."""
    figure = finite(value)
    return float(f"{figure:.6g}") if isinstance(figure, float) else figure
