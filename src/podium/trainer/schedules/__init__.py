"""Schedules arrange the two halves of training steps in time. A schedule is one function over :class:`Steps`."""

from collections.abc import Callable

from podium.runs.schedules import ScheduleDeclaration
from podium.trainer.schedules.steps import Steps
from podium.trainer.schedules.sync import sync

__all__ = ["Schedule", "ScheduleDeclaration", "Steps", "sync"]

Schedule = Callable[[Steps], None]
