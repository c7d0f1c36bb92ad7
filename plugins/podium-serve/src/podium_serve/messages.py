"""The Messages API of Anthropic: https://docs.anthropic.com/en/api/messages. It is what Claude Code and its kin ask.

system, messages of blocks, tools ─▶ messages ─▶ an answer ─▶ blocks: thinking, text, tool_use
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from podium_agents.service.budgets import LIMIT_REACHED
from podium_agents.service.request_bodies import Refusal
from podium_serve.dialects import Event, Usage, as_list, check_fields, list_parts, refuse

if TYPE_CHECKING:
    from podium_agents.service.service import Answer
    from podium_serve.pieces import Delta

__all__ = ["Messages"]

_READ: Final = frozenset({"system", "messages", "tools", "tool_choice", "stop_sequences", "thinking", "output_config"})
_SAME: Final = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream", "chat_template_kwargs", "seed")
_HARMLESS: Final = frozenset(
    {
        "metadata",
        "service_tier",
        "cache_control",
        "betas",
        "inference_geo",
        "diagnostics",
        "user_profile_id",
        "workspace_id",
    }
)
_NEUTRAL: Final[Mapping[str, Sequence[Any]]] = {
    "container": (),
    "mcp_servers": ([],),
    "context_management": (
        {},
        {"edits": []},
        {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},  # which clears nothing
    ),
    "speed": ("standard",),
    "output_format": (),
}
_CLIENT_TOOLS: Final[Mapping[str, tuple[str, Mapping[str, str], Sequence[str]]]] = {
    "bash": (
        "Run a command in a shell that stays open. With restart, start the shell anew.",
        {"command": "string", "restart": "boolean"},
        (),
    ),
    "text_editor": (
        "View and edit files by the commands view, create, str_replace and insert.",
        {
            "command": "string",
            "path": "string",
            "file_text": "string",
            "old_str": "string",
            "new_str": "string",
            "insert_line": "integer",
            "insert_text": "string",
            "view_range": "array",
        },
        ("command", "path"),
    ),
}
"""Tools that the client runs and whose parameters the API knows, without their date: what is told of each to the model,
its parameters, and those that are required."""
_OF_ANY_TOOL: Final = frozenset({"type", "name", "cache_control", "strict", "input_examples", "eager_input_streaming"})
_TOOL: Final = _OF_ANY_TOOL | {"description", "input_schema"}
_CLIENT_TOOL: Final = _OF_ANY_TOOL | {"max_characters"}  # by which the client cuts a file that is viewed
_NEUTRAL_OF_TOOLS: Final[Mapping[str, Sequence[Any]]] = {
    "defer_loading": (False,),
    "allowed_callers": ([], ["direct"]),
}
_THINKING: Final = frozenset({"type", "budget_tokens", "display"})
_MESSAGE: Final = frozenset(
    {"role", "content", "id", "type", "model", "stop_reason", "stop_sequence", "stop_details", "usage", "container"}
    | {"diagnostics", "context_management", "input_transformations"}
)
"""The fields of a message that is sent, and of an answer, which a client sends again."""
_BLOCKS: Final[Mapping[Any, frozenset[str]]] = {
    "tool_result": frozenset({"type", "tool_use_id", "content", "is_error", "toolset_name", "cache_control"}),
    "tool_use": frozenset({"type", "id", "name", "input", "caller", "toolset_name", "cache_control"}),
    "thinking": frozenset({"type", "thinking", "signature", "cache_control"}),
    "redacted_thinking": frozenset({"type", "data", "cache_control"}),
    "document": frozenset({"type", "source", "title", "context", "cache_control"}),
}
"""The fields of each type of block but text."""
_NO_CITATIONS: Final = {"citations": ({}, {"enabled": False})}
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
_TELLS_ERROR: Final = re.compile(r"\W*(\w+_)?error\b", re.IGNORECASE)
_STOPS: Final = {"length": "max_tokens", "tool_calls": "tool_use"}
_KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
_FULL: Final = "context_length_exceeded"
_SERVER_FAILS: Final = 500
_TEXT: Final = ("text",)


class Messages:
    """The dialect."""

    clips = True

    def chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """As :meth:`.Dialect.chat`. In this API a last message of the assistant asks to go on with its text."""
        request = self.read(body)
        if request["messages"] and request["messages"][-1]["role"] == "assistant":
            raise Refusal(
                400,
                "messages: the last message is the assistant's, and this service does not go on with the text of an "
                "answer: end with a message of the user, and ask for a form by output_config.format or tool_choice",
                "messages",
                "unsupported",
            )
        return request

    def read(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The conversation of a body, whoever speaks last in it. Raises as :meth:`.Dialect.chat`."""
        fields = check_fields(body, _READ | {*_SAME} | _HARMLESS, _NEUTRAL)
        request: dict[str, Any] = {name: fields[name] for name in _SAME if name in fields}
        for name in ("messages", "max_tokens"):
            if name not in fields:
                raise Refusal(400, f"{name}: Field required", name)
        request["messages"] = _messages(fields["messages"], fields.get("system"))
        if tools := fields.get("tools"):
            request["tools"] = [_tool(tool, f"tools.{number}") for number, tool in enumerate(as_list(tools, "tools"))]
        if "tool_choice" in fields:
            request |= _tool_choice(fields["tool_choice"])
        if "stop_sequences" in fields:
            request["stop"] = fields["stop_sequences"]
        request |= _read_effort(fields)
        return request

    def writer(self, body: Mapping[str, Any], model: str) -> MessageWriter:
        """As :meth:`.Dialect.writer`."""
        del body
        return MessageWriter(model)

    def describe(self, refusal: Refusal) -> dict[str, Any]:
        """As :meth:`.Dialect.describe`. The form has no place for a code, so that it stands in the message."""
        other = "invalid_request_error" if refusal.status < _SERVER_FAILS else "api_error"
        message = refusal.message
        if refusal.code == _FULL:  # the words by which clients know that they have to compact
            message = f"prompt is too long: {message}"
        message = f"{message} ({refusal.code})" if refusal.code in (_FULL, LIMIT_REACHED) else message
        return {"type": "error", "error": {"type": _KINDS.get(refusal.status, other), "message": message}}


