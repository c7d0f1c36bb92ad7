"""From what a reward returned to a grade, or to the error that ends the run."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan

from podium.errors import RewardError
from podium.rewards.config import Grade, RewardConfig
from podium.rewards.panel import Result
from podium.rewards.resolve import RewardFn

__all__ = ["Source", "make_grade", "show_traceback"]


@dataclass(frozen=True, kw_only=True)
class Source:
    """The reward functions or their names, the columns that every row has, if they are known, the run's steps, and
    whether something else may score all completions, so that nobody calls the functions."""

    rewards: tuple[str | RewardFn, ...]
    columns: tuple[str, ...] | None = None
    steps: int = 0
    optional: bool = False


def make_grade(result: Result, config: RewardConfig, label: str, item: str, remedy: str = "") -> Grade | RewardError:
    """Return the grade of a completion, or the error that its reward's failure is.

    Args:
        result: What the reward returned, or why it did not.
        label: The reward, as errors call it.
        item: The completion, as errors call it.
        remedy: What else to say of a failure.
    """
    if not result.problem and result.score is None:
        return Grade(nan, result.parts, abstained=True, extra=result.extra)
    if not result.problem and result.score is not None:
        return Grade(result.score, result.parts, config.is_correct(result.score), extra=result.extra)
    problem = result.problem
    if over_memory := result.limit == "memory" and config.memory_gib is not None:
        problem = f"ran over {config.memory_gib:g} GiB of memory (reward.memory_gib)"
    if result.limit == "time" or over_memory or config.on_error == "score":
        return Grade(config.failure_score, error=problem, timed_out=result.limit == "time")
    error = RewardError(
        f"{item}: the reward {label} {problem}; expected a finite number, or a mapping of named finite numbers with "
        '"score": repair the reward, or set reward.on_error to score, which gives such items '
        f"{config.failure_score:g} and goes on{remedy}{show_traceback(result)}"
    )
    error.__cause__ = result.error
    return error


def show_traceback(result: Result) -> str:
    """Return the end of a message that has the traceback of a reward; "" without one."""
    return f"\n\nIn the reward:\n{result.traceback.rstrip()}" if result.traceback else ""
