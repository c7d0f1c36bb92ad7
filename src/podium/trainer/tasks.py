"""The tasks of an environment: rows of the data, or of the environment itself, which are not encoded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from podium.rollout.tasks import Example
from podium.trainer.prompts import Prompt


class TaskPrompt(Prompt):
    """A task of an environment. Its sessions decide what the model reads. ``text`` is for people."""

    @cached_property
    def text(self) -> str:
        return self.shown


class Tasks(Sequence[TaskPrompt]):
    """The tasks of one side of the data, or of the environment itself.

    Args:
        examples: Their rows.
        digest: A checksum of their content.
    """

    def __init__(self, examples: Sequence[Example], digest: str) -> None:
        self.examples = [*examples]
        self.digest = digest

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[index] for index in range(*place.indices(len(self)))]
        return TaskPrompt(torch.empty(0, dtype=torch.int64), self.examples[place], str)
