"""What the model learns of a conversation: one span of its text for each turn of the assistant, found and then checked.

No template is trusted. Whatever a template writes, the learned spans must hold the assistant's turns, each in its own
span, and everything else must stand outside of them. A conversation for which that does not hold is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final, Literal, cast

from podium.errors import ConfigError, DataError
from podium.rollout.tasks.fields import list_speech, shape_of
from podium.rollout.tasks.forms import Example
from podium.rollout.tasks.messages import Messages, message_text, number_of
from podium.rollout.tasks.templates import Texts

_MARKING: Final = "set data.chat_template to a file that marks the assistant's text by {% generation %}"
_PROBE: Final = "\ue000podium\ue000"  # begins and ends with a letter of private use, which no template writes
_MARKS: Final = frozenset({"weight", "train", "trainable", "training", "loss_mask", "loss"})
"""Fields of a message by which the field's data say whether the turn is learned."""
_LIKE_MARKS: Final = re.compile(
    r"(.+_)?(train|train_on|trained|training|trainable|learn|learned|loss|masks?|weights?)(_.+)?"
)
"""Names that seem to say whether something is learned."""
_UNLIKE_MARKS: Final = re.compile(r"(is_)?(masked|ignore|ignored|skip|skipped|exclude|excluded)")
"""Names that seem to say that something is not learned."""
_SHAPES: Final = 500  # sequences of roles of which a conversation of probes is written


@dataclass(frozen=True)
class Span:
    """Where a turn of the assistant stands in the text of its conversation.

    Attributes:
        index: The turn's message.
        start: Its first character after what opens an answer.
        stop: The character after its end.
        ended: Whether the span holds a sign that ends the turn.
        learned: Whether the turn is learned. A row may mark turns that are not.
        opening: What opens an answer before it is generated, and does not stand before this turn.
    """

    index: int
    start: int
    stop: int
    ended: bool
    learned: bool = True
    opening: str = ""


def find_mark(fields: Mapping[str, Any], read: Collection[str] = ()) -> str | None:
    """Return a field that seems to say that not everything is learned, or not alike; None if there is none.

    Args:
        fields: Those of a message or a row.
        read: The names of those that are read.
    """
    for name, value in fields.items():
        if value is None or not (kind := _kind_of_mark(name)) or name in read:
            continue
        parts = cast("list[Any]", value) if isinstance(value, list) else [value]
        if kind == "ids" and isinstance(value, list):
            return name
        if kind == "off" and _is_off(value) is False:
            return name
        if kind in ("on", "weight") and any(isinstance(part, Mapping) or _is_off(part) for part in parts):
            return name
        if kind == "weight" and re.fullmatch(r"[-+.\de]+", str(value)) and _is_off(value) is None:
            return name
    return None


@lru_cache(maxsize=1024)
def _kind_of_mark(name: str) -> Literal["", "on", "off", "weight", "ids"]:
    name = name.lower()
    if name in ("labels", "input_ids"):
        return "ids"
    if _UNLIKE_MARKS.fullmatch(name):
        return "off"
    if _LIKE_MARKS.fullmatch(name):
        return "weight" if "weight" in name else "on"
    return ""


def _is_off(value: Any) -> bool | None:
    """Whether a mark is off; None for what is no mark."""
    text = str(value).lower()
    return True if text in ("false", "0", "0.0", "no") else False if text in ("true", "1", "1.0", "yes") else None


