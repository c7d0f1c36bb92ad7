"""The service over HTTP: the OpenAI API, and ids in and out as vLLM has them.

    POST /v1/chat/completions      conversations, with tools; streamed or whole
    POST /v1/completions           texts or ids
    POST /inference/v1/generate    ids in; ids, log-probabilities and versions out
    GET  /v1/models  /health  /metrics

A session is named by the header ``X-Session-ID``, or by ``metadata.session_id`` in the body.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from podium.errors import PodiumError
from podium.rollout.service.wire import ChatRequest, CompletionRequest, GenerateRequest, Refusal, parse

if TYPE_CHECKING:
    from podium.rollout.service.chat_format import Reply
    from podium.rollout.service.service import Asked, Service
    from podium.rollout.service.sessions import Sampled

__all__ = ["make_app"]

_MOST_BYTES: Final = 16 << 20  # of a request
SESSION_HEADER: Final = "x-session-id"

Handler = Callable[[Request], Awaitable[Response]]


def make_app(service: Service, token: str) -> Starlette:
    """Return the application. Requests without the bearer ``token`` are answered by 401, but for ``/health``."""
    api = _Api(service)

    def guarded(handler: Handler) -> Handler:
        async def run(request: Request) -> Response:
            try:
                given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
                if not hmac.compare_digest(given, token.encode()):
                    raise Refusal(401, "the token is missing or wrong: send it as Authorization: Bearer TOKEN")
                return await handler(request)
            except Refusal as refusal:
                headers = {"Retry-After": "1"} if refusal.status == 429 else None
                return JSONResponse(refusal.body, refusal.status, headers)
            except ClientDisconnect:
                return Response(status_code=499)
            except PodiumError as error:
                return JSONResponse(Refusal(500, str(error)).body, 500)

        return run

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok", "version": service.client.engine.version})

    return Starlette(
        routes=[
            Route("/v1/chat/completions", guarded(api.chat), methods=["POST"]),
            Route("/v1/completions", guarded(api.completions), methods=["POST"]),
            Route("/inference/v1/generate", guarded(api.generate), methods=["POST"]),
            Route("/v1/models", guarded(api.models)),
            Route("/metrics", guarded(api.metrics)),
            Route("/health", health),
        ]
    )


class _Api:
    def __init__(self, service: Service) -> None:
        self.service = service
        self._counts = {"requests": 0, "prompt_tokens": 0, "completion_tokens": 0}

    async def chat(self, request: Request) -> Response:
        body = await _body(request)
        asked_for = parse(ChatRequest, body)
        self._check_model(asked_for.model)
        asked = self.service.chat(asked_for, _session_of(request, body))
        head = _head("chatcmpl", "chat.completion", self.service)
        if asked_for.stream:
            usage = bool((asked_for.stream_options or {}).get("include_usage"))
            return _events(self._chat_stream(request, asked_for, asked, head, usage))
        drawn = await self._all(request, asked)
        choices: list[dict[str, Any]] = []
        for index, (sampled, cut) in enumerate(drawn):
            message, reason = self._message(asked, sampled, cut)
            choice: dict[str, Any] = {"index": index, "message": message, "finish_reason": reason}
            if asked_for.logprobs:
                choice["logprobs"] = {"content": self._logprobs(sampled)}
            if asked_for.return_token_ids:
                choice |= {"token_ids": list(sampled.ids), "versions": list(sampled.versions)}
            choices.append(choice)
        answer = {**head, "choices": choices, "usage": self._usage(asked, [sampled for sampled, _ in drawn])}
        if asked_for.return_token_ids:
            answer["prompt_token_ids"] = list(asked.prompt)
        return JSONResponse(answer)

    async def completions(self, request: Request) -> Response:
        asked_for = parse(CompletionRequest, await _body(request))
        self._check_model(asked_for.model)
        if asked_for.stream:
            raise Refusal(400, "stream: /v1/completions answers as a whole; use /v1/chat/completions", "stream")
        asked = [
            self.service.ask(ids, asked_for, asked_for.max_tokens, stop=asked_for.stop_token_ids)
            for ids in self._prompts(asked_for.prompt)
        ]
        drawn = await _while_there(request, asyncio.gather(*(self._draw(each, asked_for.stops) for each in asked)))
        choices: list[dict[str, Any]] = []
        for each in drawn:
            for sampled, cut in each:
                text = self._text(sampled, cut)
                reason = "stop" if cut is not None else sampled.finish_reason
                choice: dict[str, Any] = {
                    "index": len(choices),
                    "text": text,
                    "finish_reason": reason,
                    "logprobs": None,
                }
                if asked_for.return_token_ids:
                    choice |= {"token_ids": list(sampled.ids), "versions": list(sampled.versions)}
                choices.append(choice)
        usage = self._usage(asked, [sampled for each in drawn for sampled, _ in each])
        return JSONResponse({**_head("cmpl", "text_completion", self.service), "choices": choices, "usage": usage})

    async def generate(self, request: Request) -> Response:
        asked_for = parse(GenerateRequest, await _body(request))
        if asked_for.stream:
            raise Refusal(400, "stream: /inference/v1/generate answers as a whole", "stream")
        params = asked_for.sampling_params
        asked = self.service.ask(asked_for.token_ids, params, params.max_tokens, stop=params.stop_token_ids)
        drawn = await self._all(request, asked)
        choices = [
            {
                "index": index,
                "token_ids": list(sampled.ids),
                "logprobs": {"content": [{"logprob": value} for value in sampled.logprobs]},
                "finish_reason": sampled.finish_reason,
                "versions": list(sampled.versions),
            }
            for index, (sampled, _) in enumerate(drawn)
        ]
        usage = self._usage([asked], [sampled for sampled, _ in drawn])
        return JSONResponse({"request_id": f"gen-{uuid.uuid4().hex}", "choices": choices, "usage": usage})

    async def models(self, request: Request) -> Response:
        service = self.service
        card = {
            "id": service.model, "object": "model", "created": service.created_s, "owned_by": "podium",
            "max_model_len": service.context,
        }  # fmt: skip
        return JSONResponse({"object": "list", "data": [card]})

    async def metrics(self, request: Request) -> Response:
        lines = [f"podium_{name}_total {count}" for name, count in self._counts.items()]
        lines += [
            f"podium_tokens_in_flight {self.service.client.in_flight}",
            f"podium_sessions {len(self.service.sessions)}",
            f"podium_weights_version {self.service.client.engine.version}",
        ]
        return PlainTextResponse("\n".join(lines) + "\n")

    # -- drawing ---------------------------------------------------------------------------------------------------

    async def _all(self, request: Request, asked: Asked) -> list[tuple[Sampled, int | None]]:
        return await _while_there(request, asyncio.ensure_future(self._draw(asked, asked.stops)))

    async def _draw(self, asked: Asked, stops: Sequence[str]) -> list[tuple[Sampled, int | None]]:
        """Draw all completions. With each comes the number of its characters before a text that ends it."""
        drawn = await asyncio.gather(*(self.service.draw(asked, number) for number in range(len(asked.seeds))))
        return [(sampled, _cut(self._text(sampled, None), stops)) for sampled in drawn]

    async def _chat_stream(
        self, request: Request, asked_for: ChatRequest, asked: Asked, head: Mapping[str, Any], usage: bool
    ) -> AsyncIterator[Mapping[str, Any]]:
        head = {**head, "object": "chat.completion.chunk"}
        drawn = await self._draw(asked, asked.stops)
        for index, (sampled, cut) in enumerate(drawn):
            message, reason = self._message(asked, sampled, cut)
            calls = [{"index": place, **call} for place, call in enumerate(message.get("tool_calls") or [])]
            delta = {**message, **({"tool_calls": calls} if calls else {})}
            yield {**head, "choices": [{"index": index, "delta": delta, "finish_reason": None}]}
            yield {**head, "choices": [{"index": index, "delta": {}, "finish_reason": reason}]}
        if usage:
            yield {**head, "choices": [], "usage": self._usage([asked], [sampled for sampled, _ in drawn])}

    # -- answers ---------------------------------------------------------------------------------------------------

    def _message(self, asked: Asked, sampled: Sampled, cut: int | None) -> tuple[dict[str, Any], str]:
        """Return what was said, which is recorded, and why it ended."""
        reply: Reply = self.service.form.parse(asked.prompt, sampled.ids, asked.tools)
        content = reply.content if cut is None else (_before(reply.content, asked.stops))
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if reply.tool_calls else "")}
        if reply.reasoning is not None:
            message["reasoning_content"] = reply.reasoning
        if reply.tool_calls:
            message["tool_calls"] = [
                {
                    "id": f"call_{uuid.uuid4().hex[:24]}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in reply.tool_calls
            ]
        self.service.record(asked, sampled, message)
        reason = "stop" if cut is not None else sampled.finish_reason
        return message, "tool_calls" if reply.tool_calls and reason == "stop" else reason

    def _text(self, sampled: Sampled, cut: int | None) -> str:
        return self.service.decode(sampled.ids)[:cut]

    def _prompts(self, prompt: str | Sequence[Any]) -> list[list[int]]:
        if isinstance(prompt, str):
            return [self.service.encode(prompt)]
        if all(isinstance(one, int) for one in prompt):
            return [list(prompt)]
        return [self.service.encode(one) if isinstance(one, str) else list(one) for one in prompt]

    def _logprobs(self, sampled: Sampled) -> list[dict[str, Any]]:
        texts = [self.service.decode([token], special=True) for token in sampled.ids]
        return [
            {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
            for text, value in zip(texts, sampled.logprobs, strict=True)
        ]

    def _usage(self, asked: Asked | Sequence[Asked], drawn: Sequence[Sampled]) -> dict[str, int]:
        prompts = asked if isinstance(asked, Sequence) else [asked]
        prompt, completion = sum(len(one.prompt) for one in prompts), sum(len(one.ids) for one in drawn)
        self._counts["requests"] += 1
        self._counts["prompt_tokens"] += prompt
        self._counts["completion_tokens"] += completion
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _check_model(self, name: str) -> None:
        if name not in ("", self.service.model):
            raise Refusal(404, f"the model {name!r} is not here; this service has {self.service.model!r}", "model")


async def _body(request: Request) -> Any:
    """Read the body as JSON. Raises Refusal for one that is too large, or no JSON."""
    parts, count = list[bytes](), 0
    async for part in request.stream():  # to the end, since a client that still sends would not read the answer
        count += len(part)
        if count <= _MOST_BYTES:
            parts.append(part)
    if count > _MOST_BYTES:
        raise Refusal(413, f"the request is larger than {_MOST_BYTES >> 20} MiB")
    try:
        return json.loads(b"".join(parts))
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not JSON: {error}") from None


def _session_of(request: Request, body: Mapping[str, Any]) -> str:
    metadata = body.get("metadata")
    named = metadata.get("session_id") if isinstance(metadata, Mapping) else None
    return request.headers.get(SESSION_HEADER) or (named if isinstance(named, str) else "")


async def _while_there(request: Request, work: asyncio.Future[Any]) -> Any:
    """Wait for ``work``. It is cancelled when the client goes away."""

    async def gone() -> None:
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                return

    watcher = asyncio.ensure_future(gone())
    try:
        await asyncio.wait({work, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        return work.result()
    finally:
        watcher.cancel()
        work.cancel()


def _events(chunks: AsyncIterator[Mapping[str, Any]]) -> StreamingResponse:
    async def lines() -> AsyncIterator[str]:
        async for chunk in chunks:
            yield f"data: {json.dumps(chunk)}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


def _head(prefix: str, kind: str, service: Service) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": service.model,
    }  # fmt: skip


def _cut(text: str, stops: Sequence[str]) -> int | None:
    """The place of the first of ``stops`` in ``text``."""
    return min((place for stop in stops if (place := text.find(stop)) >= 0), default=None)


def _before(text: str, stops: Sequence[str]) -> str:
    place = _cut(text, stops)
    return text if place is None else text[:place]
