"""A generator whose machine vanishes while it draws: run in a network of its own, whose loopback is switched off."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from bench.sessions import Echo
from podium.rollout.sampling import SamplingParams
from podium_agents.service.session_recording import Sampled
from podium_serve import generator_client
from podium_serve.app import make_app
from podium_serve.server import Server
from tests.unit.rollout.test_generator_client import service_of

SET_FLAGS, UP = 0x8914, 0x1  # SIOCSIFFLAGS and IFF_UP of netdevice(7)


class Drawing(Echo):
    """A source that draws for ever."""

    def __init__(self) -> None:
        super().__init__([1])
        self.begun = threading.Event()

    async def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        seed: int,
        *,
        session: str = "",
        tokens: bool = True,
        caller: Any = None,
        constraint: Any = None,
        exact: bool = True,
    ) -> AsyncGenerator[Sampled]:
        """Nothing."""
        self.begun.set()
        await asyncio.sleep(600.0)
        yield self.drawn


def switch_loopback(*, on: bool) -> None:
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sH14x", b"lo", UP * on))


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60.0):
        while not holds():  # noqa: ASYNC110 - what it waits for has no event
            await asyncio.sleep(0.02)


async def main() -> None:
    generator_client.SILENT_S = 2
    switch_loopback(on=True)
    source = Drawing()
    with (
        Server(make_app(service_of(source), "token")) as silent,
        Server(make_app(service_of(Echo([5])), "token")) as other,
    ):
        tokens = generator_client.RemoteTokens([silent.url, other.url], "token")

        async def draw() -> Sequence[int]:
            async for found in tokens.stream([1, 2], SamplingParams(max_new_tokens=2), 7):
                assert isinstance(found, Sampled)
                return found.ids
            raise AssertionError("nothing was drawn")

        async with tokens.connected():
            drawing = asyncio.create_task(draw())
            await until(source.begun.is_set)
            switch_loopback(on=False)
            await until(lambda: tokens._generators[0].lost_s > 0)
            switch_loopback(on=True)
            sys.stdout.write(f"drawn elsewhere: {await drawing}\n")


if __name__ == "__main__":
    asyncio.run(main())
