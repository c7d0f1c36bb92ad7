"""How models write calls of tools and reasoning, chosen by what the chat template writes for a call.

    hermes     <tool_call>{"name": …, "arguments": …}</tool_call>, after text         Qwen and many others
    bare       {"name": …, "parameters": …} and nothing else                           Llama 3
    listed     [TOOL_CALLS] [{"name": …, "arguments": …}, …]                           Mistral
    channels   <|channel|>commentary to=functions.NAME …<|message|>{…}<|call|>         gpt-oss

What is no valid call stays text. This module imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from podium.rollout.tasks.rows import read_object

__all__ = [
    "CALL_ENDS",
    "MARKS",
    "REASONING_ENDS",
    "CallReader",
    "Offer",
    "Reply",
    "ToolCall",
    "drop_open_message",
    "read_channels",
    "read_hermes",
    "reader_of",
]

_REASONING: Final = re.compile(r"\A\s*<think>(.*?)(?:</think>|\Z)\s*", re.DOTALL)
_HERMES: Final = re.compile(r"\s*<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
CALL_ENDS: Final = ("</tool_call>", "<|end|>", "<|call|>", "<|return|>")
"""What ends a call in the forms that have an end."""
_CHANNEL: Final = re.compile(
    r"(?:<\|start\|>assistant)?(?P<head>(?:(?!<\|message\|>).)*)<\|message\|>"
    r"(?P<body>.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|(?=<\|start\|>)|\Z)",
    re.DOTALL,
)
_RECIPIENT: Final = re.compile(r"to=functions\.([\w.-]+)")
_HEADER: Final = re.compile(r"\A\s*to=functions\.|(?:<\|(?:end|call|return)\|>\s*)?<\|(?:start|channel|constrain)\|>")
"""The beginning of a header in text after which none is complete."""
_CHANNEL_MARKS: Final = (
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
)
REASONING_ENDS: Final = ("</think>", "<|end|>", "<|call|>", "<|return|>", "<|start|>")
"""Texts that end reasoning."""
_LISTED: Final = "[TOOL_CALLS]"
_ARGUMENTS: Final = "[ARGS]"
_BARE: Final = "<|python_tag|>"
_BARE_KEYS: Final = frozenset({"name", "parameters", "arguments", "type", "id"})
"""The keys of a call in the form that has no mark. Some models write a type, as they read it of the tools."""

MARKS: Final = frozenset(
    {"<think>", "<tool_call>", "</tool_call>", "<|message|>", "<|channel|>", "<|constrain|>"}
    | {*REASONING_ENDS, _LISTED, _ARGUMENTS, _BARE}
)
"""Texts by which the readers find their way. Other special tokens, such as padding, are nothing that the model says."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that the model asked for.

    Attributes:
        name: The name of the tool.
        arguments: JSON text, as the model wrote it.
        id: The id that the model gave the call; "" where it gives none.
    """

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """The content of sampled ids.

    Attributes:
        content: The text, without reasoning and tool calls.
        reasoning: The model's reasoning; None if it wrote none.
        tool_calls: The tool calls of the model. Invalid calls stay in ``content``.
    """

    content: str
    reasoning: str | None = None
    tool_calls: Sequence[ToolCall] = field(default_factory=tuple)


@dataclass(frozen=True, slots=True)
class Offer:
    """What a request lets an answer be.

    Attributes:
        tools: The names of its tools, without which no answer is a call.
        has_form: Whether it prescribes the form of an answer that is no call, such as a JSON schema.
    """

    tools: Collection[str] = ()
    has_form: bool = False


CallReader: TypeAlias = Callable[[str, Offer], Reply]
"""Reads an answer, special tokens included."""


def reader_of(written: str) -> CallReader:
    """Return the reader for a template that writes an assistant's call of a tool as ``written``."""
    if "<|channel|>" in written:
        return read_channels
    if _LISTED in written:
        return read_listed
    if "<tool_call>" not in written and re.search(r'\{\s*"name"\s*:', written):
        return read_bare
    return read_hermes


def read_hermes(text: str, offer: Offer) -> Reply:
    """Calls in ``<tool_call>``, among text."""
    reasoning, text = _split_reasoning(text)
    calls: list[ToolCall] = []

    def take(found: re.Match[str]) -> str:
        call = _call(_object(found[1]), "arguments") if offer.tools else None
        if call is None:
            return found[0]
        calls.append(call)
        return ""

    text = _HERMES.sub(take, text)
    return Reply(text.rstrip("\n") if calls else text, reasoning, tuple(calls))


def read_bare(text: str, offer: Offer) -> Reply:
    """A single object, which is the whole answer. Without a mark before it, only its keys tell it from an answer that
    is JSON."""
    reasoning, text = _split_reasoning(text)
    body = text.strip()
    is_marked = body.startswith(_BARE)
    value = _object(body.removeprefix(_BARE).strip())
    call = _call(value, "parameters") if offer.tools and (is_marked or _is_bare_call(value, offer)) else None
    return Reply(text, reasoning) if call is None else Reply("", reasoning, (call,))


