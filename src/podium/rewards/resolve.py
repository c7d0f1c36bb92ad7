"""The rewards that have names, and the search for the function that a configuration names."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from podium.errors import ConfigError
from podium.functions import load_function
from podium.rewards.columns import declared_columns, declared_least
from podium.rewards.config import RewardConfig

Score = float | Mapping[str, float] | Sequence[float | None] | None
RewardFn = Callable[..., Score | Awaitable[Score]]
"""A reward function: ``reward(completion, row)``, where the row has "prompt" and "answer" beside the columns of the
data, or another form of podium.rewards.call_forms. It returns a finite number, a mapping of named finite numbers that
has "score", or None to abstain; or, with ``async def``, what is to be awaited for that."""
Rewards = RewardFn | Sequence[str | RewardFn]
"""One reward function, or several with the names of others, whose weighted sum is the score."""

NAMED_REWARDS: Final[Mapping[str, str]] = {
    "exact": "podium.rewards.text:exact",
    "fraction": "podium.rewards.text:fraction",
    "gsm8k": "podium.rewards.text:gsm8k",
    "overlong": "podium.rewards.text:overlong",
    "model": "podium.rewards.text:model",
}
"""The rewards of the core, and the module of each. Packages bring others through the entry point group ``GROUP``."""

GROUP: Final = "podium.rewards"

# What the rewards of the core declare by podium.rewards.reads, so that it is known without loading them.
_READ_COLUMNS: Final = {
    **dict.fromkeys(("exact", "fraction", "gsm8k"), frozenset({"answer"})),
    "overlong": frozenset[str](),
    "model": frozenset({"model_score"}),
}
_LEAST_SCORES: Final = {**dict.fromkeys(("exact", "fraction", "gsm8k"), 0.0), "overlong": -1.0}


@dataclass(frozen=True, kw_only=True)
class Source:
    """The reward functions or their names, the columns that every row has, if they are known, the run's steps, whether
    something else may score all completions, so that nobody calls the functions, and whether the score is the sum of
    several of them."""

    rewards: tuple[str | RewardFn, ...]
    columns: tuple[str, ...] | None = None
    steps: int = 0
    optional: bool = False
    is_sum: bool = False


def resolve_reward(spec: str) -> RewardFn:
    """Return the reward that ``spec`` names: one of ``NAMED_REWARDS``, one of an installed package, or a form
    of :func:`load_function`.

    Raises:
        ConfigError: The reward, its module, file or function does not exist, a library that the reward needs is not
            installed, or its module raised an exception.
    """
    return load_function(spec, key="reward.name", known=NAMED_REWARDS, group=GROUP)


def load_nearby(reward: str | RewardFn) -> RewardFn | None:
    """Return the function, where it is at hand or in a file or of an installed name; None where it is of the core or a
    module's, which only grading processes load. Raises ConfigError as :func:`resolve_reward` does."""
    if not isinstance(reward, str):
        return reward
    is_of_module = ":" in reward and not reward.rpartition(":")[0].endswith(".py")
    return None if reward in NAMED_REWARDS or is_of_module else resolve_reward(reward)


def columns_read(reward: str | RewardFn) -> frozenset[str] | None:
    """Return the columns that a reward declares by :func:`podium.rewards.reads`; None if that is not known.

    Raises ConfigError as :func:`resolve_reward` does.
    """
    if isinstance(reward, str) and reward in NAMED_REWARDS:
        return _READ_COLUMNS.get(reward)
    function = load_nearby(reward)
    return None if function is None else declared_columns(function)


def least_score(reward: str | RewardFn) -> float | None:
    """Return the lowest score that a reward declares by :func:`podium.rewards.reads`; None if that is not known.

    Raises ConfigError as :func:`resolve_reward` does.
    """
    if isinstance(reward, str) and reward in NAMED_REWARDS:
        return _LEAST_SCORES.get(reward)
    function = load_nearby(reward)
    return None if function is None else declared_least(function)


def list_rewards(config: RewardConfig, reward: Rewards | None) -> tuple[str | RewardFn, ...]:
    """Return the functions or names of a run: those that a script gives, or else those of the configuration."""
    if reward is None:
        return config.names
    return tuple(reward) if isinstance(reward, list | tuple) else (cast("str | RewardFn", reward),)


def check_weights(config: RewardConfig, count: int) -> None:
    """Check that there is a reward, and a weight for each if there are weights. Raises ConfigError."""
    if not count:
        raise ConfigError("there is no reward function: give one, or a list of at least one")
    if config.weights and len(config.weights) != count:
        raise ConfigError(
            f"reward.weights = {list(config.weights)}: expected one weight for each reward function, and the number of "
            f"functions is {count}"
        )


def name_of(reward: str | RewardFn, *, short: bool = False) -> str:
    """Return what errors call a reward: its name in the configuration, or ``module:function``.

    The ``short`` name is the function's own, as parts of the score are called.
    """
    if isinstance(reward, str):
        return reward.rpartition(":")[2].rpartition(".")[2] if short else reward
    function: Any = reward
    while hasattr(function, "func") and hasattr(function, "keywords"):  # functools.partial
        function = function.func
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", type(function).__qualname__)
    if short:
        return name.rpartition(".")[2].strip("<>")
    return f"{module}:{name}" if module else name
