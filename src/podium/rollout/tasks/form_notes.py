"""Notes on the forms of rows: what is read from columns that no setting names, and what is not read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from podium.rollout.tasks.config import DataConfig
from podium.rollout.tasks.example import Example
from podium.rollout.tasks.forms import (
    NESTED_ANSWERS,
    list_systems,
    list_tools,
)
from podium.rollout.tasks.media import find_links
from podium.rollout.tasks.messages import message_text
from podium.telemetry import Note, emit

__all__ = ["Untaken", "tell_forms"]

Untaken = tuple[str, str]
"""A part of an example, "prompt" or "answer", and a field without a value of its template; "" for a column that has the
name of the part and is not the part."""

_CONTEXTS: Final = (
    *("input", "context", "passage", "document", "background", "instructions", "developer", "prefix"),
    *("suffix", "prefill", "assistant_prefix"),
)
"""Columns that belong to a question or to an answer."""
_LONGEST_NUMBER: Final = 12  # characters of a number that somebody wrote


def tell_forms(spec: str, examples: Sequence[Example], config: DataConfig, untaken: Mapping[Untaken, int]) -> None:
    """Tell of what is read from columns that no setting names, and of what a person may take for read.

    Args:
        spec: The data.
        untaken: How many rows have each of what is not taken.
    """
    for note in (*_list_read(examples, config), *_list_unread(examples, config, untaken)):
        emit(Note(f"{spec}: {note}"))


def _list_read(examples: Sequence[Example], config: DataConfig) -> Iterator[str]:
    systems = Counter(
        name
        for e in examples
        if isinstance(e.prompt, list) and "system" in e.prompt[0]["role"]
        for name, text in [*list_systems(e.row).items()][:1]
        if e.prompt[0].get("content") == text
    )
    yield from (f"column {name!r} is the system message of {count} rows" for name, count in systems.items())
    if config.answer_column == "answer":
        answers = Counter(e.columns[1] for e in examples if e.columns[1] in NESTED_ANSWERS)
        yield from (f"the answers of {count} rows are those in {name}" for name, count in answers.items())
    if opened := sum(e.columns == ("prompt", None) and bool(e.turns) for e in examples):
        yield (
            f"the prompts of {opened} rows end with the assistant's turn, which is the answer, and not the beginning "
            "of an answer that is generated"
        )
    if numbers := [e for e in examples if isinstance(value := e.row.get("answer"), float) and _is_odd(value)]:
        yield (
            f"the answers of {len(numbers)} rows are numbers such as {numbers[0].answer}, which is also their text: "
            "write them as texts, or as whole numbers, where they are compared with or learned as others"
        )
    if texts := sum(example.is_text for example in examples):
        yield f"{texts} rows are texts without prompts, of which every token is learned"


def _is_odd(number: float) -> bool:
    """Whether a number is hardly written as Python does: 7.0, as pandas makes of 7, or a fraction of float32."""
    return number.is_integer() or len(str(number)) > _LONGEST_NUMBER


def _list_unread(examples: Sequence[Example], config: DataConfig, untaken: Mapping[Untaken, int]) -> Iterator[str]:
    links = Counter(link for e in examples if (link := find_links(e.row)) is not None)
    for name, count in links.items():
        yield f"{count} rows have an address in {name!r}, and the model does not see what is there"
    for name, count in Counter(name for e in examples for name in _CONTEXTS if _is_left_out(name, e)).items():
        yield (
            f"column {name!r} of {count} rows is neither in the prompt nor in the answer: data.prompt_column and "
            "data.answer_column may be templates with it, such as '{context}\\n{question}'"
        )
    for (part, field), count in untaken.items():
        column = getattr(config, f"{part}_column")
        if not field:
            yield (
                f"a reward that reads {part!r} of {count} rows gets what data.{part}_column = {column!r} names, and "
                f"not the column {part!r}: rename that column for a reward that reads it"
            )
        else:
            yield f"{count} rows have no value in {field!r}, in the place of which data.{part}_column puts nothing"
    untold = [e for e in examples if isinstance(e.prompt, str) and not e.is_text and e.row.get("tools")]
    if untold := [example.row["tools"] for example in untold if list_tools(example.row["tools"]) is None]:
        yield (
            f"column 'tools' of {len(untold)} rows is not written, since it holds no JSON schemas of tools: "
            f"{str(untold[0])[:40]!r}"
        )


def _is_left_out(name: str, example: Example) -> bool:
    """Whether a column that belongs to a question or an answer holds a text that is a part of neither."""
    text, prompt = example.row.get(name), example.prompt
    if not isinstance(text, str) or not text.strip() or example.is_text or name in (*example.columns, *example.fields):
        return False
    shown = prompt if isinstance(prompt, str) else "\n".join(map(message_text, prompt))
    return text.strip() not in f"{shown}\n{example.answer}"
