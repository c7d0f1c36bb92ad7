"""The turns of a conversation that are learned: where they stand in its text, by the template's marks or by what it
writes, and checked twice, in the conversation itself and in one of probes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final

from podium.errors import ConfigError, DataError
from podium.rollout.tasks.examples import Messages, message_text
from podium.rollout.tasks.fields import list_speech
from podium.rollout.tasks.spans import (
    MARKING,
    Span,
    check_learned,
    check_others,
    find_turn,
    opens_otherwise,
    read_spans,
    refuse_message,
    text_differs_at,
)

__all__ = ["Texts", "TurnFinder"]

_SHAPES: Final = 500  # sequences of roles of which a conversation of probes is written


class Texts:
    """What the template writes of the first messages of a conversation, each text once."""

    def __init__(self, render: Callable[..., str], messages: Messages, tools: list[Any] | None) -> None:
        self._render = render
        self.messages = messages
        self.tools = tools
        self._made: dict[tuple[int, bool], str] = {}

    def __call__(self, count: int, opened: bool = False) -> str:
        """The text of the first ``count`` messages."""
        if (count, opened) not in self._made:
            self._made[count, opened] = self.write(self.messages[:count], opened=opened)
        return self._made[count, opened]

    def write(self, messages: Messages, opened: bool = False) -> str:
        """The text of other messages."""
        return self._render(messages, self.tools, opened=opened)

    def with_messages(self, messages: Messages) -> Texts:
        """The texts of other messages, with the same tools."""
        return Texts(self._render, messages, self.tools)

    @property
    def whole(self) -> str:
        """The text of all messages."""
        return self(len(self.messages))


@dataclass
class TurnFinder:
    """Finds what is learned of conversations.

    Attributes:
        ends: The tokens with which the template ends a turn, in their order.
        special: The texts of the tokenizer's special tokens.
        find_marks: Returns where the template marks the assistant's text, in characters.
        turns: Turns that were found; of these, those that the template writes otherwise than the row has them, those
            whose end is not learned, those that the template marks only in part, and those that stand after another
            opening than a generated answer.
    """

    ends: Sequence[str]
    special: Sequence[str]
    find_marks: Callable[[Texts], list[tuple[int, int]]]
    turns: list[int] = field(default_factory=lambda: [0, 0, 0, 0, 0])
    _proved: set[tuple[Any, ...]] = field(default_factory=set[tuple[Any, ...]])

    def find(self, texts: Texts, first: int, learned: Sequence[bool], *, marked: bool) -> list[Span]:
        """Return the spans of the turns, up to the last one that is learned.

        Args:
            texts: Writes the conversation.
            first: The message from which on turns are learned.
            learned: Whether each message may be learned.
            marked: Whether the template marks the assistant's text.

        Raises:
            ConfigError: The end of a turn cannot be told, or nothing is marked.
            DataError: What others said would be learned, or a turn would not be.
        """
        if marked and not all(learned[first:]):
            raise ConfigError(
                "a turn is marked as not to be learned, and the chat template marks the assistant's text itself: "
                "set data.chat_template to one without {% generation %}"
            )
        self._prove(texts, first, marked=marked)
        spans = self._find_marked(texts, first) if marked else self._find_written(texts, first)
        if marked:
            self._check_marked(texts, spans, first)
            self.turns[2] += sum(not span.ended for span in spans[: None if self.ends else -1])
            return spans
        spans = [replace(span, learned=learned[span.index]) for span in spans]
        self.turns[0] += len(spans)
        self.turns[1] += check_learned(texts.whole, texts.messages, spans)
        self.turns[4] += sum(span.learned and bool(span.opening) for span in spans)
        while spans and not spans[-1].learned:
            spans.pop()
        if not spans:
            raise DataError("no turn of the conversation is learned: every turn is marked as not to be learned")
        self.turns[2] += sum(span.learned and not span.ended for span in spans[:-1])
        return spans

    def _find_written(self, texts: Texts, first: int) -> list[Span]:
        """A turn is what the template adds for it to what opens it, up to its end."""
        joined = "".join(self.ends)
        signs = [sign for sign in dict.fromkeys((joined, *self.ends[:1])) if sign]
        return [
            find_turn(texts.whole, texts.messages, index, texts, texts.write, signs, self.special)
            for index in range(first, len(texts.messages))
            if texts.messages[index]["role"] == "assistant"
        ]

    def _find_marked(self, texts: Texts, first: int) -> list[Span]:
        """A turn is what the template marks, with the token that ends it, and without what opens the last one."""
        text, opened = texts.whole, texts(len(texts.messages) - 1, opened=True)
        if not text.startswith(opened):
            raise opens_otherwise(opened[text_differs_at(text, opened) :], "or data.chat_template to another file")
        start = len(texts(first, opened=True)) if first else 0
        spans = read_spans(text, self.find_marks(texts), start, self.ends, self.special)
        last = len(opened)
        spans = [replace(s, start=last) if s.start < last < s.stop else s for s in spans]
        if not spans:
            raise ConfigError(
                f"the chat template marks nothing of {str(texts.messages)[:60]} as the assistant's text: {MARKING}"
            )
        return spans

    def _check_marked(self, texts: Texts, spans: Sequence[Span], first: int) -> None:
        """Check that no marks cover what others said, and count the turns that they cover only in part."""
        messages, text = texts.messages, texts.whole
        places = [0, *(at for span in spans for at in (span.start, span.stop)), len(text)]
        parts = [text[start:stop] for start, stop in pairwise(places)]
        turns = {at for at in range(first, len(messages)) if messages[at]["role"] == "assistant"}
        check_others(text, parts[::2], messages, turns)
        learned = "\0".join(parts[1::2])
        self.turns[0] += len(turns)
        self.turns[3] += sum(any(t in text and t not in learned for t in list_speech(messages[at])) for at in turns)

    def _prove(self, texts: Texts, first: int, *, marked: bool) -> None:
        """Check a conversation of the same roles in which each message says what no other does: in the conversation
        itself, two messages may say the same.

        Raises:
            DataError: What others said would be learned, or a turn would not be.
        """
        messages = texts.messages
        shape = (first, marked, *(f"{m['role']}{bool(m.get('content'))}{bool(m.get('tool_calls'))}" for m in messages))
        if shape in self._proved or len(self._proved) >= _SHAPES:
            return
        self._proved.add(shape)
        probes = [
            f"podium{at}m" if message_text(message) or message["role"] != "assistant" else ""
            for at, message in enumerate(messages)
        ]
        pairs = zip(messages, probes, strict=True)
        probed = texts.with_messages([{**m, "content": probe} if probe else m for m, probe in pairs])
        try:
            spans = self._find_marked(probed, first) if marked else self._find_written(probed, first)
        except (ConfigError, DataError):  # the template writes some texts otherwise than others
            return
        parts = {span: probed.whole[span.start : span.stop].lower() for span in spans}
        if not all(probe in probed.whole.lower() for probe in probes):  # it leaves a message out
            return
        learned, part_of = "\0".join(parts.values()), {span.index: part for span, part in parts.items()}
        for index, probe in enumerate(probes):
            is_turn = index >= first and messages[index]["role"] == "assistant"
            if probe and not is_turn and probe in learned:
                self._proved.discard(shape)
                raise refuse_message(messages, index, "the model would learn to say it, and the assistant did not")
            if probe and is_turn and not marked and probe not in part_of.get(index, ""):
                self._proved.discard(shape)
                raise refuse_message(messages, index, "a part of it would not be learned")
