"""The settings of a grader, and the grade that it gives a completion."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from pydantic import Field

from podium.config import section
from podium.errors import ConfigError


@section("reward")
class RewardConfig:
    """The reward function, and what happens when it fails."""

    name: str | tuple[str, ...] = "exact"
    """This reward, or the sum of the rewards of this list, scores completions: exact, fraction, gsm8k, model, overlong,
    module:function, path/file.py:function, or one of an installed package, such as choice, code, format, length, math,
    reasoning_gym and repetition."""
    weights: tuple[float, ...] = ()
    """The rewards of a list have these weights in the sum. An empty list gives each the weight 1."""
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
    correct_at: float | None = Field(default=None, ge=-1e9, le=1e9)
    """A completion counts as correct in the accuracy if its score is at least this value. null means that a completion
    with the score 1 is correct, and that there is no accuracy where scores are neither 0 nor 1, or are the sum of
    several rewards."""
    memory_gib: float | None = Field(default=4.0, gt=0, le=2**20)
    """A grading process may take this much memory in addition to what importing the reward took. null sets no limit."""
    env: tuple[str, ...] = ()
    """The reward gets these environment variables, although their names look like those of secrets."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the rewards."""
        return (self.name,) if isinstance(self.name, str) else self.name

    def __post_init__(self) -> None:
        if not self.names or not all(name.strip() for name in self.names):
            raise ConfigError(
                f"reward.name = {self.name!r}: expected text or a list; each item is text, and neither may be empty"
            )

    def adds_up(self, count: int) -> bool:
        """Return whether the score is the sum of several of ``count`` reward functions. Those of weight 0 are not in
        the sum."""
        return sum(map(bool, self.weights or (1.0,) * count)) > 1

    def is_correct(self, score: float, *, is_sum: bool = False) -> bool | None:
        """Return whether a completion with this score is correct; None for a score that is no verdict.

        The sum of several rewards is none without ``correct_at``: of a wrong answer in the right format it may be 1.
        """
        if self.correct_at is not None:
            return score >= self.correct_at
        return bool(score) if score in (0, 1) and not is_sum else None


@dataclass(frozen=True, slots=True)
class Grade:
    """The grade of one completion.

    Attributes:
        score: The finite number that training uses.
        parts: The named parts beside the score, if the reward returned a mapping; by function where there are several,
            of which one may be called "score"; else empty.
        correct: Whether the completion is correct, by :meth:`RewardConfig.is_correct`; None where the score does not
            say. False if grading failed, and None if the score would have been the sum of several rewards, of which
            none says what is correct.
        error: Why the reward gave no score, so that ``failure_score`` is used; None if the score is the reward's own.
        timed_out: Whether grading ran over its time limit and was killed.
        abstained: Whether every reward function returned None, so that there is no score. ``score`` is NaN then.
        extra: What the reward logged of the completion as text, by name.
        logged: The names of those parts that functions only logged: figures of which nothing is learned.
        ruled: The score that a rule gave in place of a reward, as where grading failed, or a session reached a limit;
            None if no rule did. With ``error`` it is the score. Parts have it, too: see :meth:`with_parts`.
    """

    score: float
    parts: Mapping[str, float] = field(default_factory=dict)
    correct: bool | None = False
    error: str | None = None
    timed_out: bool = False
    abstained: bool = False
    extra: Mapping[str, str] = field(default_factory=dict)
    logged: frozenset[str] = frozenset()
    ruled: float | None = None

    def __post_init__(self) -> None:
        if self.error is not None and self.ruled is None:
            object.__setattr__(self, "ruled", self.score)

    def with_parts(self, names: Iterable[str]) -> Grade:
        """Return this with the score of a rule, if one gave it, in those parts of these ``names`` that it lacks."""
        if self.ruled is None or not (absent := [name for name in names if name not in self.parts]):
            return self
        return replace(self, parts={**self.parts, **dict.fromkeys(absent, self.ruled)})


def list_learned_parts(grades: Iterable[Grade]) -> list[str]:
    """Return the names of the parts of ``grades`` of which something is learned, in order."""
    grades = [*grades]
    logged = frozenset[str]().union(*(grade.logged for grade in grades))
    return sorted({name for grade in grades for name in grade.parts} - logged)
