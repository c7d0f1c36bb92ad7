"""Requests that come, go and are aborted in threads of their own, over an engine that serves batch by batch."""

from __future__ import annotations

import threading

import pytest
import torch

from podium.errors import ConfigError
from podium.rollout.engines import Aborted, EngineConfig, Failed, Finished, Request, Tokens, make_engine
from podium.rollout.engines.requests import RequestQueue
from podium.rollout.sampling import SamplingParams

from .conftest import MakeModel

PARAMS = SamplingParams(max_new_tokens=6)


def request(id: str, seed: int = 0, **changes: object) -> Request:
    return Request(**{"id": id, "prompt": [1, 2, 3], "params": PARAMS, "seed": seed, **changes})  # pyright: ignore[reportArgumentType]


def test_waiting_requests_stand_in_order_of_priority_then_arrival() -> None:
    queue = RequestQueue()
    queue.push([request("a"), request("b", priority=2), request("c"), request("d", priority=2), request("e", seed=7)])
    assert [one.id for one in queue] == ["b", "d", "a", "c", "e"]
    assert [one.id for one in queue.take(3, lambda one: one.seed)] == ["b", "d", "a"]
    queue.drop({"c", "unknown"})
    assert [one.id for one in queue.take(5)] == ["e"]
    assert len(queue) == 0


def test_requests_from_other_threads_are_served_by_whoever_drives(
    make_model: MakeModel, prompts: list[list[int]]
) -> None:
    engine = make_engine(EngineConfig(name="transformers"), make_model("gpt2"))
    alone = engine.generate(prompts, PARAMS, range(10))
    results: list[list[int]] = [[] for _ in range(3)]

    def batch(index: int) -> None:
        drawn = engine.generate(prompts, PARAMS, range(10))
        results[index] = [token for completion in drawn for token in completion.token_ids.tolist()]

    threads = [threading.Thread(target=batch, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    engine.submit(request("mine", prompt=prompts[3], seed=3, stream=True))
    streamed, finished = engine.poll()
    for thread in threads:
        thread.join()
    expected = [token for completion in alone for token in completion.token_ids.tolist()]
    assert results == [expected] * 3
    assert isinstance(streamed, Tokens)
    assert isinstance(finished, Finished)
    assert streamed.token_ids == finished.completion.token_ids.tolist() == alone[3].token_ids.tolist()
    assert engine.poll() == engine.poll(timeout_s=0.01) == []


def test_poll_waits_for_requests_that_come_within_its_time(make_model: MakeModel) -> None:
    engine = make_engine(EngineConfig(), make_model("qwen3"))
    later = threading.Timer(0.05, lambda: engine.submit(request("late")))
    later.start()
    (event,) = engine.poll(timeout_s=60)
    assert event.id == "late"


def test_an_id_is_free_again_after_the_last_event(make_model: MakeModel) -> None:
    engine = make_engine(EngineConfig(), make_model("qwen3"))
    engine.submit(request("a"))
    with pytest.raises(ConfigError, match="request 'a' is in flight already"):
        engine.submit(request("a"))
    engine.abort("a")
    engine.abort("a")
    engine.submit(request("a"))
    aborted, finished = engine.poll() + engine.poll()
    assert isinstance(aborted, Aborted)
    assert isinstance(finished, Finished)


def test_what_the_engine_raises_fails_every_request_and_it_goes_on(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(EngineConfig(name="transformers"), make_model("gpt2"))
    engine.submit(request("a"))
    engine.submit(request("b", params=SamplingParams(max_new_tokens=3)))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "stack", lambda *_: 1 / 0)
        events = engine.poll()
    assert {event.id for event in events} == {"a", "b"}
    assert all(isinstance(event, Failed) and isinstance(event.error, ZeroDivisionError) for event in events)
    assert engine.poll() == []
    assert len(engine.generate([[1]], PARAMS, [0])) == 1
