"""The sessions that a service remembers, by name, within a limit of memory."""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Final

from podium_agents.service.histories import Template
from podium_agents.service.session_recording import Session

__all__ = ["SessionStore"]

_FORGOTTEN: Final = 1 << 16  # sessions that are known to have been forgotten


class SessionStore:
    """Sessions by name. Those that were not used for the longest time are forgotten first. None is forgotten that has a
    request in flight.

    Args:
        most_bytes: The most bytes of all sessions together; None for any number.
        template: The template by which histories are read.
    """

    def __init__(self, most_bytes: int | None, template: Template | None = None) -> None:
        self._most, self._template = most_bytes, template
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._bytes: Counter[str] = Counter()
        self._total = 0
        self._drawing: Counter[str] = Counter()
        self._forgotten: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sessions)

    def __getitem__(self, name: str) -> Session:
        return self._sessions[name]

    def get(self, name: str) -> Session | None:
        """Return the session of this name, if there is one."""
        return self._sessions.get(name)

    def open(self, name: str) -> Session:
        """Return the session of this name, and begin it if there is none."""
        session = self._sessions.get(name) or Session(name, self._template)
        self.keep(session)
        return session

    def pop(self, name: str) -> Session | None:
        """Return the session of this name, and remember it no longer."""
        self._total -= self._bytes.pop(name, 0)
        return self._sessions.pop(name, None)

    def keep(self, session: Session) -> None:
        """Remember what was recorded in a session, which is now the one that was used last."""
        if session.over or self._sessions.setdefault(session.id, session) is not session:
            return
        self._sessions.move_to_end(session.id)
        self._total += session.nbytes - self._bytes[session.id]
        self._bytes[session.id] = session.nbytes
        if self._most is not None and self._total > self._most:
            self._forget(self._most)

    @asynccontextmanager
    async def in_use(self, session: Session | None) -> AsyncIterator[None]:
        """Forget a session at no time during the block."""
        if session is None:
            yield
            return
        self._drawing[session.id] += 1
        try:
            yield
        finally:
            self._drawing[session.id] -= 1
            if not self._drawing[session.id]:
                del self._drawing[session.id]

    def is_forgotten(self, name: str) -> bool:
        """Return whether a session of this name had calls, is remembered no longer, and was not begun again."""
        return name not in self._sessions and _mark(name) in self._forgotten

    def _forget(self, most: int) -> None:
        due, freed = list[str](), 0
        for name in self._sessions:
            if self._total - freed <= most:
                break
            if not self._drawing[name]:
                due.append(name)
                freed += self._bytes[name]
        for name in due:
            session = self.pop(name)
            if session is not None and session.calls:
                self._forgotten[_mark(name)] = None
                self._forgotten.move_to_end(_mark(name))
        while len(self._forgotten) > _FORGOTTEN:
            self._forgotten.popitem(last=False)


def _mark(name: str) -> bytes:
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=12).digest()
