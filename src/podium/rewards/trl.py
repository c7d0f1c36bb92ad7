"""Rewards of TRL's form, which take lists of completions and columns and return a list of scores.

    reward(prompts=[…], completions=[…], **columns) -> [score, …]

Grading is by the completion: each has its own time limit, its own place in a process that can be killed, and is graded
as soon as it is drawn. So such a reward is called with lists of one. What it returns for a completion must depend on
that completion alone.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeGuard

from podium.annotations import signature_of
from podium.errors import ConfigError

__all__ = ["ListReward", "of_one", "takes_lists"]

ListReward = Callable[..., Sequence[float]]

_OF_THE_TRAINER: Final = ("completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
_RESERVED: Final = ("prompt", "completion", *_OF_THE_TRAINER)


def takes_lists(reward: Callable[..., Any]) -> TypeGuard[ListReward]:
    """Return whether ``reward`` has a parameter named "completions", as TRL's rewards do."""
    return "completions" in _parameters(reward)


def of_one(reward: ListReward) -> Callable[[str, Mapping[str, Any]], float]:
    """Return ``reward`` as a function of one completion and its row.

    The completion is a list of one message where the row's prompt is a list of messages, and text otherwise.

    Raises:
        ConfigError: The reward is a coroutine function, or has a required parameter that only TRL's trainer provides,
            such as ``completion_ids``.
    """
    parameters = _parameters(reward)
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    named = [
        parameter
        for parameter in parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    needed = [parameter.name for parameter in named if parameter.default is parameter.empty]
    name = getattr(reward, "__qualname__", type(reward).__name__)
    if inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(getattr(reward, "__call__", None)):  # noqa: B004 - an object may have an async __call__
        raise ConfigError(f"the reward {name} is a coroutine function: write one that returns its scores")
    if missing := [name for name in needed if name in _OF_THE_TRAINER]:
        raise ConfigError(
            f"the reward {name} needs {missing[0]}, which only TRL's trainer has: give the parameter a default, or "
            "write a reward of (completion, row), which returns a number or a mapping of named numbers with 'score'"
        )

    def grade(completion: str, row: Mapping[str, Any]) -> float:
        prompt = row.get("prompt")
        answer = [{"role": "assistant", "content": completion}] if isinstance(prompt, list) else completion
        columns = {key: [value] for key, value in row.items() if key not in _RESERVED}
        arguments: dict[str, Any] = {**columns, "prompts": [prompt], "completions": [answer]}
        if absent := [name for name in needed if name not in arguments]:
            raise ValueError(f"the reward {name} needs the column {absent[0]!r}, and the row has {', '.join(row)}")
        return _only(
            reward(**(arguments if takes_all else {key: arguments[key] for key in parameters if key in arguments}))
        )

    return grade


def _only(scores: object) -> float:
    """The score in a list of one."""
    if not hasattr(scores, "__len__") or not hasattr(scores, "__getitem__") or isinstance(scores, str | Mapping):
        raise ValueError(f"returned {scores!r:.60} for a list of one completion: expected a list of one number")
    values: Any = scores
    if len(values) != 1:
        raise ValueError(f"returned {len(values)} scores for a list of one completion: expected one")
    if values[0] is None:
        raise ValueError(
            "returned None. In TRL, None leaves a completion to the other rewards; a run of Podium has one reward, "
            "so return a number"
        )
    return values[0]


def _parameters(reward: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return signature_of(reward).parameters
    except (TypeError, ValueError):  # some functions that are not written in Python have no signature
        return {}
