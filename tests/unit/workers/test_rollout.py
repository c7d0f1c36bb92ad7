"""The rollout worker beside generators elsewhere."""

from __future__ import annotations

import asyncio
import time
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
from podium.rollout.environments import Client
from podium.rollout.environments.config import EnvironmentConfig
from podium.rollout.sampling import SamplingParams
from podium.rollout.service.chat_format import chat_format
from podium.rollout.service.service import Service
from podium.rollout.service.sessions import Sampled
from podium.rollout.tasks.config import DataConfig
from podium.rollout.tasks.writer import Writer
from podium.trainer import PRELOAD
from podium.workers import Rollout
from tests.integration.training import MODEL

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx2")

from podium.rollout.service.app import make_app
from podium.rollout.service.server import Server

SAMPLING = SamplingParams(max_new_tokens=3)


class Slow(Echo):
    """A source that takes a tenth of a second for each token of the prompt."""

    def __init__(self) -> None:
        super().__init__([1])
        self.asked = 0

    async def stream(
        self, prompt: Sequence[int], params: SamplingParams, seed: int, *, session: str = "", tokens: bool = True
    ) -> AsyncGenerator[Sampled]:
        """The answer."""
        self.asked += 1
        await asyncio.sleep(0.1 * len(prompt))
        yield self.drawn


async def ask(task: Mapping[str, Any], client: Client) -> float:
    """Ask once, or twice without waiting for the second answer, which takes long."""
    await client.chat(task["prompt"])
    if task["leaves"]:
        late = asyncio.create_task(client.chat("1" * 20))
        late.add_done_callback(lambda done: done.exception())
        await asyncio.sleep(0.3)
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


def tasks(prompt: str, *, leaves: bool = False) -> Batch:
    """One task."""
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
    source: Slow,
    folder: Path,
    session: str = "ask",
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[Any]:
    """A rollout worker, which asks for tokens by HTTP."""
    tokenizer = make_tokenizer()
    form = chat_format(Writer(tokenizer, DataConfig()), tokenizer)
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


def test_calls_that_overlap_leave_each_other_their_connections(cluster: Cluster, tmp_path: Path) -> None:
    source = Slow()
    with rollout_worker(cluster, source, tmp_path) as worker:
        long = worker.live.submit(tasks("1" * 20), SAMPLING)
        time.sleep(0.2)
        assert len(worker.live(tasks("1"), SAMPLING)) == 1
        assert not long.done(), "the calls did not overlap"
        assert len(long.result()) == 1
    assert source.asked == 2, "a call was drawn again, because its connection was closed"


def test_a_call_that_its_session_left_loses_no_generator(cluster: Cluster, tmp_path: Path) -> None:
    with rollout_worker(cluster, Slow(), tmp_path) as worker:
        assert len(worker.live(tasks("1", leaves=True), SAMPLING)) == 1
        began_s = time.monotonic()
        assert len(worker.live(tasks("1"), SAMPLING)) == 1
    assert time.monotonic() - began_s < 4.0, "the generator was left alone for five seconds"


@pytest.mark.parametrize(("at_once", "most"), [(1, 1.0), (2, 2.0)])
def test_calls_that_overlap_share_the_limit_of_sessions_at_once(
    cluster: Cluster, tmp_path: Path, at_once: int, most: float
) -> None:
    with rollout_worker(cluster, Slow(), tmp_path, "count", {"at_once": at_once}) as worker:
        calls = [worker.live.submit(tasks("1" * length), SAMPLING) for length in (6, 7, 8)]
        lived = [call.result().python(fields.GRADE)[0].score for call in calls]
    assert max(lived) == most
