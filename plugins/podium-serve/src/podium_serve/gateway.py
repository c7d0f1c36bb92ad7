"""The address of the model for agents: one for all sessions of a rollout worker, with a key for each session.

    agent ─▶ Gateway ─┬▶ the service of one call of ``live``    found by the name of the session that is asked for
                      └▶ the service of another one

It listens once somebody asks for its address, in the event loop of the process that runs the sessions, so that all
calls of a session are recorded by one thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ipaddress
import socket
import threading
from collections.abc import AsyncIterator, Callable, Mapping, MutableMapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from podium.errors import GenerationError, PodiumError
from podium_agents.service.keys import SessionKeys, root_of
from podium_agents.service.request_bodies import Refusal

if TYPE_CHECKING:
    from concurrent.futures import Future

    from starlette.requests import Request
    from starlette.responses import Response

    from podium_agents.service.service import Service
    from podium_serve.offers import Offers

__all__ = ["LOOPBACK", "Gateway"]

LOOPBACK: Final = "127.0.0.1"
_STOP_S: Final = 5.0  # for requests in progress, when the worker ends
_ELSEWHERE: Final = ("203.0.113.1", 9)  # addresses of documentation, to which nothing is sent
_ELSEWHERE6: Final = ("2001:db8::1", 9)


class Gateway:
    """Where agents ask for the model. Close it at the end.

    Args:
        host: The address to listen at. Anything but the default listens from now on.
        ports: The ports, of which the first free one is taken; 0 is any free port.

    Raises:
        PodiumError: The address cannot be used, no port is free, or no agent could know the address.

    Attributes:
        keys: The keys of sessions.
    """

    def __init__(self, host: str = LOOPBACK, ports: Sequence[int] = (0,)) -> None:
        self.keys = SessionKeys()
        self._host, self._ports = host, ports
        self._lock = threading.Lock()
        self._services: dict[str, Service] = {}
        self._apps: dict[str, Any] = {}
        self._server: Any = None
        self._serving: Future[None] | None = None
        self._socket: socket.socket | None = None
        self._url = ""
        self._outside: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._admitted: tuple[Offers, str] | None = None
        if (host, tuple(ports)) != (LOOPBACK, (0,)):
            self._listen()

    @asynccontextmanager
    async def open(self, service: Service, call: str) -> AsyncIterator[Callable[[], str]]:
        """Answer requests of the sessions of a call during the block, which are named ``CALL-NUMBER``.

        Gives a function that returns the address, such as ``http://127.0.0.1:4321``. Any thread may call it. It raises
        GenerationError after the block.
        """
        loop = asyncio.get_running_loop()
        self._services[call] = service

        def address() -> str:
            with self._lock:
                if call not in self._services:
                    raise GenerationError(
                        "an environment requested the address of the model after the sessions of its call had ended"
                    )
                if self._serving is None:
                    self._start(loop)
                return self._url

        try:
            yield address
        finally:
            with self._lock:
                del self._services[call]
                self._apps.pop(call, None)

    def offer(self, limits_s: tuple[float, float, float], token: str, *, names_tasks: bool) -> Offers:
        """As :meth:`podium_agents.services.Gateway.offer`."""
        from podium_serve.offers import Offers

        offers = Offers(*limits_s, names_tasks=names_tasks)
        self._admitted = offers, token
        return offers

    def close(self) -> None:
        """Listen no more. Another thread than that of the event loop calls it."""
        with self._lock:
            serving, self._serving = self._serving, None
            if serving is not None:
                self._server.end()
                with contextlib.suppress(Exception):  # its loop may have ended, and the server with it
                    if self._admitted is not None and self._loop is not None:
                        self._loop.call_soon_threadsafe(self._admitted[0].close)
                    serving.result(_STOP_S)
            if self._socket is not None:
                self._socket.close()

    def _listen(self) -> None:
        from podium_serve.server import in_url, listen_at_first
        from podium_view.listener import Listener

        public = in_url(_public_host(self._host))
        self._socket = Listener(listen_at_first(self._host, self._ports, key="environment.options"))
        self._url = f"http://{public}:{self._socket.getsockname()[1]}"

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._socket is None:
            self._listen()
        from podium_serve.server import make_server

        self._loop = loop
        self._server = make_server(self._answer, self._socket)  # pyright: ignore[reportArgumentType] - it is a Listener
        # What asks for the address first is one of many sessions, and its context is not the server's.
        context = contextvars.Context()
        self._serving = context.run(asyncio.run_coroutine_threadsafe, self._server.serve([self._socket]), loop)

    async def _answer(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        """Hand a request to the service of its session. The service checks its token."""
        if self._admitted is not None and is_outside_path(scope.get("path", "")):
            from podium_serve.outside import make_outside_app

            self._outside = self._outside or make_outside_app(*self._admitted)
            await self._outside(scope, receive, send)
            return
        call = _call_of(scope)
        if call not in self._apps:
            from podium_serve.app import make_app
            from podium_serve.routes import PATHS, make_routes

            service = self._services.get(call)
            if service is None:
                await make_routes(dict.fromkeys(PATHS, _refuse), self.keys)(scope, receive, send)
                return
            self._apps[call] = make_app(service, self.keys)
        await self._apps[call](scope, receive, send)


def is_outside_path(path: str) -> bool:
    """Whether a request opens, ends or rewards a session, as :mod:`.outside` has it."""
    return path == "/sessions" or (path.startswith("/sessions/") and path.endswith(("/end", "/reward")))


async def _refuse(request: Request) -> Response:
    from podium_serve.exchange import session_of

    name = session_of(request, None)
    raise Refusal(404, f"the session {name!r} is over, or was never open; use the base_url that the run gave", "")


def _call_of(scope: Mapping[str, Any]) -> str:
    """Return the call of ``live`` that the session of a request belongs to. "" if the request names no session."""
    if scope["type"] != "http":
        return ""
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
    path = scope["path"]
    in_path = path.removeprefix("/sessions/").partition("/")[0] if path.startswith("/sessions/") else ""
    key = headers.get("authorization", "").rpartition(" ")[2] or headers.get("x-api-key", "")
    name = in_path or headers.get("x-session-id") or key
    session = root_of(name)
    return session.rpartition("-")[0] or session


def _public_host(host: str) -> str:
    """Return the address by which others reach what listens at ``host``: this machine's own where that is any address.

    Raises:
        PodiumError: The machine has no address to others.
    """
    try:
        if not ipaddress.ip_address(host).is_unspecified:
            return host
    except ValueError:  # a name
        return host
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(_ELSEWHERE6 if ":" in host else _ELSEWHERE)  # which sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise PodiumError(
            f"environment.options.host = {host!r} is every address of this machine, of which none leads elsewhere "
            f"({error.strerror}): set it to the address by which agents reach this machine"
        ) from error
