"""The tasks of an environment: rows of the data, or of the environment itself, which are not encoded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from podium.errors import ConfigError
from podium.rollout.environments.config import EnvironmentConfig
from podium.rollout.environments.resolve import resolve_environment
from podium.rollout.tasks import DataConfig, Example, load_examples
from podium.trainer.prompts import Prompt

__all__ = ["TaskPrompt", "Tasks", "load_tasks"]


class TaskPrompt(Prompt):
    """A task of an environment. What the model reads is made in its sessions; the text here is for people."""

    @cached_property
    def text(self) -> str:
        return self.shown


class Tasks(Sequence[TaskPrompt]):
    """The tasks of one side of the data, or of the environment itself."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self.examples = [*examples]
        rows = json.dumps([example.row for example in self.examples], sort_keys=True, default=str)
        self.digest = hashlib.sha256(rows.encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        return TaskPrompt(torch.empty(0, dtype=torch.int64), self.examples[place], str)


def load_tasks(
    data: DataConfig, environment: EnvironmentConfig, split: str, seed: int = 0, limit: int | None = None
) -> Tasks:
    """Load the tasks of "train" or of "test": those of the data, or of the environment where there are no data.

    Raises:
        ConfigError, DataError: There are none.
    """
    side: Any = split
    if data.train or (split == "test" and data.eval):
        return Tasks(load_examples(data.train, data, side, seed, limit))
    found = resolve_environment(environment).tasks
    if found is None:
        raise ConfigError(
            f"data.train is not set, and environment.name = {environment.name!r} has no tasks of its own: set "
            "data.train"
        )
    rows = [dict(row) for row in found(side)][:limit]
    if not rows:
        raise ConfigError(f"environment.name = {environment.name!r} has no tasks for {split!r}")
    return Tasks([Example(_shown(row), _answer(row), row) for row in rows])


def _shown(row: Mapping[str, Any]) -> Any:
    return row["prompt"] if "prompt" in row else json.dumps(row, default=str, ensure_ascii=False)[:2000]


def _answer(row: Mapping[str, Any]) -> str | None:
    return None if row.get("answer") is None else str(row["answer"])
