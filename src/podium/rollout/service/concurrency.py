"""Awaits several things at the same time, which end together: when one fails, the others are cancelled. The many things
that one request wants take turns with those of other requests.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final, TypeVar

__all__ = ["Caller", "all_of", "in_turns", "merge_streams"]

T = TypeVar("T")

_TURN_S: Final = 0.01


class Caller:
    """One request, which may want thousands of completions.

    Args:
        most_tokens: The most tokens that its completions hold at the same time, prompts included. Others wait.

    Attributes:
        priority: That of its last completion at the engine. The next one gets a lower one, so that completions of other
            requests begin between them.
    """

    def __init__(self, most_tokens: int) -> None:
        self.priority: int | None = None
        self._most = most_tokens
        self._held = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def hold(self, tokens: int) -> AsyncIterator[None]:
        """Wait until there is room for a completion, and hold its tokens during the block."""
        if self._waiting or not self._has_room(tokens):
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append((tokens, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._release(tokens)
                raise
        else:
            self._held += tokens
        try:
            yield
        finally:
            self._release(tokens)

    def _has_room(self, tokens: int) -> bool:
        return not self._held or self._held + tokens <= self._most

    def _release(self, tokens: int) -> None:
        self._held -= tokens
        while self._waiting and (self._waiting[0][1].done() or self._has_room(self._waiting[0][0])):
            wanted, turn = self._waiting.popleft()
            if not turn.done():
                self._held += wanted
                turn.set_result(None)


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
