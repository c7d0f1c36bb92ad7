"""Requests that arrive, end and go on at any time in the lanes of the native engine."""

from __future__ import annotations

import copy
import random
from itertools import product
from typing import Any

import pytest
import torch

from podium.errors import ConfigError
from podium.rollout.engines import Engine, EngineConfig, Event, Finished, Request
from podium.rollout.sampling import Completion, SamplingParams
from podium_native import NativeEngine, engine as engine_module
from tests.unit.rollout.engines.conftest import VOCABULARY, MakeModel, compute_trained_logprobs, same

STOPS = tuple(range(6))
MIXED = [
    SamplingParams(max_new_tokens=30, stop_token_ids=STOPS),
    SamplingParams(max_new_tokens=7, temperature=0.7, top_p=0.9, stop_token_ids=STOPS[:2]),
    SamplingParams(max_new_tokens=45, top_k=9),
    SamplingParams(max_new_tokens=1, temperature=0.0),
    SamplingParams(max_new_tokens=20, temperature=0.7),
]


def _native(model: Any, **changes: Any) -> NativeEngine:
    return NativeEngine(EngineConfig(name="native", **changes), copy.deepcopy(model))


def _prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(10, VOCABULARY), k=length)


def _served(engine: Engine, events: list[Event] | None = None) -> dict[Any, Completion]:
    events = [] if events is None else events
    while new := engine.poll():
        events += new
    return {event.id: event.completion for event in events if isinstance(event, Finished)}


def _asked(engine: Engine, id: Any, prompt: list[int], params: SamplingParams = MIXED[0], **changes: Any) -> Completion:
    engine.submit(Request(id=id, prompt=prompt, params=params, seed=3, **changes))
    return _served(engine)[id]


