"""What clients send, by the names of the OpenAI API and of vLLM, and what is refused by name.

A parameter that changes what is sampled is taken or refused. None is ignored without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from podium.rollout.tasks.fields import is_speech

__all__ = [
    "WISHES",
    "ChatRequest",
    "CommonRequest",
    "Messages",
    "Refusal",
    "Restricted",
    "Temperature",
    "Tools",
    "parse",
    "texts_of",
]

R = TypeVar("R", bound=BaseModel)

_HARMLESS: Final = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("include_reasoning", "request_id", "priority", "cache_salt"),
}
"""Parameters that do not change what is sampled."""
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "repetition_penalty": (1, None),
    "min_tokens": (0, None),
    "best_of": (1, None),
    "suffix": ("", None),
    "ignore_eos": (False, None),
    "modalities": (["text"], None),
    "functions": ([], None),
    "function_call": ("auto", "none", None),
    "logprobs_mode": (None,),
    "prompt_logprobs": (None,),
    "web_search_options": (None,),
    "prediction": (None,),
    "audio": (None,),
    "verbosity": (None,),
}
"""Parameters that the service does not have, and the values with which they change nothing."""

WISHES: Final[Mapping[str, tuple[Any, ...]]] = {
    name: _NEUTRAL[name] for name in ("frequency_penalty", "presence_penalty", "repetition_penalty", "verbosity")
}
"""Those of them that a run overrules, as it does a temperature: agents send them to any model."""

_COLDEST: Final = 1e-3  # the least temperature beside 0; logits divided by less overflow


class Refusal(Exception):
    """A request that is answered with an error.

    Args:
        status: The HTTP status.
        message: What is wrong with the request, and the remedy.
        param: The parameter that is wrong.
        code: A word for programs, such as "context_length_exceeded".
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, Any]:
        """The error as OpenAI's clients read it."""
        kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def _check_temperature(temperature: float) -> float:
    if 0 < temperature < _COLDEST:
        raise ValueError(f"{temperature:g} is too small to divide by: give 0, or at least {_COLDEST:g}")
    return temperature


LogitBias = dict[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=-100, le=100)]]
Temperature = Annotated[float, AfterValidator(_check_temperature)]


class StreamOptions(BaseModel):
    """What a stream has beside the answer."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    include_obfuscation: bool = False  # of the lengths of pieces, of which there is none
    continuous_usage_stats: Literal[False] = False


class Restricted(BaseModel):
    """What a request may ask of single tokens and of the form of an answer."""

    min_p: float | None = Field(default=None, ge=0, le=1)
    logit_bias: LogitBias | None = None
    structured_outputs: Any = None


class CommonRequest(Restricted):
    """What requests of conversations and of texts have in common."""

    model_config = ConfigDict(extra="allow", strict=False)

    model: str = ""
    n: int = Field(default=1, ge=1, le=128)
    temperature: Temperature = Field(default=1.0, ge=0, le=100)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1)
    response_format: Any = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False

    @property
    def stops(self) -> list[str]:
        """The texts that end an answer."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in stops if text]


def _check_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    messages = [_without_thoughts(message) for message in messages]
    for index, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise ValueError(f"message {index} has no role")
        content = message.get("content")
        may_be_null = message["role"] in ("assistant", "tool", "function")
        if ("content" not in message and message["role"] != "assistant") or (content is None and not may_be_null):
            raise ValueError(f"message {index}, of the role {message['role']!r}, has no content: send a text, or ''")
        for part in content if isinstance(content, list) else ():
            if not (isinstance(part, dict) and isinstance(part.get("text"), str)):
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise ValueError(
                    f"message {index} has a part of type {str(kind)[:40]!r}; this service reads text alone"
                )
        if not isinstance(content, str | list | None):
            raise ValueError(f"the content of message {index} is neither a text nor a list of texts")
        calls = message.get("tool_calls")
        if not (calls is None or (isinstance(calls, list) and all(map(_is_call, calls)))):
            raise ValueError(f"the tool_calls of message {index} are not function calls with name and arguments")
    return messages


