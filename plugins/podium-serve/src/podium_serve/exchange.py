"""Reads requests up to a size and for a time, and ends answers with the client that waits for them."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from math import isfinite
from typing import Any, Final, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from podium.plain_values import explain_json
from podium_agents.service.keys import root_of
from podium_agents.service.request_bodies import Refusal
from podium_serve.concurrency import all_of

__all__ = ["SESSION_HEADER", "Streamed", "as_json", "read_body", "session_of", "while_there"]

T = TypeVar("T")

SESSION_HEADER: Final = "x-session-id"
_LONGEST_NAME: Final = 256  # characters of a session's name
_MOST_BYTES: Final = 16 << 20  # of a request
_MOST_SENT: Final = 1 << 30  # bytes that are read and thrown away before a client is told that it sends too much
_READING_S: Final = 60.0  # for all of a body, which a client could otherwise send byte by byte for ever
_MOST_VALUES: Final = 50_000  # objects, lists, texts and names of a body; numbers, such as token ids, do not count
_MOST_OBJECTS: Final = 4096  # of one list: messages, parts or tools
_HALF: Final = re.compile(r"\\u[dD][89a-fA-F]")


async def read_body(request: Request) -> bytes:
    """Return the body. Bytes beyond the largest allowed size are read and dropped, because a client that still sends
    would not read the answer.

    Raises:
        Refusal: The body is compressed or too large, or did not arrive in time.
        ClientDisconnect: The client went away.
    """
    if (encoding := request.headers.get("content-encoding", "identity")).lower() != "identity":
        raise Refusal(
            415, f"Content-Encoding: {encoding[:40]}: this service reads no compressed body; send it as it is"
        )
    parts, count = list[bytes](), 0
    try:
        async with asyncio.timeout(_READING_S):
            async for part in request.stream():
                count += len(part)
                if count <= _MOST_BYTES:
                    parts.append(part)
                else:
                    parts.clear()
                if count > _MOST_SENT:
                    break
    except TimeoutError:
        raise Refusal(408, f"the body of the request did not come within {_READING_S:g} s") from None
    if count > _MOST_BYTES:
        raise Refusal(413, f"the request is larger than {_MOST_BYTES >> 20} MiB")
    return b"".join(parts)


def as_json(raw: bytes) -> Any:
    """Read a body. Raises Refusal if the body is not JSON, has text that is not Unicode, an object with two values of
    one name, or more values than the service can look at while others wait."""
    try:
        text = raw.decode(json.detect_encoding(raw))  # json.loads() takes bytes that are half of a surrogate pair
        body = json.loads(text, object_pairs_hook=_read_object, parse_constant=_read_number, parse_float=_read_number)
        _check_size(body)
        if _HALF.search(text):
            json.dumps(body, ensure_ascii=False).encode()
        return body
    except UnicodeEncodeError:
        raise Refusal(400, "the body has half of a surrogate pair, which is no character") from None
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not JSON: {_explain(error, raw)}") from None


def _explain(error: ValueError | RecursionError, raw: bytes) -> str:
    text = "" if isinstance(error, UnicodeError) else raw.decode(json.detect_encoding(raw))
    return explain_json(error, text)


def _read_object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object, of which Python would keep the last of two values of one name without a word."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        name = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise Refusal(400, f"an object of the body has {name[:80]!r} more than once: send the one that is meant", name)
    return fields


def _read_number(text: str) -> float:
    """A number that JSON can say again. Python would read NaN and Infinity."""
    if not isfinite(number := float(text)):
        raise ValueError(f"{text[:40]} is no number of JSON")
    return number


def _check_size(body: Any) -> None:
    """Raise Refusal for a body of very many small values: each costs far more time than its bytes."""
    left, count = [body], 0
    while left:
        value = left.pop()
        if isinstance(value, dict):
            children, count = list(value.values()), count + len(value)
        elif isinstance(value, list):
            children = value
            if sum(map(_is_object, children)) > _MOST_OBJECTS:
                raise Refusal(
                    413, f"a list of the request has {len(children):,} objects; at most {_MOST_OBJECTS:,} may be sent"
                )
        else:
            continue
        children = [child for child in children if isinstance(child, str | list | dict)]
        count += len(children)
        if count > _MOST_VALUES:
            raise Refusal(413, f"the request has more than {_MOST_VALUES:,} texts, lists, objects and names")
        left += children


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def session_of(request: Request, body: Any) -> str:
    """Return the name of the session that a request names, or else of the one whose key it sends; "" for none.

    Raises:
        Refusal: Two different sessions are named. Or the name is no text, too long, or not of the session whose key the
            request sends.
    """
    metadata = body.get("metadata") if isinstance(body, Mapping) else None
    named = metadata.get("session_id") if isinstance(metadata, Mapping) else None
    names = [request.path_params.get("session", ""), request.headers.get(SESSION_HEADER), named]
    name, *others = [*filter(None, names), ""]
    if different := next((other for other in others if other and other != name), ""):
        raise Refusal(
            400,
            f"the request names two sessions, {str(name)[:80]!r} and {str(different)[:80]!r}: name one, by the path, "
            "by X-Session-ID or by metadata.session_id",
        )
    if not isinstance(name, str):
        raise Refusal(400, f"metadata.session_id is {str(name)[:80]}: a session is named by a text", "metadata")
    if len(name) > _LONGEST_NAME:
        raise Refusal(400, f"the name of the session has {len(name)} characters; {_LONGEST_NAME} are the limit")
    scope = getattr(request.state, "scope", "")
    if scope and name and root_of(name) != scope:
        raise Refusal(401, "the token is the key of another session: each session has a key of its own")
    return name or scope


async def while_there(request: Request, works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Wait for all of ``works``. If one fails or the client goes away, all are cancelled, and have ended when this
    returns.

    Raises:
        ClientDisconnect: The client went away.
    """

    async def is_gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    everything = asyncio.ensure_future(all_of(works))
    watcher = asyncio.ensure_future(is_gone())
    try:
        await asyncio.wait({everything, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not everything.done():
            raise ClientDisconnect
        return everything.result()
    finally:
        watcher.cancel()
        everything.cancel()
        await asyncio.gather(watcher, everything, return_exceptions=True)


class Streamed(StreamingResponse):
    """An answer in pieces. ``close`` is awaited at its end, also where the client went away before."""

    def __init__(self, pieces: AsyncIterator[str | bytes], close: Callable[[], Awaitable[None]], **how: Any) -> None:
        super().__init__(pieces, **how)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As Starlette's."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._close()
