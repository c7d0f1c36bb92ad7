"""What a message says to the model. By this a session recognizes the history that a client sends back.

A client may change an answer on its way: it adds fields, renames calls, writes JSON anew. What counts is what the chat
template reads: the role, the text, calls of tools by their names and arguments, and to which call a result belongs.
Reasoning counts nowhere, because many clients leave it out. Any other field counts where the template writes it, which
is tried. This module imports no torch.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from podium.rollout.tasks.fields import is_speech, to_tool_calls

__all__ = [
    "Departure",
    "Key",
    "MessageReader",
    "Template",
    "describe_departure",
    "message_key",
    "rename_results",
    "tools_key",
]

Message: TypeAlias = Mapping[str, Any]
Key: TypeAlias = str
"""What a message says, in a form that is equal for what two clients send of the same message."""

_READ: Final = frozenset({"role", "content", "tool_calls", "function_call", "tool_call_id"})
_EMPTY: Final[tuple[Any, ...]] = (None, "", [], {})
_ABSENT: Final = object()
_SHOWN: Final = 60  # characters of a value in a note


class Template(Protocol):
    """What a chat template says about messages."""

    def reads(self, role: str, fields: Message) -> bool:
        """Whether it writes a message of this role otherwise if it has these fields too."""
        ...

    def writes_alike(self, messages: Sequence[Message], tools: Sequence[Message]) -> bool:
        """Whether it writes these messages of one role, each alone after a question, as the same text."""
        ...


class Departure(NamedTuple):
    """Where a client's history leaves what a session has recorded.

    Attributes:
        at: The place of the first message that is another one.
        recorded: What the session has there.
        key: Its key.
        sent: What the client sends there.
    """

    at: int
    recorded: Message
    key: Key
    sent: Message


class MessageReader:
    """Gives the keys of a session's messages.

    Args:
        template: The template by which fields count; None if only role, text and calls count.
    """

    def __init__(self, template: Template | None = None) -> None:
        self._template = template
        self._schemas: dict[str, Any] = {}

    def learn(self, tools: Sequence[Message]) -> None:
        """Remember the parameters of tools, by which arguments are read."""
        for tool in tools:
            function = tool.get("function")
            if isinstance(function, Mapping):
                self._schemas[str(function.get("name"))] = function.get("parameters")

    def keys(self, messages: Sequence[Message], earlier: Iterable[tuple[Message | None, Key]] = ()) -> list[Key]:
        """Return the key of each message. ``earlier`` are messages with their keys, which those that are equal and in
        the same places have already."""
        pairs = zip(messages, chain(earlier, repeat((None, ""))), strict=False)
        return [
            key if message == before else self.key(messages, at) for at, (message, (before, key)) in enumerate(pairs)
        ]

    def key(self, messages: Sequence[Message], at: int) -> Key:
        """Return the key of the message at a place of a conversation. Raises RecursionError for one nested too
        deeply."""
        return message_key(messages[at], _find_call(messages, at), self._schemas, self._template)

    def is_alike(self, departure: Departure, tools: Sequence[Message]) -> bool:
        """Whether the template writes both messages of a departure alike, without names of calls and reasoning."""
        both = departure.recorded, departure.sent
        if self._template is None or len({str(message.get("role")) for message in both}) > 1:
            return False
        return self._template.writes_alike([_normalize_message(message, self._schemas) for message in both], tools)


def message_key(
    message: Message,
    call: int | None = None,
    schemas: Mapping[str, Any] | None = None,
    template: Template | None = None,
) -> Key:
    """Return what a message says.

    White space around an assistant's text, text in parts, the ids of calls, the form of their JSON arguments, defaults
    of the tools' schemas among these, reasoning, and fields that the template does not write make no difference.

    Args:
        message: The message.
        call: For a result, the number of the call that it answers.
        schemas: The parameters of tools, by name.
        template: Says which other fields count; None for no other field.
    """
    role = str(message.get("role"))
    others = _other_fields(message)
    if others and template is not None:
        others = {name: value for name, value in others.items() if template.reads(role, {name: value})}
    else:
        others = {}
    key = [role, _text(message), _calls(message, schemas or {}), call, others]
    return json.dumps(key, sort_keys=True, ensure_ascii=False, default=str)


def rename_results(results: Sequence[Message], sent: Message, recorded: Message) -> Sequence[Message]:
    """Return messages after an answer, whose results name its calls as the session recorded them, and not as the client
    has renamed them."""
    ids, names = ([call.get("id") for call in message.get("tool_calls") or ()] for message in (sent, recorded))
    renamed = {before: now for before, now in zip(ids, names, strict=False) if before != now and before is not None}
    if not renamed:
        return results
    called = [message.get("tool_call_id") for message in results]
    pairs = zip(results, called, strict=True)
    return [{**message, "tool_call_id": renamed[call]} if call in renamed else message for message, call in pairs]


def tools_key(tools: Sequence[Message], options: Mapping[str, Any] | None = None) -> Key:
    """Return what the tools of a request say, and the variables that its template got; "" for none. The order of an
    object's entries makes no difference."""
    parts = [*tools, *([options] if options else ())]
    return json.dumps(parts, sort_keys=True, ensure_ascii=False, default=str) if parts else ""


