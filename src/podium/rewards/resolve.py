"""The rewards that have names, and the search for the function that a configuration names."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

from podium.errors import ConfigError
from podium.functions import load_function

__all__ = ["NAMED_REWARDS", "READS_ANSWER", "RewardFn", "check_arguments", "resolve_reward"]

RewardFn = Callable[[str, Any], float | Mapping[str, float]]  # Any: a row may be declared as dict or Mapping
"""``reward(completion, row)`` takes the completion's text and the row, which has "prompt" and "answer" beside the
columns of the data. It returns a finite number, or a mapping of named finite numbers that has "score"."""

NAMED_REWARDS: Final[Mapping[str, str]] = {
    "exact": "podium.rewards.text:exact",
    "fraction": "podium.rewards.text:fraction",
    "gsm8k": "podium.rewards.text:gsm8k",
    "model": "podium.rewards.model:model",
    "math": "podium.rewards.symbolic:mathematics",
    "reasoning_gym": "podium.rewards.gym:reasoning_gym",
}
"""The rewards that Podium brings, and the module of each."""

READS_ANSWER: Final = frozenset({"exact", "fraction", "gsm8k", "math"})
"""Those of Podium's rewards that compare with the row's answer as text."""


def resolve_reward(spec: str) -> RewardFn:
    """Return the reward that ``spec`` names: one of ``NAMED_REWARDS``, or a form of :func:`load_function`.

    Raises:
        ConfigError: The reward, its module, file or function does not exist, or a library that the reward needs is not
            installed. What the module itself raises while it is imported passes through.
    """
    return load_function(spec, key="reward.name", known=NAMED_REWARDS)


def check_arguments(reward: RewardFn) -> None:
    """Raise ConfigError unless ``reward`` can be called with a completion and its row."""
    try:
        signature = inspect.signature(reward)
    except (TypeError, ValueError):  # Some functions that are not written in Python have no signature.
        return
    try:
        signature.bind("", {})
    except TypeError as error:
        name = getattr(reward, "__qualname__", type(reward).__name__)
        raise ConfigError(
            f"the reward {name} is called with two positional arguments, (completion, row), and its signature is "
            f"{signature}: {error}"
        ) from None
