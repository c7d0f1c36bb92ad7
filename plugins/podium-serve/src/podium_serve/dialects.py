"""What the other APIs in which agents ask have in common: each is translated into a request of conversations, and back.

    /v1/responses   the Responses API of OpenAI           :mod:`.responses`
    /v1/messages    the Messages API of Anthropic         :mod:`.messages`

A parameter that a translator does not know, and that would change the answer, is refused by its name.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, cast

from podium.errors import PodiumError
from podium_agents.service.request_bodies import Refusal
from podium_serve.exchange import Streamed

if TYPE_CHECKING:
    from podium_agents.service.service import Answer
    from podium_serve.pieces import Delta

__all__ = ["Dialect", "Event", "Usage", "Writer", "as_list", "check_fields", "list_parts", "refuse", "stream_events"]

Event = dict[str, Any]


class Usage(NamedTuple):
    """Tokens of a request: those of its prompt, those of them that were not computed again, those that were drawn, and
    those of them up to the end of the reasoning."""

    prompt: int
    cached: int
    completion: int
    reasoning: int


class Writer(Protocol):
    """Writes one answer in a dialect: as the events of a stream and, after the last one, as a whole."""

    whole: dict[str, Any]

    def begin(self, prompt: int) -> Iterator[Event]:
        """The events before the answer, whose prompt has so many tokens."""
        ...

    def add(self, delta: Delta, logprobs: Sequence[Any] = ()) -> Iterator[Event]:
        """The events of the next piece. ``logprobs`` are those of its tokens, where they are asked for."""
        ...

    def end(self, answer: Answer, usage: Usage) -> Iterator[Event]:
        """The events after the last piece."""
        ...

    def fail(self, refusal: Refusal) -> Iterator[Event]:
        """The events of a stream that ends with an error."""
        ...


class Dialect(Protocol):
    """One API.

    Attributes:
        clips: Whether a limit of tokens that leaves the context is lowered, because clients have to send one.
    """

    clips: bool

    def chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The body of the same request for ``/v1/chat/completions``. Raises Refusal for what that cannot say."""
        ...

    def writer(self, body: Mapping[str, Any], model: str) -> Writer:
        """What writes the answer to a request."""
        ...

    def describe(self, refusal: Refusal) -> dict[str, Any]:
        """The body of an error."""
        ...


def stream_events(events: AsyncGenerator[Mapping[str, Any]], writer: Writer) -> Streamed:
    """Return the answer that sends events by their names as they come."""

    async def lines() -> AsyncIterator[str]:
        try:
            async for event in events:
                yield _line(event)
        except (Refusal, PodiumError) as error:  # too late for a status
            for event in writer.fail(error if isinstance(error, Refusal) else Refusal(500, str(error))):
                yield _line(event)

    return Streamed(lines(), events.aclose, media_type="text/event-stream")


def _line(event: Mapping[str, Any]) -> str:
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"


def refuse(name: str, value: Any, why: str = "this service does not support it; leave it out") -> Refusal:
    """Return the refusal of a parameter, or of a part of one."""
    return Refusal(400, f"{name} = {str(value)[:80]}: {why}", name, "unsupported")


def check_fields(
    body: Any, known: frozenset[str], neutral: Mapping[str, Sequence[Any]], what: str = ""
) -> dict[str, Any]:
    """Return a JSON object without its nulls, which are as absent.

    Args:
        body: The object.
        known: The names that are read, and those without an effect on the answer.
        neutral: Names that are not read, and the values with which they change nothing.
        what: The place of the object, for the message.

    Raises:
        Refusal: It is no object, or has another name or another value.
    """
    if not isinstance(body, Mapping):
        raise Refusal(400, f"{what or 'the body'} is not a JSON object", what or None)
    fields = {str(name): value for name, value in body.items() if value is not None}
    for name, value in fields.items():
        path = f"{what}.{name}" if what else name
        if name in neutral and value not in neutral[name]:
            raise refuse(path, value)
        if name not in neutral and name not in known:
            raise Refusal(400, f"{path}: this service knows no such parameter", path, "unknown_parameter")
    return fields


def as_list(value: Any, name: str) -> list[Any]:
    """Return a value that is a list. Raises Refusal for any other."""
    if not isinstance(value, list):
        raise Refusal(400, f"{name}: Input should be a valid list", name)
    return cast("list[Any]", value)


_PART: Final = frozenset(
    {"type", "text", "refusal", "cache_control", "citations", "annotations", "logprobs", "parsed", "parsed_output"}
    | {"prompt_cache_breakpoint"}
)
"""The fields of a part that is a text: those that are read, what an answer had, which a client sends again, and marks
of what a cache may keep."""


def list_parts(content: Any, where: str, kinds: Sequence[str]) -> str:
    """Return the text of a content: a text, or parts of which each has a text.

    Raises:
        Refusal: A part is of another type than ``kinds``, or has a field that nothing reads.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise Refusal(400, f"{where} is neither a text nor a list of parts", where)
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("text", part.get("refusal")) if isinstance(part, Mapping) else None
        if kind not in kinds or not isinstance(text, str):
            raise Refusal(400, f"{where} has a part of type {str(kind)[:40]!r}; this service reads text alone", where)
        check_fields(part, _PART, {}, where)
        texts.append(text)
    return "".join(texts)
