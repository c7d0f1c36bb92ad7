"""What a grader is told and what it answers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from podium.errors import ConfigError

__all__ = ["Grade", "RewardConfig"]


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Which reward, and what happens when it misbehaves.

    Raises:
        ConfigError: a value outside its range, named.
    """

    name: str = "exact"  # exact, fraction, gsm8k, math, reasoning_gym; or module:function, or path/file.py:function
    time_limit_s: float = 5.0  # for one completion; what runs longer is killed and gets failure_score
    processes: int = 0  # grading processes; 0: one a core, at most 8
    failure_score: float = 0.0  # score of a completion whose grading was killed (or failed, with on_error = score)
    on_error: Literal["raise", "score"] = "raise"  # a reward that raises, dies or returns NaN: stop, or failure_score
    correct_at: float = 1.0  # a completion is correct, for the accuracy, from this score on

    def __post_init__(self) -> None:
        checks = {
            "name": (bool(self.name.strip()), "a reward's name, or module:function"),
            "time_limit_s": (0 < self.time_limit_s < math.inf, "a positive number of seconds"),
            "processes": (self.processes >= 0, "at least 0 (0: one a core)"),
            "failure_score": (math.isfinite(self.failure_score), "a finite number"),
            "on_error": (self.on_error in ("raise", "score"), '"raise" or "score"'),
            "correct_at": (math.isfinite(self.correct_at), "a finite number"),
        }
        for name, (valid, expected) in checks.items():
            if not valid:
                raise ConfigError(f"reward.{name} = {getattr(self, name)!r}: expected {expected}")


@dataclass(frozen=True, slots=True)
class Grade:
    """The judgement on one completion.

    Attributes:
        score: what training uses, finite.
        parts: the named parts where the reward returned a mapping ("score" included), else empty.
        correct: ``score >= RewardConfig.correct_at``; never for an item that failed.
        error: why there is no score of the reward's own, else None.
        timed_out: the item ran over its time limit and was killed.
    """

    score: float
    parts: Mapping[str, float] = field(default_factory=dict)
    correct: bool = False
    error: str | None = None
    timed_out: bool = False
