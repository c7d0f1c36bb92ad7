"""The rewards that have names, and the search for the function that a configuration names."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from podium.annotations import signature_of
from podium.errors import ConfigError
from podium.functions import load_function
from podium.rewards.trl import ListReward, of_one, takes_lists

__all__ = ["NAMED_REWARDS", "READS_ANSWER", "ItemReward", "RewardFn", "item_reward", "resolve_reward"]

ItemReward = Callable[[str, Any], float | Mapping[str, float]]  # Any: a row may be declared as dict or Mapping
"""``reward(completion, row)`` takes the completion's text and the row, which has "prompt" and "answer" beside the
columns of the data. It returns a finite number, or a mapping of named finite numbers that has "score"."""
RewardFn = ItemReward | ListReward
"""A reward of Podium's form, or of TRL's: ``reward(completions, **columns)``, see podium.rewards.trl."""

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

_NO_COMPLETION: Final = frozenset({"prompt", "question", "row", "answer", "ground_truth"})
"""Names of a first parameter that expects something else than the completion, which would score it without an error."""

_NO_ROW: Final = frozenset(
    {"completion", "response", "answer", "prompt", "ground_truth", "solution", "target", "label", "reference"}
)
"""Names of a second parameter that expects one column, and not the row."""


def resolve_reward(spec: str) -> RewardFn:
    """Return the reward that ``spec`` names: one of ``NAMED_REWARDS``, or a form of :func:`load_function`.

    Raises:
        ConfigError: The reward, its module, file or function does not exist, a library that the reward needs is not
            installed, or its module raised an exception.
    """
    return load_function(spec, key="reward.name", known=NAMED_REWARDS)


def item_reward(reward: RewardFn) -> ItemReward:
    """Return ``reward`` as a function of one completion and its row. Raises ConfigError if it cannot be called so."""
    if takes_lists(reward):
        return of_one(reward)
    by_item = cast("ItemReward", reward)
    name = getattr(reward, "__name__", type(reward).__name__)
    if inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__):
        raise ConfigError(f"the reward {name} is a coroutine function: write one that returns its score")
    try:
        signature = signature_of(reward)
    except (TypeError, ValueError):  # Some functions that are not written in Python have no signature.
        return by_item
    try:
        signature.bind("", {})
    except TypeError as error:
        raise ConfigError(
            f"the reward {name} is called with two positional arguments, (completion, row), and its signature is "
            f"{signature}: {error}"
        ) from None
    first, second = [*signature.parameters, "", ""][:2]
    if first in _NO_COMPLETION or second in _NO_ROW:
        raise ConfigError(
            f"the reward {name} has the signature {signature} and is called as {name}(completion, row), where row is a "
            f'mapping of the columns: write `def {name}(completion, row)`, and read row["answer"] in it'
        )
    return by_item
