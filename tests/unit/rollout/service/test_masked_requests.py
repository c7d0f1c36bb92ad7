"""What requests ask of single tokens, over HTTP and in sessions: drawn, recorded, and trained as recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from podium.data import Batch, Jagged, fields
from podium.data.masks import mask_columns
from podium.rollout.sampling import SamplingParams
from podium.training.micro_batches import cut
from podium.training.scoring import score_tokens
from podium_agents.service.request_bodies import ChatRequest, Refusal
from podium_agents.service.service import Service
from podium_agents.service.session_recording import Row
from podium_serve.app import make_app
from podium_serve.generator_client import RemoteTokens
from podium_serve.server import Server
from tests.unit.rollout.service.engine import engine_service
from tests.unit.rollout.service.scripted import TOKEN, USER, posted

pytest.importorskip("uvicorn")


@pytest.fixture(scope="module")
def service() -> Service:
    return engine_service()[0]


@pytest.fixture(scope="module")
def url(service: Service) -> Iterator[str]:
    with Server(make_app(service, TOKEN)) as server:
        yield server.url


def training(service: Service, source: Any = None, **rules: Any) -> Service:
    """The service of a run over the same engine, or over ``source``."""
    params = SamplingParams(**{"max_new_tokens": 10, "stop_token_ids": (), **rules})
    return Service(
        source or service.source, service.form, service.tokenizer,
        model="policy", context=512, stop_token_ids=(), most_tokens=1 << 40, rules=params,
    )  # fmt: skip


def said_in_session(service: Service, *requests: dict[str, Any]) -> Row:
    """The row of a session with these requests, each of one more message."""
    service.open_session("s", seed=5)

    async def talk() -> None:
        messages: list[Any] = []
        for wishes in requests:
            messages.append(USER)
            answer = await service.answer(service.chat(ChatRequest(messages=messages, **wishes), "s"))
            messages.append(dict(answer.message))

    asyncio.run(talk())
    session = service.close_session("s")
    assert session is not None
    (row,) = session.rows
    return row


def trained_logprobs(
    service: Service, row: Row, temperature: float = 1.0, *, masked: bool = True, kept: bool = False
) -> list[float]:
    engine: Any = service.source.engine  # type: ignore[attr-defined]
    tokens = Jagged.from_rows([torch.tensor(row.ids)])
    columns: dict[str, Any] = {fields.TOKENS: tokens, fields.LOSS_MASK: tokens.like(torch.tensor(row.sampled))}
    batch = Batch(
        columns | (mask_columns([row.masks], tokens) if masked else {}),
        {"temperature": temperature, "text_ids": engine.text_ids},
    )
    if kept:
        sizes = tokens.like(torch.tensor([len(ids) for ids in row.kept], dtype=torch.int64))
        ids = Jagged.from_rows([torch.tensor([token_id for ids in row.kept for token_id in ids])])
        batch = batch.with_columns({fields.KEPT_SIZES: sizes, fields.KEPT_IDS: ids})
    (micro,) = cut(batch, 4000, packed=False)
    with torch.no_grad():
        return score_tokens(engine.model, batch, micro).logprobs.tolist()


def recorded_logprobs(row: Row) -> list[float]:
    return [value for value, sampled in zip(row.logprobs, row.sampled, strict=True) if sampled]


BANS: dict[str, Any] = {"logit_bias": {str(token): -100 for token in range(3, 60)}}


def test_bans_and_only_ids_are_kept_over_http(service: Service, url: str) -> None:
    import json

    for wishes, allowed in (
        ({"logit_bias": {"7": 100, "9": 100.0, "11": -100}}, {7, 9}),
        (BANS, {*range(service.vocabulary)} - {*range(3, 60)}),
        ({"min_p": 1.0}, None),
    ):
        body = {"prompt": [5, 6], "max_tokens": 40, "seed": 3, "return_token_ids": True, **wishes}
        status, answer = posted(f"{url}/v1/completions", body)
        assert status == 200, answer
        ids = json.loads(answer)["choices"][0]["token_ids"]
        if allowed is not None:
            assert {*ids} <= allowed
        else:  # only the most probable token is left
            greedy = posted(f"{url}/v1/completions", {**body, "min_p": 0, "temperature": 0})
            assert ids == json.loads(greedy[1])["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    ("wishes", "said"),
    [
        ({"logit_bias": {"99999": 1}}, "logit_bias.99999: the vocabulary has"),
        ({"logit_bias": {"3": 101}}, "less than or equal to 100"),
        ({"logit_bias": {"-3": 1}}, "greater than or equal to 0"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {str(token): -100 for token in range(1000)}}, "the vocabulary has"),
        ({"min_p": 2}, "min_p"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(url: str, wishes: dict[str, Any], said: str) -> None:
    status, answer = posted(f"{url}/v1/chat/completions", {"messages": [USER], "max_tokens": 3, **wishes})
    assert (status, said in answer) == (400, True), answer


def test_no_token_at_all_is_refused(service: Service, url: str) -> None:
    everything = {str(token): -100 for token in range(service.vocabulary)}
    status, answer = posted(f"{url}/v1/chat/completions", {"messages": [USER], "logit_bias": everything})
    assert (status, "bans every token" in answer) == (400, True), answer


def test_null_is_as_absent(url: str) -> None:
    body = {"messages": [USER], "max_tokens": 3, "seed": 1}
    status, answer = posted(f"{url}/v1/chat/completions", {**body, "logit_bias": None, "min_p": None})
    assert status == 200, answer


@pytest.mark.parametrize("rules", [{}, {"temperature": 0.6}, {"temperature": 0.0}])
def test_the_trainer_agrees_with_the_wire_about_every_turn(service: Service, rules: dict[str, Any]) -> None:
    only = {"logit_bias": {"7": 100, "9": 100, "40": 100, "41": 100}}
    row = said_in_session(training(service, **rules), BANS, {}, only)
    expected = recorded_logprobs(row)
    temperature = rules.get("temperature", 1.0)
    got = trained_logprobs(service, row, temperature)
    assert len(expected) == 30
    assert got == pytest.approx(expected, abs=1e-5)
    unmasked = trained_logprobs(service, row, temperature, masked=False)
    assert max(abs(ours - theirs) for ours, theirs in zip(unmasked[:10], expected[:10], strict=True)) > 1e-3
    assert unmasked[10:20] == pytest.approx(expected[10:20], abs=1e-5), "the second turn has no mask"


def test_a_generator_elsewhere_gives_the_same_record(service: Service, url: str) -> None:
    async def remote_row() -> None:
        async with source.connected():
            service_there.open_session("s", seed=5)
            await service_there.answer(service_there.chat(ChatRequest(messages=[USER], **BANS), "s"))

    source = RemoteTokens([url], TOKEN)
    service_there = training(service, source)
    asyncio.run(remote_row())
    session = service_there.close_session("s")
    assert session is not None
    (there,) = session.rows
    here = said_in_session(training(service), BANS)
    assert (there.ids, there.masks) == (here.ids, here.masks)
    assert sum(map(bool, here.masks)) == 10
    assert trained_logprobs(service, there) == pytest.approx(recorded_logprobs(there), abs=1e-5)


def test_in_training_a_bias_that_is_no_ban_is_refused_and_min_p_is_overruled(service: Service) -> None:
    run = training(service)
    run.open_session("s", seed=1)
    with pytest.raises(Refusal, match="in training only -100, which bans a token, and 100") as refused:
        run.chat(ChatRequest(messages=[USER], logit_bias={4: 1.5}), "s")
    assert (refused.value.status, refused.value.param) == (400, "logit_bias")
    assert run.chat(ChatRequest(messages=[USER], logit_bias={4: 0.0}), "s").constraint is None
    asked = run.chat(ChatRequest(messages=[USER], min_p=0.2), "s")
    assert (asked.params.min_p, run.overruled["min_p"]) == (0.0, 1)
