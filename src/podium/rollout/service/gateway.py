"""The service for agents on this machine: it listens once somebody asks for its address.

It runs in the event loop of whoever lives the sessions, so that all calls of a session are recorded by one thread.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from podium.errors import ConfigError, GenerationError
from podium.extras import install_command

if TYPE_CHECKING:
    from concurrent.futures import Future

    from podium.rollout.service.service import Service

__all__ = ["gateway"]


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
            from podium.rollout.service.app import make_app
            from podium.rollout.service.front import Front
            from podium.rollout.service.server import fronted, listen
        except ImportError as error:
            raise ConfigError(
                f"an agent requested the address of the model, which needs {error.name}, which is not installed: "
                f"{install_command('serve')}"
            ) from None

        front = Front(listen("127.0.0.1", 0))
        self._server = fronted(make_app(service, token), front)
        # What asks for the address first is one of many sessions, and its context is not the server's.
        context = contextvars.Context()
        self._serving = context.run(asyncio.run_coroutine_threadsafe, self._server.serve([front]), loop)
        self.url = f"http://127.0.0.1:{front.getsockname()[1]}"

    async def stop(self) -> None:
        if self._serving is not None:
            self._server.should_exit = True
            await asyncio.wrap_future(self._serving)
