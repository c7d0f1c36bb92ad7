"""Runs an application on an address of this machine, in a thread of its own."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any, Final, Self

import uvicorn

from podium.errors import PodiumError
from podium.rollout.service.connection_owner import protocol_at

__all__ = ["Server", "listen"]

_BACKLOG: Final = 1024  # connections that wait
_LAST_PORT: Final = 65535


def listen(host: str, port: int) -> socket.socket:
    """Listen at an address of IPv4 or IPv6; ``::`` is all of both. Raises PodiumError if the address cannot be used."""
    free = "; --port 0 takes one that is free" if port else ""
    authority = f"{_in_url(host)}:{port}"
    if not 0 <= port <= _LAST_PORT:  # create_server raises OverflowError then, and leaves its socket open
        raise PodiumError(f"cannot listen at {authority}: a port is a number from 0 to {_LAST_PORT}{free}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    except OSError as error:
        raise PodiumError(f"cannot listen at {authority}: {error.strerror or error}{free}") from error


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class Server:
    """Serves ``app`` until it is closed. Use it in a ``with`` block.

    Args:
        app: An ASGI application.
        host: The address to listen at; by default only processes of this machine reach it.
        port: The port; 0 chooses a free port.

    Raises:
        PodiumError: The address or port cannot be used.

    Attributes:
        url: Address of the server, such as ``http://127.0.0.1:43210``.
    """

    def __init__(self, app: Any, host: str = "127.0.0.1", port: int = 0) -> None:
        self._socket = listen(host, port)
        self.url = f"http://{_in_url(host)}:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            app,
            http=protocol_at(self._socket),
            log_level="error",
            access_log=False,
            lifespan="on",
            ws="none",
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="podium-http", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.run(self._server.serve([self._socket]))

    def close(self) -> None:
        """Finish requests in progress for at most a second, and end."""
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
