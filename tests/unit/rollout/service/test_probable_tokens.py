"""The most probable tokens at each place of an answer (``top_logprobs``), in sessions of training."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from podium.models import char_tokenizer
from podium.rollout.engines.requests import Tokens
from podium.rollout.sampling import SamplingParams
from podium_agents.service import engine_client
from podium_agents.service.request_bodies import ChatRequest
from podium_agents.service.service import Service
from podium_agents.service.session_recording import Sampled
from podium_serve.generator_client import RemoteTokens
from tests.unit.rollout.service.engine import random_service
from tests.unit.rollout.service.scripted import ALPHABET, CHATML, SPECIAL, TOKEN, USER, posted

pytest.importorskip("uvicorn")

from podium_serve.app import make_app
from podium_serve.server import Server

RULES = SamplingParams(max_new_tokens=8, temperature=0.7)
ASK: dict[str, Any] = {"messages": [USER], "logprobs": True}
TOP = {"top_logprobs": 3}


def make_service(rules: SamplingParams | None = RULES, name: str = "native") -> Service:
    tokenizer = char_tokenizer(ALPHABET, chat_template=CHATML)
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL]})  # type: ignore[arg-type]
    return random_service(tokenizer, name=name, rules=rules)


@contextmanager
def sessions_of(service: Service) -> Iterator[str]:
    with Server(make_app(service, TOKEN)) as server:
        yield f"{server.url}/sessions/s"


def entries_of(body: str) -> list[dict[str, Any]]:
    """The log-probabilities of an answer, streamed or whole."""
    if not body.startswith("data: "):
        return json.loads(body)["choices"][0]["logprobs"]["content"]
    chunks = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
    return [entry for chunk in chunks for entry in (chunk["choices"][0].get("logprobs") or {"content": []})["content"]]


def check_entries(service: Service, sampled: Sampled, prompt: list[int], entries: list[dict[str, Any]]) -> None:
    """Compare with the model's own logits."""
    model = service.source.engine.model  # type: ignore[attr-defined]
    with torch.inference_mode():  # the model has more ids than the tokenizer, and those are not drawn
        logits = model(input_ids=torch.tensor([[*prompt, *sampled.ids]])).logits[
            0, len(prompt) - 1 : -1, : service.vocabulary
        ]
    expected = (logits.float() / RULES.temperature).log_softmax(-1).topk(3, -1)
    assert len(entries) == len(sampled.ids) > 0
    for entry, ids, values in zip(entries, expected.indices.tolist(), expected.values.tolist(), strict=True):
        assert [other["token"] for other in entry["top_logprobs"]] == [service.decode([id], special=True) for id in ids]
        assert [other["logprob"] for other in entry["top_logprobs"]] == pytest.approx(values, abs=1e-4)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["native", "transformers"])
def test_a_session_of_training_tells_them_and_records_the_same_bits(name: str, stream: bool) -> None:
    rows, body = [], ""
    for how in ({}, TOP):
        service = make_service(name=name)
        session = service.open_session("s", seed=5)
        with sessions_of(service) as url:
            for _ in range(2):
                status, body = posted(f"{url}/v1/chat/completions", {**ASK, **how, "stream": stream})
                assert status == 200, body
        rows.append([(turn.start, row.ids, row.logprobs) for row in session.rows for turn in row.turns])
        if how:
            (turn,) = session.rows[-1].turns
            ids, logprobs = session.rows[-1].ids[turn.start :], session.rows[-1].logprobs[turn.start :]
            check_entries(
                service, Sampled(ids, logprobs, (), ""), [*session.rows[-1].ids[: turn.start]], entries_of(body)
            )
    assert rows[0] == rows[1]


def test_generators_elsewhere_tell_them() -> None:
    source = make_service(rules=None)
    with Server(make_app(source, TOKEN)) as generator:
        service = make_service()
        engine, service.source = service.source, RemoteTokens([generator.url], TOKEN)
        session = service.open_session("s", seed=5)

        async def ask() -> Any:
            async with service.source.connected():  # type: ignore[attr-defined]
                question = service.chat(ChatRequest.model_validate({**ASK, **TOP}), "s")
                return question, await service.draw(question)

        question, sampled = asyncio.run(ask())
        service.source = engine
        entries = [
            {"top_logprobs": [{"token": service.decode([id], special=True), "logprob": value} for id, value in others]}
            for others in sampled.top
        ]
        check_entries(service, sampled, question.prompt, entries)
        assert session.rows == []


def test_what_other_weights_have_drawn_has_none() -> None:
    service = make_service()
    service.open_session("s", seed=5)
    drawing = service.source.stream

    async def stream(*args: Any, **how: Any) -> Any:
        async for event in drawing(*args, **how):
            if isinstance(event, Tokens):
                yield event
                continue
            yield Sampled(event.ids, event.logprobs, [7, *event.versions[1:]], event.finish_reason)

    service.source.stream = stream  # type: ignore[method-assign] - as if the weights had changed after the first token
    with sessions_of(service) as url:
        _, body = posted(f"{url}/v1/chat/completions", {**ASK, **TOP})
    first, *others = [len(entry["top_logprobs"]) for entry in entries_of(body)]
    assert (first, {*others}) == (0, {3})


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_cannot_be_told_is_not_recorded(stream: bool) -> None:
    service = make_service()
    session = service.open_session("s", seed=5)
    model = service.source.engine.model  # type: ignore[attr-defined]
    with sessions_of(service) as url:
        service.source.engine.model = None  # type: ignore[attr-defined]
        service.source.engine.poll = drawing(service, model)  # type: ignore[attr-defined]
        _, body = posted(f"{url}/v1/chat/completions", {**ASK, **TOP, "stream": stream})
    assert "gives no log-probabilities of texts, which top_logprobs" in body
    assert session.rows == []


def drawing(service: Service, model: Any) -> Any:
    """Poll an engine that draws with a model that it does not show, as vllm does."""
    engine: Any = service.source.engine  # type: ignore[attr-defined]
    poll = engine.poll

    def polled() -> Any:
        engine.model = model
        try:
            return poll()
        finally:
            engine.model = None

    return polled


def test_an_answer_that_fills_the_context_has_them() -> None:
    service = make_service(rules=SamplingParams(max_new_tokens=4096, temperature=0.7))
    service.stop_token_ids = ()
    service.open_session("s", seed=5)
    with sessions_of(service) as url:
        asked = {"messages": [{"role": "user", "content": "x" * (service.context - 60)}]}
        status, body = posted(f"{url}/v1/chat/completions", {**asked, "logprobs": True, **TOP})
        assert status == 200, body
    answer = json.loads(body)
    assert answer["usage"]["total_tokens"] == service.context
    assert {len(entry["top_logprobs"]) for entry in entries_of(body)} == {3}


def test_logits_that_are_too_many_for_one_pass_are_computed_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    source: Any = make_service().source
    ids = list(range(10, 40))
    whole = source._score(ids, 4, 3, 1.0)
    monkeypatch.setattr(engine_client, "_MOST_LOGITS", 7 * source.engine.vocabulary)
    parts = source._score(ids, 4, 3, 1.0)
    assert len(whole.logprobs) == 26 and len(parts.logprobs) == 26
    assert parts.logprobs == pytest.approx(whole.logprobs, abs=1e-5)
    assert [[id for id, _ in others] for others in parts.top] == [[id for id, _ in others] for others in whole.top]
