"""The Responses API of OpenAI: https://platform.openai.com/docs/api-reference/responses. It is what the Agents SDK asks
by default, and all that Codex asks.

    input, instructions, tools ─▶ messages ─▶ an answer ─▶ items: reasoning, message, function_call
"""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from podium_agents.service.request_bodies import Refusal
from podium_serve.dialects import Event, Usage, as_list, check_fields, list_parts, refuse

if TYPE_CHECKING:
    from podium_agents.service.service import Answer
    from podium_serve.pieces import Delta

__all__ = ["Responses"]

_READ: Final = frozenset(
    {"model", "input", "instructions", "tools", "tool_choice", "reasoning", "text", "include", "top_logprobs"}
    | {"max_output_tokens", "previous_response_id"}
)
_SAME: Final = (
    "model",
    "temperature",
    "top_p",
    "stream",
    "parallel_tool_calls",
    "chat_template_kwargs",
    "seed",
    "stop",
)
_MORE: Final = (*_SAME, "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias")
_HARMLESS: Final = frozenset(
    {"store", "metadata", "user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
    | {"stream_options", "max_tool_calls", "prompt_cache_options", "client_metadata"}
)
_NEUTRAL: Final[Mapping[str, Sequence[Any]]] = {
    "background": (False,),
    "truncation": ("disabled", "auto"),  # a conversation that is too long is refused, so that nothing is cut
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
}
_REASONING: Final = frozenset({"effort", "summary", "generate_summary", "context"})
_TEXTS: Final = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
_LOGPROBS: Final = "message.output_text.logprobs"
_INCLUDED: Final = (
    _LOGPROBS,
    "reasoning.encrypted_content",  # there is nothing encrypted, and no need of it
    "web_search_call.action.sources",  # nor of what follows, which is of tools and images that no answer has
    "web_search_call.results",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
)
_CALL: Final = frozenset({"type", "id", "status", "call_id", "name", "created_by", "caller"})
_OUTPUT: Final = frozenset({"type", "id", "status", "call_id", "name", "output", "created_by", "caller"})
_ITEMS: Final[Mapping[Any, frozenset[str]]] = {
    "message": frozenset({"type", "id", "status", "role", "content", "phase", "created_by"}),
    "reasoning": frozenset({"type", "id", "status", "summary", "content", "encrypted_content", "created_by"}),
    "function_call": _CALL | {"arguments", "parsed_arguments"},
    "custom_tool_call": _CALL | {"input"},
    "function_call_output": _OUTPUT,
    "custom_tool_call_output": _OUTPUT,
}
"""The fields of each type of item."""
_NEUTRAL_OF_ITEMS: Final = {  # what the SDK dumps by its alias, or by its name
    "async": (False,),  # of a call whose result may come later, which chat templates cannot write
    "async_": (False,),
    "namespace": ("",),
}
_GRAMMAR: Final = frozenset({"type", "syntax", "definition"})
_FREE: Final = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""The parameters of a freeform tool, which takes a text."""


class Responses:
    """The dialect."""

    clips = False

    def chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """As :meth:`.Dialect.chat`."""
        fields = check_fields(body, _READ | {*_MORE} | _HARMLESS, _NEUTRAL)
        if previous := fields.get("previous_response_id"):
            raise refuse("previous_response_id", previous, "this service keeps no responses; send the whole input")
        if "input" not in fields:
            raise Refusal(400, "input: Field required", "input")
        request: dict[str, Any] = {name: fields[name] for name in _MORE if name in fields}
        request["messages"] = _messages(fields["input"], fields.get("instructions"))
        if tools := fields.get("tools"):
            request["tools"] = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(as_list(tools, "tools"))]
        if "tool_choice" in fields:
            request["tool_choice"] = _tool_choice(fields["tool_choice"], request.get("tools", []))
        if "max_output_tokens" in fields:
            request["max_tokens"] = fields["max_output_tokens"]
        request |= _read_form(fields)
        return request

    def writer(self, body: Mapping[str, Any], model: str) -> ResponseWriter:
        """As :meth:`.Dialect.writer`."""
        return ResponseWriter(body, model)

    def describe(self, refusal: Refusal) -> dict[str, Any]:
        """As :meth:`.Dialect.describe`."""
        return refusal.body


def _read_form(fields: Mapping[str, Any]) -> dict[str, Any]:
    """How much the model is to think, the form of its answer, and what is told of it."""
    read: dict[str, Any] = {}
    reasoning = check_fields(fields.get("reasoning", {}), _REASONING, {}, "reasoning")
    if "effort" in reasoning:
        read["reasoning_effort"] = reasoning["effort"]
    text = check_fields(fields.get("text", {}), frozenset({"format", "verbosity"}), {}, "text")
    if "verbosity" in text:
        read["verbosity"] = text["verbosity"]
    if (form := text.get("format")) is not None:
        read["response_format"] = _format(form)
    include = as_list(fields.get("include", []), "include")
    if other := [name for name in include if name not in _INCLUDED]:
        raise refuse("include", other[0])
    if _LOGPROBS in include or "top_logprobs" in fields:
        read |= {"logprobs": True, "top_logprobs": fields.get("top_logprobs")}
    return read


def _messages(sent: Any, instructions: Any) -> list[dict[str, Any]]:
    """Messages of input items. What the model said in one answer is one message, and instructions before the first
    question are one too."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": list_parts(instructions, "instructions", _TEXTS)})
    items = [{"role": "user", "content": sent}] if isinstance(sent, str) else as_list(sent, "input")
    for number, item in enumerate(items):
        message = _message(item, f"input[{number}]")
        if namespace := item.get("namespace"):
            why = "chat templates write the name alone; join both in name, here and in tools, as in crm_find_order"
            raise refuse(f"input[{number}].namespace", namespace, why)
        check_fields(item, _ITEMS[item.get("type") or "message"], _NEUTRAL_OF_ITEMS, f"input[{number}]")
        role = message["role"]
        if messages and role == messages[-1]["role"] == "assistant" and not _begins_answer(messages[-1], message):
            _extend(messages[-1], message)
        elif messages and len(messages) == 1 and role == messages[0]["role"] == "system":
            messages[0]["content"] = f"{messages[0]['content']}\n\n{message['content']}"
        else:
            messages.append(message)
    return messages


