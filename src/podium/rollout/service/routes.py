"""The paths of the API, who may ask there, and what everybody else is answered."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, TypeAlias

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from podium.errors import ConfigError, PodiumError
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
    token: str,
    running: Callable[[Starlette], AbstractAsyncContextManager[None]] | None = None,
) -> Starlette:
    """Return an application that answers at ``PATHS``, those of conversations and texts in sessions too.

    Requests without the bearer ``token`` get the status 401 before their body is read, except for ``/health``.

    Args:
        handlers: The handler of each of ``PATHS``. A session's name is the path parameter "session".
        token: The bearer token.
        running: The block during which requests are answered.

    Raises:
        ConfigError: ``token`` is empty.
    """
    if not token:
        raise ConfigError("the token of a service is empty, which would let everybody in: give a token")
    routes = [
        Route(prefix + path, _guard(handlers[path], "" if path == _OPEN else token), methods=[method])
        for path, method in _METHODS.items()
        for prefix in ("", "/sessions/{session}")[: 1 + (path in _IN_SESSIONS)]
    ]
    answered: dict[Any, Any] = {404: _elsewhere, 405: _otherwise, Exception: _answer_failure}
    return Starlette(routes=routes, exception_handlers=answered, lifespan=running)


def _guard(handler: Handler, token: str) -> Handler:
    async def run(request: Request) -> Response:
        try:
            kind, _, credentials = request.headers.get("authorization", "").partition(" ")
            is_known = kind.lower() == "bearer" and hmac.compare_digest(credentials.strip().encode(), token.encode())
            if token and not is_known:
                raise Refusal(401, "the token is missing or wrong: send it as Authorization: Bearer TOKEN")
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=499)
        except (Refusal, PodiumError) as error:
            return _answer_refusal(error)

    return run


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
