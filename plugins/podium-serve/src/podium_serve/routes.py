"""The paths of the API, who may ask there, and what everybody else is answered."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, TypeAlias

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from podium.errors import ConfigError, PodiumError
from podium_agents.service.keys import Access, OneToken
from podium_agents.service.request_bodies import Refusal
from podium_serve.dialects import Dialect
from podium_serve.exchange import session_of
from podium_serve.messages import Messages
from podium_serve.repeats import Repeats
from podium_serve.responses import Responses

__all__ = ["PATHS", "Handler", "find_dialect", "guard", "make_application", "make_routes"]

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]

_OPEN: Final = "/health"
_LONGEST_ID: Final = 128  # characters of a request's id
_MODEL: Final = "/v1/models/{model:path}"
_DIALECTS: Final[Mapping[str, Dialect]] = {"/v1/responses": Responses(), "/v1/messages": Messages()}
_COUNT: Final = "/v1/messages/count_tokens"
_IN_SESSIONS: Final = {
    **dict.fromkeys(("/v1/chat/completions", "/v1/completions", *_DIALECTS, _COUNT), "POST"),
    **dict.fromkeys(("/v1/models", _MODEL), "GET"),
    **dict.fromkeys(("/tokenize", "/detokenize"), "POST"),
}
_IDS: Final = ("/inference/v1/generate", "/inference/v1/score")
_METHODS: Final = {**_IN_SESSIONS, **dict.fromkeys(_IDS, "POST"), "/metrics": "GET", _OPEN: "GET"}
PATHS: Final = (*_METHODS,)
"""The paths outside of sessions."""


def make_routes(
    handlers: Mapping[str, Handler],
    access: str | Access,
    running: Callable[[Starlette], AbstractAsyncContextManager[None]] | None = None,
) -> Starlette:
    """Return an application that answers at ``PATHS``, those of conversations and texts in sessions too.

    Requests without a bearer token that ``access`` knows get the status 401 before their body is read, except for
    ``/health``. The key of a session reaches that session alone, and nothing else.

    Args:
        handlers: The handler of each of ``PATHS``. A session's name is the path parameter "session".
        access: The bearer token, or what says which tokens are good for what.
        running: The block during which requests are answered.

    Raises:
        ConfigError: The token is empty.
    """
    if not access:
        raise ConfigError("the token of a service is empty, which would let everybody in: give a token")
    access = OneToken(access) if isinstance(access, str) else access
    repeats = Repeats()
    routes = [
        Route(prefix + path, guard(handlers[path], None if path == _OPEN else access, path, repeats), methods=[method])
        for path, method in _METHODS.items()
        for prefix in ("", "/sessions/{session}")[: 1 + (path in _IN_SESSIONS)]
    ]
    return make_application(routes, running)


def make_application(
    routes: Sequence[Route], running: Callable[[Starlette], AbstractAsyncContextManager[None]] | None = None
) -> Starlette:
    """Return an application that answers mistakes as the OpenAI API does."""
    answered: dict[Any, Any] = {404: _elsewhere, 405: _otherwise, Exception: _answer_failure}
    return Starlette(routes=routes, exception_handlers=answered, lifespan=running)


def guard(handler: Handler, access: Access | None, path: str, repeats: Repeats) -> Handler:
    """Return a handler that answers those whom ``access`` knows, all if it is None, and each repeated request once."""

    async def answer(request: Request) -> Response:
        return _number(request, await handler(request))

    async def run(request: Request) -> Response:
        try:
            if access is not None:
                _admit(request, access, path)
            return await repeats.answer(request, answer)
        except ClientDisconnect:
            return Response(status_code=499)
        except (Refusal, PodiumError) as error:
            return _answer_refusal(request, error)

    return run


def find_dialect(request: Request) -> Dialect | None:
    """Return the dialect of a request; None for the API of conversations and all other paths."""
    path = request.scope["path"].removesuffix("/count_tokens")
    return next((dialect for suffix, dialect in _DIALECTS.items() if path.endswith(suffix)), None)


def _admit(request: Request, access: Access, path: str) -> None:
    """Note which session a request may reach, by its token. Raises Refusal where that is not what it asks for."""
    sent = request.headers.get("authorization") or f"Bearer {request.headers.get('x-api-key', '')}"
    kind, _, credentials = sent.partition(" ")
    scope = access.scope_of(credentials.strip()) if kind.lower() == "bearer" else None
    if scope is None:
        raise Refusal(401, "the token is missing or wrong: send it as Authorization: Bearer TOKEN")
    request.state.scope = scope
    if scope and path not in _IN_SESSIONS:
        raise Refusal(401, f"the token is the key of a session, which does not reach {path}")
    session_of(request, None)


def _elsewhere(request: Request, error: Exception) -> Response:
    return _answer_refusal(request, Refusal(404, f"nothing is at {request.url.path}; the paths are {', '.join(PATHS)}"))


def _otherwise(request: Request, error: Exception) -> Response:
    allowed = (getattr(error, "headers", None) or {}).get("Allow", "")
    return _answer_refusal(request, Refusal(405, f"{request.url.path} takes {allowed or 'another method'}"))


def _answer_failure(request: Request, error: Exception) -> Response:
    return _answer_refusal(request, Refusal(500, f"the service failed, and its log says where: {type(error).__name__}"))


def _answer_refusal(request: Request, error: Refusal | PodiumError) -> Response:
    refusal, dialect = error if isinstance(error, Refusal) else Refusal(500, str(error)), find_dialect(request)
    body = refusal.body if dialect is None else dialect.describe(refusal)
    headers = {"Retry-After": "1"} if refusal.status in (429, 503) else None
    return _number(request, JSONResponse(body, refusal.status, headers))


def _number(request: Request, response: Response) -> Response:
    """Return a response with the id of its request, which the client may have chosen."""
    number = request.headers.get("x-request-id") or f"req_{uuid.uuid4().hex}"
    for name in ("x-request-id", "request-id"):  # as clients of OpenAI and of Anthropic read it
        response.headers.setdefault(name, number[:_LONGEST_ID])
    return response
