"""What clients send, by the names of the OpenAI API and of vLLM, and what is refused by name.

A parameter that changes what is sampled is taken or refused. None is ignored without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

__all__ = ["ChatRequest", "CompletionRequest", "GenerateRequest", "Refusal", "parse"]

R = TypeVar("R", bound=BaseModel)

_HARMLESS: Final = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("parallel_tool_calls", "skip_special_tokens", "include_reasoning", "request_id", "priority", "cache_salt"),
}
"""Parameters that do not change what is sampled."""
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "repetition_penalty": (1, None),
    "min_p": (0, None),
    "min_tokens": (0, None),
    "logit_bias": ({}, None),
    "top_logprobs": (0, None),
    "best_of": (1, None),
    "echo": (False, None),
    "suffix": ("", None),
    "ignore_eos": (False, None),
    "tool_choice": ("auto", "none", None),
    "response_format": ({"type": "text"}, None),
    "modalities": (["text"], None),
    "functions": ([], None),
    "function_call": ("auto", "none", None),
    "logprobs_mode": (None,),
    "prompt_logprobs": (None,),
    "web_search_options": (None,),
    "prediction": (None,),
    "audio": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "chat_template_kwargs": ({}, None),
}
"""Parameters that the service does not have, and the values with which they change nothing."""


class Refusal(Exception):
    """A request that is answered with an error.

    Args:
        status: The HTTP status.
        message: What is wrong with it, and what to do.
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


class _Request(BaseModel):
    model_config = ConfigDict(extra="allow", strict=False)

    model: str = ""
    n: int = Field(default=1, ge=1, le=128)
    temperature: float = Field(default=1.0, ge=0, le=100)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1)
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool = False

    @property
    def stops(self) -> list[str]:
        """The texts that end an answer."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in given if text]


class ChatRequest(_Request):
    """The body of ``/v1/chat/completions``."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None


class CompletionRequest(_Request):
    """The body of ``/v1/completions``. ``prompt`` is a text, ids, or several of either."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = Field(default=16, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=1)


class Sampling(BaseModel):
    """``sampling_params`` of ``/inference/v1/generate``."""

    model_config = ConfigDict(extra="allow")

    n: int = Field(default=1, ge=1, le=128)
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0, le=100)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1)
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    logprobs: int | None = Field(default=None, ge=0, le=1)


class GenerateRequest(BaseModel):
    """The body of ``/inference/v1/generate``: ids in, ids out."""

    model_config = ConfigDict(extra="allow")

    model: str = ""
    token_ids: list[int] = Field(min_length=1)
    sampling_params: Sampling = Sampling()
    stream: bool = False


def parse(cls: type[R], body: Any) -> R:
    """Return the request in ``body``.

    Raises:
        Refusal: It is no such request, or asks for what the service does not have.
    """
    if not isinstance(body, Mapping):
        raise Refusal(400, "the body is not a JSON object")
    try:
        found = cls.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise Refusal(400, f"{where}: {first['msg']}", where) from None
    for holder in (found, getattr(found, "sampling_params", None)):
        for name, value in ((holder.model_extra or {}) if holder is not None else {}).items():
            if name in _HARMLESS or value in _NEUTRAL.get(name, ()):
                continue
            if name in _NEUTRAL:
                raise Refusal(
                    400,
                    f"{name} = {str(value)[:80]}: this service does not support it; leave it out",
                    name,
                    "unsupported",
                )
            raise Refusal(400, f"{name}: this service knows no such parameter", name, "unknown_parameter")
    return found