def read_marks(messages: Messages) -> tuple[Messages, list[bool]]:
    """Return the messages without the fields that say whether a turn is learned, and what these fields say.

    Raises:
        DataError: A mark is neither true nor false, or asks to learn what the assistant did not say.
    """
    plain: Messages = []
    learned: list[bool] = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant" and (name := find_mark(message, _MARKS)):
            raise DataError(
                f"message {number_of(messages, index)} has {name} = {str(message[name])[:40]}, which seems to say that "
                "not all of it is learned. Podium does not read this field: a turn that is not learned has weight = 0. "
                "Remove the field if it means something else"
            )
        if _MARKS.isdisjoint(message):
            plain.append(message)
            learned.append(True)
            continue
        marks = {name: message[name] for name in _MARKS if message.get(name) is not None}
        number = number_of(messages, index)
        for name, mark in marks.items():
            if not isinstance(mark, bool | int | float) or mark not in (0, 1):
                raise DataError(
                    f"message {number} has {name} = {str(mark)[:40]}; expected true or false, 1 or 0: a turn is "
                    "learned or not, and has no other weight"
                )
            if mark and message["role"] != "assistant" and name != "weight":
                raise DataError(
                    f"message {number} of the role {message['role']!r} has {name} = {mark}; only the assistant's turns "
                    "are learned: take the field out"
                )
        plain.append({name: entry for name, entry in message.items() if name not in marks})
        learned.append(all(marks.values()))
    return plain, learned


def split_turns(example: Example) -> list[Example]:
    """Return an example for each turn of the assistant that is learned: what was said before it is the prompt.

    An example that cannot be split, of which its encoding tells, is returned as it is.
    """
    prompt = [{"role": "user", "content": example.prompt}] if isinstance(example.prompt, str) else example.prompt
    messages: Messages = [*prompt, *map(dict, example.turns)]
    first = 0 if example.whole else len(prompt)
    try:
        _, learned = read_marks(messages)
    except DataError:
        return [example]
    turns = [at for at in range(first, len(messages)) if messages[at]["role"] == "assistant" and learned[at]]
    if example.is_text or not example.turns or not turns or turns[0] == 0:
        return [example]
    place = f"{example.place}, " if example.place else ""
    return [
        replace(
            example,
            prompt=messages[:at],
            answer=message_text(messages[at]),
            turns=[messages[at]],
            whole=False,
            place=f"{place}message {at + 1}",
        )
        for at in turns
    ]


@dataclass
class TurnFinder:
    """Finds what is learned of conversations.

    Attributes:
        ends: The tokens with which the template ends a turn, in their order.
        special: The texts of the tokenizer's special tokens.
        words: The texts of all tokens that were added to the vocabulary, the special ones among them.
        find_marks: Returns where the template marks the assistant's text, in characters.
        turns: Turns that were found; of these, those that the template writes otherwise than the row has them, those
            whose end is not learned, those that the template marks only in part, and those that stand after another
            opening than a generated answer.
    """

    ends: Sequence[str]
    special: Sequence[str]
    words: Collection[str]
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
            _find_turn(texts, index, signs, self.special, self.words)
            for index in range(first, len(texts.messages))
            if texts.messages[index]["role"] == "assistant"
        ]

    def _find_marked(self, texts: Texts, first: int) -> list[Span]:
        """A turn is what the template marks, with the token that ends it, and without what opens it."""
        text, opened = texts.whole, texts(len(texts.messages) - 1, opened=True)
        if not text.startswith(opened):
            raise _opens_otherwise(opened[text_differs_at(text, opened) :], "or data.chat_template to another file")
        start = len(texts(first, opened=True)) if first else 0
        spans = _read_spans(text, self.find_marks(texts), start, self.ends, self.special)
        for opening in _list_openings(texts, first).values():
            if text.startswith(opening):  # a mark may begin within what opens the answer, which is not generated
                begin = len(opening)
                spans = [replace(s, start=begin) if s.start < begin < s.stop else s for s in spans]
        if not spans:
            raise ConfigError(
                f"the chat template marks nothing of {str(texts.messages)[:60]} as the assistant's text: {_MARKING}"
            )
        return spans

    def _check_marked(self, texts: Texts, spans: Sequence[Span], first: int) -> None:
        """Check that no marks cover what others said, and count the turns that they cover only in part."""
        messages, text = texts.messages, texts.whole
        places = [0, *(at for span in spans for at in (span.start, span.stop)), len(text)]
        parts = [text[start:stop] for start, stop in pairwise(places)]
        turns = {at for at in range(first, len(messages)) if messages[at]["role"] == "assistant"}
        _check_others(text, parts[::2], messages, turns)
        learned = "\0".join(parts[1::2])
        partial = {at for at in turns if any(t in text and t not in learned for t in list_speech(messages[at]))}
        begin = len(texts(len(messages) - 1, opened=True))
        if not any(span.start <= begin < span.stop for span in spans):  # the model generates what stands before a mark
            partial.add(len(messages) - 1)
        written = "".join(text.split())
        self.turns[0] += len(turns)
        self.turns[1] += sum("".join(message_text(messages[at]).split()) not in written for at in turns)
        self.turns[3] += len(partial)
        self.turns[4] += sum(not text.startswith(opening) for opening in _list_openings(texts, first).values())

    def _prove(self, texts: Texts, first: int, *, marked: bool) -> None:
        """Check a conversation of the same roles in which each message says what no other does: in the conversation
        itself, two messages may say the same.

        Raises:
            DataError: What others said would be learned, or a turn would not be.
        """
        messages = texts.messages
        shape = (first, marked, *shape_of(messages))
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
                raise _refuse_message(messages, index, "the model would learn to say it, and the assistant did not")
            if probe and is_turn and not marked and probe not in part_of.get(index, ""):
                self._proved.discard(shape)
                raise _refuse_message(messages, index, "a part of it would not be learned")


