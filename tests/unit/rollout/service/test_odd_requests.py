"""Requests that are odd: what they ask for is done, or refused by its name, and nothing of it is dropped."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
from typing import Any

import pytest

from podium.errors import ConfigError
from podium.models import ModelConfig, char_tokenizer
from podium.rollout.sampling import SamplingParams
from podium.rollout.tasks.config import DataConfig
from podium.trainer.checks.preflight import with_stop_tokens
from podium_agents.service.request_bodies import ChatRequest, Refusal
from tests.unit.rollout.service.scripted import LOOK, TOKEN, USER, say, scripted
from tests.unit.rollout.service.spelling import make_tokenizer

httpx: Any = pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

END = "<|im_end|>"
CHAT = "/v1/chat/completions"
QUESTION = b'{"role": "user", "content": "a"}'


class Served:
    """A service that is asked in this process.

    Attributes:
        service: The service.
        source: What it draws from.
    """

    def __init__(self, *answers: Any, tokenizer: Any = None) -> None:
        from podium_serve.app import make_app

        self.service, self.source, _ = scripted(*answers, tokenizer=tokenizer)
        self._app = make_app(self.service, TOKEN)

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """The status and the body of an answer; a stream's body is its text."""

        async def ask() -> Any:
            transport = httpx.ASGITransport(self._app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
                content = body if isinstance(body, bytes) else json.dumps(body)
                return await client.post(
                    path, content=content, headers={"Authorization": f"Bearer {TOKEN}", **headers}, timeout=60
                )

        answer = asyncio.run(ask())
        streams = answer.headers["content-type"].startswith("text/event-stream")
        return answer.status_code, answer.text if streams else answer.json()

    def refusal(self, path: str, body: Any, **headers: str) -> str:
        """The error of a request that is refused before anything is drawn."""
        status, answer = self.post(path, body, **headers)
        assert (status in (400, 413, 415, 422), self.source.prompts) == (True, []), answer
        return str(answer["error"]["message"])


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"messages": [' + QUESTION + b'], "temperature": 0, "temperature": 1}', "'temperature' more than once"),
        (b'{"messages": [{"role": "user", "content": "a", "content": "b"}]}', "'content' more than once"),
        (b'{"messages": [' + QUESTION + b'], "stop": ["x"], "user": "\xed\xa0\x80"}', "the body is not JSON"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}'.encode("utf-16"), "half of a surrogate pair"),
        (b'{"messages": [' + QUESTION + b'], "metadata": {"a": NaN}}', "NaN is no number of JSON"),
        (b'{"messages": [' + QUESTION + b'], "metadata": {"a": 1e999}}', "1e999 is no number of JSON"),
    ],
)
def test_a_body_that_json_does_not_have_is_refused(body: bytes, says: str) -> None:
    assert says in Served().refusal(CHAT, body)


def test_two_names_of_sessions_are_refused() -> None:
    path, named = "/sessions/one/v1/chat/completions", {"session_id": "two"}
    for where, body, headers in (
        (path, {"messages": [USER]}, {"X-Session-ID": "two"}),
        (path, {"messages": [USER], "metadata": named}, {}),
        (CHAT, {"messages": [USER], "metadata": named}, {"X-Session-ID": "one"}),
    ):
        assert "names two sessions, 'one' and 'two': name one" in Served().refusal(where, body, **headers)
    same = {"messages": [USER], "metadata": {"session_id": "one"}}
    assert Served("A." + END).post(path, same, **{"X-Session-ID": "one"})[0] == 200


def test_a_call_with_two_values_of_one_argument_is_none() -> None:
    call = '{"name": "look", "arguments": {"place": "a", "place": "b"}}'
    body = {"messages": [USER], "tools": [LOOK]}
    status, answer = Served(f"<tool_call>{call}</tool_call>{END}").post(CHAT, body)
    message = answer["choices"][0]["message"]
    assert (status, message.get("tool_calls") or None) == (200, None)
    assert call in message["content"]
    history = {"function": {"name": "look", "arguments": '{"place": "a", "place": "b"}'}, "type": "function", "id": "1"}
    said = {"role": "assistant", "content": None, "tool_calls": [history]}
    result = {"role": "tool", "tool_call_id": "1", "content": "x"}
    refusal = Served().refusal(CHAT, {"messages": [USER, said, result], "tools": [LOOK]})
    assert "one object has the name 'place' twice, with different values" in refusal


def test_a_compressed_body_is_refused_with_the_remedy() -> None:
    body = gzip.compress(json.dumps({"messages": [USER]}).encode())
    assert "no compressed body; send it as it is" in Served().refusal(CHAT, body, **{"Content-Encoding": "gzip"})
    assert Served("A." + END).post(CHAT, {"messages": [USER]}, **{"Content-Encoding": "identity"})[0] == 200


