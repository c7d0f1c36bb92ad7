"""Keys and values in pages: what a prompt finds there, and what goes when memory is short."""

from __future__ import annotations

import copy
import random
from itertools import pairwise
from typing import Any

import pytest
import torch

from podium.rollout.engines import EngineConfig, Finished, Request
from podium.rollout.sampling import Completion, SamplingParams
from podium_native import NativeEngine
from podium_native.memory import PagedMemory
from tests.unit.rollout.engines.conftest import VOCABULARY, MakeModel, compute_trained_logprobs, same

POSITION_BYTES = 2 * 2 * 2 * 3 * 4  # keys and values, two layers, two kv heads, head_dim 3, float32


def make_texts(seed: int) -> list[list[int]]:
    """Texts of 1 to 102 tokens that often begin alike and part within a page or at its end."""
    chance = random.Random(seed)
    texts: list[list[int]] = []
    for _ in range(chance.randint(1, 14)):
        earlier = chance.choice(texts) if texts and chance.random() < 0.7 else []
        text = earlier[: chance.choice([16, 31, 32, 33, 64, len(earlier)])]
        for _ in range(chance.randint(1, 3)):
            text = [*text, *[chance.randint(0, 2)] * chance.choice([1, 15, 16, 17, 32])]
        texts.append(text)
    return texts


