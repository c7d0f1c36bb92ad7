"""The service for agents on this machine: it listens once somebody asks for its address.

It runs in the event loop of whoever lives the sessions, so that all calls of a session are recorded by one thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from podium.errors import ConfigError, GenerationError
from podium.extras import install_command

if TYPE_CHECKING:
    from concurrent.futures import Future

    from podium.rollout.service.service import Service

__all__ = ["gateway"]

_BACKLOG = 1024  # of connections that wait; a thousand agents may begin at the same time


@asynccontextmanager
async def gateway(service: Service, token: str) -> AsyncIterator[Callable[[], str]]:
    """Give, during the block, a function that returns the address of ``service``, such as ``http://127.0.0.1:4321``.

    Any thread may call it. It raises ConfigError where the extra ``serve`` is not installed, and GenerationError after
    the block.

    Args:
        service: The service that answers.
        token: The bearer token that clients send.
    """
    opened, lock, loop = _Opened(), threading.Lock(), asyncio.get_running_loop()

    def address() -> str:
        with lock:
            if opened.over:
                raise GenerationError(
                    "an environment requested the address of the model after the sessions of its call had ended"
                )
            if not opened.url:
                opened.start(service, token, loop)
            return opened.url

    try:
        yield address
    finally:
        with lock:
            opened.over = True
        await opened.stop()


class _Opened:
    url = ""
    over = False
    _server: Any = None
    _serving: Future[None] | None = None

    def start(self, service: Service, token: str, loop: asyncio.AbstractEventLoop) -> None:
        try:
            import uvicorn

            from podium.rollout.service.app import make_app
            from podium.rollout.service.connection_owner import OwnUserProtocol
        except ImportError as error:
            raise ConfigError(
                f"an agent requested the address of the model, which needs {error.name}, which is not installed: "
                f"{install_command('serve')}"
            ) from None

        class Server(uvicorn.Server):
            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield  # signals are the run's

        listening = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
        config = uvicorn.Config(
            make_app(service, token),
            http=OwnUserProtocol,
            log_level="error",
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=1,
        )
        self._server = Server(config)
        # What asks for the address first is one of many sessions, and its context is not the server's.
        context = contextvars.Context()
        self._serving = context.run(asyncio.run_coroutine_threadsafe, self._server.serve([listening]), loop)
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"

    async def stop(self) -> None:
        if self._serving is not None:
            self._server.should_exit = True
            await asyncio.wrap_future(self._serving)
