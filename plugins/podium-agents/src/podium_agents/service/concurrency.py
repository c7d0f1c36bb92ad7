"""The many completions that one request wants take turns with those of other requests."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

__all__ = ["Caller"]


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