def _read_effort(fields: Mapping[str, Any]) -> dict[str, Any]:
    """How much the model is to think, and the form of its answer. A budget of thinking is a wish: nothing counts it."""
    read: dict[str, Any] = {}
    thinking = check_fields(fields.get("thinking", {}), _THINKING, {}, "thinking")
    if thinking.get("type", "disabled") not in ("enabled", "adaptive", "disabled"):
        raise refuse("thinking.type", thinking["type"], "expected enabled, adaptive or disabled")
    if "thinking" in fields:
        read["thinking"] = thinking.get("type") != "disabled"
    output = check_fields(fields.get("output_config", {}), frozenset({"effort", "format"}), {}, "output_config")
    if "effort" in output:
        read["reasoning_effort"] = output["effort"]
    if (form := output.get("format")) is not None:
        schema = check_fields(form, frozenset({"type", "schema", "name"}), {}, "output_config.format")
        if schema.get("type") != "json_schema":
            raise refuse("output_config.format.type", schema.get("type"), "expected json_schema")
        inner = {"name": schema.get("name", "answer"), "schema": schema.get("schema"), "strict": True}
        read["response_format"] = {"type": "json_schema", "json_schema": inner}
    return read


def _messages(sent: Any, system: Any) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if system:
        messages.append({"role": "system", "content": list_parts(system, "system", _TEXT)})
    for number, message in enumerate(as_list(sent, "messages")):
        where = f"messages.{number}"
        fields = check_fields(message, _MESSAGE, {}, where)
        role, content = fields.get("role"), fields.get("content")
        if role not in ("user", "assistant", "system"):
            raise refuse(f"{where}.role", role, "expected user, assistant or system")
        if isinstance(content, str) or role == "system":
            messages.append({"role": role, "content": list_parts(content, f"{where}.content", _TEXT)})
        elif not isinstance(content, list):
            raise Refusal(400, f"{where}.content is neither a text nor a list of blocks", f"{where}.content")
        elif role == "assistant":
            messages.append(_answer(content, f"{where}.content"))
        else:
            messages += _read_user(content, f"{where}.content")
    return messages


