"""The paths of the API, who may ask there, and what everybody else is answered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, TypeAlias

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from podium.errors import ConfigError, PodiumError
from podium.rollout.service.exchange import session_of
from podium.rollout.service.keys import Access, OneToken
from podium.rollout.service.repeats import Repeats
from podium.rollout.service.wire import Refusal

__all__ = ["PATHS", "Handler", "make_routes"]

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]

_OPEN: Final = "/health"
_IN_SESSIONS: Final = {"/v1/chat/completions": "POST", "/v1/completions": "POST", "/v1/models": "GET"}
_METHODS: Final = {**_IN_SESSIONS, "/inference/v1/generate": "POST", "/metrics": "GET", _OPEN: "GET"}
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
        Route(prefix + path, _guard(handlers[path], None if path == _OPEN else access, path, repeats), methods=[method])
        for path, method in _METHODS.items()
        for prefix in ("", "/sessions/{session}")[: 1 + (path in _IN_SESSIONS)]
    ]
    answered: dict[Any, Any] = {404: _elsewhere, 405: _otherwise, Exception: _answer_failure}
    return Starlette(routes=routes, exception_handlers=answered, lifespan=running)


def _guard(handler: Handler, access: Access | None, path: str, repeats: Repeats) -> Handler:
    async def run(request: Request) -> Response:
        try:
            if access is not None:
                _admit(request, access, path)
            return await repeats.answer(request, handler)
        except ClientDisconnect:
            return Response(status_code=499)
        except (Refusal, PodiumError) as error:
            return _answer_refusal(error)

    return run


def _admit(request: Request, access: Access, path: str) -> None:
    """Note which session a request may reach, by its token. Raises Refusal where that is not what it asks for."""
    kind, _, credentials = request.headers.get("authorization", "").partition(" ")
    scope = access.scope_of(credentials.strip()) if kind.lower() == "bearer" else None
    if scope is None:
        raise Refusal(401, "the token is missing or wrong: send it as Authorization: Bearer TOKEN")
    request.state.scope = scope
    if scope and path not in _IN_SESSIONS:
        raise Refusal(401, f"the token is the key of a session, which does not reach {path}")
    session_of(request, None)


def _elsewhere(request: Request, error: Exception) -> Response:
    return _answer_refusal(Refusal(404, f"nothing is at {request.url.path}; the paths are {', '.join(PATHS)}"))


def _otherwise(request: Request, error: Exception) -> Response:
    allowed = (getattr(error, "headers", None) or {}).get("Allow", "")
    return _answer_refusal(Refusal(405, f"{request.url.path} takes {allowed or 'another method'}"))


def _answer_failure(request: Request, error: Exception) -> Response:
    return _answer_refusal(Refusal(500, f"the service failed, and its log says where: {type(error).__name__}"))


def _answer_refusal(error: Refusal | PodiumError) -> Response:
    refusal = error if isinstance(error, Refusal) else Refusal(500, str(error))
    return JSONResponse(refusal.body, refusal.status, {"Retry-After": "1"} if refusal.status == 429 else None)
