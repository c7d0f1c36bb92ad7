"""The settings by which runs measure their held-out figures: what has to be equal for these to compare.

The module imports no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, Final, cast

from podium.rollout.tasks.config import DataConfig
from podium.rollout.tasks.rows import is_generated
from podium.runs.run_reader import RunRecord, is_run
from podium.telemetry.held_out import ACCURACY, Metric

TOKENIZER: Final = "the tokenizer"
OF_TRAINING: Final = frozenset({"train_items"})
"""Keys of the section data that concern training alone."""
OF_BOTH_SIDES: Final = frozenset({"train", "holdout", "train_split"})
"""Keys of the section data that decide held-out examples only where these are taken from the training data."""
_ALWAYS: Final = ("eval.items",)
_OF_COMPLETIONS: Final = (
    *("eval.temperature", "reward", "environment", "sampling.max_new_tokens", "sampling.stop_token_ids"),
)
_OF_PREFERENCES: Final = ("algorithm.loss", "algorithm.options")
_MOST_RUNS: Final = 8  # that are followed from one model to the one before
_FILE: Final = "tokenizer.json"


def select_measures(
    settings: Mapping[str, Any], metric: Metric | None = None, contents: Mapping[tuple[str, str], str] | None = None
) -> dict[str, str]:
    """Return what the settings of a run say about the measuring of a held-out figure, by sections and keys.

    Every key of the section ``data`` counts that does not concern training alone, and the tokenizer does where the
    figure counts tokens. A key that the settings lack has its default, because an earlier version had no such key.

    Args:
        settings: Values by the dotted names of their keys.
        metric: The figure; None stands for all that a run has.
        contents: What the files hold that the settings name, as :attr:`.RunRecord.contents`. Those count whose keys do.
    """
    trained, evaluated = [*_list_trained(settings)], [*_list_evaluated(settings)]
    takes_part = not evaluated or any(source in trained and is_generated(source) for source in evaluated)
    usual, measures = DataConfig(), dict[str, str]()
    names = _ALWAYS if metric is not None and metric.is_of_answers else (*_ALWAYS, *_OF_COMPLETIONS)
    learns_preferences = "algorithm.loss" in settings and any(key.startswith("batch.examples") for key in settings)
    if learns_preferences and (metric is None or metric.is_of_answers):
        names = (*names, *_OF_PREFERENCES)
    elif learns_preferences and metric == Metric(ACCURACY):
        names = (*names, "algorithm.loss")
    for name in names:
        measures[name] = _write(_select(settings, name))
    for field in fields(cast("Any", DataConfig)):
        key = f"data.{field.name}"
        if field.name in OF_TRAINING or (field.name in OF_BOTH_SIDES and not takes_part):
            continue
        values = _select(settings, key) or {key: getattr(usual, field.name)}
        if field.name == "train":
            values = {key: sorted(trained)}  # weights and order are those of training
        elif field.name == "options":
            values = _choose_options(values, {*trained, *evaluated}, {*(trained if takes_part else []), *evaluated})
        measures[key] = _write(values)
    measures |= _choose_contents(contents or {}, [*measures])
    if metric is None or metric.counts_tokens:
        measures[TOKENIZER] = find_tokenizer(settings)
    return measures


def name_content(key: str, path: str) -> str:
    """Name what a file holds, as a thing in which runs differ.

    >>> name_content("data.eval", "hard.jsonl")
    'the content of hard.jsonl (data.eval)'
    """
    return f"the content of {path} ({key})"


def list_differing(runs: list[dict[str, str]]) -> list[str]:
    """Return the sections and keys in which what :func:`select_measures` returns for several runs differs.

    A key that only some of the runs have, because others have held-out data of their own, is not compared with these.
    """
    keys = dict.fromkeys(key for run in runs for key in run)
    differing = [key for key in keys if len({run[key] for run in runs if key in run}) > 1]
    tokenizers = {run[TOKENIZER] for run in runs if TOKENIZER in run}
    if TOKENIZER in differing and len({_read_vocabulary(name) or name for name in tokenizers}) == 1:
        differing.remove(TOKENIZER)
    return differing


def find_tokenizer(settings: Mapping[str, Any], depth: int = _MOST_RUNS) -> str:
    """Return the directory, the hub name or the alphabet of a run's tokenizer. The model of another run has that of the
    other run, so that a run which trains a model further has the same one."""
    name = str(settings.get("model.tokenizer") or settings.get("model.path") or "")
    folder = Path(name)
    for parent in folder.parents if depth and folder.is_dir() else ():
        if is_run(parent) and (run := RunRecord(parent)).is_own:
            return find_tokenizer(run.settings, depth - 1) or name
    return name


@cache
def _read_vocabulary(name: str) -> str:
    """A digest of the tokens of a tokenizer and their ids; "" where this machine does not have its file."""
    file = Path(name) / _FILE
    if not Path(name).is_dir():
        from huggingface_hub import try_to_load_from_cache

        with suppress(ValueError):  # raised for what is no name of the hub
            file = Path(str(try_to_load_from_cache(name, _FILE)))
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8") if file.is_file() else "")
        tokens = [
            content["model"]["vocab"],
            sorted((token["id"], token["content"]) for token in content["added_tokens"]),
        ]
    except (OSError, ValueError, LookupError, TypeError):
        return ""
    return hashlib.sha256(json.dumps(tokens, sort_keys=True).encode()).hexdigest()


def _select(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if f"{key}.".startswith(f"{name}.")}


def _write(values: Mapping[str, Any]) -> str:
    values = {key: list(cast("Any", value)) if isinstance(value, tuple) else value for key, value in values.items()}
    return str(sorted(values.items())) if any(value not in (None, "", {}, []) for value in values.values()) else ""


def _list_trained(settings: Mapping[str, Any]) -> Iterator[str]:
    """The sources of data.train: a text, a list, or the keys of a mapping."""
    for key, value in _select(settings, "data.train").items():
        if source := key.removeprefix("data.train").removeprefix("."):
            yield source
        else:
            yield from _list_texts(value)


def _list_evaluated(settings: Mapping[str, Any]) -> Iterator[str]:
    """The sources of data.eval: a text, a list, or the values of a mapping."""
    for value in _select(settings, "data.eval").values():
        yield from _list_texts(value)


def _list_texts(value: object) -> list[str]:
    if isinstance(value, str):
        return [value] if value else []
    return [str(text) for text in cast("list[Any]", value)] if isinstance(value, list | tuple) else []


def _choose_contents(contents: Mapping[tuple[str, str], str], names: list[str]) -> dict[str, str]:
    """The contents of the files that are named by one of the sections and keys ``names``, by what they are called."""
    return {
        name_content(key, path): content
        for (key, path), content in contents.items()
        if any(f"{key}.".startswith(f"{name}.") for name in names)
    }


def _choose_options(values: dict[str, Any], sources: set[str], measuring: set[str]) -> dict[str, Any]:
    """The options of the sources ``measuring`` alone, where all of ``sources`` have options of their own."""

    def lies_below(key: str, names: set[str]) -> bool:
        return any(f"{key}.".startswith(f"data.options.{name}.") for name in names)

    if not all(lies_below(key, sources) for key in values):
        return values
    return {key: value for key, value in values.items() if lies_below(key, measuring)}