def _answer(blocks: Sequence[Any], where: str) -> dict[str, Any]:
    texts, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
    for number, block in enumerate(blocks):
        kind = _check_block(block, f"{where}.{number}")
        if kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind == "tool_use":
            arguments = block.get("input")
            text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
            function = {"name": block.get("name"), "arguments": text}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            texts.append(list_parts([block], f"{where}.{number}", _TEXT))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    return {**message, "tool_calls": calls} if calls else message


def _check_block(block: Any, where: str) -> Any:
    """Return the type of a block. Raises Refusal for a field that nothing reads."""
    if not isinstance(block, Mapping):
        return type(block).__name__
    kind = block.get("type")
    if isinstance(kind, str) and (fields := _BLOCKS.get(kind)) is not None:
        check_fields(block, fields, _NO_CITATIONS if kind == "document" else {}, where)
    return kind


def _read_user(blocks: Sequence[Any], where: str) -> Iterator[dict[str, Any]]:
    """Results of tools as messages of their own, and what else stands between them."""
    text = ""
    for number, block in enumerate(blocks):
        kind = _check_block(block, f"{where}.{number}")
        if kind == "document":
            text += _read_document(block, f"{where}.{number}")
            continue
        if kind != "tool_result":
            text += list_parts([block], f"{where}.{number}", _TEXT)
            continue
        if text:
            yield {"role": "user", "content": text}
            text = ""
        content = list_parts(block.get("content"), f"{where}.{number}.content", _TEXT)
        if (failed := block.get("is_error")) not in (None, True, False):
            raise refuse(f"{where}.{number}.is_error", failed, "expected true or false")
        if failed and not _TELLS_ERROR.match(content):  # templates have no other place for it
            content = f"error: {content}"
        yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}
    if text or not blocks:
        yield {"role": "user", "content": text}


