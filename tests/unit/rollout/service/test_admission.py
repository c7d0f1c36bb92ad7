"""Which sessions may take a turn, and that each of them can in the end."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from podium.rollout.engines.requests import SessionRoom
from podium_agents.service import admission
from podium_agents.service.admission import Admission

ROOM = SessionRoom(sessions=0, tokens=1000)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0.001)


class Playing:
    """Turns that begin and end when a test says so."""

    def __init__(self, gate: Admission) -> None:
        self.gate, self.began, self.ends = gate, list[str](), dict[str, asyncio.Event]()
        self.tasks = list[asyncio.Task[None]]()

    def turn(self, name: str, tokens: int, room: SessionRoom | None = ROOM) -> None:
        self.ends[name] = asyncio.Event()

        async def take() -> None:
            async with self.gate.turn(name, tokens, room):
                self.began.append(name)
                await self.ends[name].wait()
            self.gate.note(name, tokens)

        self.tasks.append(asyncio.create_task(take()))

    async def end(self, *names: str) -> None:
        for name in names:
            self.ends[name].set()
        await settle()


def make(*names: str) -> Playing:
    gate = Admission()
    for name in names:
        gate.begin(name)
    return Playing(gate)


def test_the_youngest_waits_until_another_session_has_ended() -> None:
    async def main() -> None:
        playing = make("a", "b", "c")
        for name in "abc":
            playing.turn(name, 100)  # each may become four times as long
            await settle()
        assert playing.began == ["a", "b"]
        assert playing.gate.waiting == 1
        assert playing.gate.waited_s("c") > 0 == playing.gate.waited_s("a")
        await playing.end("a", "b")
        assert playing.began == ["a", "b"], "between its turns a session keeps its memory"
        playing.gate.end("b")
        await settle()
        assert (playing.began, playing.gate.waiting) == (["a", "b", "c"], 0)
        await playing.end("c")

    asyncio.run(main())


def test_a_session_that_is_longer_than_all_room_goes_on_alone() -> None:
    async def main() -> None:
        playing = make("a", "b")
        playing.turn("a", 5000)
        playing.turn("b", 10)
        await settle()
        assert playing.began == ["a"]
        await playing.end("a")
        playing.turn("a", 6000)
        await settle()
        assert playing.began == ["a", "a"]
        await playing.end("a")
        playing.gate.end("a")
        await settle()
        assert playing.began[-1] == "b"
        await playing.end("b")

    asyncio.run(main())


def test_agents_never_wait_for_the_session_that_waits_for_them() -> None:
    async def main() -> None:
        playing = make("a", "a.critic", "b", "b.critic")
        playing.turn("a", 900)
        playing.turn("b", 900)
        await settle()
        playing.turn("a.critic", 900)
        await settle()
        assert playing.began == ["a", "a.critic"]
        await playing.end("a", "a.critic")
        playing.gate.end("a")
        await settle()
        assert "b" not in playing.began, "an agent of the session is still open"
        playing.gate.end("a.critic")
        await settle()
        assert playing.began[-1] == "b"
        await playing.end("b")

    asyncio.run(main())


def test_who_is_cancelled_or_ends_while_it_waits_holds_nobody_up() -> None:
    async def main() -> None:
        playing = make("a", "b", "c")
        for name in "abc":
            playing.turn(name, 600)
        await settle()
        playing.tasks[1].cancel()
        await settle()
        playing.gate.end("b")
        await playing.end("a")
        playing.gate.end("a")
        await settle()
        assert playing.began == ["a", "c"]
        await playing.end("c")
        playing.gate.end("c")
        assert playing.gate.waiting == 0

    asyncio.run(main())


def test_without_a_limit_and_for_others_than_sessions_of_a_run_nothing_waits() -> None:
    async def main() -> None:
        playing = make("a", "b")
        for name in ("a", "b", "elsewhere", ""):
            playing.turn(name, 5000, None if name in "ab" else ROOM)
        await settle()
        assert playing.began == ["a", "b", "elsewhere", ""]
        await playing.end(*playing.ends)

    asyncio.run(main())


def test_sessions_that_wait_for_one_another_elsewhere_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_STALL_S", 0.01)

    async def main() -> None:
        playing = make("a", "b")
        playing.turn("a", 900)
        playing.turn("b", 900)
        await settle()
        await playing.end("a")  # and it takes no further turn before b has spoken
        async with asyncio.timeout(60):
            while "b" not in playing.began:  # noqa: ASYNC110 - what it waits for has no event
                await asyncio.sleep(0.01)
        await playing.end("b")

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(30))
def test_whatever_sessions_do_all_of_them_end(seed: int) -> None:
    async def main() -> None:
        chance, gate, drawing, most = random.Random(seed), Admission(), Counter[str](), 0
        room = SessionRoom(chance.choice([0, 1, 16]), chance.choice([0, 100, 3000, 10**6]))

        async def play(name: str) -> None:
            nonlocal most
            gate.begin(name)
            length = chance.randint(1, 400)
            for _ in range(chance.randint(1, 6)):
                async with gate.turn(name, length, room, engine=chance.choice(["x", "x", "x", "y"])):
                    drawing[name] += 1
                    most = max(most, sum(drawing.values()))
                    await asyncio.sleep(0)
                    drawing[name] -= 1
                length += chance.randint(1, 400)
                gate.note(name, length)
                if chance.random() < 0.3:
                    await asyncio.sleep(0.001)
            gate.end(name)

        async with asyncio.timeout(60):
            await asyncio.gather(*(play(f"s-{number}") for number in range(40)))
        assert gate.waiting == 0
        if room.tokens == 0:
            assert most <= 2 * max(1, room.sessions), "on two engines"

    asyncio.run(main())
