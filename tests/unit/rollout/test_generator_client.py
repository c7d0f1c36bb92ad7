"""Tokens of generators elsewhere: what is waited for when one of them is lost."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from bench.sessions import Echo, make_tokenizer
from podium.errors import GenerationError
from podium.rollout.engines.requests import SessionRoom
from podium.rollout.sampling import SamplingParams
from podium.rollout.tasks.chat_encoder import ChatEncoder
from podium.rollout.tasks.config import DataConfig
from podium_agents.service.chat_format import chat_format
from podium_agents.service.service import Service
from podium_agents.service.session_recording import Sampled

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx2")

from podium_serve import generator_client
from podium_serve.app import make_app
from podium_serve.generator_client import RemoteTokens
from podium_serve.server import Server
from tests.waits import LONG_S


class Dying(Echo):
    """A source that draws until its patience is long over, by the clock of ``generator_client``, and then fails."""

    def __init__(self, ids: Sequence[int]) -> None:
        super().__init__(ids)
        self.now_s = 1000.0

    async def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        seed: int,
        *,
        session: str = "",
        tokens: bool = True,
        caller: object = None,
        constraint: object = None,
        exact: bool = True,
    ) -> AsyncGenerator[Sampled]:
        """Nothing."""
        self.now_s += 10 * LONG_S
        raise GenerationError("the generator is lost")
        yield self.drawn


class Noting(Echo):
    """A source that notes the sessions of its requests, and those of which it hears that they have ended."""

    def __init__(self) -> None:
        super().__init__([5])
        self.sessions, self.ended = list[str](), list[str]()

    async def stream(self, *args: Any, session: str = "", **options: Any) -> AsyncGenerator[Sampled]:
        self.sessions.append(session)
        async for event in super().stream(*args, session=session, **options):
            yield event

    def end_session(self, name: str) -> None:
        self.ended.append(name)


def service_of(source: Echo) -> Service:
    tokenizer = make_tokenizer()
    form = chat_format(ChatEncoder(tokenizer, DataConfig()), tokenizer)
    return Service(source, form, tokenizer, model="echo", context=512, stop_token_ids=(), most_tokens=1 << 60)


async def drawn(urls: Sequence[str], patience_s: float) -> Sampled:
    remote = RemoteTokens(urls, "token", patience_s=patience_s)
    async with remote.connected():
        async for found in remote.stream([1, 2], SamplingParams(max_new_tokens=2), 7):
            assert isinstance(found, Sampled)
            return found
    raise AssertionError("nothing was drawn")


def test_patience_is_for_the_time_without_a_generator_and_not_for_drawing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = Dying([1])
    monkeypatch.setattr(generator_client, "time", SimpleNamespace(monotonic=lambda: source.now_s))
    with (
        Server(make_app(service_of(source), "token")) as dying,
        Server(make_app(service_of(Echo([5])), "token")) as other,
    ):
        assert asyncio.run(drawn([dying.url, other.url], patience_s=LONG_S)).ids == [5]
    assert source.now_s > 1000.0, "nobody asked the generator that dies"


def test_sessions_wait_for_memory_of_a_generator_which_hears_of_their_end() -> None:
    source = Noting()

    async def main(url: str) -> None:
        remote = RemoteTokens([url], "token")
        remote.room = SessionRoom(sessions=0, tokens=100)
        for name in ("a", "b"):
            remote.admission.begin(name)

        async def ask(name: str) -> None:
            async for _ in remote.stream([1] * 90, SamplingParams(max_new_tokens=2), 7, session=name):
                pass

        async with remote.connected(), asyncio.timeout(LONG_S):
            await ask("a")
            waiting = asyncio.create_task(ask("b"))
            await ask("a")
            assert (source.sessions, remote.admission.waiting) == (["a", "a"], 1)
            remote.end_session("a")
            await waiting
        assert (source.sessions, source.ended) == (["a", "a", "b"], ["a"])

    with Server(make_app(service_of(source), "token")) as server:
        asyncio.run(main(server.url))


def test_where_nobody_answers_the_wait_ends_with_the_reason() -> None:
    with pytest.raises(GenerationError, match=r"no generator answered within 0.5 s; the last reason: ConnectError"):
        asyncio.run(asyncio.wait_for(drawn(["http://127.0.0.1:9"], patience_s=0.5), LONG_S))


@pytest.mark.exhaustive
def test_a_machine_that_vanishes_is_lost_without_a_word() -> None:
    """Where the cable is cut, nobody closes the connection on which an answer is waited for."""
    network = ["unshare", "--map-root-user", "--net"]
    try:
        subprocess.run([*network, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network of its own: {error}")
    script = [*network, sys.executable, "-m", "tests.unit.rollout.silent_network"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(script, capture_output=True, text=True, timeout=120.0, env=env)
    assert done.stdout == "drawn elsewhere: [5]\n", done.stderr