def cached_of(text: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values ``[2, 2, T, 3]``, each position a function of the text up to it."""
    sums = torch.tensor([hash(tuple(text[: end + 1])) % 9973 for end in range(len(text))], dtype=torch.float32)
    keys = sums.view(1, 1, -1, 1).expand(2, 2, -1, 3)
    return keys, -keys


def common(first: list[int], second: list[int]) -> int:
    return next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


@pytest.mark.parametrize("seed", range(40))
def test_a_prompt_finds_the_longest_beginning_that_any_text_has(seed: int) -> None:
    texts = make_texts(seed)
    memory = PagedMemory()
    memory.limit_bytes = 10**9
    for count, text in enumerate(texts):
        match = memory.find(text, reuse_completions=True)
        expected = max((common(text[:-1], earlier) for earlier in texts[:count]), default=0)
        assert match.length == expected
        keys, values = (torch.zeros(2, 2, match.length, 3) for _ in range(2))
        match.copy_into(keys, values)
        assert all(map(torch.equal, (keys, values), cached_of(text[: match.length])))
        memory.remember(text, len(text), *cached_of(text))


@pytest.mark.parametrize("seed", range(40))
def test_the_limit_is_kept_and_what_is_left_is_right(seed: int) -> None:
    texts, pages, memory = make_texts(seed), seed % 6, PagedMemory()
    memory.limit_bytes = pages * 32 * POSITION_BYTES
    for text in texts:
        memory.remember(text, len(text), *cached_of(text))
        assert memory.nbytes <= memory.limit_bytes
        assert memory.nbytes == sum(page.nbytes for page in memory._pages)
        match = memory.find([*text, 0], reuse_completions=True)
        keys, values = (torch.zeros(2, 2, match.length, 3) for _ in range(2))
        match.copy_into(keys, values)
        assert torch.equal(keys, cached_of(text[: match.length])[0])
        reached, stack = set[Any](), [memory._root]
        while stack:
            children = [page for alike in stack.pop().children.values() for page in alike]
            reached |= {*children}
            stack += children
        assert reached == {*memory._pages}, "no page is kept that no prompt can reach"


def test_the_text_that_was_not_needed_for_the_longest_time_goes_first() -> None:
    memory = PagedMemory()
    memory.limit_bytes = 4 * 32 * POSITION_BYTES
    first, second, third = ([token] * 64 for token in (1, 2, 3))
    for text in (first, second):
        memory.remember(text, 64, *cached_of(text))
    memory.find([*first, 0], reuse_completions=True)
    memory.remember(third, 64, *cached_of(third))
    lengths = [memory.find([*text, 0], reuse_completions=True).length for text in (first, second, third)]
    assert lengths == [64, 0, 64]
    assert memory.evicted_tokens == 64


def test_what_decoding_computed_serves_only_requests_that_allow_it() -> None:
    memory, text = PagedMemory(), [*range(100)]
    memory.limit_bytes = 10**9
    memory.remember(text, 40, *cached_of(text))
    assert memory.find([*text, 0], reuse_completions=True)[1:] == (100, 40)
    assert memory.find([*text, 0], reuse_completions=False)[1:] == (40, 40)
    memory.remember(text, 70, *cached_of(text))  # a prefill went further
    assert memory.find([*text, 0], reuse_completions=False)[1:] == (70, 70)
    memory.clear()
    assert memory.find([*text, 0], reuse_completions=True).length == 0


def take_turns(
    engine: NativeEngine, prompts: list[list[int]], params: SamplingParams, turn: int
) -> list[tuple[list[int], Completion]]:
    """Have all sessions take a turn at once; return their prompts and completions."""
    for id, prompt in enumerate(prompts):
        engine.submit(Request(id=id, prompt=prompt, params=params, seed=turn * len(prompts) + id))
    done: dict[Any, Completion] = {}
    while events := engine.poll():
        done |= {event.id: event.completion for event in events if isinstance(event, Finished)}
    return [(prompt, done[id]) for id, prompt in enumerate(prompts)]


def converse(
    engine: NativeEngine, sessions: int, turns: int, params: SamplingParams, opening: int = 40
) -> list[list[tuple[list[int], Completion]]]:
    """Return the prompts and completions of each turn of sessions that have the first 20 tokens in common."""
    head = random.Random(0).choices(range(10, VOCABULARY), k=20)
    prompts = [[*head, *random.Random(seed).choices(range(10, VOCABULARY), k=opening)] for seed in range(sessions)]
    history: list[list[tuple[list[int], Completion]]] = []
    for turn in range(turns):
        history.append(take_turns(engine, prompts, params, turn))
        prompts = [[*prompt, *completion.token_ids.tolist(), 11, 12, 13] for prompt, completion in history[-1]]
    return history


@pytest.mark.parametrize("family", ["qwen3", "smollm3"])
def test_more_sessions_than_lanes_compute_only_what_is_new(make_model: MakeModel, family: str) -> None:
    model, params = make_model(family), SamplingParams(max_new_tokens=12)
    engine = NativeEngine(EngineConfig(name="native", max_sequences=16), copy.deepcopy(model))
    history = converse(engine, 40, 1, params, opening=20)
    counts = [engine.prefilled_tokens]
    for turn in range(1, 5):
        prompts = [[*prompt, *completion.token_ids.tolist(), 11, 12, turn] for prompt, completion in history[-1]]
        history.append(take_turns(engine, prompts, params, turn))
        counts.append(engine.prefilled_tokens)
    assert [later - before for before, later in pairwise(counts)] == [40 * (3 + 1)] * 4  # a last token was not fed
    assert engine.prompt_tokens is not None
    read = sum(len(prompt) for turn in history for prompt, _ in turn)
    assert engine.prompt_tokens.read == read
    assert engine.prompt_tokens.reused == read - engine.prefilled_tokens
    assert engine.prompt_tokens.evicted == 0
    for prompt, completion in random.Random(1).sample(history[-1], 6):
        expected = compute_trained_logprobs(model, prompt, completion, 1.0)
        assert (completion.logprobs - expected).abs().max() < 1e-5


def test_requests_that_ask_for_the_bits_of_a_prefill_get_them(make_model: MakeModel) -> None:
    model, params = make_model("llama"), SamplingParams(max_new_tokens=12)
    engine = NativeEngine(EngineConfig(name="native", max_sequences=16), copy.deepcopy(model))
    history = converse(engine, 40, 3, params)
    before = engine.prefilled_tokens
    for turn in (0, 2):
        for id in (3, 30):
            prompt, completion = history[turn][id]
            text = [*prompt, *completion.token_ids.tolist(), 7]
            engine.submit(Request(id=id, prompt=text, params=params, seed=5, reuse_completions=False))
            (event,) = engine.poll()
            assert isinstance(event, Finished)
            alone = NativeEngine(EngineConfig(name="native"), copy.deepcopy(model)).generate([text], params, [5])
            assert same([event.completion], alone)
    assert engine.prefilled_tokens - before < 2 * (13 + 13 + 3 * 15)


def test_new_weights_end_the_memory_of_pages(make_model: MakeModel) -> None:
    model, params = make_model("qwen3"), SamplingParams(max_new_tokens=6)
    engine = NativeEngine(EngineConfig(name="native", max_sequences=16), model)
    history = converse(engine, 40, 1, params)
    assert engine._lanes.memory.nbytes
    engine.refresh(1)
    before = engine.prefilled_tokens
    engine.submit(Request(id=0, prompt=history[0][0][0], params=params, seed=0))
    engine.poll()
    assert engine.prefilled_tokens - before == 60
    engine.release()
    assert engine._lanes.memory.nbytes == 0


def test_memory_that_is_short_costs_only_work(make_model: MakeModel) -> None:
    model, params = make_model("qwen3"), SamplingParams(max_new_tokens=12)
    gib = 2 * 16 * 160 * 2 * 2 * 2 * 32 * 4 / 2**30
    tight = NativeEngine(EngineConfig(name="native", max_sequences=16, cache_gib=gib), copy.deepcopy(model))
    roomy = NativeEngine(EngineConfig(name="native", max_sequences=16), copy.deepcopy(model))
    for mine, theirs in zip(converse(tight, 90, 4, params), converse(roomy, 90, 4, params), strict=True):
        for (_, a), (_, b) in zip(mine, theirs, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()
    cache, memory = tight._lanes.cache, tight._lanes.memory
    assert cache is not None
    assert tight._bytes(cache.lanes, cache.length) + memory.nbytes <= gib * 2**30
    assert tight.prompt_tokens is not None and tight.prompt_tokens.evicted > 0
    assert tight.prefilled_tokens > roomy.prefilled_tokens