def _without_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    """An answer with the reasoning that is in parts of its content as ``reasoning_content``."""
    content = message.get("content")
    if message.get("role") != "assistant" or not isinstance(content, list):
        return message
    thoughts = [part for part in content if isinstance(part, dict) and is_speech(str(part.get("type")))]
    if not thoughts:
        return message
    texts = [part.get("thinking") or part.get("text") or part.get("reasoning") for part in thoughts]
    reasoning = {"reasoning_content": "\n".join(text for text in texts if isinstance(text, str) and text)}
    return {**reasoning, **message, "content": [part for part in content if part not in thoughts]}


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments"), str | dict | None)
    )


def _check_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    for index, tool in enumerate(tools or ()):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise ValueError(f"tool {index} is no function: this service knows tools of type 'function'")
        if not isinstance(function.get("name"), str) or not isinstance(function.get("parameters"), dict | None):
            raise ValueError(f"tool {index} is a function without a name, or its parameters are no JSON schema")
    return tools


Messages = Annotated[list[dict[str, Any]], AfterValidator(_check_messages)]
Tools = Annotated[list[dict[str, Any]] | None, AfterValidator(_check_tools)]


class ChatRequest(CommonRequest):
    """The body of ``/v1/chat/completions``."""

    messages: Messages = Field(min_length=1)
    tools: Tools = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int = Field(default=0, ge=0, le=20)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    reasoning_effort: str | None = None
    thinking: bool | None = None

    @property
    def limit(self) -> int | None:
        """The most tokens of an answer; None where the request has no limit."""
        return min(filter(None, (self.max_tokens, self.max_completion_tokens)), default=None)

    @property
    def forces_call(self) -> bool:
        """Whether the answer must be a call of a tool."""
        return self.tool_choice not in (None, "auto", "none")

    @model_validator(mode="after")
    def _check_choice(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if not self.forces_call:
            return self
        names = [tool["function"]["name"] for tool in self.tools or ()]
        if self.tool_choice == "required":
            if not names:
                raise ValueError("tool_choice = 'required': the request has no tools")
            return self
        wanted = self.tool_choice
        wanted = wanted.get("function") if isinstance(wanted, dict) else None
        wanted = wanted.get("name") if isinstance(wanted, dict) else None
        if wanted is None:
            raise ValueError(
                f"tool_choice = {str(self.tool_choice)[:80]}: this service knows auto, none, required, and an object "
                "that names a function"
            )
        if wanted not in names:
            raise ValueError(f"tool_choice names {str(wanted)[:80]!r}, which is not among the tools {names}")
        return self


def _without_nulls(body: Mapping[str, Any]) -> dict[str, Any]:
    """A request without its nulls, and its sampling parameters and options of a stream without theirs."""
    present = {str(name): value for name, value in body.items() if value is not None}
    for name in ("sampling_params", "stream_options"):
        if isinstance(nested := present.get(name), Mapping):
            present[name] = _without_nulls(nested)
    return present


def parse(cls: type[R], body: Any, wishes: Mapping[str, Any] | None = None) -> R:
    """Return the request in ``body``. A null is as no parameter.

    Args:
        cls: The kind of the request.
        body: The JSON value.
        wishes: Parameters that the service lacks and lets pass, because something else decides what they ask for.

    Raises:
        Refusal: The body is not such a request, or uses a feature that the service lacks.
    """
    if not isinstance(body, Mapping):
        raise Refusal(400, "the body is not a JSON object")
    try:
        parsed = cls.model_validate(_without_nulls(body))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        what = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            raise Refusal(400, f"{where}: this service knows no such parameter", where, "unknown_parameter") from None
        raise Refusal(400, f"{where}: {what}" if where else what, where or None) from None
    for holder in (parsed, getattr(parsed, "sampling_params", None)):
        for name, value in ((holder.model_extra or {}) if holder is not None else {}).items():
            if name in _HARMLESS or value in _NEUTRAL.get(name, (None,)) or name in (wishes or ()):
                continue
            if name in _NEUTRAL:
                raise Refusal(
                    400,
                    f"{name} = {str(value)[:80]}: this service does not support it; leave it out",
                    name,
                    "unsupported",
                )
            raise Refusal(400, f"{name}: this service knows no such parameter", name, "unknown_parameter")
    return parsed


def texts_of(value: Any) -> Iterator[str]:
    """Yield every text and name in a JSON value, but for media, which are given as ``data:`` addresses."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, str):
            if not value.startswith("data:"):
                yield value
        elif isinstance(value, Mapping):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            left += value