def _begins_answer(before: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
    """Whether a second answer begins with an item: after its calls a model says nothing more."""
    return bool(before.get("tool_calls")) and not message.get("tool_calls")


def _extend(message: dict[str, Any], more: Mapping[str, Any]) -> None:
    message["content"] = f"{message.get('content') or ''}{more.get('content') or ''}"
    for name, join in (("tool_calls", list), ("reasoning_content", str)):
        if name in more:
            message[name] = join(message.get(name, join())) + more[name]


def _message(item: Any, where: str) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise Refusal(400, f"{where} is not a JSON object", where)
    kind = item.get("type") or ("message" if "role" in item else None)
    if kind == "message":
        role = {"developer": "system"}.get(str(item.get("role")), str(item.get("role")))
        return {"role": role, "content": list_parts(_required(item, "content", where), f"{where}.content", _TEXTS)}
    if kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        return {"role": "assistant", "content": "", "reasoning_content": list_parts(parts, where, _TEXTS)}
    if kind in ("function_call", "custom_tool_call"):
        free = kind != "function_call"
        arguments = json.dumps({"input": item.get("input")}, ensure_ascii=False) if free else item.get("arguments")
        function = {"name": item.get("name"), "arguments": arguments}
        call = {"id": item.get("call_id") or item.get("id"), "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind in ("function_call_output", "custom_tool_call_output"):
        output = list_parts(_required(item, "output", where), f"{where}.output", _TEXTS)
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
    raise refuse(f"{where}.type", kind, "this service reads messages, reasoning, function calls and their outputs")


def _required(item: Mapping[str, Any], name: str, where: str) -> Any:
    if item.get(name) is None:
        raise Refusal(400, f"{where}.{name}: Field required", where)
    return item[name]


def _tool(tool: Any, where: str) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if kind == "custom" and isinstance(tool, Mapping):
        form = check_fields(tool.get("format") or {}, _GRAMMAR, {}, f"{where}.format")
        about = [str(tool.get("description") or "")]
        if form.get("type") == "grammar":
            about.append(f"The input follows this grammar ({form.get('syntax')}):\n{form.get('definition')}")
        function = {"name": tool.get("name"), "description": "\n\n".join(filter(None, about)), "parameters": _FREE}
        return {"type": "function", "function": function}
    if kind != "function":
        raise refuse(f"{where}.type", kind, "this service knows functions and custom tools; leave the tool out")
    return {"type": "function", "function": {n: v for n, v in tool.items() if n != "type" and v is not None}}


def _tool_choice(choice: Any, tools: Sequence[Mapping[str, Any]]) -> Any:
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") == "allowed_tools":
        listed = as_list(choice.get("tools") or [], "tool_choice.tools")
        allowed = {str(tool.get("name")) for tool in listed if isinstance(tool, Mapping)}
        if allowed != {tool["function"].get("name") for tool in tools}:
            raise refuse("tool_choice.tools", sorted(map(str, allowed)), "send the tools that may be called alone")
        return choice.get("mode")
    if choice.get("type") in ("function", "custom"):
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format(form: Any) -> Any:
    if isinstance(form, Mapping) and form.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {n: v for n, v in form.items() if n != "type"}}
    return form


class ResponseWriter:
    """Writes an answer as a response.

    Args:
        body: The request.
        model: The name of the model.

    Attributes:
        whole: The response so far.
    """

    def __init__(self, body: Mapping[str, Any], model: str) -> None:
        self._numbers = itertools.count()
        self._kind = ""  # of the item that is open
        self._items: list[dict[str, Any]] = []
        self.whole: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time()),
            "status": "in_progress", "background": False, "error": None, "incomplete_details": None,
            "instructions": body.get("instructions"), "max_output_tokens": body.get("max_output_tokens"),
            "model": model, "output": [], "parallel_tool_calls": body.get("parallel_tool_calls", True),
            "previous_response_id": None, "reasoning": body.get("reasoning") or {"effort": None, "summary": None},
            "store": False, "temperature": body.get("temperature", 1.0), "text": body.get("text") or _PLAIN,
            "tool_choice": body.get("tool_choice") or "auto", "tools": body.get("tools") or [],
            "top_p": body.get("top_p", 1.0), "truncation": "disabled", "usage": None, "user": body.get("user"),
            "metadata": body.get("metadata") or {},
        }  # fmt: skip
        self._free = {tool.get("name") for tool in self.whole["tools"] if tool.get("type") == "custom"}
        self._has_summary = bool((body.get("reasoning") or {}).get("summary"))

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": f"response.{kind}", "sequence_number": next(self._numbers), **fields}

    def begin(self, prompt: int) -> Iterator[Event]:
        """As :meth:`.Writer.begin`."""
        del prompt  # it is told at the end
        yield self._event("created", response=dict(self.whole))
        yield self._event("in_progress", response=dict(self.whole))

    def add(self, delta: Delta, logprobs: Sequence[Any] = ()) -> Iterator[Event]:
        """As :meth:`.Writer.add`. Reasoning has no log-probabilities in this API."""
        for kind, text in (("reasoning", delta.reasoning), ("message", delta.content)):
            if not text:
                continue
            if self._kind != kind:
                yield from self._close()
                yield from self._open(kind)
            part = self._items[-1]["content"][0]
            part["text"] += text
            extra = {} if kind == "reasoning" else {"logprobs": [*logprobs]}
            if kind == "message":
                part["logprobs"] += logprobs
            yield self._event(f"{part['type']}.delta", **self._place, content_index=0, delta=text, **extra)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _open(self, kind: str, item: Mapping[str, Any] | None = None) -> Iterator[Event]:
        self._kind = kind
        if kind == "reasoning":
            item = {"id": f"rs_{uuid.uuid4().hex}", "type": kind, "summary": []}
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        else:
            item = {"id": f"msg_{uuid.uuid4().hex}", "type": kind, "role": "assistant"}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._items.append({**item, "status": "in_progress", "content": [part]})
        index = len(self._items) - 1
        added = {**item, "status": "in_progress", "content": []}
        yield self._event("output_item.added", output_index=index, item=added)
        yield self._event("content_part.added", **self._place, content_index=0, part=dict(part))

    def _close(self, status: str = "completed") -> Iterator[Event]:
        if not self._kind:
            return
        item = self._items[-1]
        part = item["content"][0]
        extra: dict[str, Any] = {}
        if self._kind == "message":
            extra = {"logprobs": part["logprobs"]}
        elif self._has_summary:
            item["summary"] = [{"type": "summary_text", "text": part["text"]}]
        item["status"] = status
        place = {**self._place, "content_index": 0}
        yield self._event(f"{part['type']}.done", **place, text=part["text"], **extra)
        yield self._event("content_part.done", **place, part=dict(part))
        yield self._event("output_item.done", output_index=len(self._items) - 1, item=item)
        self._kind = ""

    def end(self, answer: Answer, usage: Usage) -> Iterator[Event]:
        """As :meth:`.Writer.end`."""
        is_cut = answer.finish_reason == "length"
        calls = answer.message.get("tool_calls") or []
        status = "incomplete" if is_cut else "completed"
        if not calls and not any(item["type"] == "message" for item in self._items):
            yield from self._close()
            yield from self._open("message")  # an empty answer is one, too
        yield from self._close(status)
        for call in calls:
            yield from self._call(call)
        details = {"reason": "max_output_tokens"} if is_cut else None
        self.whole |= {"status": status, "incomplete_details": details, "output": self._items}
        self.whole["usage"] = {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning},
            "total_tokens": usage.prompt + usage.completion,
        }
        yield self._event(status, response=self.whole)

    def _call(self, call: Mapping[str, Any]) -> Iterator[Event]:
        arguments, name = call["function"]["arguments"], call["function"]["name"]
        if name in self._free:
            yield from self._call_free(call["id"], name, _read_input(arguments))
            return
        item = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "call_id": call["id"], "name": name}
        self._items.append({**item, "arguments": arguments, "status": "completed"})
        index = len(self._items) - 1
        yield self._event(
            "output_item.added", output_index=index, item={**item, "arguments": "", "status": "in_progress"}
        )
        yield self._event("function_call_arguments.delta", **self._place, delta=arguments)
        yield self._event("function_call_arguments.done", **self._place, name=name, arguments=arguments)
        yield self._event("output_item.done", output_index=index, item=self._items[-1])

    def _call_free(self, call_id: str, name: str, text: str) -> Iterator[Event]:
        item = {"id": f"ctc_{uuid.uuid4().hex}", "type": "custom_tool_call", "call_id": call_id, "name": name}
        self._items.append({**item, "input": text, "status": "completed"})
        index = len(self._items) - 1
        yield self._event("output_item.added", output_index=index, item={**item, "input": "", "status": "in_progress"})
        yield self._event("custom_tool_call_input.delta", **self._place, delta=text)
        yield self._event("custom_tool_call_input.done", **self._place, input=text)
        yield self._event("output_item.done", output_index=index, item=self._items[-1])

    def fail(self, refusal: Refusal) -> Iterator[Event]:
        """As :meth:`.Writer.fail`."""
        code = refusal.code or ("server_error" if refusal.status >= 500 else "invalid_prompt")
        self.whole |= {"status": "failed", "error": {"code": code, "message": refusal.message}}
        yield self._event("failed", response=self.whole)


def _read_input(arguments: str) -> str:
    """Return the text of a call of a freeform tool; what the model wrote, where it wrote something else."""
    with suppress(ValueError, RecursionError):
        if isinstance(parsed := json.loads(arguments), dict) and isinstance(parsed.get("input"), str):
            return parsed["input"]
    return arguments


_PLAIN: Final = {"format": {"type": "text"}}
