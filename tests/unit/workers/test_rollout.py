"""The rollout worker beside generators elsewhere."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

import podium
from bench.sessions import Echo, make_tokenizer
from podium import Cluster
from podium.data import Batch, fields
from podium.models import ModelConfig
from podium.rollout.environments import EnvironmentConfig
from podium.rollout.sampling import SamplingParams
from podium.rollout.tasks.chat_encoder import ChatEncoder
from podium.rollout.tasks.config import DataConfig
from podium.trainer import PRELOAD
from podium_agents import Client, Rollout
from podium_agents.service.chat_format import chat_format
from podium_agents.service.service import Service
from podium_agents.service.session_recording import Sampled
from tests.integration.training import MODEL

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx2")

from podium_serve.app import make_app
from podium_serve.generator_client import RemoteTokens
from podium_serve.server import Server
from tests.waits import LONG_S, wait_until

SAMPLING = SamplingParams(max_new_tokens=3)


LONG = "1" * 20  # a prompt whose answer waits for the test


class Gated(Echo):
    """A source whose answers wait.

    The answer to a long prompt waits until the test lets it go, others until ``together`` prompts have come.

    Attributes:
        asked: How many answers it was asked for.
        go: Lets the answers to long prompts go.
        path: A file that exists as soon as a long prompt has come.
    """

    def __init__(self, folder: Path, together: int = 1) -> None:
        super().__init__([1])
        self.asked, self.together, self.path, self.go = 0, together, folder / "asked", threading.Event()

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
        """The answer."""
        self.asked += 1
        if len(prompt) == len(LONG):
            self.path.touch()
            await asyncio.to_thread(self.go.wait, LONG_S)
        while self.asked < self.together:  # noqa: ASYNC110 - requests of other threads' loops count
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        yield self.drawn


async def ask(task: Mapping[str, Any], client: Client) -> float:
    """Ask once, or twice without waiting for the second answer, which does not come."""
    await client.chat(task["prompt"])
    if task["leaves"]:
        late = asyncio.create_task(client.chat(LONG))
        late.add_done_callback(lambda done: done.exception())
        while not Path(task["leaves"]).exists():  # noqa: ASYNC110, ASYNC240 - another process makes the file
            await asyncio.sleep(0.01)
    return 1.0


_living = 0


async def count(task: Mapping[str, Any], client: Client) -> float:
    """Ask once. The reward is how many sessions live meanwhile."""
    global _living  # noqa: PLW0603 - of the worker's process
    _living += 1
    try:
        await client.chat(task["prompt"])
        return float(_living)
    finally:
        _living -= 1


def tasks(prompt: str, *, leaves: str = "") -> Batch:
    """One task, whose session asks once more and leaves when there is a file ``leaves``."""
    numbers = torch.arange(1)
    columns = {fields.SEED: numbers, fields.GROUP: numbers, fields.SESSION: numbers}
    return Batch({fields.TASK: [{"prompt": prompt, "leaves": leaves}], **columns}, {"key": prompt})


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with podium.connect("local", preload=PRELOAD) as running:
        yield running


@contextmanager
def rollout_worker(
    cluster: Cluster,
    source: Gated,
    folder: Path,
    session: str = "ask",
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[Any]:
    """A rollout worker, which asks for tokens by HTTP."""
    tokenizer = make_tokenizer()
    form = chat_format(ChatEncoder(tokenizer, DataConfig()), tokenizer)
    service = Service(source, form, tokenizer, model="echo", context=512, stop_token_ids=(), most_tokens=1 << 60)
    (folder / "chat.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    data = DataConfig(chat_template=str(folder / "chat.jinja"))
    bound = Rollout.bind(ModelConfig(**MODEL), data, EnvironmentConfig(name=f"{__file__}:{session}", options=options))
    with Server(make_app(service, "token")) as server:
        worker = cluster.start(bound, cluster.pool([1]))
        try:
            worker.connect([server.url], "token")
            yield worker
        finally:
            worker.group.close()


def lost_generators(worker: Rollout) -> int:
    """How many generators have been lost so far."""
    assert isinstance(worker._remote, RemoteTokens)
    return sum(generator.lost_s > 0 for generator in worker._remote._generators)


def test_calls_that_overlap_leave_each_other_their_connections(cluster: Cluster, tmp_path: Path) -> None:
    source = Gated(tmp_path)
    with rollout_worker(cluster, source, tmp_path) as worker:
        long = worker.live.submit(tasks(LONG), SAMPLING)
        assert wait_until(source.path.exists)
        assert len(worker.live(tasks("1"), SAMPLING)) == 1
        assert not long.done(), "the calls did not overlap"
        source.go.set()
        assert len(long.result()) == 1
    assert source.asked == 2, "a call was drawn again, because its connection was closed"


def test_a_call_that_its_session_left_loses_no_generator(cluster: Cluster, tmp_path: Path) -> None:
    source = Gated(tmp_path)
    with rollout_worker(cluster, source, tmp_path) as worker:
        assert len(worker.live(tasks("1", leaves=str(source.path)), SAMPLING)) == 1
        assert len(worker.live(tasks("1"), SAMPLING)) == 1
        assert worker.group.run(lost_generators) == [0], "the generator was left alone for a while"
        source.go.set()


@pytest.mark.parametrize(("at_once", "most"), [(1, 1.0), pytest.param(2, 2.0, marks=pytest.mark.exhaustive)])
def test_calls_that_overlap_share_the_limit_of_sessions_at_once(
    cluster: Cluster, tmp_path: Path, at_once: int, most: float
) -> None:
    with rollout_worker(cluster, Gated(tmp_path, int(most)), tmp_path, "count", {"at_once": at_once}) as worker:
        calls = [worker.live.submit(tasks("1" * length), SAMPLING) for length in (6, 7, 8)]
        lived = [call.result().python(fields.GRADE)[0].score for call in calls]
    assert max(lived) == most
