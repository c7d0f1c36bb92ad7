"""How the two halves of training steps follow one another in time: a schedule is one function over :class:`Steps`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Final

from podium.errors import ConfigError
from podium.functions import load_function
from podium.trainer.schedules.steps import Steps
from podium.trainer.schedules.sync import sync

__all__ = ["SCHEDULES", "Schedule", "Steps", "load_schedule", "sync"]

Schedule = Callable[[Steps], None]

SCHEDULES: Final[dict[str, Schedule]] = {"sync": sync}

_WRONG_KINDS: Final = (
    (inspect.iscoroutinefunction, "a coroutine function"),
    (inspect.isgeneratorfunction, "a generator function"),
    (inspect.isasyncgenfunction, "an asynchronous generator function"),
    (inspect.isclass, "a class"),
)


def load_schedule(name: str) -> Schedule:
    """Return the schedule that ``run.schedule`` names: ``sync``, ``module:function`` or ``path/file.py:function``.

    Raises:
        ConfigError: There is no such function, and the message has the nearest name that exists; or the name is not
            that of a plain function that can be called with one argument.
    """
    found = load_function(name, key="run.schedule", known=SCHEDULES)
    subject = f"run.schedule = {name!r}: {name.rpartition(':')[2]!r}"
    for is_kind, kind in _WRONG_KINDS:
        if is_kind(found):
            raise ConfigError(f"{subject} is {kind}; write a plain function")
    try:
        inspect.signature(found).bind(None)
    except (TypeError, ValueError):  # ValueError: a built-in function without a signature
        raise ConfigError(f"{subject} must take exactly one argument, the steps") from None
    return found