def _read_document(block: Mapping[str, Any], where: str) -> str:
    """Return the text of a document, below its title and its context."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, Mapping) else None
    if kind not in ("text", "content") or not isinstance(source, Mapping):
        raise refuse(f"{where}.source.type", kind, "this service reads documents of type text or content")
    text = source.get("data") if kind == "text" else list_parts(source.get("content"), f"{where}.source.content", _TEXT)
    return "".join(f"{part}\n" for part in (block.get("title"), block.get("context"), text) if part)


def _tool(tool: Any, where: str) -> dict[str, Any]:
    kind = tool.get("type", "custom") if isinstance(tool, Mapping) else None
    if isinstance(tool, Mapping) and (known := _CLIENT_TOOLS.get(str(kind).rpartition("_")[0])):
        fields = check_fields(tool, _CLIENT_TOOL, _NEUTRAL_OF_TOOLS, where)
        about, parameters, required = known
        schema = {"type": "object", "properties": {name: {"type": of} for name, of in parameters.items()}}
        schema["required"] = [*required]
        function = {"name": fields.get("name"), "description": about, "parameters": schema}
        return {"type": "function", "function": function | _hints(fields, about, where)}
    if kind not in ("custom", None) or not isinstance(tool, Mapping):
        raise refuse(f"{where}.type", kind, "this service knows tools with an input_schema; leave the tool out")
    fields = check_fields(tool, _TOOL, _NEUTRAL_OF_TOOLS, where)
    function = {"name": fields.get("name"), "parameters": fields.get("input_schema", {})}
    if "description" in fields:
        function["description"] = fields["description"]
    return {"type": "function", "function": function | _hints(fields, fields.get("description"), where)}


def _hints(fields: Mapping[str, Any], about: Any, where: str) -> dict[str, Any]:
    """What the model reads of a tool's ``strict`` and ``input_examples``: the field that the other APIs have, and
    examples behind the description ``about``."""
    strict = fields.get("strict", False)
    if not isinstance(strict, bool):
        raise refuse(f"{where}.strict", strict, "expected true or false")
    hints: dict[str, Any] = {"strict": True} if strict else {}
    if examples := as_list(fields.get("input_examples", []), f"{where}.input_examples"):
        if not isinstance(about, str | None):
            raise refuse(f"{where}.description", about, "expected a text")
        lines = ["Examples of its input:", *(json.dumps(example, ensure_ascii=False) for example in examples)]
        hints["description"] = "\n\n".join(filter(None, (about, "\n".join(lines))))
    return hints


def _tool_choice(choice: Any) -> dict[str, Any]:
    fields = check_fields(choice, frozenset({"type", "name", "disable_parallel_tool_use"}), {}, "tool_choice")
    kind = fields.get("type")
    if kind == "tool":
        read: dict[str, Any] = {"tool_choice": {"type": "function", "function": {"name": fields.get("name")}}}
    elif kind in _CHOICES:
        read = {"tool_choice": _CHOICES[kind]}
    else:
        raise refuse("tool_choice.type", kind, "expected auto, any, tool or none")
    return {**read, "parallel_tool_calls": False} if fields.get("disable_parallel_tool_use") else read


class MessageWriter:
    """Writes an answer as a message.

    Args:
        model: The name of the model.

    Attributes:
        whole: The message so far.
    """

    def __init__(self, model: str) -> None:
        self._kind = ""  # of the block that is open
        self._blocks: list[dict[str, Any]] = []
        self.whole: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model,
            "content": [], "stop_reason": None, "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }  # fmt: skip

    def begin(self, prompt: int) -> Iterator[Event]:
        """As :meth:`.Writer.begin`."""
        self.whole["usage"] = {"input_tokens": prompt, "output_tokens": 0}
        yield {"type": "message_start", "message": dict(self.whole)}

    def add(self, delta: Delta, logprobs: Sequence[Any] = ()) -> Iterator[Event]:
        """As :meth:`.Writer.add`."""
        del logprobs  # of which the API has none
        for kind, text in (("thinking", delta.reasoning), ("text", delta.content)):
            if not text:
                continue
            if self._kind != kind:
                yield from self._close()
                signed = {"signature": ""} if kind == "thinking" else {}
                yield self._open({"type": kind, kind: "", **signed})
            self._blocks[-1][kind] += text
            yield self._delta(f"{kind}_delta", **{kind: text})

    def _open(self, block: dict[str, Any]) -> Event:
        self._kind = block["type"]
        self._blocks.append(block)
        return {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}

    def _delta(self, kind: str, **fields: Any) -> Event:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": {"type": kind, **fields}}

    def _close(self) -> Iterator[Event]:
        if self._kind:
            yield {"type": "content_block_stop", "index": len(self._blocks) - 1}
        self._kind = ""

    def end(self, answer: Answer, usage: Usage) -> Iterator[Event]:
        """As :meth:`.Writer.end`."""
        yield from self._close()
        for call in answer.message.get("tool_calls") or []:
            name, text = call["function"]["name"], call["function"]["arguments"]
            yield self._open({"type": "tool_use", "id": call["id"], "name": name, "input": {}})
            yield self._delta("input_json_delta", partial_json=text)
            self._blocks[-1]["input"] = _parse(text)
            yield from self._close()
        reason = _STOPS.get(answer.finish_reason, "end_turn" if answer.stop is None else "stop_sequence")
        self.whole |= {"content": self._blocks, "stop_reason": reason, "stop_sequence": answer.stop}
        self.whole["usage"] = {
            "input_tokens": usage.prompt - usage.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached,
            "output_tokens": usage.completion,
        }
        stopped = {"stop_reason": reason, "stop_sequence": answer.stop}
        yield {"type": "message_delta", "delta": stopped, "usage": self.whole["usage"]}
        yield {"type": "message_stop"}

    def fail(self, refusal: Refusal) -> Iterator[Event]:
        """As :meth:`.Writer.fail`."""
        yield Messages().describe(refusal)


def _parse(arguments: str) -> Any:
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
