"""Which cases of a grid run every day: one of each kind. ``make test-all`` runs the others, too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

__all__ = ["mark_others"]


def mark_others(cases: Iterable[Any], is_everyday: Callable[[Any], bool]) -> list[Any]:
    """Return the parameters of a test for ``pytest.mark.parametrize``, those that are not everyday as exhaustive.

    A case that is a tuple has the values of several parameters.

    >>> [param.marks for param in mark_others("ab", "a".__eq__)]
    [(), (MarkDecorator(mark=Mark(name='exhaustive', args=(), kwargs={})),)]
    """
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=() if is_everyday(case) else pytest.mark.exhaustive
        )
        for case in cases
    ]
