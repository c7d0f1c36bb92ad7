"""Checks of a run's data, model and functions, which need them loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from transformers import GenerationConfig, PreTrainedTokenizerBase

from podium.errors import ConfigError
from podium.rewards import RewardFn
from podium.rollout.sampling import SamplingParams
from podium.runtime import Bound
from podium.trainer.prompts import PromptSource
from podium.workers import ModelConfig
from podium.workers.models import longest_text

if TYPE_CHECKING:
    from podium.trainer.roles import RoleWorkers

__all__ = ["check_columns", "check_given", "check_lengths", "names_of_given", "with_stop_tokens"]

_REWARD, _REWARD_NAME = "reward", "reward.name"


def check_lengths(model: ModelConfig, max_new_tokens: int, sources: Mapping[str, PromptSource]) -> None:
    """Compare the longest prompts, with a completion of ``max_new_tokens``, with the model's positions.

    Args:
        sources: Prompts by what they are called: "training", "held-out".

    Raises:
        ConfigError: A prompt does not fit. The message names the settings that would make it fit.
    """
    most = longest_text(model) if sources else None
    for what, source in sources.items():
        if most is not None and source.longest + max_new_tokens > most:
            room = most - max_new_tokens
            shorter = f", or data.max_prompt_tokens to {room} (data.overlong says what becomes of longer ones)"
            raise ConfigError(
                f"the longest {what} prompt has {source.longest} tokens, which with sampling.max_new_tokens = "
                f"{max_new_tokens} is more than the model's {most} positions: lower sampling.max_new_tokens"
                + (shorter if room > 0 else "")
            )


def check_columns(source: PromptSource, columns: Iterable[str], advantage: str) -> None:
    """Look for the columns of the data that the advantage estimator declares in every prompt.

    Raises:
        ConfigError: A prompt lacks a column. The message names the columns that it has.
    """
    for example in source.all().examples:
        if missing := [name for name in columns if name not in example.row]:
            raise ConfigError(
                f"algorithm.advantage = {advantage!r} reads the column {missing[0]!r} of the data, and a training "
                f"prompt has {', '.join(example.row)}"
            )


def with_stop_tokens(
    sampling: SamplingParams, model: ModelConfig, tokenizer: PreTrainedTokenizerBase
) -> SamplingParams:
    """Return ``sampling`` with stop tokens.

    Where the configuration names none, they are those of the tokenizer and of the model's own generation_config.json,
    which for chat models names the end of a turn too.
    """
    if sampling.stop_token_ids:
        return sampling
    found = dict.fromkeys([*_ids(tokenizer.eos_token_id), *_ids(_generation_config(model).eos_token_id)])
    return replace(sampling, stop_token_ids=tuple(found))


def _generation_config(model: ModelConfig) -> Any:
    if not model.path:
        return GenerationConfig()
    try:
        return GenerationConfig.from_pretrained(model.path)
    except OSError:  # a model need not have one
        return GenerationConfig()


def _ids(value: object) -> Iterable[int]:
    if isinstance(value, int):
        return [value]
    return cast("list[int]", value) if isinstance(value, list) else []


def names_of_given(reward: RewardFn | None, reward_name: str, workers: RoleWorkers | None) -> dict[str, str]:
    """Return names of the functions and classes that a script gives a run beside its configuration, by role.

    A configuration file cannot hold them, so a resume from it would go on with others and say nothing. Each checkpoint
    keeps their names instead. "reward" is the function, "reward.name" the configured name that it replaced.
    """
    given = {
        role: _name(worker.cls if isinstance(worker, Bound) else worker) for role, worker in (workers or {}).items()
    }
    return given if reward is None else {**given, _REWARD: _name(reward), _REWARD_NAME: reward_name}


def check_given(before: Mapping[str, str], now: Mapping[str, str], reward_name: str) -> None:
    """Compare what a script gave the run with what it gives the run's resume.

    Raises:
        ConfigError: A role's class is missing; or the reward function is, and ``reward.name`` is the one from before.
    """
    missing = [name for name in before if name not in now and name not in (_REWARD, _REWARD_NAME)]
    if _REWARD in before and _REWARD not in now and before.get(_REWARD_NAME) == reward_name:
        missing.append(_REWARD)
    if missing:
        what = ", ".join(f"{name} ({before[name]})" for name in missing)
        remedy = ", or name a reward with reward.name" if missing == [_REWARD] else ""
        raise ConfigError(
            f"this run was given its own {what} from Python, which its config.yaml cannot hold: resume it from the "
            f"script that gave it, with run.resume{remedy}"
        )


def _name(given: object) -> str:
    return f"{getattr(given, '__module__', '?')}.{getattr(given, '__qualname__', type(given).__name__)}"
