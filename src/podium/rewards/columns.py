"""The columns of a row that a reward reads: those that it declares, and those that its code shows without running."""

import dis
from collections.abc import Callable
from functools import partial
from types import CodeType
from typing import Any, Final, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_SKIPPED: Final = frozenset({"CACHE", "PUSH_NULL", "NOP", "EXTENDED_ARG"})
_ATTRIBUTE: Final = "podium_reads"
_LEAST: Final = "podium_least_score"


def reads(*columns: str, least: float | None = None) -> Callable[[F], F]:
    """Declare the columns that a reward needs of each row. ``reads()`` declares that it needs none.

    A row without such a column is named before the run starts. "answer" is the answer as text: an answer that is
    neither text nor messages is named, too, and a note says how many answers are empty. "model_score" is the score of
    the reward model: ``reward.path`` has to be set. A function of a module (``module:function``) is loaded in the
    grading processes alone, so its declaration is not checked; one of a file or of the script is.

    ``least`` is the lowest score that the function returns, if that is known. Penalties are then named before the start
    of a run whose advantage estimator takes no rewards below 0.

    >>> @reads("answer")
    ... def ends_right(completion, row):
    ...     return float(completion.endswith(row["answer"]))
    """

    def declare(function: F) -> F:
        setattr(function, _ATTRIBUTE, frozenset(columns))
        setattr(function, _LEAST, least)
        return function

    return declare


def declared_columns(reward: Callable[..., Any]) -> frozenset[str] | None:
    """Return the columns that a reward declares by :func:`reads`; None if it declares nothing."""
    return getattr(_unwrap(reward), _ATTRIBUTE, None)


def declared_least(reward: Callable[..., Any]) -> float | None:
    """Return the lowest score that a reward declares by :func:`reads`; None if it declares none."""
    return getattr(_unwrap(reward), _LEAST, None)


def _unwrap(reward: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(reward, partial):
        reward = reward.func
    return reward


def list_read_keys(code: CodeType | None, variable: str) -> list[str]:
    """Return the constant texts by which ``code``, or a function within it, reads ``variable[key]`` or
    ``variable.get(key)``.

    >>> def score(completion, row): return row["answer"] == completion or row.get("other")
    >>> list_read_keys(score.__code__, "row")
    ['answer', 'other']
    """
    if code is None:
        return []
    steps = [step for step in dis.get_instructions(code) if step.opname not in _SKIPPED]
    keys: list[str] = []
    for number, step in enumerate(steps):
        loaded = step.argval[-1] if step.argval and isinstance(step.argval, tuple) else step.argval
        if not ("LOAD_FAST" in step.opname or "LOAD_DEREF" in step.opname) or loaded != variable:
            continue
        following = steps[number + 1 : number + 4]
        if following and following[0].argval == "get" and following[0].opname in ("LOAD_METHOD", "LOAD_ATTR"):
            keys += [step.argval for step in following[1:2] if isinstance(step.argval, str)]
        elif len(following) > 1 and following[1].opname.startswith("BINARY_") and "LOAD_CONST" in following[0].opname:
            keys += [step.argval for step in following[:1] if isinstance(step.argval, str)]
    for constant in code.co_consts:
        keys += list_read_keys(constant, variable) if isinstance(constant, CodeType) else []
    return list(dict.fromkeys(keys))