def test_lanes_grow_with_what_is_drawn(
    make_model: MakeModel, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that may take the whole context costs what it draws, and no bit depends on how lanes grow."""
    model, requests = make_model("qwen3"), [(prompt, MIXED[index % 5]) for index, prompt in enumerate(prompts)]
    requests.append((prompts[0], SamplingParams(max_new_tokens=128 - len(prompts[0]))))
    whole = [_native(model).generate([prompt], params, [index])[0] for index, (prompt, params) in enumerate(requests)]
    monkeypatch.setattr(engine_module, "FIRST_ANSWER", 8, raising=False)
    engine = _native(model)
    short = SamplingParams(max_new_tokens=100, stop_token_ids=tuple(range(VOCABULARY)))
    engine.generate([prompts[0]], short, [0])
    cache = engine._lanes.cache
    assert cache is not None
    assert cache.length < 64
    for index, (prompt, params) in enumerate(requests):
        engine.submit(Request(id=index, prompt=prompt, params=params, seed=index))
    served = _served(engine)
    assert same([served[index] for index in range(len(requests))], whole)
    assert engine._lanes.cache is not None
    assert engine._lanes.cache.length == 128


@pytest.mark.everyday("llama-20")
@pytest.mark.parametrize(
    ("family", "lanes"),
    list(product(("llama", "qwen3"), (3, 20, 64))),
)
def test_no_bit_depends_on_when_requests_arrive(
    make_model: MakeModel, prompts: list[list[int]], family: str, lanes: int
) -> None:
    model, chance = make_model(family), random.Random(lanes)
    engine = _native(model, max_sequences=lanes)
    asked = [
        Request(id=index, prompt=prompts[index // 5 % 10], params=MIXED[index % 5], seed=index, stream=index % 9 == 0)
        for index in range(60)
    ]
    chance.shuffle(asked)
    events: list[Event] = []
    for request in asked:
        engine.submit(request)
        while chance.random() < 0.7:
            events += engine.poll(timeout_s=0)
    done = _served(engine, events)
    for request in asked:
        alone = _native(model).generate([request.prompt], request.params, [request.seed])
        assert same([done[request.id]], alone)


def test_the_next_turn_of_a_conversation_computes_only_what_is_new(make_model: MakeModel) -> None:
    model, prompt = make_model("qwen3"), _prompt(20)
    engine, fresh = _native(model), _native(model)
    for turn in range(3):
        before = engine.prefilled_tokens
        mine, theirs = _asked(engine, turn, prompt), _asked(fresh, turn, prompt)
        new = 20 if turn == 0 else 1 + 5  # the last token drawn was not fed
        assert engine.prefilled_tokens - before == new
        assert torch.equal(mine.token_ids, theirs.token_ids)
        expected = compute_trained_logprobs(model, prompt, theirs, 1.0)
        assert (mine.logprobs - expected).abs().max() < 1e-5
        prompt = [*prompt, *mine.token_ids.tolist(), *_prompt(5, turn)]
        fresh.release()


def test_what_a_prefill_computed_changes_no_bit_where_it_is_used_again(make_model: MakeModel) -> None:
    model, head = make_model("llama"), _prompt(50)
    engine = _native(model)
    first = _asked(engine, "a", [*head, 7, 8, 9], reuse_completions=False)
    before = engine.prefilled_tokens
    other = _asked(engine, "b", [*head, 9, 8, 7, 6], reuse_completions=False)
    again = _asked(engine, "c", [*head, 7, 8, 9], reuse_completions=False)
    assert engine.prefilled_tokens - before == 4 + 1
    assert same(
        [first, other, again], [_asked(_native(model), 0, head + tail) for tail in ([7, 8, 9], [9, 8, 7, 6], [7, 8, 9])]
    )
    turn = [*head, 7, 8, 9, *first.token_ids.tolist(), 5]
    before = engine.prefilled_tokens
    assert same([_asked(engine, "d", turn, reuse_completions=False)], [_asked(_native(model), 0, turn)])
    assert engine.prefilled_tokens - before == len(turn) - 53  # what was decoded is rounded otherwise, and not used
    assert same(engine.generate([[*head, 7, 8, 9]], MIXED[0], [3]), [first])


def test_new_weights_end_all_memory(make_model: MakeModel) -> None:
    model, prompt = make_model("qwen3"), _prompt(40)
    engine = _native(model)
    _asked(engine, 0, prompt)
    engine.refresh(1)
    before = engine.prefilled_tokens
    _asked(engine, 1, prompt)
    assert engine.prefilled_tokens - before == 40
    engine.release()
    _asked(engine, 2, prompt)
    assert engine.prefilled_tokens - before == 80


def test_members_of_a_group_that_come_later_compute_one_token(make_model: MakeModel) -> None:
    model, prompt = make_model("qwen3"), _prompt(33)
    engine = _native(model)
    alone = _native(model).generate([prompt], SamplingParams(max_new_tokens=30, n=8, stop_token_ids=STOPS), range(8))
    events: list[Event] = []
    for seed in range(8):
        engine.submit(Request(id=seed, prompt=prompt, params=MIXED[0], seed=seed))
        if seed in (3, 4, 5):
            events += engine.poll(timeout_s=0)
    done = _served(engine, events)
    assert same([done[seed] for seed in range(8)], alone)
    assert engine.prefilled_tokens == 33 + 1 + 1 + 1


def test_conversations_are_remembered_beyond_the_lanes_that_draw(make_model: MakeModel) -> None:
    """Sixteen conversations begin together; each then has its turn alone, in the lowest lanes."""
    model = make_model("qwen3")
    engine = _native(model, max_sequences=32)
    texts = {id: _prompt(24, id) for id in range(16)}
    for turn in range(3):
        for id, text in texts.items():
            engine.submit(Request(id=id, prompt=text, params=MIXED[0], seed=turn))
            if turn:
                before = engine.prefilled_tokens
                texts[id] = [*text, *_served(engine)[id].token_ids.tolist(), 50]
                assert engine.prefilled_tokens - before == 2
        if not turn:
            texts = {id: [*texts[id], *one.token_ids.tolist(), 50] for id, one in _served(engine).items()}


def test_longer_requests_wait_where_memory_cannot_hold_both_caches(make_model: MakeModel) -> None:
    model = make_model("qwen3")
    position = 2 * 2 * 2 * 32 * 4  # keys and values, layers, kv heads, head_dim, float32
    engine = _native(model, cache_gib=16 * 128 * position / 2**30)
    roomy = _native(model)
    asked = {"short": (_prompt(4), MIXED[4]), "long": (_prompt(60), MIXED[2]), "short too": (_prompt(5), MIXED[4])}
    events: list[Event] = []
    for id, (prompt, params) in asked.items():
        engine.submit(Request(id=id, prompt=prompt, params=params, seed=3))
        events += engine.poll(timeout_s=0)
    done = _served(engine, events)
    assert list(done) == ["short", "short too", "long"] or list(done) == ["short", "long", "short too"]
    for id, (prompt, params) in asked.items():
        assert same([done[id]], [_asked(roomy, id, prompt, params)])
    with pytest.raises(ConfigError, match=r"cache_gib=.* too little for the prompt of request 'huge'"):
        _native(model, cache_gib=1e-3).submit(Request(id="huge", prompt=_prompt(90), params=MIXED[0], seed=0))
