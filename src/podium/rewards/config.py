"""The settings of a grader, and the grade that it gives a completion."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field

from podium.config import section

__all__ = ["Grade", "RewardConfig"]


@section("reward")
class RewardConfig:
    """The reward function, and what happens when it fails."""

    name: str = Field(default="exact", pattern=r"\S")
    """This reward scores completions: exact, fraction, gsm8k, math, model, reasoning_gym, module:function, or
    path/file.py:function."""
    path: str = ""
    """A reward model is loaded from this directory or hub name. The reward finds its score in row["model_score"]."""
    time_limit_s: float = Field(default=5.0, gt=0, le=86400)
    """Grading one completion takes at most this many seconds. A grader that takes longer is killed."""
    processes: int = Field(default=0, ge=0, le=1024)
    """This many processes grade completions. 0 means one for each core, and 8 at most."""
    failure_score: float = Field(default=0.0, ge=-1e9, le=1e9)
    """A completion gets this score if its grader was killed, or failed while reward.on_error is score."""
    on_error: Literal["raise", "score"] = "raise"
    """A reward that raises, dies or returns NaN ends the run (raise) or gives failure_score (score)."""
    correct_at: float = Field(default=1.0, ge=-1e9, le=1e9)
    """A completion counts as correct in the accuracy if its score is at least this value."""
    memory_gib: float | None = Field(default=4.0, gt=0, le=2**20)
    """A grading process may take this much memory in addition to what importing the reward took. null sets no limit."""
    env: tuple[str, ...] = ()
    """The reward gets these environment variables, although their names look like those of secrets."""


@dataclass(frozen=True, slots=True)
class Grade:
    """The grade of one completion.

    Attributes:
        score: The finite number that training uses.
        parts: The named parts, with "score", if the reward returned a mapping; else empty.
        correct: Whether the score is at least ``RewardConfig.correct_at``. False if grading failed.
        error: Why the reward gave no score, so that ``failure_score`` is used; None if the score is the reward's own.
        timed_out: Whether grading ran over its time limit and was killed.
    """

    score: float
    parts: Mapping[str, float] = field(default_factory=dict)
    correct: bool = False
    error: str | None = None
    timed_out: bool = False
