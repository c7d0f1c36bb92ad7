"""Typed settings that a command does not read, and what counts in their place. This module imports no torch.

Settings of a run or of a file are meant for other commands too; those on the command line are meant for this one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Final

from podium.config import parse_overrides
from podium.errors import ConfigError
from podium.runs.config import InferenceConfig
from podium.runs.named_files import is_needed
from podium.runs.run_reader import flatten
from podium.runs.sections import EvalSampling

ListUnread = Callable[[InferenceConfig], Mapping[str, str]]
"""A function that returns the keys and sections that a command does not read, each with what counts instead."""

_OF_REQUESTS: Final = ("n", "temperature", "top_p", "top_k", "max_new_tokens")
_ROWS: Final = (
    *("train", "eval", "holdout", "train_items", "prompt_column", "answer_column", "bad_rows", "split_turns"),
    *("train_split", "eval_split", "options"),
)
_LENGTHS: Final = ("max_prompt_tokens", "overlong")
_TIMES: Final = ("every", "at_start", "stop_at", "patience")


def refuse_unread(overrides: Sequence[str], unread: Mapping[str, str]) -> None:
    """Refuse typed settings that have no effect. Raises ConfigError, with a line for each."""
    typed = dict.fromkeys(key for key, _ in flatten(dict(parse_overrides(InferenceConfig, overrides))))
    lines = [
        f"--{key} has no effect: {reason}"
        for key in typed
        for name, reason in unread.items()
        if is_needed(key, (name,))
    ]
    if lines:
        raise ConfigError("\n".join(lines))


def list_unread_by_eval(config: InferenceConfig) -> dict[str, str]:
    """What ``podium eval`` does not read: what ``eval.temperature`` replaces, and when a run evaluates."""
    unread = _name_all("eval", _TIMES, "podium eval evaluates once; leave it out")
    if config.scores_answers:
        reason = (
            f"eval.metric = {config.eval.metric!r} scores held-out answers, and the model draws none; leave it out, or "
            "set eval.metric to accuracy or reward"
        )
        return unread | dict.fromkeys(("sampling", "engine", "reward", "environment", "eval.temperature"), reason)
    draws = config.eval.sampling.apply(config.sampling)
    others = [name for name in _OF_REQUESTS if getattr(draws, name) != getattr(config.sampling, name)]
    reason = f"evaluations draw by eval.temperature: write --eval.temperature '{{{_list_entries(config)}}}'"
    return unread | _name_all("sampling", others, reason)


def _list_entries(config: InferenceConfig) -> str:
    """The entries of ``eval.temperature`` with which evaluations draw as ``sampling`` says."""
    entries = {"temperature": config.sampling.temperature}
    for field in fields(EvalSampling):
        value = getattr(config.sampling, field.name)
        limited = field.name != "max_new_tokens" or config.eval.sampling.max_new_tokens is not None
        if limited and value != getattr(EvalSampling(), field.name):
            entries[field.name] = value
    return ", ".join(f"{name}: {value}" for name, value in entries.items())


def list_unread_by_sample(_config: InferenceConfig) -> dict[str, str]:
    """What ``podium sample`` does not read without ``--best``: rows, and what scores completions."""
    rows = "prompts are those of --prompt, or the lines of stdin; those of data.train are for --best FILE"
    reason = "completions are only printed; podium eval and podium sample --best score completions"
    return _name_all("data", _ROWS, rows) | _without_scores(reason)


def list_unread_by_best(_config: InferenceConfig) -> dict[str, str]:
    """What ``podium sample --best`` does not read."""
    sessions = "completions are single answers, and no session is played; leave it out"
    return {
        "eval": "nothing is evaluated, and completions are drawn by sampling.*; leave it out",
        "environment.options": sessions,
    }


def list_unread_by_service(_config: InferenceConfig) -> dict[str, str]:
    """What a model that answers requests does not read: what is the requests' own, rows, and what scores answers."""
    sampling = (
        "each request has its own n, temperature, top_p, top_k and max_tokens; of this section only stop_token_ids "
        "counts"
    )
    rows = "prompts are those of the requests; leave it out"
    return {
        **_name_all("sampling", _OF_REQUESTS, sampling),
        **_name_all("data", (*_ROWS, *_LENGTHS), rows),
        **_without_scores("requests are answered, and answers are not scored; leave it out"),
    }


def _name_all(section: str, names: Sequence[str], reason: str) -> dict[str, str]:
    return {f"{section}.{name}": reason for name in names}


def _without_scores(reason: str) -> dict[str, str]:
    return dict.fromkeys(("reward", "environment", "eval"), reason)
