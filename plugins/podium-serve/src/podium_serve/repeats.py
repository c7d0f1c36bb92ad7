"""Requests that are sent again because their answer was lost: ``Idempotency-Key`` makes them one.

    request ─┬▶ its handler, once ─▶ what it sends, kept ─┬▶ the client
             └── the same again ──────────────────────────┴▶ the client again

The handler goes on as long as a client waits for its answer. Once it has sent something it goes on to its end, because
the calls of a session may have been recorded then.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, TypeAlias

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from podium_agents.service.request_bodies import Refusal
from podium_serve.exchange import SESSION_HEADER, read_body, while_there

__all__ = ["Repeats"]

_HEADER: Final = "idempotency-key"
_LONGEST: Final = 256  # characters of a key
_MOST_BYTES: Final = 64 << 20  # of answers that are kept
_REPLAYED: Final = (b"idempotent-replayed", b"true")


_Name: TypeAlias = tuple[str, str, str, str]  # the session of the request's token, its path, its session, and its key


class Repeats:
    """The answers to requests with a key, the latest ones within a limit of memory."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._nbytes = 0
        self._recordings: dict[_Name, _Recording] = {}

    async def answer(self, request: Request, handler: Callable[[Request], Awaitable[Response]]) -> Response:
        """Return the answer of ``handler``, or its first answer if the request was made before under the same key.

        Raises:
            Refusal: The key is too long, or another request was made under it.
        """
        key = request.headers.get(_HEADER)
        if not key or request.method != "POST":
            return await handler(request)
        if len(key) > _LONGEST:
            raise Refusal(400, f"the Idempotency-Key has {len(key)} characters; {_LONGEST} are the limit")
        body = await read_body(request)
        session = request.headers.get(SESSION_HEADER, "")
        name = (getattr(request.state, "scope", ""), request.url.path, session, key)
        digest = hashlib.blake2b(body).digest()
        recording = self._recordings.get(name)
        if is_first := recording is None:
            recording = self._recordings[name] = _Recording(digest)
            recording.task = asyncio.create_task(_run(handler, Request(request.scope, _replay(body)), recording))
            recording.task.add_done_callback(partial(self._settle, name, recording))
        if recording.digest != digest:
            raise Refusal(
                422, f"another request was made under the Idempotency-Key {key!r}: each request has a key of its own",
                code="idempotency_key_reused",
            )  # fmt: skip
        recording.waiting += 1
        try:
            await while_there(request, [recording.wait_for(0)])
        finally:
            recording.waiting -= 1
            if not recording.waiting and not recording.messages:
                self._forget(name, recording)
                recording.task.cancel()
        return _Replay(recording, is_first=is_first)

    def _settle(self, name: _Name, recording: _Recording, task: asyncio.Task[None]) -> None:
        """Forget a request that has failed, and the oldest answers where there is no room."""
        if task.cancelled() or task.exception() is not None:
            self._forget(name, recording)
            return
        self._nbytes += recording.nbytes
        for oldest, kept in [*self._recordings.items()] if self._nbytes > self._most_bytes else ():
            if kept.task.done():
                self._forget(oldest, kept)
                self._nbytes -= kept.nbytes
            if self._nbytes <= self._most_bytes:
                break

    def _forget(self, name: _Name, recording: _Recording) -> None:
        if self._recordings.get(name) is recording:
            del self._recordings[name]


class _Recording:
    """What a handler sends.

    Attributes:
        digest: What was asked.
        messages: What it has sent.
        nbytes: The bytes of that.
        waiting: How many clients wait for its first message.
        task: Runs the handler.
    """

    task: asyncio.Task[None]

    def __init__(self, digest: bytes) -> None:
        self.digest, self.messages, self.nbytes, self.waiting = digest, list[Message](), 0, 0
        self._changed = asyncio.Event()

    async def send(self, message: Message) -> None:
        """Keep a message. This never waits, so that an answer is kept as soon as it is recorded."""
        self.messages.append(message)
        self.nbytes += len(message.get("body", b""))
        self._changed.set()

    async def wait_for(self, number: int) -> Message | None:
        """Return the message ``number``; None if there are fewer. Raises what the handler raised."""
        while len(self.messages) <= number and not self.task.done():
            self._changed.clear()
            changed = asyncio.ensure_future(self._changed.wait())
            await asyncio.wait({changed, self.task}, return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
        if len(self.messages) > number:
            return self.messages[number]
        self.task.result()
        return None


class _Replay(Response):
    """An answer that is sent as it was recorded, or as it is being recorded."""

    def __init__(self, recording: _Recording, *, is_first: bool) -> None:
        super().__init__()
        self._recording, self._is_first = recording, is_first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As Starlette's."""
        number = 0
        while (message := await self._recording.wait_for(number)) is not None:
            if not number and not self._is_first:
                message = {**message, "headers": [*message["headers"], _REPLAYED]}
            await send(message)
            number += 1


async def _run(handler: Callable[[Request], Awaitable[Response]], request: Request, recording: _Recording) -> None:
    response = await handler(request)
    await response(request.scope, request.receive, recording.send)


def _replay(body: bytes) -> Receive:
    """Return a channel that has all of a body, and whose client never goes away."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        raise AssertionError("nobody sets this event")

    return receive