def _list_openings(texts: Texts, first: int) -> dict[int, str]:
    """Return what the template writes up to each answer of the messages from ``first`` on, when it is generated. An
    answer after messages of which alone it writes none is left out."""
    openings: dict[int, str] = {}
    for at in range(max(first, 1), len(texts.messages)):
        if texts.messages[at]["role"] == "assistant":
            with suppress(ConfigError):
                openings[at] = texts(at, opened=True)
    return openings


def _find_turn(texts: Texts, index: int, ends: Sequence[str], special: Collection[str], words: Collection[str]) -> Span:
    """Find the assistant's turn of the message ``index`` in the text of all messages.

    A turn begins after what the template writes to open it. It ends with the template's sign: with that of the text
    itself where the template ends the last turn otherwise, and with the next role's token where it writes no sign.

    Args:
        texts: Writes the conversation.
        ends: The signs that end the last turn of a conversation, the longest first.
        special: The texts of the tokenizer's special tokens.
        words: The texts of all tokens that were added to the vocabulary.

    Raises:
        ConfigError: The template writes the turn otherwise than it is generated, or its end cannot be told.
        DataError: The conversation begins with the turn.
    """
    text, messages = texts.whole, texts.messages
    if index == 0:
        raise DataError(f"a conversation begins with the assistant's turn {str(messages)[:60]!r}; repair the row")
    opened = texts(index, opened=True)
    start = len(opened) if text.startswith(opened) else text_differs_at(text, opened)
    # An earlier turn may stand without a part of what opens an answer, such as <think>. The last may not.
    if start < len(opened) and not (index < len(messages) - 1 and text.startswith(texts(index))):
        earlier_start = text_differs_at(texts(index), opened)
        if start < earlier_start and index < len(messages) - 1:
            raise _writes_otherwise(messages, index, opened[max(0, start - 8) : earlier_start])
        raise _opens_otherwise(opened[_begin_token(opened, start, words) :], f"or {_MARKING}")
    probe = {"role": messages[index]["role"], "content": _PROBE}
    probed = [*messages[:index], probe, *messages[index + 1 :]]
    if start < len(opened):  # the turn itself may begin as that part does, and a token of it as one of that part
        start = _begin_token(text, min(start, text_differs_at(texts.write(probed), opened)), words)
    bounds = _find_end(text, texts(index + 1), start, ends, special)
    if bounds is None:
        bounds = _find_common_end(text, texts.write(probed), start, [*ends, *special])
    if bounds is None:
        raise ConfigError(
            f"the chat template changes the turn {str(messages[index])[:60]} when later messages follow it: {_MARKING}"
        )
    return Span(index, start, bounds[0], ended=bounds[1], opening=opened[start:])