def _is_bare_call(value: Any, offer: Offer) -> bool:
    """Whether a value is a call, and no answer that is JSON: a name with arguments and nothing that no call has, or the
    name of a tool alone. Where the request prescribes the form of an answer, only a call of one of its tools with
    arguments is one."""
    if (
        not isinstance(value, Mapping)
        or not _BARE_KEYS.issuperset(value)
        or value.get("type", "function") != "function"
    ):
        return False
    values = [value[key] for key in ("parameters", "arguments") if key in value]
    if value.get("name") in offer.tools:
        return len(values) == 1 or not (values or offer.has_form)
    return len(values) == 1 and _is_object(values[0]) and not offer.has_form


def _is_object(value: Any) -> bool:
    """Whether a value is an object, or JSON text of one."""
    return isinstance(_object(value) if isinstance(value, str) else value, Mapping)


def read_listed(text: str, offer: Offer) -> Reply:
    """A list of objects after a mark; or a name, a second mark and an object, as later models of the family write."""
    reasoning, text = _split_reasoning(text)
    before, mark, rest = text.partition(_LISTED)
    if not (mark and offer.tools):
        return Reply(text, reasoning)
    if _ARGUMENTS in rest:
        parts = [piece.partition(_ARGUMENTS) for piece in rest.split(_LISTED)]
        entries = [{"name": name.strip(), "arguments": _object(body)} for name, _, body in parts]
    else:
        value = _object(rest)
        entries = value if isinstance(value, list) else [value]
    calls = [_call(entry, "arguments") for entry in entries]
    if not calls or None in calls:
        return Reply(text, reasoning)
    return Reply(before.rstrip(), reasoning, tuple(call for call in calls if call is not None))


def read_channels(text: str, offer: Offer) -> Reply:
    """Messages in channels: what is analyzed is reasoning, what is addressed to a function is a call."""
    content, reasoning, calls, done = list[str](), list[str](), list[ToolCall](), 0
    for match in _CHANNEL.finditer(text):
        content.append(text[done : match.start()])
        done = match.end()
        head, body = match["head"], match["body"]
        to = _RECIPIENT.search(head)
        if to and offer.tools and isinstance(called := _object(body), dict) and _is_unicode(called):
            calls.append(ToolCall(to[1], body.strip()))
        elif "analysis" in head:
            reasoning.append(body)
        else:
            content.append(body if not to else match[0])
    content.append(_before_header(text[done:]))
    return Reply("".join(content), "\n".join(reasoning) if reasoning else None, tuple(calls))


def drop_open_message(text: str, tools: bool) -> str:
    """Return messages in channels without the text at the end of which the next tokens decide what it is.

    That is a header that is not complete, because all text before ``<|message|>`` belongs to it, and a message to a
    function, which is a call once its JSON is complete.
    """
    done = 0
    for match in _CHANNEL.finditer(text):
        if tools and match.end() == len(text) and _RECIPIENT.search(match["head"]):
            return text[: match.start()]
        done = match.end()
    return text[:done]


def _before_header(text: str) -> str:
    """What follows the last message, without the header that begins in it, or that a cut left unfinished."""
    if header := _HEADER.search(text):
        return text[: header.start()]
    before, opener, rest = text.rpartition("<|")
    return before if opener and any(mark.startswith(opener + rest) for mark in _CHANNEL_MARKS) else text


def _split_reasoning(text: str) -> tuple[str | None, str]:
    """The reasoning at the beginning of an answer, and the rest."""
    match = _REASONING.match(text)
    return (match[1].strip("\n"), text[match.end() :]) if match else (None, text)


def _object(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=read_object)  # of two values of one name nobody knows which is meant
    except (ValueError, RecursionError):
        return None


def _call(found: Any, key: str) -> ToolCall | None:
    """A call from an object with a name and arguments. None for what is none."""
    if not (isinstance(found, Mapping) and isinstance(found.get("name"), str)):
        return None
    arguments = found.get(key, found.get("arguments", {}))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    call_id = found.get("id")
    return ToolCall(found["name"], text, call_id if isinstance(call_id, str) else "") if _is_unicode(found) else None


def _is_unicode(found: Any) -> bool:
    """Whether all texts in an object have UTF-8. Half of a surrogate pair has none, and JSON can spell it."""
    with contextlib.suppress(UnicodeEncodeError):
        if isinstance(found, str):
            json.dumps(_object(found), ensure_ascii=False).encode()
        json.dumps(found, ensure_ascii=False).encode()
        return all(map(_is_unicode, found.values())) if isinstance(found, Mapping) else True
    return False
