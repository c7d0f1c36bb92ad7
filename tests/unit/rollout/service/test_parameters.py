"""Parameters of requests that are no matter of sampling: what the template gets, what is sent back, and nulls."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from podium_agents.service.request_bodies import ChatRequest, Refusal, parse
from podium_serve.bodies import CompletionRequest, GenerateRequest
from podium_serve.texts import encode
from tests.unit.rollout.service.scripted import CHATML, LOOK, TOKEN, USER, posted, say, scripted
from tests.unit.rollout.service.test_dialects import END, serve

READS = CHATML.replace("{% if tools %}", "{{ reasoning_effort or '' }}{{ mood or '' }}{% if tools %}", 1)
SWITCHES = CHATML.replace("{% if tools %}", "{{ '<no>' if enable_thinking is false }}{% if tools %}", 1)


def get(url: str, **headers: str) -> tuple[int, Any, str | None]:
    """The status, the body and the id of a request."""
    asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {TOKEN}", **headers})
    try:
        answer = urllib.request.urlopen(asked, timeout=60)
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        return int(answer.status or 0), json.loads(answer.read()), answer.headers["x-request-id"]


def chat(url: str, **changed: Any) -> tuple[int, Any]:
    status, text = posted(f"{url}/v1/chat/completions", {"messages": [USER], **changed})
    return status, json.loads(text)


@pytest.mark.parametrize("cls", [ChatRequest, CompletionRequest, GenerateRequest])
def test_a_null_is_as_no_parameter(cls: Any) -> None:
    required: dict[str, Any] = {"messages": [USER], "prompt": "x", "token_ids": [1]}
    needed = {name: value for name, value in required.items() if name in cls.model_fields}
    names = {*cls.model_fields, "response_format", "n", "frequency_penalty", "whatever"} - {*needed}
    parsed = parse(cls, {**needed, **dict.fromkeys(names)})
    assert parsed.model_dump() == parse(cls, needed).model_dump()
    assert parsed.model_fields_set == {*needed}
    assert parse(GenerateRequest, {"token_ids": [1], "sampling_params": {"n": None, "x": None}}).sampling_params.n == 1
    for name in needed:
        with pytest.raises(Refusal, match=f"{name}: Field required"):
            parse(cls, {**needed, name: None})


def test_the_template_gets_the_variables_of_a_request() -> None:
    with serve(*["A." + END] * 4, template=READS) as (url, service, source):
        assert chat(url, reasoning_effort="high", chat_template_kwargs={"mood": "glad"})[0] == 200
        assert chat(url)[0] == 200
        texts = [service.decode(prompt, special=True) for prompt in source.prompts]
        assert (texts[0].startswith("highglad"), texts[1]) == (True, texts[0].removeprefix("highglad"))
        for name in ("other", "tools", "messages", "tokenize", "add_generation_prompt"):
            status, body = chat(url, chat_template_kwargs={name: 1})
            assert (status, f"chat_template_kwargs.{name}" in body["error"]["message"]) == (400, True), body


def test_an_effort_that_no_template_reads_is_refused_by_name() -> None:
    with serve("A." + END) as (url, _, _):
        status, body = chat(url, reasoning_effort="low")
        assert (status, body["error"]["param"]) == (400, "reasoning_effort")
    with serve("A." + END, "B." + END, template=SWITCHES) as (url, service, source):
        assert (chat(url, reasoning_effort="none")[0], chat(url, reasoning_effort="low")[0]) == (200, 200)
        assert ["<no>" in service.decode(prompt) for prompt in source.prompts] == [True, False]


def test_other_variables_begin_a_row_and_the_same_go_on() -> None:
    service, _, _ = scripted(*["A." + END] * 3, template=READS)

    async def talk() -> None:
        history = [USER, await say(service, [USER], chat_template_kwargs={"mood": "glad"}), USER]
        await say(service, history, chat_template_kwargs={"mood": "glad"})
        assert [len(row.turns) for row in service.sessions["s"].rows] == [2]
        await say(service, history, chat_template_kwargs={"mood": "sad"})

    asyncio.run(talk())
    session = service.sessions["s"]
    assert ([len(row.turns) for row in session.rows], session.unrecognized) == ([2, 1], 0)


def test_special_tokens_are_in_the_text_if_they_are_asked_for() -> None:
    said = "A<|eot|>B." + END
    service, _, _ = scripted(said, said, "C." + END)

    async def talk() -> None:
        assert (await say(service, [USER], "a"))["content"] == "AB."
        answer = await say(service, [USER], skip_special_tokens=False)
        assert answer["content"] == "A<|eot|>B."
        await say(service, [USER, answer, USER], skip_special_tokens=False)

    asyncio.run(talk())
    assert [len(row.turns) for row in service.sessions["s"].rows] == [2]


def test_a_completion_with_special_tokens() -> None:
    with serve("A<|eot|>B.", "A<|eot|>B.") as (url, _, _):
        for skip, text in ((True, "AB."), (False, "A<|eot|>B.")):
            body = {"prompt": "x", "skip_special_tokens": skip}
            assert json.loads(posted(f"{url}/v1/completions", body)[1])["choices"][0]["text"] == text


def test_a_stream_begins_with_the_ids_of_its_prompt() -> None:
    with serve("Hello." + END, pause_s=0.03) as (url, _, source):
        body = {"messages": [USER], "stream": True, "return_token_ids": True}
        lines = posted(f"{url}/v1/chat/completions", body)[1].splitlines()
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        assert len(chunks) > 1
        assert [chunk.get("prompt_token_ids") for chunk in chunks] == [source.prompts[0], *[None] * (len(chunks) - 1)]


def test_texts_are_tokenized_and_back() -> None:
    with serve("A." + END) as (url, service, source):
        assert chat(url, tools=[LOOK])[0] == 200
        asked = {"messages": [USER], "tools": [LOOK], "return_token_strs": True}
        read = json.loads(posted(f"{url}/tokenize", asked)[1])
        assert (read["tokens"], read["count"]) == (source.prompts[0], len(source.prompts[0]))
        assert (read["max_model_len"], len(read["token_strs"])) == (service.context, read["count"])
        text = json.loads(posted(f"{url}/detokenize", {"tokens": read["tokens"]})[1])["prompt"]
        assert text == service.decode(source.prompts[0], special=True)
        closed = json.loads(posted(f"{url}/tokenize", {**asked, "add_generation_prompt": False})[1])["tokens"]
        assert closed == read["tokens"][: len(closed)] != read["tokens"]
        plain = json.loads(posted(f"{url}/tokenize", {"prompt": "one two"})[1])["tokens"]
        assert plain == encode(service, "one two")
        for body in ({}, {"prompt": "x", "messages": [USER]}, {"prompt": "x", "bogus": 1}, {"messages": []}):
            assert posted(f"{url}/tokenize", body)[0] == 400
        for body in ({}, {"tokens": [-1]}, {"tokens": [1 << 40]}, {"tokens": "x"}):
            assert posted(f"{url}/detokenize", body)[0] == 400


def test_one_model_is_described_by_its_name() -> None:
    with serve() as (url, _, _):
        cards = get(f"{url}/v1/models")[1]["data"]
        assert get(f"{url}/v1/models/tiny")[1] == cards[0]
        assert get(f"{url}/sessions/s/v1/models/tiny")[1] == cards[0]
        status, body, _ = get(f"{url}/v1/models/org/other")
        assert (status, "'org/other' is not served" in body["error"]["message"]) == (404, True)


def test_each_answer_has_the_id_of_its_request() -> None:
    with serve("A." + END) as (url, _, _):
        first, second = (get(f"{url}/v1/models")[2] for _ in range(2))
        assert first != second
        assert get(f"{url}/v1/models", **{"X-Request-ID": "mine"})[2] == "mine"
        assert get(f"{url}/v1/models", **{"X-Request-ID": "m" * 9999})[2] == "m" * 128
        body, both = {"messages": [USER]}, list[str | None]()
        for _ in range(2):
            headers = {"Authorization": f"Bearer {TOKEN}", "Idempotency-Key": "k", "X-Request-ID": "first"}
            asked = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
            with urllib.request.urlopen(asked, timeout=60) as answer:
                both.append(answer.headers["x-request-id"])
        assert both == ["first", "first"]
        for path, status in (("/nowhere", 404), ("/v1/messages", 405)):
            assert get(f"{url}{path}", **{"X-Request-ID": "mine"})[::2] == (status, "mine")


@pytest.mark.parametrize(("changed", "param"), [({"logprobs": None}, "top_logprobs"), ({}, "top_logprobs")])
def test_probable_tokens_are_asked_for_with_logprobs_and_at_most_twenty(changed: Any, param: str) -> None:
    with serve() as (url, _, _):
        count = 5 if changed else 21
        status, body = chat(url, **{"logprobs": True, "top_logprobs": count, **changed})
        assert (status, param in body["error"]["message"]) == (400, True)
