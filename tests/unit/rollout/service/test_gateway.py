"""The service of a run: it listens once somebody asks for its address, and no longer than its block."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable

import pytest

from podium.errors import GenerationError
from podium.rollout.service.gateway import gateway
from tests.unit.rollout.service.scripted import TOKEN, USER, posted, scripted

pytest.importorskip("uvicorn")


def refuses(url: str) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) != 0


def test_it_answers_during_its_block_alone() -> None:
    service, _, _ = scripted("A.<|im_end|>")

    async def talk() -> tuple[str, int, Callable[[], str]]:
        async with gateway(service, TOKEN) as address:
            url = await asyncio.to_thread(address)
            status, _ = await asyncio.to_thread(posted, f"{url}/v1/chat/completions", {"messages": [USER]})
        return url, status, address

    url, status, address = asyncio.run(talk())
    assert (status, refuses(url)) == (200, True)
    with pytest.raises(GenerationError, match="after the sessions of its call had ended"):
        address()


def test_a_thread_that_outlives_the_block_opens_nothing() -> None:
    service, _, _ = scripted()
    over, said = threading.Event(), list[str]()

    def late(address: Callable[[], str]) -> None:
        over.wait()
        try:
            said.append(address())
        except GenerationError as error:
            said.append(str(error))

    async def live() -> None:
        async with gateway(service, TOKEN) as address:
            thread = threading.Thread(target=late, args=(address,))
            thread.start()
        over.set()
        await asyncio.to_thread(thread.join)
        await asyncio.sleep(0.1)

    asyncio.run(live())
    (found,) = said
    assert "had ended" in found
