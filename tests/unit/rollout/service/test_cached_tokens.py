"""The tokens of a prompt that were in the cache, as answers tell them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.rollout.service.engine import engine_service
from tests.unit.rollout.service.scripted import TOKEN, posted

pytest.importorskip("uvicorn")

QUESTION = "what is one and one? " * 5
CHAT, TEXT, IDS = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"


@pytest.fixture
def url() -> Iterator[str]:
    from podium_serve.app import make_app
    from podium_serve.server import Server

    with Server(make_app(engine_service()[0], TOKEN)) as server:
        yield server.url


def body_of(path: str, text: str, n: int) -> dict[str, Any]:
    if path == IDS:
        return {"token_ids": [5 + ord(letter) % 50 for letter in text], "sampling_params": {"max_tokens": 3, "n": n}}
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    return {**prompt, "max_tokens": 3, "n": n, "seed": 1}


def read_usage(url: str, path: str, body: dict[str, Any], stream: bool = False) -> tuple[int, int]:
    """The tokens of the prompts of an answer, and those of them that were in the cache."""
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    status, answer = posted(url + path, {**body, **options})
    assert status == 200, answer
    chunks = [line[6:] for line in answer.splitlines() if line.startswith("data: {")] if stream else [answer]
    usage = json.loads(chunks[-1])["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("n", [1, 2, 4, 8, 11])  # the engine draws 8 at once
@pytest.mark.parametrize(("path", "stream"), [(CHAT, False), (CHAT, True), (TEXT, False), (TEXT, True), (IDS, False)])
def test_a_prompt_that_several_completions_share_counts_once(path: str, stream: bool, n: int, url: str) -> None:
    """With n = 8, seven prompts of a new question were counted as cached, which was more than its one prompt."""
    prompt, cached = read_usage(url, path, body_of(path, QUESTION, n), stream)
    assert cached == 0 < prompt
    prompt, cached = read_usage(url, path, body_of(path, QUESTION, n), stream)
    assert prompt // 2 < cached <= prompt


@pytest.mark.parametrize("stream", [False, True])
def test_every_prompt_of_a_request_counts_its_own(stream: bool, url: str) -> None:
    """A stream ends the completions of the prompts in another order."""
    new, old = "another one: ", QUESTION
    alone = read_usage(url, TEXT, body_of(TEXT, old, 1))
    again = read_usage(url, TEXT, body_of(TEXT, old, 1))
    body = {**body_of(TEXT, "", 3), "prompt": [new, old], "max_tokens": 40, "stop": [*"abcdefgh"]}
    prompt, cached = read_usage(url, TEXT, body, stream)
    assert alone[1] == 0 < again[1] == cached
    assert prompt == len(new) + len(old)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("n", [1, 5])
def test_an_answer_that_a_text_ends_tells_them_too(path: str, n: int, stream: bool, url: str) -> None:
    """It told none, because the service ends it before the engine has finished it."""
    body = {**body_of(path, QUESTION, n), "max_tokens": 40, "stop": [*"abcdefgh"]}
    assert read_usage(url, path, body_of(path, QUESTION, 1))[1] == 0
    prompt, cached = read_usage(url, path, body, stream)
    assert prompt // 2 < cached <= prompt
