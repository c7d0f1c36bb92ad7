"""One example of the data: a prompt, its answer and its row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from podium.errors import ConfigError, DataError
from podium.rollout.tasks.forms import list_fields
from podium.rollout.tasks.messages import Messages

__all__ = ["Example", "Preference"]


@dataclass(frozen=True, slots=True)
class Preference:
    """What the data say of the answer of an example.

    Attributes:
        rejected: The example with the worse answer to the same prompt; None where answers have labels.
        desirable: The label.
        margin: By how much the answer is better than the rejected one; None where the data do not say.
    """

    rejected: Example | None = None
    desirable: bool = True
    margin: float | None = None


@dataclass(frozen=True, slots=True)
class Example:
    """One prompt, its answer and its row of the data.

    Attributes:
        prompt: Text, or chat messages.
        answer: The answer as text. None means that there is none.
        row: All columns of the data, plus "prompt" and "answer". A reward gets this row.
        turns: The answer as messages, if the data have it in that form. The last message is the assistant's.
        whole: Whether prompt and turns are one conversation, of which supervised fine-tuning learns every turn of the
            assistant.
        place: Where the row comes from, as in "train.jsonl, line 3". Empty for a row that comes from no data.
        columns: The columns of prompt and answer, or the templates that write them; None for one that is not there.
        preference: What the data say of the answer, where preferences are learned.
        source: The name of the source in ``data.train``, where there are several.
    """

    prompt: str | Messages
    answer: str | None
    row: Mapping[str, Any]
    turns: Sequence[Mapping[str, Any]] = ()
    whole: bool = False
    place: str = ""
    columns: tuple[str | None, str | None] = (None, None)
    preference: Preference | None = None
    source: str = ""

    @property
    def fields(self) -> list[str]:
        """The columns, and fields of columns, that prompt and answer are made of."""
        return [field for column in self.columns for field in list_fields(column)]

    @property
    def is_text(self) -> bool:
        """Whether the prompt is a text of which supervised fine-tuning learns every token."""
        return self.whole and not self.turns

    @contextmanager
    def name_in_errors(self) -> Iterator[None]:
        """Put the place of the row, or its prompt where it has no place, before the text of errors of the block."""
        try:
            yield
        except (ConfigError, DataError) as error:
            name = self.place or f"the row of the prompt {str(self.prompt)[:60]!r}"
            raise type(error)(f"{name}: {error}") from error.__cause__
