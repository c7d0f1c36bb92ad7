"""Messages of a conversation: what they have to be, their text, and the form that every chat template can write."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeGuard, cast

from podium.errors import DataError
from podium.plain_values import explain_json
from podium.rollout.tasks.rows import read_object

Messages = list[dict[str, Any]]
"""A conversation: each entry has "role", and "content", "tool_calls" or both."""

INSTRUCTING: Final = ("system", "developer")
"""The roles of messages before which no ``data.system_prompt`` comes."""
_TEXT_PARTS: Final = ("text", "input_text", "output_text")


def is_conversation(prompt: object) -> TypeGuard[Messages]:
    """Return whether a value is a list of messages."""
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(
            isinstance(m, Mapping) and isinstance(m.get("role"), str) and ("content" in m or "tool_calls" in m)
            for m in prompt
        )
    )


class SystemPrompt(dict[str, Any]):
    """The message of ``data.system_prompt``, which no row has."""

    def __init__(self, text: str) -> None:
        super().__init__(role="system", content=text)


def number_of(messages: Messages, index: int) -> int:
    """Return the number of ``messages[index]`` among those of its row, from 1."""
    return index + 1 - isinstance(messages[0], SystemPrompt)


def check_messages(column: str | None, messages: object) -> None:
    """Raise DataError unless ``messages`` are a conversation that a chat template can write as text."""
    if not is_conversation(messages):
        are_ids = isinstance(messages, list) and bool(messages) and all(type(entry) is int for entry in messages)
        raise DataError(
            f"column {column!r} holds {str(messages)[:60]!r} ({type(messages).__name__}); expected text, or a list of "
            'messages such as [{"role": "user", "content": "…"}]'
            f"{'; token ids are not read: give the text that they stand for' if are_ids else ''}"
        )
    for number, message in enumerate(cast(Messages, messages), start=1):
        where = f"message {number} of column {column!r}"
        content, calls = message.get("content"), message.get("tool_calls")
        read: Any = read_calls(calls) if calls else []
        if not isinstance(read, list) or not all(isinstance(call, Mapping) for call in read):
            raise DataError(
                f"{where} has tool_calls = {str(calls)[:60]!r}; expected a list of calls such as "
                '{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}'
            )
        if isinstance(content, str) or (content is None and (calls or message.get("function_call"))):
            continue
        parts = content if isinstance(content, list) else []
        kinds = [part.get("type") if isinstance(part, Mapping) else type(part).__name__ for part in parts]
        if parts and all(kind in _TEXT_PARTS for kind in kinds):
            if other := next((part for part in parts if not isinstance(part.get("text"), str)), None):
                raise DataError(
                    f"{where} has the part {str(dict(other))[:60]}, whose text is {str(other.get('text'))[:40]}; "
                    'expected {"type": "text", "text": "…"}'
                )
            continue
        if other := next((kind for kind in kinds if isinstance(kind, str) and kind not in _TEXT_PARTS), None):
            raise DataError(
                f"{where} has a part of the type {other!r}, which a model that is trained on text alone would not "
                "see; expected text, or parts of the type text"
            )
        raise DataError(
            f"{where} has the content {str(content)[:60]!r} ({type(content).__name__}); expected text, parts of the "
            "type text, or tool_calls without content"
        )


def half_pair(text: str) -> int | None:
    """Return the place of the first character that is half of a surrogate pair, and so no text; None if none is."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def message_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message, whose parts are joined."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content)


def strip_end(text: str, ends: Sequence[str]) -> str:
    """Return a text without the sign of ``ends`` with which it ends, and which is written after it."""
    end = next((end for end in ends if end and text.rstrip().endswith(end)), "")
    return text.rstrip().removesuffix(end) if end else text


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as every chat template can write them: the content is text, no entry is None, and the arguments
    of tool calls are objects.

    A template that expects text writes a list of parts as Python shows it, and arguments that are JSON text, which the
    OpenAI API has, as a string in quotes. An entry of None is one that a Parquet row lacks.
    """
    written: list[Any] = []
    for message in messages:
        plain_message = {name: entry for name, entry in message.items() if entry is not None}
        content = plain_message.get("content", "")
        plain_message["content"] = message_text(message) if isinstance(content, list) else content
        if plain_message.get("tool_calls"):
            plain_message["tool_calls"] = read_calls(plain_message["tool_calls"])
        written.append(plain_message)
    return written


def read_calls(calls: Any) -> Any:
    """Return calls of tools as a list, with their arguments as objects: calls, a call, or the JSON text of either.

    What is no JSON object stays as it is.
    """
    calls = parse_json(calls, "{" if isinstance(calls, str) and calls.lstrip().startswith("{") else "[", strict=True)
    if isinstance(calls, Mapping):
        calls = [calls]
    return [_with_object(parse_json(call, "{", strict=True)) for call in calls] if isinstance(calls, list) else calls


def _with_object(call: Any) -> Any:
    """A tool call with its arguments as an object."""
    if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_object(call["function"])}
    if not isinstance(call, Mapping) or "arguments" not in call:
        return call
    text = call["arguments"]
    written = isinstance(text, str) and text.strip()
    arguments = parse_json(text, "{", strict=True) if written else text or {}
    return {**call, "arguments": arguments} if isinstance(arguments, Mapping) else call


def parse_json(value: Any, sign: str, *, strict: bool = False) -> Any:
    """Return the object or list that a JSON text which begins with ``sign`` holds; any other value as it is.

    Args:
        strict: Raise DataError where an object has a name twice, with different values, of which otherwise the last
            one is taken, or a number is too long to be read.
    """
    if isinstance(value, str) and value.lstrip().startswith(sign):
        try:
            return json.loads(value, object_pairs_hook=read_object if strict else None)
        except (json.JSONDecodeError, RecursionError):
            return value
        except ValueError as error:
            if not strict:
                return value
            raise DataError(f"the JSON text {value.strip()[:60]!r}: {explain_json(error, value)}") from None
    return value