def _begin_token(text: str, at: int, tokens: Collection[str]) -> int:
    """Return ``at``, or the beginning of the token of ``tokens`` within which it stands: <start> begins as <stop>."""
    places = (at - back for token in tokens for back in range(1, len(token)) if text.startswith(token, at - back))
    return min((place for place in places if place >= 0), default=at)


def _find_end(
    text: str, closed: str, start: int, ends: Sequence[str], special: Collection[str]
) -> tuple[int, bool] | None:
    """Return where a turn ends, and whether with a token; None where that cannot be told.

    Args:
        closed: What the template writes up to the turn.
    """
    if text.startswith(closed):
        for sign in ends:
            if (at := text.rfind(sign, start, len(closed))) >= 0:
                while (turn := text[start:at].rstrip()).endswith(sign):  # a template may write the end twice
                    at = start + len(turn) - len(sign)
                return at + len(sign), True
        turn = closed.rstrip()
        if ends and len(turn) > start and any(turn.endswith(token) for token in special):
            return len(turn), True  # a call of a tool may end with a token of its own
        following = next((token for token in special if text.startswith(token, len(closed))), "")
        return len(closed) + len(following), bool(following)
    differs = text_differs_at(text, closed)
    for token in special:
        for at in range(max(start, differs - len(token) + 1), differs + 1):
            if text.startswith(token, at) and _is_special(closed[at:], special):
                turn = text[start:at].rstrip()  # a template may write more than the end after the last turn
                has_ended = any(turn.endswith(sign) for sign in ends)
                return start + len(turn) if has_ended else at + len(token), True
    return None


def _find_common_end(text: str, probed: str, start: int, tokens: Sequence[str]) -> tuple[int, bool] | None:
    """Return the end of a turn by what it has in common with the same conversation in which the turn says something
    else: the token that stands after its text."""
    at = max(start, len(text) - text_differs_at(text[::-1], probed[::-1]))
    at += len(text[at:]) - len(text[at:].lstrip())
    token = next((token for token in tokens if text.startswith(token, at)), "")
    return (at + len(token), True) if token else None


def _is_special(text: str, special: Collection[str]) -> bool:
    """Whether a text consists of special tokens and white space alone, and has a special token."""
    rest = text
    for token in sorted(special, key=len, reverse=True):
        rest = rest.replace(token, "")
    return not rest.strip() and bool(text.strip())


def _read_spans(
    text: str, marks: Sequence[tuple[int, int]], known: int, ends: Sequence[str], special: Collection[str]
) -> list[Span]:
    """Return the spans that a template marks in ``text``, each with the token that ends its turn.

    Args:
        marks: First character of each mark, and the one after its last.
        known: The characters of the prompt, in which nothing is learned.
        ends: The tokens that end a turn, in their order. A mark may hold some of them.
        special: The texts of the tokenizer's special tokens.
    """
    spans: list[Span] = []
    for start, stop in marks:
        if stop < known:
            continue
        begin, ended = max(start, known), bool(ends) and text[start:stop].rstrip().endswith("".join(ends))
        for count in reversed(range(len(ends) if not ended else 0)):
            rest = "".join(ends[count:])
            blank = len(text[stop:]) - len(text[stop:].lstrip()) if not count else 0
            if text[start:stop].endswith("".join(ends[:count])) and text.startswith(rest, stop + blank):
                stop, ended = stop + blank + len(rest), True
                break
        if not ends and (following := next((token for token in special if text.startswith(token, stop)), "")):
            stop, ended = stop + len(following), True
        if stop > begin:
            spans.append(Span(-1, begin, stop, ended))
    return spans


