"""From messages to token ids and back, without ever tokenizing again what the model sampled.

    prompt   messages, tools ──▶ ids            the first call of a conversation, and one that could not be bridged
    bridge   ids so far + new messages ──▶ ids  the next call: what was recorded, and what the template adds
    parse    sampled ids ──▶ text, reasoning, tool calls

All of it follows the text of the model's chat template. Where that does not say how a history goes on, a renderer of
the library ``renderers`` may know it (:mod:`.renderers`). This module imports no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from podium.errors import ConfigError
from podium.rollout.tasks.messages import message_text
from podium.spelling import write_count
from podium_agents.service.answer_forms import AnswerForms
from podium_agents.service.grammars import Grammars
from podium_agents.service.renderers import CALL, TOOL, USER, LibraryBridge, library_bridge
from podium_agents.service.request_bodies import Refusal
from podium_agents.service.tool_calls import (
    MARKS,
    CallReader,
    Offer,
    Reply,
    ToolCall,
    drop_open_message,
    read_channels,
    read_hermes,
    reader_of,
)

if TYPE_CHECKING:
    from podium.rollout.tasks.chat_encoder import ChatEncoder

__all__ = ["ChatFormat", "Reply", "ToolCall", "chat_format"]

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]

_MARK: Final = "podium\u241fmark"  # stands for an answer whose place in a written conversation is looked for


_KINDS: Final = 4096  # of histories, about which is remembered what their last messages stand for
_REPEATS: Final = 12
_VARIANTS: Final = 64  # of variables that requests set
_START: Final = 3  # characters of special tokens by which they are told apart
_VALUES: Final = 16  # of a field, of which it is tried whether the template writes them
_UNKNOWN: Final = {"podium_field": "podium"}  # which a template writes that writes all fields of a message


class Mark(NamedTuple):
    """A special token in the text of a message.

    Attributes:
        role: The role of the message.
        name: The token.
        is_written: Whether the chat template itself writes the token around messages.
        text: The text of the message.
    """

    role: str
    name: str
    is_written: bool
    text: str

    def describe(self, count: int) -> str:
        """What ``count`` messages of this role with this token mean."""
        has = "has" if count == 1 else "have"
        where = f"{write_count(count, 'message')} of the role {self.role!r} {has} {self.name!r}"
        if self.is_written:
            return (
                f"{where}, which the chat template itself writes around messages: the model cannot tell the two apart, "
                "and such a text may pose as another turn. Take it out of the text before it is sent, unless it "
                "is meant"
            )
        return (
            f"{where}, a special token of the tokenizer: the model reads it as that token and not as its letters. Take "
            "it out of the text before it is sent, unless it is meant"
        )


class ChatFormat:
    """How one model writes conversations. Tool calls are read in the form in which its template writes them
    (:mod:`.tool_calls`).

    Args:
        encoder: Writes conversations by the template.
        tokenizer: Decodes sampled tokens.
        library: Writes the tokens between turns where the template's text cannot.
    """

    def __init__(self, encoder: ChatEncoder, tokenizer: Any, library: LibraryBridge | None = None) -> None:
        self._encoder = encoder
        self._tokenizer = tokenizer
        self.library = library
        self._read_fields: dict[tuple[str, ...], dict[str, bool]] = {}  # by role and name, whether values are written
        self._variants: dict[str, ChatFormat] = {}  # by the variables of requests
        self._trusted: dict[tuple[Any, ...], int] = {}  # by kind, the longest history that its last messages stand for
        special = {token_id: str(token) for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._names = {text: token_id for token_id, text in special.items()}
        self._special = {*special}
        self._silent = {token_id for token_id, text in special.items() if text not in MARKS}
        self._ends = {token_id for token_id, text in special.items() if not (text in MARKS and text.startswith("</"))}

    def with_options(self, options: Mapping[str, Any]) -> ChatFormat:
        """Return the format whose template gets these variables. Raises ConfigError for one that it does not read."""
        if not options:
            return self
        key = json.dumps(options, sort_keys=True, default=str)
        if key not in self._variants:
            try:
                variant = ChatFormat(self._encoder.with_options(options), self._tokenizer)
            except ConfigError as error:
                raise ConfigError(str(error).removeprefix("data.")) from None
            if len(self._variants) >= _VARIANTS:
                self._variants.clear()
            self._variants[key] = variant
        return self._variants[key]

    def effort(self, effort: str | None, thinking: bool | None) -> dict[str, Any]:
        """The variables of the template by which a client's wishes about reasoning are met; {} if it has none."""
        options: dict[str, Any] = {}
        if effort is not None and self._encoder.mentions("reasoning_effort"):
            options["reasoning_effort"] = effort
        elif effort is not None and thinking is None:
            thinking = effort != "none"
        if thinking is not None and self._encoder.mentions("enable_thinking"):
            options["enable_thinking"] = thinking
        return options

    def drop_reasoning(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages without the reasoning of answers, where the template has no place for it."""
        written = any(map(self._encoder.mentions, ("reasoning_content", "reasoning", "thinking")))
        return [
            {name: value for name, value in message.items() if written or name != "reasoning_content"}
            for message in messages
        ]

    def prompt(self, messages: Messages, tools: Tools = (), *, opened: bool = True) -> list[int]:
        """The ids of a conversation with the assistant's turn opened after it, unless ``opened`` is False.
        ``data.system_prompt`` comes first where the conversation does not begin with a system message or a developer's.

        Raises:
            ConfigError: The template cannot write the conversation.
        """
        return self._encoder.encode(self._text(messages, tools, opened=opened))

    def check(self, said: Messages, new: Messages, tools: Tools) -> None:
        """Check that the template writes what ``new``, which follows ``said``, and the tools say.

        Raises:
            ConfigError: It does not.
        """
        before = (self._recent(said, new, tools) if said else None) or said
        self._encoder.check([*before, *new], list(tools) or None, len(before))

    def check_calls(self) -> None:
        """Check that calls of tools are read in the form in which the template writes them.

        Raises:
            ConfigError: They are not, so that none that the model writes would be a call.
        """
        if form := self._unread_call:
            raise ConfigError(
                f"tools: the chat template writes a call of a tool as {form[:200]!r}, and Podium does not read this "
                "form, so that the model's calls would be text: give a template that writes calls as JSON in "
                "<tool_call> (data.chat_template), or leave tools out and name them in a message"
            )

    def is_vast(self, characters: int, tokens: int) -> bool:
        """As :meth:`.ChatEncoder.is_vast`."""
        return self._encoder.is_vast(characters, tokens)

    def bridge(
        self,
        prompt: Sequence[int],
        sampled: Sequence[int],
        said: Messages,
        new: Messages,
        tools: Tools = (),
        *,
        ends: Sequence[int] = (),
    ) -> list[int] | None:
        """The ids of the next prompt, which begin with ``prompt`` and ``sampled`` as they are.

        Args:
            prompt: The prompt ids of the previous call.
            sampled: The ids that the previous call sampled.
            said: The messages of that call and its answer.
            new: The messages since then.
            tools: The tools of the conversation.
            ends: The tokens by which the model ends its turn. A turn that ended otherwise, such as by a stop token of
                the client, gets the template's end.

        Returns:
            The ids; None where the template writes ``said`` otherwise once ``new`` follows.
        """
        recent = self._recent(said, new, tools)
        text = None if recent is None else self._added(recent, new, tools)
        if text is None:
            text = self._added(said, new, tools)
            self._learn_recent(said, new, tools, text)
        if text is None:
            return self._by_library(prompt, sampled, [*said, *new], new, tools)
        added = self._encoder.encode(text)
        if sampled and added and sampled[-1] in {added[0], *ends} & self._special and added[0] in self._special:
            added = added[1:]  # the model has written the end of its turn itself
        elif sampled and (at := next((n for n, token in enumerate(added) if token in self._special), 0)):
            before = str(self._tokenizer.decode(added[:at], skip_special_tokens=False))
            if added[at] == sampled[-1] and not before.strip():  # and without the space that the template puts there
                added = added[at + 1 :]
        return [*prompt, *sampled, *added]

    def _added(self, said: Messages, new: Messages, tools: Tools) -> str | None:
        """What the template adds to ``said``, without the text of its last answer, once ``new`` follows; None where it
        then writes ``said`` otherwise."""
        prefix = self._text(said[:-1], tools, opened=True)
        full_text = self._text([*said, *new], tools, opened=True)
        closed = self._text(said, tools, opened=False)
        if not (full_text.startswith(prefix) and full_text.startswith(closed)):
            return None
        ending = self._ending(said, tools)
        return None if ending is None else ending + full_text[len(closed) :]

    def _recent(self, said: Messages, new: Messages, tools: Tools) -> Messages | None:
        """The messages of ``said`` by which alone the template is known to write what follows; None for all of them.

        Writing a whole history at each call would cost the square of its length. Its beginning and its last messages
        stand for it if they have given the same text as a history of the same kind and at least half the length, and
        as histories of a dozen lengths in which they come again and again: a template may count messages.
        """
        recent = recent_messages(said, new)
        if recent is None or len(said) > self._trusted.get(_kind(recent, new, tools), 0):
            return None
        return recent.messages

    def _learn_recent(self, said: Messages, new: Messages, tools: Tools, added: str | None) -> None:
        """Note whether the last messages alone give the text ``added``, which all of ``said`` have given."""
        recent = recent_messages(said, new)
        if recent is None or (before := self._trusted.get(kind := _kind(recent, new, tools), 0)) < 0:
            return
        counts = (1,) if before else range(1, _REPEATS + 1)
        try:
            same = added is not None and all(self._added(recent.repeat(n), new, tools) == added for n in counts)
        except ConfigError:
            same = False
        if len(self._trusted) >= _KINDS:
            self._trusted.clear()
        self._trusted[kind] = 2 * len(said) if same else -1

    def _by_library(
        self, prompt: Sequence[int], sampled: Sequence[int], messages: Messages, new: Messages, tools: Tools
    ) -> list[int] | None:
        """As :meth:`bridge`, where the library adds what the template writes at the end of ``messages``."""
        added = self.library.added(prompt, sampled, new, tools) if self.library is not None else None
        if not added:
            return None
        whole = self._text(messages, tools, opened=True)
        text = self._tokenizer.decode(added, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return [*prompt, *sampled, *added] if whole.endswith(text) else None

    def reads(self, role: str, fields: Mapping[str, Any]) -> bool:
        """As :meth:`.histories.Template.reads`. A template that mentions no field and does not write whole messages
        reads none; others are tried, each field with the first values that it has."""
        if not any(map(self._encoder.mentions, fields)) and _UNKNOWN.keys() != fields.keys():
            return self.reads(role, _UNKNOWN)
        names = role, *fields
        values = self._read_fields.setdefault(names, {})
        key = json.dumps(fields, sort_keys=True, default=str)
        if key not in values and len(values) < _VALUES:
            values[key] = any(self._writes_field(role, fields, tools) for tools in ((), (TOOL,)))
        return values.get(key, any(values.values()))

    def _writes_field(self, role: str, fields: Mapping[str, Any], tools: Tools) -> bool:
        plain = {"role": role, "content": "podium"}
        try:
            return self._written(plain, tools) != self._written({**plain, **fields}, tools)
        except ConfigError:
            return False

    def writes_alike(self, messages: Messages, tools: Tools) -> bool:
        """As :meth:`.histories.Template.writes_alike`. A template that writes none of them says nothing."""
        try:
            texts = {self._written(message, tools) for message in messages}
            return len(texts) == 1 and self._text([USER], tools, opened=False) not in texts
        except ConfigError:
            return False

    def _written(self, message: Mapping[str, Any], tools: Tools) -> str:
        """A question, and the message where one of its role may stand."""
        if message["role"] in ("system", "developer"):
            return self._text([message, USER], tools, opened=False)
        before = [USER, CALL] if message["role"] == "tool" else [USER] if message["role"] == "assistant" else []
        if message["role"] == "tool":
            message = {"tool_call_id": CALL["tool_calls"][0]["id"], **message}
        return self._text([*before, message], tools, opened=False)

    def parse(
        self,
        prompt: Sequence[int],
        sampled: Sequence[int],
        tools: Tools = (),
        *,
        special: bool = False,
        has_form: bool = False,
        partial: bool = False,
    ) -> Reply:
        """Return the content of ``sampled``, which follows ``prompt``.

        Args:
            prompt: The ids before the answer.
            sampled: The ids of the answer.
            tools: The tools of the conversation.
            special: Whether all special tokens but those at the end of the answer are in it as text.
            has_form: Whether the request prescribes the form of an answer that is no call.
            partial: Whether more ids follow. A message in a channel whose kind they decide is then left out.
        """
        ids = list(sampled)
        while ids and ids[-1] in self._ends:
            ids.pop()
        ids = [token_id for token_id in ids if special or token_id not in self._silent]
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if self.opens_reasoning(prompt):
            text = f"<think>{text}"
        if partial and self._reader is read_channels:
            text = drop_open_message(text, bool(tools))
        return self._reader(text, Offer([str(tool["function"]["name"]) for tool in tools], has_form))

    @cached_property
    def _reader(self) -> CallReader:
        """Reads what the model writes, in the form in which the template writes a call of a tool."""
        return reader_of(self._written_call[1]) if self._written_call[1] else read_hermes

    @cached_property
    def _written_call(self) -> tuple[str, str]:
        """What the template writes before a call of a tool, and with it; "" for a template that writes none."""
        for call in (CALL, {**CALL, "content": "So."}):
            try:
                prefix = self._text([USER], [TOOL], opened=False)
                full_text = self._text([USER, call], [TOOL], opened=False)
            except ConfigError:
                continue
            if "look" in (written := full_text.removeprefix(prefix)):
                return prefix if len(written) < len(full_text) else "", written
        return "", ""

    @cached_property
    def _unread_call(self) -> str:
        """A call as the template writes it, if the reader of the model's answers sees none in it; else ""."""
        prefix, written = self._written_call
        if not prefix:  # how calls are written is not known
            return ""
        opened = self._text([USER], [TOOL], opened=True)
        parts = [f"{prefix}{written}".removeprefix(opened), written]
        parts += [part[part.find("{") : part.rfind("}") + 1] for part in parts]  # without an end that is plain text
        replies = (self.parse((), self._encoder.encode(part), [TOOL]) for part in parts)
        return "" if any(_is_same_call(reply.tool_calls) for reply in replies) else written

    @cached_property
    def grammars(self) -> Grammars:
        """Compiles grammars over the model's tokens."""
        return Grammars(self._tokenizer)

    @cached_property
    def forms(self) -> AnswerForms:
        """The forms in which the template writes answers and calls."""
        return AnswerForms(self._text, self._tokenizer, self._ends)

    def find_stop_tokens(self, stops: Sequence[str]) -> list[int]:
        """The special tokens among texts that end an answer. Their texts are not in the text of an answer, in which the
        others are looked for. Raises Refusal for a text that has such a token beside others."""
        for stop in stops:
            if stop not in self._names and (name := next((name for name in self._names if name in stop), None)):
                raise Refusal(
                    400,
                    f"stop = {stop[:80]!r} has the special token {name!r} beside other text, and would never be found: "
                    "send the token alone, or the other text alone",
                    "stop",
                )
        return [self._names[stop] for stop in stops if stop in self._names]

    def find_marks(self, messages: Messages) -> Iterator[Mark]:
        """Yield each special token in the text of a message that is not the model's own, once for each message."""
        for message in messages:
            if message["role"] == "assistant":
                continue
            text = message_text(message)
            for name in sorted({*self._name_pattern.findall(text)} if self._names else ()):
                yield Mark(str(message["role"]), name, name in self._written_marks, text)

    @cached_property
    def _name_pattern(self) -> re.Pattern[str]:
        """Any special token; the longest of those that begin at one place. Tokens are grouped by how they begin: a
        vocabulary may have thousands, and a page thousands of ``<``."""
        rests_by_start: dict[str, list[str]] = {}
        for name in sorted(filter(None, self._names), key=len, reverse=True):
            rests_by_start.setdefault(name[:_START], []).append(re.escape(name[_START:]))
        return re.compile("|".join(f"{re.escape(start)}(?:{'|'.join(r)})" for start, r in rests_by_start.items()))

    @cached_property
    def _written_marks(self) -> list[str]:
        """The special tokens that the template writes around messages."""
        text, ends = "", {name for name, _ in self._encoder.ends}
        with suppress(ConfigError):  # of a template that begins otherwise
            text = self._text([USER], (), opened=True)
        return [name for name in self._names if name in text or name in ends]

    def opens_reasoning(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends with the beginning of the model's reasoning."""
        tail = self._tokenizer.decode(list(prompt[-8:]), skip_special_tokens=False)
        return tail.rstrip().endswith("<think>")

    def _ending(self, said: Messages, tools: Tools) -> str | None:
        """What the template writes after the text and the tool calls of the last answer, up to its next message; None
        if the template changes the text of answers."""
        answer = {**said[-1], "content": _MARK}
        for name in ("tool_calls", "reasoning_content"):
            answer.pop(name, None)
        _, mark, ending = self._text([*said[:-1], answer], tools, opened=False).rpartition(_MARK)
        return ending if mark else None

    def _text(self, messages: Messages, tools: Tools, *, opened: bool) -> str:
        return self._encoder.text(messages, list(tools) or None, opened=opened)


def _is_same_call(calls: Sequence[ToolCall]) -> bool:
    """Whether these calls are the one of ``CALL``."""
    function = CALL["tool_calls"][0]["function"]
    with suppress(ValueError):
        return [(call.name, json.loads(call.arguments)) for call in calls] == [
            (function["name"], json.loads(function["arguments"]))
        ]
    return False


class RecentMessages(NamedTuple):
    """A conversation without its middle: up to the first message of a user, and from the last answer but one on."""

    head: list[Mapping[str, Any]]
    exchange: list[Mapping[str, Any]]
    answer: Mapping[str, Any]

    @property
    def messages(self) -> list[Mapping[str, Any]]:
        """All of these messages, in their order."""
        return self.repeat(1)

    def repeat(self, count: int) -> list[Mapping[str, Any]]:
        """The messages with those between the beginning and the last answer ``count`` times."""
        return [*self.head, *self.exchange * count, self.answer]


def recent_messages(said: Messages, new: Messages) -> RecentMessages | None:
    """Return the beginning of ``said`` and its end. None if nothing between them is left out.

    If other messages follow than results of tools, the end begins before the last message of a user, because many
    templates write differently what was said since then.
    """
    roles = [message["role"] for message in said]
    if "user" not in roles:
        return None
    head = roles.index("user") + 1
    last_user = len(roles) - roles[::-1].index("user") - 1
    answers = [at for at, role in enumerate(roles[:-1]) if role == "assistant"]
    if any(message["role"] != "tool" for message in new):
        answers = [at for at in answers if at < last_user]
    if not answers or answers[-1] <= head:
        return None
    return RecentMessages([*said[:head]], [*said[answers[-1] : -1]], said[-1])


def _kind(recent: RecentMessages, new: Messages, tools: Tools) -> tuple[Any, ...]:
    """What histories have in common that a template writes alike: roles and fields of their messages, and tools."""
    messages = (*recent.messages, *new)
    fields = tuple((m["role"], *sorted(name for name, value in m.items() if value)) for m in messages)
    return len(new), bool(tools), fields


def chat_format(encoder: ChatEncoder, tokenizer: Any) -> ChatFormat:
    """Return the format of a model, with a renderer of the library ``renderers`` if there is one for it."""
    plain = ChatFormat(encoder, tokenizer)
    return ChatFormat(encoder, tokenizer, library_bridge(tokenizer, plain.prompt))
