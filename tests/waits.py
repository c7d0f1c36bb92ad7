"""How tests wait: for a condition, with a deadline that only what hangs passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from podium_testing import target

__all__ = ["LONG_S", "all_end", "wait_until"]

LONG_S = 60.0  # what a test must meet, however busy the machine is


def wait_until(condition: Callable[[], object]) -> bool:
    """Wait until ``condition`` is true. Return False if it is still false after a minute."""
    return target.wait_for(lambda: bool(condition()), LONG_S)


def all_end(pids: Iterable[int]) -> bool:
    """Wait until none of the processes ``pids`` runs. Return False if one still runs after a minute."""
    return not target.all_gone(pids, LONG_S)