def check_learned(text: str, messages: Messages, spans: Sequence[Span]) -> int:
    """Check that the spans hold what the assistant said, and nothing that others said.

    Returns:
        Number of learned turns of which the template writes another text than the row has.

    Raises:
        DataError: Spans overlap, a span holds a text of another message, or a turn stands outside of its span.
    """
    rewritten, done = 0, 0
    outside: list[str] = []
    learned = [span for span in spans if span.learned]
    for span in learned:
        if span.start < done or span.stop <= span.start:
            raise _refuse_message(messages, span.index, "its text cannot be told from another turn's")
        outside.append(text[done : span.start])
        done = span.stop
        content = message_text(messages[span.index]).strip()
        if content and content not in text[span.start : span.stop]:
            if content in text:
                raise _refuse_message(messages, span.index, "a part of it would not be learned")
            rewritten += "".join(content.split()) not in "".join(text[span.start : span.stop].split())
    _check_others(text, [*outside, text[done:]], messages, {span.index for span in learned})
    return rewritten


def _check_others(text: str, outside: Sequence[str], messages: Messages, turns: Collection[int]) -> None:
    """Check that the texts of all messages but the learned ``turns`` stand in those parts of the text that are not
    learned.

    Raises:
        DataError: The text of another message would be learned.
    """
    rest = "\0".join(outside)
    whole_at = rest_at = 0
    for index, message in enumerate(messages):
        content = message_text(message).strip()
        at = text.find(content, whole_at)
        if not content or at < 0:
            continue  # the template writes it otherwise, or before an earlier message
        whole_at = at + len(content)
        if index in turns:
            continue
        at = rest.find(content, rest_at)
        if at < 0:
            raise _refuse_message(messages, index, "the model would learn to say it, and the assistant did not")
        rest_at = at + len(content)


def _refuse_message(messages: Messages, index: int, reason: str) -> DataError:
    """The error for a message that the template writes so that the learned text would be wrong."""
    return DataError(
        f"the chat template writes message {number_of(messages, index)} of the role {messages[index]['role']!r}, "
        f"{message_text(messages[index])[:40]!r}, so that {reason}: {_MARKING}"
    )


def mask_tokens(offsets: Sequence[tuple[int, int]], spans: Sequence[Span]) -> list[bool] | None:
    """Return whether each token is learned, by the characters that it stands for; None if a token stands on the border
    of a span. A token that stands for no character, which many tokenizers put after a special token, is learned where
    it follows the token that opens a turn: the model generates it.

    Args:
        offsets: First character of each token, and the one after its last.
    """
    mask = [False] * len(offsets)
    token = 0
    for span in spans:
        if not span.learned:
            continue
        while token < len(offsets) and offsets[token][0] < span.start >= offsets[token][1]:
            token += 1
        while token < len(offsets) and offsets[token][0] < span.stop:
            first, last = offsets[token]
            if first < span.start or last > span.stop:
                return None
            mask[token] = True
            token += 1
    return mask


def _opens_otherwise(opening: str, remedy: str) -> ConfigError:
    """The error for a template that opens an answer with a text that a conversation's answer lacks."""
    return ConfigError(
        f"the chat template opens an answer with {opening[:40]!r}, and writes a conversation's answer without it, so "
        "that the model would learn what it never generates: set data.chat_template_kwargs, as in "
        f"{{enable_thinking: false}}, {remedy}"
    )


def _writes_otherwise(messages: Messages, index: int, changed: str) -> ConfigError:
    """The error for a template that writes what stands before a turn otherwise once later messages follow."""
    return ConfigError(
        f"the chat template writes the messages before message {number_of(messages, index)} in another way if later "
        f"messages follow it, near {changed[:40]!r}, so that the model would learn this turn after another text "
        "than it reads when it generates: set data.split_turns to true, which makes a row of each turn"
    )


def text_differs_at(text: str, other: str) -> int:
    """Return the first place at which two texts differ, or the length of the shorter."""
    low, high = 0, min(len(text), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if text[low:middle] == other[low:middle] else (low, middle - 1)
    return low
