"""One address for several services of the same model.

    client ─▶ load balancer ─┬▶ service of rank 0   the session's own, or else the one with the fewest tokens in flight
                             └▶ service of rank 1

A request with the token and to a path of the API is passed on as it came, and its answer as it comes. The service
checks all of it again. The load balancer has no tokenizer, so it estimates how many tokens a request holds.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

import httpx2
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response

from podium_agents.service.request_bodies import Refusal
from podium_serve.exchange import Streamed, read_body, session_of, while_there
from podium_serve.metrics import add_line
from podium_serve.routes import PATHS, make_routes

__all__ = ["make_load_balancer"]

_REMEMBERED: Final = 1 << 16  # sessions whose service is known
_PASSED_ON: Final = ("content-type", "retry-after", "www-authenticate")
_BYTES: Final = 4  # of a request, for each token of its prompt
_UNLIMITED: Final = 1024  # tokens of an answer without a limit
_NOT_SENT: Final = ("host", "connection", "content-length", "transfer-encoding", "accept-encoding")


@dataclass(eq=False)
class _Rank:
    url: httpx2.URL
    tokens: int = 0
    taken: int = 0


def make_load_balancer(urls: Sequence[str], token: str) -> Starlette:
    """Return an application that hands requests with the bearer ``token`` to the services at ``urls``.

    Raises:
        ConfigError: ``token`` is empty.
    """
    balancer = _LoadBalancer(urls)
    return make_routes(dict.fromkeys(PATHS, balancer.pass_on) | {"/metrics": balancer.metrics}, token, balancer.running)


class _LoadBalancer:
    def __init__(self, urls: Sequence[str]) -> None:
        self._ranks = [_Rank(httpx2.URL(url)) for url in urls]
        self._of: OrderedDict[str, _Rank] = OrderedDict()

    @asynccontextmanager
    async def running(self, app: Starlette) -> AsyncIterator[None]:
        """Hold connections to the services during the block."""
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=256)
        timeout = httpx2.Timeout(None)
        async with httpx2.AsyncClient(limits=limits, timeout=timeout, trust_env=False) as self._services:
            yield

    async def pass_on(self, request: Request) -> Response:
        """Hand a request to a service, and its answer to the client."""
        raw = await read_body(request)
        body = _body(raw)
        rank, size = self._choose(session_of(request, body)), _size(body, raw)
        target = rank.url.copy_with(raw_path=_quote(request.scope["path"]))
        headers = [(name, value) for name, value in request.headers.items() if name not in _NOT_SENT]
        forwarded = self._services.build_request(request.method, target, content=raw, headers=headers)
        rank.tokens += size
        rank.taken += 1
        got: httpx2.Response | None = None

        async def close() -> None:
            rank.tokens -= size
            if got is not None:
                await got.aclose()

        try:
            (got,) = await while_there(request, [self._services.send(forwarded, stream=True)])
        except (httpx2.HTTPError, ClientDisconnect) as error:
            await close()
            raise Refusal(502, f"the generator at {rank.url} does not answer: {type(error).__name__}") from None
        kept = {name: got.headers[name] for name in _PASSED_ON if name in got.headers}
        return Streamed(got.aiter_raw(), close, status_code=got.status_code, headers=kept)

    async def metrics(self, request: Request) -> Response:
        headers = {"Authorization": request.headers.get("authorization", "")}
        texts = list[str]()
        for rank in self._ranks:
            try:
                got = await self._services.get(rank.url.copy_with(raw_path=b"/metrics"), headers=headers)
            except httpx2.HTTPError:
                continue
            if got.status_code != httpx2.codes.OK:
                return Response(got.content, got.status_code, media_type="application/json")
            texts.append(got.text)
        return PlainTextResponse(add_line(texts))

    def _choose(self, session: str) -> _Rank:
        if (service := self._of.get(session)) is not None:
            self._of.move_to_end(session)
            return service
        chosen = min(self._ranks, key=lambda rank: (rank.tokens, rank.taken))
        if session:
            self._of[session] = chosen
            while len(self._of) > _REMEMBERED:
                self._of.popitem(last=False)
        return chosen


def _quote(path: str) -> bytes:
    """A path as a request has it. Dots are quoted too: a session named ".." is no step upwards."""
    return quote(path).replace(".", "%2E").encode()


def _body(raw: bytes) -> Mapping[str, Any]:
    """The body of a request; nothing for what is none, of which the service says what is wrong."""
    try:
        body = json.loads(raw) if raw else {}
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}  # pyright: ignore[reportUnknownVariableType]


def _size(body: Mapping[str, Any], raw: bytes) -> int:
    """About how many tokens a request may hold: those of its prompt, and those of its longest answers."""
    sampling = body.get("sampling_params", body)
    settings: Mapping[str, Any] = sampling if isinstance(sampling, Mapping) else body
    limits = (settings.get(name) for name in ("max_completion_tokens", "max_tokens"))
    limit = next((limit_value for limit_value in limits if isinstance(limit_value, int)), _UNLIMITED)
    count = settings.get("n")
    return len(raw) // _BYTES + max(0, limit) * (count if isinstance(count, int) and count > 0 else 1)