@pytest.mark.parametrize(
    ("path", "fields", "says"),
    [
        (CHAT, {"stream_options": {"bogus": 1}}, "stream_options.bogus: this service knows no such parameter"),
        (CHAT, {"stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
        (CHAT, {"thinking": False}, "thinking: the chat template reads no such variable"),
        (CHAT, {"metadata": {"session_id": 5}}, "metadata.session_id is 5: a session is named by a text"),
        (CHAT, {"stop_token_ids": [0, 128009]}, "stop_token_ids has 128009, and the vocabulary has 103 tokens"),
        (CHAT, {"stop": "x<|eot|>"}, "has the special token '<|eot|>' beside other text"),
        (CHAT, {"messages": [{"role": "user", "contents": "hi"}]}, "message 0, of the role 'user', has no content"),
        (CHAT, {"messages": [{"role": "system", "content": None}, USER]}, "of the role 'system', has no content"),
        (CHAT, {"messages": [USER, {"role": "tool", "output": "4"}]}, "of the role 'tool', has no content"),
        ("/v1/responses", {"input": [{"role": "user", "contents": "hi"}]}, "input[0].content: Field required"),
        (
            "/v1/responses",
            {"input": [{"type": "function_call_output", "call_id": "a", "result": "4"}]},
            "input[0].output: Field required",
        ),
        ("/v1/completions", {"prompt": ["12", 5]}, "prompt: expected a text"),
        ("/v1/completions", {"prompt": [True, False]}, "prompt: expected a text"),
        ("/v1/completions", {"prompt": [[1, "2"]]}, "prompt: expected a text"),
        ("/v1/completions", {"prompt": "x", "stop": "<|eot|> "}, "has the special token '<|eot|>' beside other text"),
        ("/inference/v1/generate", {"token_ids": ["5"]}, "valid integer"),
        ("/detokenize", {"tokens": [True]}, "valid integer"),
        (
            "/v1/messages",
            {"max_tokens": 9, "messages": [USER, {"role": "assistant", "content": "The answer is"}]},
            "does not go on with the text of an answer",
        ),
    ],
)
def test_what_would_be_dropped_is_refused_by_its_name(path: str, fields: dict[str, Any], says: str) -> None:
    body = {**({"messages": [USER]} if path == CHAT else {}), **fields}
    assert says in Served().refusal(path, body)


def test_no_body_of_another_api_makes_the_service_fail() -> None:
    chance = random.Random(3)
    leaves: list[Any] = [
        *(None, True, 0, -1, 0.5, 10**30, "", "a", "auto", "user", [], {}, [5], ["a"], [{}], {"type": "text"}),
        *({"name": "x"}, [{"type": "function", "name": "f"}], [{"type": "custom"}], {"type": "json_schema"}),
        *([{"type": "custom", "name": "x", "format": "y"}], {"type": "allowed_tools", "tools": 5}, {"format": "x"}),
    ]
    fields = {
        "/v1/responses": "input instructions tools tool_choice reasoning text include stop metadata",
        "/v1/messages": "system messages tools tool_choice stop_sequences thinking output_config metadata",
        "/v1/messages/count_tokens": "system messages tools tool_choice thinking",
        "/tokenize": "prompt messages tools chat_template_kwargs",
    }
    served = Served(*["A." + END] * 400)
    for _ in range(400):
        path = chance.choice([*fields])
        body: dict[str, Any] = {"input": "x"} if "responses" in path else {"messages": [USER], "max_tokens": 5}
        for _ in range(chance.choice((1, 2))):
            body[chance.choice(fields[path].split())] = chance.choice(leaves)
        status, answer = served.post(path, body)
        assert status in (200, 400), (path, body, answer)


def test_both_limits_of_tokens_hold() -> None:
    for most, allowed in ((5, 50), (50, 5)):
        assert ChatRequest(messages=[USER], max_tokens=most, max_completion_tokens=allowed).limit == 5
    assert ChatRequest(messages=[USER]).limit is None


def test_a_conversation_that_ends_with_an_answer_may_be_counted() -> None:
    body = {"messages": [USER, {"role": "assistant", "content": "x"}]}
    assert Served().post("/v1/messages/count_tokens", body)[0] == 200


def test_a_key_of_one_session_does_not_answer_another() -> None:
    served = Served("One." + END, "Two." + END)
    for session, text in (("a", "One."), ("b", "Two."), ("a", "One.")):
        headers = {"X-Session-ID": session, "Idempotency-Key": "1"}
        answer = served.post(CHAT, {"messages": [USER]}, **headers)[1]
        assert answer["choices"][0]["message"]["content"] == text
    assert [len(served.service.sessions[name].calls) for name in "ab"] == [1, 1]


@pytest.mark.parametrize("shown", [True, False])
def test_a_special_token_among_the_stop_texts_ends_the_answer(shown: bool) -> None:
    service, _, tokenizer = scripted("A<|eot|>", "B." + END)
    asked = service.chat(ChatRequest(messages=[USER], stop=["<|eot|>"], skip_special_tokens=shown), "s")
    assert tokenizer.convert_tokens_to_ids("<|eot|>") in asked.params.stop_token_ids

    async def talk() -> None:
        answer = await service.answer(asked)
        assert (answer.message["content"], answer.stop) == ("A", "<|eot|>")
        await say(service, [USER, answer.message, USER])

    asyncio.run(talk())
    assert [len(row.turns) for row in service.sessions["s"].rows] == [2]


def test_a_special_token_ends_a_text_and_is_named() -> None:
    served = Served("A<|eot|>", "A<|eot|>")
    body = {"prompt": "x", "stop": ["<|eot|>"], "skip_special_tokens": False}
    assert served.post("/v1/completions", body)[1]["choices"][0]["text"] == "A"
    body = {"messages": [USER], "max_tokens": 9, "stop_sequences": ["<|eot|>"]}
    answer = served.post("/v1/messages", body)[1]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "<|eot|>")


def test_a_run_whose_stop_text_could_never_be_found_does_not_start() -> None:
    tokenizer = char_tokenizer("ab\n")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|eot|>"]})  # type: ignore[arg-type] # as ours are
    sampling: Any = SamplingParams(max_new_tokens=4, stop_token_ids=("<|eot|>\n",))  # type: ignore[arg-type] # a text
    with pytest.raises(ConfigError, match=r"stop_token_ids has '<\|eot\|>\\n'.*would never be found"):
        with_stop_tokens(sampling, ModelConfig(config={"vocab_size": 9}, tokenizer="chars:ab"), tokenizer, DataConfig())


@pytest.mark.parametrize("special", [True, False])
def test_a_stream_of_a_text_has_the_special_tokens_of_the_whole(special: bool) -> None:
    served = Served("A<|eot|>B.", "A<|eot|>B.")
    body = {"prompt": "x", "skip_special_tokens": not special}
    whole = served.post("/v1/completions", body)[1]["choices"][0]["text"]
    lines = served.post("/v1/completions", {**body, "stream": True})[1].splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole
    assert ("<|eot|>" in whole) == special


def test_texts_that_end_all_answers_are_in_no_text_of_completions() -> None:
    served = Served("A.##B", "A.##B")
    served.service.stops = ("##",)
    whole = served.post("/v1/completions", {"prompt": "x"})[1]["choices"][0]
    assert (whole["text"], whole["finish_reason"]) == ("A.", "stop")


def test_a_switch_of_thinking_is_a_hint_in_another_api_alone() -> None:
    """In another API it is a hint, and in chat it is refused where the template reads none."""
    body = {"messages": [USER], "max_tokens": 9, "thinking": {"type": "disabled"}, "tools": []}
    assert Served("A." + END).post("/v1/messages", body)[0] == 200
    with pytest.raises(Refusal, match="thinking"):
        scripted()[0].chat(ChatRequest(messages=[USER], thinking=True, tools=[LOOK]))


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_tokens_of_an_answer_say_its_text(kind: str, stream: bool) -> None:
    """A character of several tokens, and a space that a tokenizer writes before words, are in none of them alone."""
    said = "the quick fox \u00e9\U0001f98a yes"
    served = Served(said, said + END, tokenizer=make_tokenizer(kind))
    body = {"prompt": "x", "logprobs": 1, "stream": stream}
    text, tokens, offsets = "", list[str](), list[int]()
    for choice in choices(served.post("/v1/completions", body)[1]):
        text += choice["text"]
        if choice["logprobs"]:
            tokens += choice["logprobs"]["tokens"]
            offsets += choice["logprobs"]["text_offset"]
    assert (text, len([token for token in tokens if token.startswith("bytes:")])) == (said, 6)
    assert all(text.startswith(name, at) or "bytes:" in name for name, at in zip(tokens, offsets, strict=True))
    spelled = b""
    for choice in choices(served.post(CHAT, {"messages": [USER], "logprobs": True, "stream": stream})[1]):
        spelled += bytes(byte for entry in (choice.get("logprobs") or {}).get("content", ()) for byte in entry["bytes"])
    assert spelled.decode() == said + END


def choices(answer: Any) -> list[Any]:
    """The choices of an answer, or of the pieces of a stream."""
    lines = answer.splitlines() if isinstance(answer, str) else []
    bodies = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return [choice for body in bodies or [answer] for choice in body["choices"]]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_in_the_reasoning_ends_the_answer_and_is_not_in_it(stream: bool) -> None:
    served = Served(*["<think>a STOP b</think>x" + END] * 2)
    body = {"messages": [USER], "stop": "STOP", "stream": stream}
    thoughts = ""
    for choice in choices(served.post(CHAT, body)[1]):
        thoughts += choice.get("message", choice.get("delta")).get("reasoning_content", "")
    assert thoughts == "a "
    if not stream:
        asked = {"messages": [USER], "max_tokens": 99, "stop_sequences": ["STOP"]}
        answer = served.post("/v1/messages", asked)[1]
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "STOP")
        assert [block.get("thinking") for block in answer["content"]] == ["a "]
