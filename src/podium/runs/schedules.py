"""The schedules that ``run.schedule`` names, and what a schedule declares about itself."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from podium.errors import ConfigError
from podium.functions import load_function

F = TypeVar("F", bound=Callable[..., Any])

SCHEDULES: Final = {
    "sync": "podium.trainer.schedules.sync:sync",
    "one_step_off": "podium.trainer.schedules.one_step_off:one_step_off",
    "asynchronous": "podium.trainer.schedules.asynchronous:asynchronous",
}
"""Podium's own schedules by name, and where each is."""

_ATTRIBUTE: Final = "podium_declaration"


@dataclass(frozen=True, kw_only=True)
class ScheduleDeclaration:
    """What a schedule needs besides the usual: a decorator for a function of your own.

    >>> @ScheduleDeclaration(staleness=1)
    ... def one_step_off(steps): ...

    Attributes:
        staleness: No token that trains was drawn by weights that are more than this many updates older than the newest
            ones. Each step checks this before it trains. With 0 the halves never run beside each other, so that a
            generator may leave its device while the policy learns, and completions need no correction. None says that
            nothing is known.
        side_by_side: Up to ``run.max_staleness + 1`` steps are collected at the same time, in parts of a few prompts,
            and no token is more than ``run.max_staleness`` updates older than the newest weights.
        overlaps: Halves of different steps run at the same time. A run whose generator reads the policy's own weights
            is refused before it starts.
    """

    staleness: int | None = None
    side_by_side: bool = False
    overlaps: bool = False

    def __post_init__(self) -> None:
        if self.side_by_side and self.staleness is not None:
            raise ConfigError(
                f"ScheduleDeclaration(staleness={self.staleness}, side_by_side=True): leave out staleness, which is "
                "run.max_staleness where several steps are collected at the same time"
            )
        if self.staleness is not None and self.staleness < 0:
            raise ConfigError(f"ScheduleDeclaration(staleness={self.staleness}): expected 0 or more")
        if self.staleness == 0 and self.overlaps:
            raise ConfigError("ScheduleDeclaration(staleness=0, overlaps=True): halves that overlap have older weights")

    def __call__(self, function: F) -> F:
        """Attach this declaration to ``function``, and return ``function``."""
        setattr(function, _ATTRIBUTE, self)
        return function


def declaration_of(schedule: Callable[..., Any]) -> ScheduleDeclaration:
    """Return what a schedule declares."""
    return getattr(schedule, _ATTRIBUTE, ScheduleDeclaration())


def find_schedule(name: str) -> Callable[..., Any]:
    """Load the function that ``run.schedule`` names. Raises ConfigError as :func:`load_function` does."""
    return load_function(name, key="run.schedule", known=SCHEDULES)
