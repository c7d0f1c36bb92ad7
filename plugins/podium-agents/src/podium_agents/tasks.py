"""The tasks of an environment: rows of the data, or of the environment itself, which are not encoded."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from transformers import PreTrainedTokenizerBase

from podium.errors import ConfigError, DataError
from podium.rollout.environments import EnvironmentConfig
from podium.rollout.tasks import DataConfig, Example, load_examples
from podium.rollout.tasks.bad_rows import BadRows
from podium.rollout.tasks.chat_encoder import ChatEncoder
from podium.rollout.tasks.encode import check_media
from podium.rollout.tasks.examples import map_columns
from podium.trainer.prompts import Tasks
from podium_agents.environments.resolve import resolve_environment

__all__ = ["check_conversations", "load_tasks", "make_tasks"]


_DEEPEST: Final = 50  # nested levels of a task that are compared
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")


def make_tasks(examples: Sequence[Example]) -> Tasks:
    """Return the tasks of rows, with a checksum of the content of all."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(json.dumps(_comparable(example.row)).encode())
    return Tasks(examples, digest.hexdigest()[:16])


def check_conversations(tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> None:
    """Check that there is a chat template, by which sessions write conversations. Raises ConfigError if not."""
    ChatEncoder(tokenizer, data).text([{"role": "user", "content": "1 + 1 ="}], opened=True)


def load_tasks(
    data: DataConfig, environment: EnvironmentConfig, split: str, seed: int = 0, limit: int | None = None
) -> Tasks:
    """Load the tasks of "train" or "test": those of the data, or, without data, those of the environment.

    Raises:
        ConfigError, DataError: Neither the data nor the environment have tasks.
    """
    side: Any = split
    if data.train or (split == "test" and data.eval):
        examples = _without_media(load_examples(data.train, data, side, seed, limit, read=_read_task), data)
        # A session begins with the row's own system message.
        return make_tasks([replace(e, row={**e.row, "prompt": e.prompt}) for e in examples])
    tasks = resolve_environment(environment).tasks
    if tasks is None:
        raise ConfigError(
            f"data.train is not set, and environment.name = {environment.name!r} has no tasks of its own: set "
            "data.train"
        )
    limit = data.train_items if limit is None and split == "train" else limit
    rows = [dict(row) for row in tasks(side)][:limit]
    if not rows:
        raise ConfigError(f"environment.name = {environment.name!r} has no tasks for {split!r}")
    return make_tasks([Example(_show(row), _answer(row), row) for row in rows])


_read_task: Final = partial(map_columns, in_session=True)


def _without_media(examples: Sequence[Example], data: DataConfig) -> list[Example]:
    """Return the tasks without images, video and audio, which a session could not show to the model.

    Raises:
        DataError: A task has one, and ``data.bad_rows`` refuses it.
    """
    bad, kept = BadRows(data.bad_rows), list[Example]()
    for example in examples:
        try:
            with example.name_in_errors():
                check_media(example, ())
            kept.append(example)
        except DataError as error:
            bad.add(error)
    bad.settle(len(examples))
    if bad:
        bad.tell(len(bad), len(examples))
    return kept


def _comparable(value: Any, depth: int = 0) -> Any:
    """Return the content of a task as plain JSON, which is equal in every process for equal tasks. Rows of an
    environment may hold anything: keys of any type, arrays, and objects of any class."""
    if value is None or isinstance(value, str | int | float):
        return value
    if depth > _DEEPEST:
        return type(value).__qualname__
    deeper = partial(_comparable, depth=depth + 1)
    if isinstance(value, Mapping):
        return sorted(([deeper(key), deeper(entry)] for key, entry in value.items()), key=json.dumps)
    if isinstance(value, list | tuple):
        return [*map(deeper, value)]
    if isinstance(value, set | frozenset):
        return sorted(map(deeper, value), key=json.dumps)
    if callable(plain := getattr(value, "tolist", None)):  # arrays and tensors
        return deeper(plain())
    text = _ADDRESS.sub("", repr(value))
    return (
        [text, deeper(vars(value))] if type(value).__repr__ is object.__repr__ and hasattr(value, "__dict__") else text
    )


def _show(row: Mapping[str, Any]) -> Any:
    """Return a text for people: the task's prompt, or the whole task if the prompt is neither text nor messages."""
    prompt = row.get("prompt")
    if isinstance(prompt, str) or _is_conversation(prompt):
        return prompt
    try:
        text = json.dumps(row, default=_describe_task, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):  # keys of other types, or a row that contains itself
        text = _ADDRESS.sub("", repr(row))
    return text[:2000]


def _is_conversation(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(isinstance(message, Mapping) and "role" in message for message in prompt)


def _describe_task(value: Any) -> Any:
    """Return a text for a value that JSON cannot hold. It is equal in every process."""
    return sorted(value, key=repr) if isinstance(value, set | frozenset) else _ADDRESS.sub("", str(value))


def _answer(row: Mapping[str, Any]) -> str | None:
    return None if row.get("answer") is None else str(row["answer"])