def describe_departure(departure: Departure) -> str:
    """Return which field of which message is another one than was recorded, and both values."""
    recorded, sent = departure.recorded, departure.sent
    name, before, now = next(_differences(recorded, sent), ("", "", ""))
    what = f"{name} = {_show(now)}, and the session has {_show(before)}" if name else "fields that the template writes"
    return f"message {departure.at + 1}, of the role {str(sent.get('role'))!r}, has {what}"


def _differences(recorded: Message, sent: Message) -> Iterator[tuple[str, Any, Any]]:
    for name, read in (("role", lambda message: message.get("role")), ("content", _text)):
        if read(recorded) != read(sent):
            yield name, read(recorded), read(sent)
    calls, calls_sent = _calls(recorded, {}), _calls(sent, {})
    if len(calls) != len(calls_sent):
        yield "tool_calls", [name for name, _ in calls], [name for name, _ in calls_sent]
    for number, (before, now) in enumerate(zip(calls, calls_sent, strict=False)):
        for entry, old, new in zip(("name", "arguments"), before, now, strict=True):
            if old != new:
                yield f"tool_calls[{number}].function.{entry}", old, new
    fields, fields_sent = _other_fields(recorded), _other_fields(sent)
    for name in sorted({*fields, *fields_sent}):
        if fields.get(name) != fields_sent.get(name):
            yield name, fields.get(name), fields_sent.get(name)
    if recorded.get("tool_call_id") != sent.get("tool_call_id"):
        yield "tool_call_id", recorded.get("tool_call_id"), sent.get("tool_call_id")


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]}…{text[-_SHOWN // 2 :]}"


def _other_fields(message: Message) -> dict[str, Any]:
    """The fields that count where a template writes them: no reasoning of the model, and no name that a client gives to
    it."""
    is_answer = message.get("role") == "assistant"
    return {
        name: value
        for name, value in message.items()
        if name not in _READ and value not in _EMPTY and not (is_answer and (name == "name" or is_speech(name)))
    }


def _text(message: Message) -> str:
    """The text of a message. White space around an answer is often lost on the way, and so is reasoning in it."""
    content, is_answer = message.get("content"), message.get("role") == "assistant"
    if isinstance(content, list):
        content = "".join(
            str(part.get("text", part)) if isinstance(part, Mapping) else str(part)
            for part in content
            if not (is_answer and isinstance(part, Mapping) and is_speech(str(part.get("type"))))
        )
    text = "" if content is None else content if isinstance(content, str) else json.dumps(content, default=str)
    return text.strip() if is_answer else text


def _find_call(messages: Sequence[Message], at: int) -> int | None:
    """The number of the call that the result at a place answers: by its id, and else by its place among the results;
    None for what is no result."""
    if messages[at].get("role") not in ("tool", "function"):
        return None
    before = at
    while before and messages[before - 1].get("role") in ("tool", "function"):
        before -= 1
    calls = messages[before - 1].get("tool_calls") if before else None
    ids = [call.get("id") if isinstance(call, Mapping) else None for call in calls] if isinstance(calls, list) else []
    call_id = messages[at].get("tool_call_id")
    return ids.index(call_id) if call_id is not None and call_id in ids else at - before


def _calls(message: Message, schemas: Mapping[str, Any]) -> list[list[str]]:
    """The name of each call and its arguments."""
    calls = to_tool_calls(message).get("tool_calls")
    functions = [call.get("function") if isinstance(call, Mapping) else None for call in calls or ()]
    return [
        [str(function.get("name")), _arguments(function.get("arguments"), schemas.get(str(function.get("name"))))]
        if isinstance(function, Mapping)
        else ["", str(function)]
        for function in functions
    ]


def _arguments(arguments: Any, schema: Any) -> str:
    """Arguments as JSON text without defaults; a text that is no JSON as it is."""
    with contextlib.suppress(ValueError, RecursionError):
        parsed = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        parsed = _without_defaults({} if parsed is None else parsed, schema, schema)
        return json.dumps(parsed, sort_keys=True, ensure_ascii=False, default=str)
    return arguments if isinstance(arguments, str) else json.dumps(arguments, sort_keys=True, default=str)


def _without_defaults(value: Any, schema: Any, root: Any) -> Any:
    """A value without entries of objects that its JSON schema takes for given: those with their default, and a null for
    what is neither required nor has another default. A number is the same with and without a fraction of zero."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    schema = _resolve(schema, root)
    if isinstance(value, list):
        return [_without_defaults(entry, schema.get("items"), root) for entry in value]
    if not isinstance(value, Mapping):
        return value
    properties, required = schema.get("properties"), schema.get("required")
    kept: dict[str, Any] = {}
    for name, entry in value.items():
        part = properties.get(name) if isinstance(properties, Mapping) else None
        plain = _without_defaults(entry, part, root)
        if isinstance(part, Mapping):
            default = _resolve(part, root).get("default", _ABSENT)
            is_optional = name not in (required if isinstance(required, list) else ())
            absent = (None if is_optional else _ABSENT) if default is _ABSENT else default
            if absent is not _ABSENT and _json(plain) == _json(_without_defaults(absent, part, root)):
                continue
        kept[name] = plain
    return kept


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _resolve(schema: Any, root: Any) -> Message:
    """A schema with what it refers to, and with the only object or list among its alternatives."""
    resolved = dict(schema) if isinstance(schema, Mapping) else {}
    for _ in range(8):  # a reference to a reference; of a circle there is no end
        reference, target = resolved.pop("$ref", None), root
        branches = [resolved.pop(name) for name in ("allOf", "anyOf", "oneOf") if isinstance(resolved.get(name), list)]
        for step in str(reference).split("/")[1:] if isinstance(reference, str) and reference[:1] == "#" else ():
            target = target.get(step) if isinstance(target, Mapping) else None
        nested = [
            part
            for branch in branches
            for part in branch
            if isinstance(part, Mapping) and not {"$ref", "properties", "items"}.isdisjoint(part)
        ]
        if isinstance(reference, str) and isinstance(target, Mapping):
            resolved = {**target, **resolved}
        elif len(nested) == 1:
            resolved = {**nested[0], **resolved}
        else:
            break
    return resolved


def _normalize_message(message: Message, schemas: Mapping[str, Any]) -> dict[str, Any]:
    """A message as it is written to be compared: with what counts alone, and calls named by their numbers."""
    plain: dict[str, Any] = {"role": message.get("role"), "content": _text(message), **_other_fields(message)}
    calls: list[Any] = []
    for number, (name, arguments) in enumerate(_calls(message, schemas)):
        function = {"name": name, "arguments": arguments}
        calls.append({"id": f"call{number:05}", "type": "function", "function": function})
    return {**plain, "tool_calls": calls} if calls else plain
