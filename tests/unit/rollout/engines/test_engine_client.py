"""An engine, asked from an event loop: what is in flight goes on with new weights, and what nobody waits for ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from podium.errors import ConfigError
from podium.rollout.engines import EngineConfig, make_engine
from podium.rollout.sampling import SamplingParams
from podium_agents.service.engine_client import EngineClient
from podium_agents.service.session_recording import Sampled


def test_a_request_outlives_new_weights_and_each_token_names_its_version(make_model: Any) -> None:
    model = make_model("llama")
    engine = make_engine(EngineConfig(name="native"), model)
    client = EngineClient(engine)
    count = 120

    async def ask() -> Sampled:
        refreshed = False
        async for event in client.stream([1, 2, 3], SamplingParams(max_new_tokens=count), 0):
            if isinstance(event, Sampled):
                return event
            if not refreshed:
                refreshed = True

                def renew() -> None:
                    with torch.no_grad():
                        for parameter in model.parameters():
                            parameter.mul_(1.01)
                    engine.refresh(7)

                await asyncio.to_thread(renew)
        raise AssertionError("a stream ends with all of the completion")

    before = engine.version
    drawn = asyncio.run(ask())
    assert len(drawn.ids) == len(drawn.versions) == len(drawn.logprobs) == count
    assert list(drawn.versions) == sorted(drawn.versions)
    assert {*drawn.versions} == {before, 7}
    assert client.in_flight == 0


def test_a_caller_that_goes_away_ends_its_request(make_model: Any) -> None:
    engine = make_engine(EngineConfig(name="native"), make_model("llama"))
    client = EngineClient(engine)

    async def leave() -> None:
        stream = client.stream([1, 2, 3], SamplingParams(max_new_tokens=120), 0)
        await anext(stream)
        await stream.aclose()
        for _ in range(500):
            if engine.idle:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("the engine still draws for nobody")

    asyncio.run(leave())
    assert client.in_flight == 0


def test_a_prompt_that_is_too_long_is_named_in_words(make_model: Any) -> None:
    client = EngineClient(make_engine(EngineConfig(name="native"), make_model("llama")))
    most = client.positions
    assert most is not None
    with pytest.raises(ConfigError, match=r"^the prompt of request 0 of the service has 2 tokens"):
        asyncio.run(anext(client.stream([1, 2], SamplingParams(max_new_tokens=most), 0)))
