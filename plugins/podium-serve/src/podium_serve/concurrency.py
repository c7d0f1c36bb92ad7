"""Awaits several things at the same time, which end together: when one fails, the others are cancelled. The many things
that one request wants take turns with those of other requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from contextlib import aclosing
from typing import Any, Final, TypeVar

__all__ = ["all_of", "in_turns", "merge_streams"]

T = TypeVar("T")

_TURN_S: Final = 0.01


async def in_turns(items: Iterable[T]) -> list[T]:
    """Return ``items``, whose computation takes turns with other coroutines."""
    computed, begun_s = list[T](), time.monotonic()
    for item in items:
        computed.append(item)
        if time.monotonic() - begun_s > _TURN_S:
            await asyncio.sleep(0)
            begun_s = time.monotonic()
    return computed


async def all_of(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return what all of ``works`` return. Raises the first error after all have ended."""
    if len(works) == 1:
        return [await works[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def merge_streams(streams: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """Yield the items of several streams as they arrive, each with the number of its stream. A stream goes on once its
    item is taken.

    Closing the iterator closes all streams. The first error closes them too, and is raised.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for piece in stream:
                yield 0, piece
        return
    queue: asyncio.Queue[tuple[int, T, asyncio.Event] | asyncio.Task[None]] = asyncio.Queue()

    async def pump(place: int, stream: AsyncGenerator[T]) -> None:
        async with aclosing(stream):
            async for piece in stream:
                taken = asyncio.Event()
                queue.put_nowait((place, piece, taken))
                await taken.wait()

    pumps = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    for task in pumps:
        task.add_done_callback(queue.put_nowait)
    try:
        left = len(pumps)
        while left:
            got = await queue.get()
            if isinstance(got, asyncio.Task):
                got.result()
                left -= 1
            else:
                number, piece, taken = got
                yield number, piece
                taken.set()
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
