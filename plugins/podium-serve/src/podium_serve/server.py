"""Runs an application on an address of this machine, in a thread of its own or in an event loop that runs already."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import socket
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final, Self

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from podium.errors import PodiumError
from podium_view.listener import IDLE_S, Listener, Phase

__all__ = ["ListenerServer", "Server", "in_url", "listen", "listen_at_first", "make_server"]

_BACKLOG: Final = 1024  # connections that wait; a thousand agents may begin at the same time
_LAST_PORT: Final = 65535
_TICK_S: Final = 0.1  # between two looks of a server at its clock
_LOOK_S: Final = 0.005  # between two looks at the connections of one that ends


def listen(host: str, port: int) -> socket.socket:
    """Listen at an address of IPv4 or IPv6; ``::`` is all of both. Raises PodiumError if the address cannot be used."""
    free = "; --port 0 takes one that is free" if port else ""
    authority = f"{in_url(host)}:{port}"
    if not 0 <= port <= _LAST_PORT:  # create_server raises OverflowError then, and leaves its socket open
        raise PodiumError(f"cannot listen at {authority}: a port is a number from 0 to {_LAST_PORT}{free}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    except OSError as error:
        raise PodiumError(f"cannot listen at {authority}: {error.strerror or error}{free}") from error


def listen_at_first(host: str, ports: Sequence[int], *, key: str) -> socket.socket:
    """Listen at the first of ``ports`` that is free, which the option ``key.ports`` names.

    Raises:
        PodiumError: The address cannot be used, or no port is free.
    """
    for port in ports:
        try:
            return listen(host, port)
        except PodiumError as error:
            if getattr(error.__cause__, "errno", None) != errno.EADDRINUSE:
                raise PodiumError(f"{key}.host = {host!r}: {error}") from error
    listed = f"{ports[0]}" if len(ports) == 1 else f"{ports[0]} to {ports[-1]}"
    raise PodiumError(
        f"{key}.ports: port {listed} of {host} is in use; each rollout worker needs a port of its own: name more ports"
    )


def in_url(host: str) -> str:
    """Return a host as it stands in a URL."""
    return f"[{host}]" if ":" in host else host


class _Protocol(H11Protocol):
    """Tells the visitor of ``listener`` in which phase its request is."""

    def __init__(self, listener: Listener, **how: Any) -> None:
        super().__init__(**how)
        self._listener = listener

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] - as uvicorn's own
        super().connection_made(transport)
        self._visitor = self._listener.visitors[transport.get_extra_info("socket").fileno()]

    def handle_events(self) -> None:
        try:
            super().handle_events()
        except h11.LocalProtocolError:  # what is no HTTP came while an answer was under way
            self.transport.abort()
        self._enter_phase()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._enter_phase()

    def _enter_phase(self) -> None:
        sends = self.conn.their_state is h11.SEND_BODY
        if self.transport.is_closing():
            self._visitor.enter(Phase.REST)
        elif self.cycle is not None and not self.cycle.response_complete:
            self._visitor.enter(Phase.BODY if sends and not self.flow.read_paused else Phase.ANSWER)
        elif sends:
            self._visitor.enter(Phase.REST)
        elif self._visitor.phase in (Phase.BODY, Phase.ANSWER, Phase.REST):
            self._visitor.enter(Phase.IDLE)


class ListenerServer(uvicorn.Server):
    """A server of uvicorn's that ends at once: by itself it looks every tenth of a second whether it shall."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ending: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are for the program around it

    def end(self) -> None:
        """Have it finish requests in progress and end. Any thread may call this."""
        self.should_exit = True
        if self._ending is not None:
            loop, event = self._ending
            with contextlib.suppress(RuntimeError):  # the loop has ended, and the server with it
                loop.call_soon_threadsafe(event.set)

    async def main_loop(self) -> None:
        """Wait until it shall end."""
        event = asyncio.Event()
        self._ending = asyncio.get_running_loop(), event
        for tick in itertools.count():
            if await self.on_tick(tick):
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), _TICK_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close idle connections and wait for the others, as uvicorn does, but not for another tenth of a second."""
        for listener in [*self.servers, *(sockets or [])]:
            listener.close()
        state, clock = self.server_state, asyncio.get_running_loop().time
        for connection in [*state.connections]:
            connection.shutdown()
        until = clock() + (self.config.timeout_graceful_shutdown or 0)
        while (state.connections or state.tasks) and clock() < until:  # noqa: ASYNC110 - these sets have no event
            await asyncio.sleep(_LOOK_S)
        for task in state.tasks:
            task.cancel()
        await self.lifespan.shutdown()


def make_server(app: Any, listener: Listener, *, lifespan: str = "off") -> ListenerServer:
    """Return the server of an ASGI application. Serve the connections of ``listener`` with ``serve([listener])``."""
    config = uvicorn.Config(
        app,
        interface="asgi3",
        http=partial(_Protocol, listener),  # type: ignore[arg-type] - uvicorn calls it as it calls a class
        log_level="error",
        access_log=False,
        lifespan=lifespan,  # type: ignore[arg-type] - one of uvicorn's words
        ws="none",
        timeout_keep_alive=2 * int(IDLE_S),  # the listener closes idle connections before
        timeout_graceful_shutdown=1,
    )
    return ListenerServer(config)


class Server:
    """Serves ``app`` until it is closed. Use it in a ``with`` block.

    Args:
        app: An ASGI application.
        host: The address to listen at; by default only processes of this machine reach it.
        port: The port; 0 chooses a free port.
        how: Limits of the :class:`.Listener`.

    Raises:
        PodiumError: The address or port cannot be used.

    Attributes:
        url: Address of the server, such as ``http://127.0.0.1:43210``.
        listener: What accepts its connections.
    """

    def __init__(self, app: Any, host: str = "127.0.0.1", port: int = 0, **how: Any) -> None:
        self.listener = Listener(listen(host, port), **how)
        self.url = f"http://{in_url(host)}:{self.listener.getsockname()[1]}"
        self._server = make_server(app, self.listener, lifespan="on")
        self._thread = threading.Thread(target=self._run, name="podium-http", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.run(self._server.serve([self.listener]))

    def close(self) -> None:
        """Finish requests in progress for at most a second, and end."""
        self._server.end()
        self._thread.join()
        self.listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
