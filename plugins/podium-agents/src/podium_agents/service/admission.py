"""Which open sessions may take a turn, so that the keys and values of each stay in its engine's memory between turns.

    begin ─▶ turn ─ its engine has room ─▶ drawn ─▶ turn ... ─▶ end       what an ended session held is room for others
               └─ no room: the youngest wait, the oldest never ─┘

An engine says how much of open sessions it remembers (:class:`.SessionRoom`). A session counts by the length that it is
expected to reach, so that few wait in the middle: the mean of those that ended lately and of open ones, whose length so
far counts as a quarter of it at first, and as half of it when many have ended. Sessions have the order of their first
turns, and those from the first on that fit together may go. One that is longer than all room goes on alone. Agents of
one session are one, because the session may wait for them.

Sessions that wait for one another outside of this process's sight could all wait here. If no turn begins or ends for
``_STALL_S`` seconds, the oldest of those that wait goes on.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Hashable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from podium.rollout.engines.requests import SessionRoom

__all__ = ["Admission"]

_RECENT: Final = 64  # ended sessions whose lengths are remembered
_STALL_S: Final = 30.0


@dataclass(eq=False)
class _Turn:
    """A turn that waits."""

    loop: asyncio.AbstractEventLoop
    may_go: asyncio.Future[None]

    def go(self) -> None:
        self.loop.call_soon_threadsafe(lambda: None if self.may_go.done() else self.may_go.set_result(None))


@dataclass(eq=False)
class _Session:
    """A session with its agents. ``tokens`` has the length so far of each conversation."""

    agents: set[str] = field(default_factory=set[str])
    engine: _Engine | None = None
    tokens: dict[str, int] = field(default_factory=dict[str, int])
    turns: list[_Turn] = field(default_factory=list[_Turn])
    since_s: float = 0.0
    ended_waits_s: float = 0.0

    @property
    def length(self) -> int:
        return sum(self.tokens.values())

    @property
    def waited_s(self) -> float:
        return self.ended_waits_s + (time.monotonic() - self.since_s if self.turns else 0.0)

    def wait(self, turn: _Turn) -> None:
        if not self.turns:
            self.since_s = time.monotonic()
        self.turns.append(turn)

    def stop_waiting(self, turn: _Turn) -> None:
        self.ended_waits_s = self.waited_s
        self.since_s = time.monotonic()
        self.turns.remove(turn)


@dataclass(eq=False)
class _Engine:
    """The sessions of one engine, the oldest first."""

    room: SessionRoom
    sessions: dict[_Session, None] = field(default_factory=dict[_Session, None])
    ended: deque[int] = field(default_factory=lambda: deque[int](maxlen=_RECENT))
    longest: int = 0
    drawing: int = 0
    changes: int = 0

    def admitted(self) -> Iterator[_Session]:
        """The sessions that may take turns."""
        expected, total = self._expected(), 0
        for number, session in enumerate(self.sessions, 1):
            total += max(session.length, expected)
            if number > 1 and not self.room.holds(number, total):
                return
            yield session

    def admits(self, session: _Session) -> bool:
        """Whether a session may take a turn."""
        count = len(self.sessions)
        longest = max(4 * self.longest, max(self.ended, default=0))
        if self.room.holds(count, count * longest):
            return True
        return any(other is session for other in self.admitted())

    def look(self) -> None:
        """Let the turns go on that may."""
        self.changes += 1
        if any(session.turns for session in self.sessions):
            for session in self.admitted():
                for turn in session.turns:
                    turn.go()

    def _expected(self) -> int:
        """The length that a session reaches, as far as that is known."""
        factor = 4 - 2 * len(self.ended) / _RECENT
        lengths = [factor * session.length for session in self.sessions if not session.turns]
        if not (lengths or self.ended):
            lengths = [factor * session.length for session in islice(self.sessions, 1)]
        return int((sum(lengths) + sum(self.ended)) / max(1, len(lengths) + len(self.ended)))


class Admission:
    """The open sessions of a source of tokens. Calls may come from several event loops."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: dict[str, _Session] = {}
        self._engines: dict[Hashable, _Engine] = {}

    @property
    def waiting(self) -> int:
        """The number of sessions that wait for room now."""
        with self._lock:
            return sum(bool(session.turns) for session in {*self._sessions.values()})

    def begin(self, name: str) -> None:
        """Take part with a session, or with an agent, whose name is the session's with a further part after a dot."""
        with self._lock:
            self._sessions.setdefault(_root(name), _Session()).agents.add(name)

    def waited_s(self, name: str) -> float:
        """How many seconds turns of an open session and of its agents have waited, those that wait now among them."""
        with self._lock:
            session = self._sessions.get(_root(name))
            return 0.0 if session is None else session.waited_s

    def end(self, name: str) -> bool:
        """Take part no more. Returns whether nothing of the session is open."""
        with self._lock:
            session = self._sessions.get(_root(name))
            if session is None:
                return False
            session.agents.discard(name)
            if session.agents:
                return False
            del self._sessions[_root(name)]
            if session.engine is not None:
                session.engine.sessions.pop(session, None)
                session.engine.ended.append(session.length)
                session.engine.look()
            for turn in session.turns:
                turn.go()
            return True

    def note(self, name: str, tokens: int) -> None:
        """Note how long a conversation is now."""
        with self._lock:
            if (session := self._sessions.get(_root(name))) is not None and session.engine is not None:
                session.tokens[name] = max(tokens, session.tokens.get(name, 0))
                session.engine.longest = max(session.engine.longest, session.length)

    @asynccontextmanager
    async def turn(
        self, name: str, tokens: int, room: SessionRoom | None, engine: Hashable = None
    ) -> AsyncGenerator[None]:
        """Wait until a session may take a turn whose prompt has so many ``tokens``, and take it during the block.

        A session that did not begin, and an engine without a limit (``room`` is None), let every turn go at once.
        """
        session = self._enter(name, tokens, room, engine)
        if session is None or (state := session.engine) is None:
            yield
            return
        await self._wait(session, state)
        with self._lock:
            state.drawing += 1
            state.changes += 1
        try:
            yield
        finally:
            with self._lock:
                state.drawing -= 1
                state.look()

    def _enter(self, name: str, tokens: int, room: SessionRoom | None, engine: Hashable) -> _Session | None:
        with self._lock:
            session = self._sessions.get(_root(name))
            if session is None or room is None:
                return None
            state = self._engines.setdefault(engine, _Engine(room))
            state.room = room
            if session.engine is not state:  # it is new, or its engine was lost
                if session.engine is not None:
                    session.engine.sessions.pop(session, None)
                    session.engine.look()
                session.engine = state
                state.sessions[session] = None
            session.tokens[name] = max(tokens, session.tokens.get(name, 0))
            state.longest = max(state.longest, session.length)
            return session

    async def _wait(self, session: _Session, state: _Engine) -> None:
        loop = asyncio.get_running_loop()
        with self._lock:
            if state.admits(session):
                return
            turn = _Turn(loop, loop.create_future())
            session.wait(turn)
        try:
            while not turn.may_go.done():
                changes = state.changes
                await asyncio.wait({turn.may_go}, timeout=_STALL_S)
                with self._lock:
                    oldest = next((other for other in state.sessions if other.turns), None)
                    if changes == state.changes and not state.drawing and oldest is session:
                        return
        finally:
            with self._lock:
                session.stop_waiting(turn)


def _root(name: str) -> str:
    """The name of the session to which an agent belongs."""
    return name.partition(".")[0]
