"""The most probable tokens that engines record are those of the distribution from which each token was drawn."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from podium.errors import ConfigError
from podium.rollout.engines import EngineConfig, Finished, Request, make_engine
from podium.rollout.engines.draw import draw
from podium.rollout.engines.journal import Drawn, Journal
from podium.rollout.sampling import Completion, RequestParams, SamplingParams
from podium_agents.service.constraints import Constraint
from podium_native import NativeEngine

from .conftest import VOCABULARY, MakeModel

ENGINES = ("native", "transformers")
COUNT = 5


def check(model: Any, prompt: list[int], completion: Completion, temperature: float, allowed: Any = None) -> None:
    """Compare with a forward pass over prompt and completion."""
    assert completion.top is not None and completion.top.shape == (len(completion), 2 * COUNT)
    with torch.no_grad():
        logits = model(input_ids=torch.cat([torch.tensor(prompt), completion.token_ids])[None]).logits[0]
    logits = logits[len(prompt) - 1 : -1].double() / temperature
    if allowed is not None:
        logits[:, [id for id in range(logits.shape[1]) if id not in allowed]] = -torch.inf
    expected = logits.log_softmax(-1)
    logprobs, ids = completion.top.chunk(2, -1)
    torch.testing.assert_close(logprobs.double(), expected.topk(COUNT, -1).values, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(expected.gather(1, ids.long()), logprobs.double(), rtol=1e-4, atol=1e-4)
    at, place = (ids.long() == completion.token_ids[:, None]).nonzero(as_tuple=True)
    assert torch.equal(logprobs[at, place], completion.logprobs[at])  # the same bits as what was drawn


@pytest.mark.each_value
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", ENGINES)
def test_the_recorded_tokens_are_those_of_the_distribution(
    make_model: MakeModel, prompts: list[list[int]], name: str, temperature: float
) -> None:
    model = make_model("qwen3")
    params = SamplingParams(max_new_tokens=9, n=2, stop_token_ids=tuple(range(4)), temperature=temperature)
    plain, recorded = (
        make_engine(EngineConfig(name=name, max_sequences=3), copy.deepcopy(model)).generate(prompts, kind, range(20))
        for kind in (params, params.to_request(record_top=COUNT))
    )
    for index, (before, completion) in enumerate(zip(plain, recorded, strict=True)):
        assert before.top is None
        assert torch.equal(before.token_ids, completion.token_ids) and torch.equal(before.logprobs, completion.logprobs)
        check(model, prompts[index // 2], completion, temperature)


@pytest.mark.parametrize("name", ENGINES)
def test_requests_that_record_stand_beside_others_and_end_with_texts(
    make_model: MakeModel, prompts: list[list[int]], name: str
) -> None:
    model = make_model("qwen3")
    engine = make_engine(EngineConfig(name=name), copy.deepcopy(model))
    engine.decode = lambda ids: "".join(chr(65 + id % 26) for id in ids)
    plain = RequestParams(max_new_tokens=30, stop_token_ids=(1,))
    recorded = replace(plain, record_top=COUNT)
    ended = replace(recorded, stop=("A", "E", "I", "O"))
    ruled = Constraint(only=(3, 5, 8))
    requests = [
        Request(id=number, prompt=prompt, params=params, seed=number, constraint=rule)
        for number, (prompt, params, rule) in enumerate(
            [
                (prompts[0], plain, None),
                (prompts[1], recorded, None),
                (prompts[2], ended, None),
                (prompts[0], recorded, ruled),
            ]
        )
    ]
    engine.submit(*requests)
    completions: dict[Any, Completion] = {}
    while len(completions) < len(requests):
        completions |= {event.id: event.completion for event in engine.poll() if isinstance(event, Finished)}
    assert completions[0].top is None and completions[2].stop
    for number in (1, 2):
        check(model, prompts[number], completions[number], 1.0)
    check(model, prompts[0], completions[3], 1.0, allowed={3, 5, 8})


def test_a_vocabulary_of_fewer_ids_leaves_places_without_probability() -> None:
    params = RequestParams(max_new_tokens=1, record_top=6)
    for temperature in (1.0, 0.0):
        top_B2J = draw(torch.randn(2, 4), replace(params, temperature=temperature), torch.rand(2).double()).top_B2J
        assert top_B2J is not None and top_B2J.shape == (2, 12)
        assert top_B2J[:, 4:6].eq(-torch.inf).all() and top_B2J[:, :4].exp().sum(-1).tolist() == pytest.approx([1, 1])


def test_what_another_engine_began_is_drawn_again(
    make_model: MakeModel, prompts: list[list[int]], tmp_path: Any
) -> None:
    """A journal has no probable tokens."""
    engine = NativeEngine(EngineConfig(), make_model("qwen3"))
    params = RequestParams(max_new_tokens=6, record_top=COUNT)
    begun = {7: Drawn([4, 5], [-1.0, -1.0], [0, 0])}
    first, again = (
        engine.generate(prompts[:1], params, [7], Journal(tmp_path / "journal"), begun=known) for known in ({}, begun)
    )
    assert first[0].top is not None and again[0].top is not None
    assert torch.equal(first[0].token_ids, again[0].token_ids) and torch.equal(first[0].top, again[0].top)


def test_an_engine_that_does_not_record_refuses(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = NativeEngine(EngineConfig(), make_model("qwen3"))
    monkeypatch.setattr(NativeEngine, "records", frozenset())
    with pytest.raises(ConfigError, match="prompt 0 asks for record_top, which NativeEngine does not serve"):
        engine.generate([[4]], RequestParams(max_new_tokens=1, record_top=3), [1])
    with pytest.raises(ConfigError, match="record_top = 3 with top_k, top_p or min_p"):
        RequestParams(max_new_tokens=1, top_p=0.9, record_top=3)
    assert VOCABULARY > COUNT
