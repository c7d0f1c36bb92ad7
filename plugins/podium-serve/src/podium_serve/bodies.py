"""The bodies of requests of texts and of ids, by the names of the OpenAI API and of vLLM."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from podium_agents.service.request_bodies import CommonRequest, Messages, Restricted, Temperature, Tools

__all__ = [
    "CompletionRequest",
    "DetokenizeRequest",
    "GenerateRequest",
    "ScoreRequest",
    "TokenizeRequest",
    "read_masks",
    "write_masks",
]

_MOST_COMPLETIONS: Final = 4096  # of one request


TokenIds = list[Annotated[int, Field(strict=True)]]  # neither texts of digits nor true and false


def _check_prompt(prompt: Any) -> Any:
    kinds = {*map(type, prompt)} if isinstance(prompt, list) else {None}
    if isinstance(prompt, str) or kinds <= {str} or kinds <= {int}:
        return prompt
    if kinds == {list} and all({*map(type, entry)} <= {int} for entry in prompt):
        return prompt
    raise ValueError("expected a text, token ids, a list of texts, or a list of lists of token ids")


class CompletionRequest(CommonRequest):
    """The body of ``/v1/completions``. ``prompt`` is a text, ids, or several of either."""

    prompt: Annotated[str | list[str] | TokenIds | list[TokenIds], BeforeValidator(_check_prompt)]
    max_tokens: int | None = Field(default=16, ge=0)
    logprobs: int | None = Field(default=None, ge=0, le=1)
    echo: bool | None = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.max_tokens == 0 and not (self.echo and self.logprobs is not None):
            raise ValueError("max_tokens = 0 generates nothing: use it only with echo and logprobs")
        if self.echo and self.stream:
            raise ValueError("echo does not stream: leave stream out")
        alone = isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int)
        several = 1 if alone else len(self.prompt)
        if several * self.n > _MOST_COMPLETIONS:
            raise ValueError(
                f"{several} prompts with n = {self.n}: {_MOST_COMPLETIONS} completions are the limit of one request"
            )
        return self


class Sampling(Restricted):
    """``sampling_params`` of ``/inference/v1/generate``."""

    model_config = ConfigDict(extra="allow")

    n: int = Field(default=1, ge=1, le=128)
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: Temperature = Field(default=1.0, ge=0, le=100)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1)
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    logprobs: int | None = Field(default=None, ge=0, le=1)


class GenerateRequest(BaseModel):
    """The body of ``/inference/v1/generate``: ids in, ids out."""

    model_config = ConfigDict(extra="allow")

    model: str = ""
    token_ids: TokenIds = Field(min_length=1)
    sampling_params: Sampling = Sampling()
    stream: bool = False
    session: str = ""  # of which the engine may keep keys and values
    ended_sessions: list[str] = []


class ScoreRequest(BaseModel):
    """The body of ``/inference/v1/score``: ids in; the log-probabilities of those from ``first`` on out."""

    model_config = ConfigDict(extra="allow")

    model: str = ""
    token_ids: TokenIds = Field(min_length=1)
    first: int = Field(default=1, ge=1)
    top: int = Field(default=0, ge=0, le=20)
    temperature: Temperature = Field(default=1.0, gt=0, le=100)


class TokenizeRequest(BaseModel):
    """The body of ``/tokenize``: a text, or a conversation."""

    model_config = ConfigDict(extra="allow")

    model: str = ""
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt, a text, or messages, a conversation")
        return self


class DetokenizeRequest(BaseModel):
    """The body of ``/detokenize``."""

    model_config = ConfigDict(extra="allow")

    model: str = ""
    tokens: list[Annotated[int, Field(strict=True, ge=0)]] = Field(
        max_length=1 << 18
    )  # decoding holds up other requests


def write_masks(masks: Sequence[bytes]) -> dict[str, Any]:
    """Return the masks of a completion as JSON: each of them once, and by token the number of its mask."""
    numbers: dict[bytes, int] = {}
    of = [numbers.setdefault(mask, len(numbers)) for mask in masks]
    return {"table": [base64.b64encode(mask).decode() for mask in numbers], "of": of}


def read_masks(written: Mapping[str, Any]) -> list[bytes]:
    """Return the masks that :func:`write_masks` wrote."""
    table = [base64.b64decode(text) for text in written["table"]]
    return [table[number] for number in written["of"]]
