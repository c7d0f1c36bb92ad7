"""The rollout service over HTTP, as the official client and plain requests use it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from podium.errors import PodiumError
from podium.models import ModelConfig, char_tokenizer, load_model
from podium.rollout.engines import EngineConfig, make_engine
from podium.rollout.engines.requests import Tokens
from podium.rollout.tasks.chat_encoder import ChatEncoder
from podium.rollout.tasks.config import DataConfig
from podium_agents.service.admission import Admission
from podium_agents.service.chat_format import ChatFormat
from podium_agents.service.engine_client import EngineClient
from podium_agents.service.service import Service
from podium_agents.service.session_recording import Sampled
from podium_serve.gateway import Gateway
from podium_serve.server import listen
from podium_serve.texts import encode
from podium_view.owner import _ask_kernel, _look_up_owner, owner_of  # pyright: ignore[reportPrivateUsage]
from tests.lazy_module import import_when_used

openai = import_when_used("openai")
pytest.importorskip("uvicorn")

ALPHABET = "".join(map(chr, range(32, 127))) + "\n"
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKEN = "secret"
USER = {"role": "user", "content": "hello"}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
AT_NONE = {"type": "function", "function": {"name": "fly"}}


@dataclass
class Served:
    url: str
    service: Service
    client: Any

    def post(self, path: str, body: Any, token: str = TOKEN, **headers: str) -> tuple[int, Any]:
        import urllib.error
        import urllib.request

        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        asked = urllib.request.Request(self.url + path, content, {"Authorization": f"Bearer {token}", **headers})
        try:
            with urllib.request.urlopen(asked) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    from podium_serve.app import make_app
    from podium_serve.server import Server

    tokenizer = char_tokenizer(ALPHABET, chat_template=TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})  # type: ignore[arg-type]
    settings = {
        "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": len(tokenizer),
        "max_position_embeddings": 512, "initializer_range": 0.3,
    }  # fmt: skip
    torch.manual_seed(0)
    model = load_model(ModelConfig(config=settings, tokenizer=f"chars:{ALPHABET}"))
    client = EngineClient(make_engine(EngineConfig(max_sequences=8), model))
    end: Any = tokenizer.convert_tokens_to_ids("<|im_end|>")
    service = Service(
        client, ChatFormat(ChatEncoder(tokenizer, DataConfig()), tokenizer), tokenizer,
        model="tiny", context=512, stop_token_ids=[end], most_tokens=100_000,
    )  # fmt: skip
    with Server(make_app(service, TOKEN)) as server:
        url = f"{server.url}/v1"
        with openai.OpenAI(base_url=url, api_key=TOKEN, max_retries=0) as asking:
            yield Served(server.url, service, asking)


def test_the_official_client_talks_and_everything_is_recorded_as_sampled(served: Served) -> None:
    messages: list[Any] = [USER]
    headers = {"X-Session-ID": "talk"}
    sampled: list[list[int]] = []
    for turn in range(4):
        answer = served.client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=12, seed=turn, extra_headers=headers,
            extra_body={"return_token_ids": True},
        )  # fmt: skip
        (choice,) = answer.choices
        sampled.append(choice.token_ids)
        assert answer.usage.completion_tokens == len(choice.token_ids) <= 12
        messages += [choice.message.model_dump(exclude_none=True), {"role": "user", "content": f"and {turn}"}]
    session = served.service.close_session("talk")
    assert session is not None
    (row,) = session.rows
    assert session.splits == 0
    assert [row.ids[turn.start : turn.stop] for turn in row.turns] == sampled
    assert sum(row.sampled) == sum(map(len, sampled))


def test_metrics_say_which_prompt_tokens_were_not_computed_again(served: Served) -> None:
    import urllib.request

    def count() -> dict[str, float]:
        asked = urllib.request.Request(f"{served.url}/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(asked) as answer:
            lines = [line.split() for line in answer.read().decode().splitlines() if line.startswith("podium_prompt_")]
        return {name.removeprefix("podium_prompt_tokens_"): float(value) for name, value in lines}

    messages: list[Any] = [{"role": "user", "content": "how much is one and one? " * 2}]
    counts = [count()]
    for _ in range(2):
        answer = served.client.chat.completions.create(model="tiny", messages=messages, max_tokens=12, seed=1)
        messages += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "and two?"}]
        counts.append(count())
    first, second = ({name: after[name] - before[name] for name in after} for before, after in pairwise(counts))
    assert second["read"] > first["read"] > 50
    assert second["read"] - second["reused"] < 50, "the second turn computes the new message"
    assert first["evicted"] == second["evicted"] == 0


def test_an_answer_says_how_many_tokens_of_its_prompt_were_not_computed_again(served: Served) -> None:
    messages: list[Any] = [{"role": "user", "content": "how much is two and one? " * 2}]
    counts: list[tuple[int, int]] = []
    for _ in range(2):
        answer = served.client.chat.completions.create(model="tiny", messages=messages, max_tokens=12, seed=1)
        counts.append((answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens))
        messages += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "and two?"}]
    (first, _), (second, reused) = counts
    assert first < reused <= second
    whole = {"model": "tiny", "input": messages[0]["content"], "max_output_tokens": 12}
    details = served.client.responses.create(**whole).usage.input_tokens_details
    assert details.cached_tokens > first // 2


def join_characters(tokens: Iterable[str]) -> str:
    """The text of tokens of one character; special ones have more."""
    return "".join(token for token in tokens if len(token) == 1)


@pytest.mark.parametrize(
    "how", [{}, {"temperature": 0}, {"temperature": 0.5}, {"temperature": 0.7, "top_p": 0.6}], ids=str
)
def test_the_most_probable_tokens_have_the_probabilities_of_sampling(served: Served, how: dict[str, float]) -> None:
    asked: Any = {
        "model": "tiny",
        "messages": [USER],
        "max_tokens": 12,
        "seed": 3,
        "logprobs": True,
        "top_logprobs": 20,
    }
    answer = served.client.chat.completions.create(**asked, **how)
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) == answer.usage.completion_tokens
    seen = 0
    for token in tokens:
        assert [entry.logprob for entry in token.top_logprobs] == sorted(
            (entry.logprob for entry in token.top_logprobs), reverse=True
        )
        assert sum(2.718281828459045**entry.logprob for entry in token.top_logprobs) < 1.0001
        for entry in token.top_logprobs:
            if entry.token == token.token:
                assert entry.logprob == pytest.approx(token.logprob, abs=1e-4)
                seen += 1
    assert seen > len(tokens) // 2
    if "top_p" in how:
        assert min(len(token.top_logprobs) for token in tokens) < 20, "those that top-p left out are not told"
    chunks = list(served.client.chat.completions.create(**asked, **how, stream=True))
    streamed = [entry for chunk in chunks if (logprobs := chunk.choices[0].logprobs) for entry in logprobs.content]
    for entry, token in zip(streamed, tokens, strict=True):
        assert entry.token == token.token
        assert entry.logprob == pytest.approx(token.logprob, abs=1e-4)
        expected = {other.token: pytest.approx(other.logprob, abs=1e-4) for other in token.top_logprobs[:10]}
        got = {other.token: other.logprob for other in entry.top_logprobs}
        assert {name: got.get(name) for name in expected} == expected
    for chunk in chunks:
        if text := chunk.choices[0].delta.content:
            assert join_characters(entry.token for entry in chunk.choices[0].logprobs.content) == text


def test_the_responses_api_streams_log_probabilities_with_their_text(served: Served) -> None:
    asked: Any = {"model": "tiny", "input": "ab", "max_output_tokens": 12, "extra_body": {"seed": 3}}
    asked |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = served.client.responses.create(**asked).output[0].content[0]
    with served.client.responses.stream(**asked) as stream:
        events = [*stream]
    (done,) = (event for event in events if event.type == "response.output_text.done")
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1
    tokens = [entry for event in deltas for entry in event.logprobs]
    assert [entry.token for entry in tokens] == [entry.token for entry in whole.logprobs]
    assert [entry.logprob for entry in tokens] == pytest.approx([entry.logprob for entry in whole.logprobs], abs=1e-4)
    assert [entry.token for entry in done.logprobs] == [entry.token for entry in tokens]
    assert all(len(entry.top_logprobs) == 2 for entry in (*tokens, *whole.logprobs))
    assert all(join_characters(entry.token for entry in event.logprobs) == event.delta for event in deltas)


def test_a_stream_says_what_the_whole_answer_says(served: Served) -> None:
    asked: Any = {"model": "tiny", "messages": [USER], "max_tokens": 8, "seed": 3}
    whole = served.client.chat.completions.create(**asked)
    chunks = list(served.client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


def test_completions_stream_their_texts_as_they_are_drawn(served: Served) -> None:
    asked: Any = {"model": "tiny", "prompt": ["ab", "cd"], "max_tokens": 200, "n": 2, "seed": 3, "logprobs": 1}
    whole = served.client.completions.create(**asked)
    chunks = list(served.client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    for choice in whole.choices:
        own = [each for chunk in chunks for each in chunk.choices if each.index == choice.index]
        assert len(own) > 2, "more than one piece of the text, and the end"
        assert "".join(each.text for each in own) == choice.text
        assert [each.finish_reason for each in own] == [None] * (len(own) - 1) + [choice.finish_reason]
        for name in ("tokens", "token_logprobs", "text_offset"):
            joined = [entry for each in own for entry in getattr(each.logprobs, name)]
            assert joined == getattr(choice.logprobs, name)
        assert all(join_characters(each.logprobs.tokens) == each.text for each in own)
    assert chunks[-1].usage == whole.usage


def test_the_choices_of_a_seed_are_none_of_another_seed(served: Served) -> None:
    request: Any = {"model": "tiny", "prompt": "ab", "max_tokens": 12, "temperature": 1.0}

    def draw(seed: int, n: int) -> list[str]:
        return [choice.text for choice in served.client.completions.create(**request, seed=seed, n=n).choices]

    first, *others = draw(5, 4)
    assert draw(5, 4) == [first, *others]
    assert draw(5, 1) == [first]
    alone = [draw(seed, 1)[0] for seed in range(6, 9)]
    assert len({first, *others, *alone}) == 7


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_vast_text_is_refused_before_it_is_encoded(
    path: str, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encoding takes minutes and gigabytes in most tokenizers. Here it would raise."""
    text, encode = "1" * 10_000_000, PreTrainedTokenizerBase.__call__

    def encode_short_texts(tokenizer: Any, texts: Any, *args: Any, **options: Any) -> Any:
        assert len(str(texts)) < len(text)
        return encode(tokenizer, texts, *args, **options)

    monkeypatch.setattr(PreTrainedTokenizerBase, "__call__", encode_short_texts)
    status, answer = served.post(
        path, {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    )
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert "10000000 characters; the model's context has 512 tokens" in answer["error"]["message"]


def test_texts_ids_and_models(served: Served) -> None:
    found = served.client.completions.create(model="tiny", prompt=["ab", "cd"], max_tokens=5, n=2, temperature=0)
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert found.choices[0].text == found.choices[1].text
    assert served.client.models.list().data[0].max_model_len == 512
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 4, "seed": 1, "logprobs": 1}}
    status, answer = served.post("/inference/v1/generate", body)
    assert status == 200
    (choice,) = answer["choices"]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == len(choice["versions"])


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{", 400, "the body is not JSON"),
        (b"[]", 400, "not a JSON object"),
        ({"model": "tiny"}, 400, "messages"),
        ({"messages": [USER], "temperature": "hot"}, 400, "temperature"),
        ({"messages": [USER], "colour": 1}, 400, "colour: this service knows no such parameter"),
        ({"messages": [USER], "frequency_penalty": 0.5}, 400, "frequency_penalty = 0.5: this service does not support"),
        ({"messages": [USER], "response_format": {"type": "xml"}}, 400, "response_format"),
        ({"messages": [USER], "model": "other"}, 404, "the model 'other' is not served here"),
        ({"messages": [USER], "max_tokens": 5000}, 400, "the model's context has 512"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, 400, "the model's context has 512"),
        ({"messages": [USER], "temperature": 1e-9}, 400, "too small to divide by"),
        ({"messages": [USER], "top_k": 10**30}, 400, "sampling.top_k"),
        ({"messages": [USER], "stop_token_ids": [-5]}, 400, "sampling.stop_token_ids"),
        ({"messages": [{"content": "x"}]}, 400, "message 0 has no role"),
        ({"messages": [{"role": "user", "content": 1}]}, 400, "neither a text nor a list"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "'image_url'; this service reads text",
        ),
        ({"messages": [USER], "tools": [{"type": "web_search"}]}, 400, "tool 0 is no function"),
        ({"messages": [USER], "tools": TOOLS, "tool_choice": AT_NONE}, 400, "tool_choice names 'fly', which is not"),
        ({"messages": [USER], "tool_choice": "required"}, 400, "the request has no tools"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, "half of a surrogate pair"),
        (b" " * (17 << 20), 413, "larger than 16 MiB"),
    ],
)
def test_bad_requests_are_answered_by_name(served: Served, body: Any, status: int, said: str) -> None:
    found, answer = served.post("/v1/chat/completions", body)
    assert (found, said in answer["error"]["message"]) == (status, True), answer


def test_a_wrong_token_is_refused(served: Served) -> None:
    for token in ("", "wrong", TOKEN[:-1]):
        assert served.post("/v1/chat/completions", {"messages": [USER]}, token)[0] == 401
    with (
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="wrong") as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


OTHER_USERS = pytest.mark.skipif(
    not Path("/usr/bin/python3").exists() or not hasattr(os, "geteuid") or os.geteuid() != 0,
    reason="only root can become another user, who needs a Python that he can read",
)
NOBODY = 65534


def _has_ipv6() -> bool:
    try:
        listen("::1", 0).close()
    except PodiumError:
        return False
    return True


WITH_IPV6 = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6")


def asked_by(user: int, url: str, token: str = TOKEN) -> str:
    """What a user of this machine is answered who has the token: the status, and the body of an error."""
    script = (
        "import sys, urllib.request, urllib.error\n"
        "asked = urllib.request.Request(sys.argv[1], None, {'Authorization': 'Bearer ' + sys.argv[2]})\n"
        "try: print(urllib.request.urlopen(asked).status)\n"
        "except urllib.error.HTTPError as error: print(error.code, error.read().decode())\n"
    )
    asked = subprocess.run(
        ["/usr/bin/python3", "-c", script, url, token],
        user=user, group=user, extra_groups=[], capture_output=True, text=True, check=True, cwd="/",
    )  # fmt: skip
    return asked.stdout


@OTHER_USERS
def test_another_user_of_the_machine_is_refused_although_he_has_the_token(served: Served) -> None:
    for path in ("/v1/models", "/health", "/sessions/a/v1/models"):
        assert asked_by(NOBODY, served.url + path).startswith("403")
        assert asked_by(os.geteuid(), served.url + path).startswith("200")


@OTHER_USERS
def test_another_user_is_refused_by_the_service_of_a_run(served: Served) -> None:
    async def both() -> list[str]:
        gateway = Gateway()
        async with gateway.open(served.service, "s") as address:
            url, key = await asyncio.to_thread(address) + "/v1/models", gateway.keys.key_of("s")
            return [await asyncio.to_thread(asked_by, user, url, key) for user in (NOBODY, os.geteuid())]

    other, own = asyncio.run(both())
    assert other.startswith("403") and own.startswith("200")


def test_the_log_probabilities_of_a_prompt_are_those_of_transformers(served: Served) -> None:
    engine: Any = served.service.source.engine  # type: ignore[attr-defined]
    prompts = ["to be or not", "x", "that is the question"]
    found = served.client.completions.create(
        model="tiny", prompt=prompts, max_tokens=1, temperature=0, logprobs=1, echo=True
    )
    for prompt, choice in zip(prompts, found.choices, strict=True):
        ids = encode(served.service, prompt)
        with torch.no_grad():
            expected = engine.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        said = choice.logprobs
        assert "".join(said.tokens) == choice.text and choice.text.startswith(prompt)
        assert [said.text_offset[place] for place in range(len(prompt))] == [*range(len(prompt))]
        assert (said.token_logprobs[0], said.top_logprobs[0], said.top_logprobs[-1]) == (None, None, None)
        chosen = [float(expected[place, token]) for place, token in enumerate(ids[1:])]
        assert said.token_logprobs[1 : len(ids)] == pytest.approx(chosen, abs=1e-5)
        best = [float(row.max()) for row in expected[:-1]]
        assert [max(top.values()) for top in said.top_logprobs[1 : len(ids)]] == pytest.approx(best, abs=1e-5)
        assert said.token_logprobs[-1] == pytest.approx(float(expected[-1].max()), abs=1e-5)  # drawn greedily
    alone = served.client.completions.create(model="tiny", prompt="to be", max_tokens=0, logprobs=0, echo=True)
    assert (alone.choices[0].text, alone.usage.completion_tokens) == ("to be", 0)
    status, answer = served.post("/v1/completions", {"prompt": "x", "max_tokens": 0})
    assert (status, "max_tokens = 0 generates nothing" in answer["error"]["message"]) == (400, True)


class Scripted:
    """Says what a model with tools would say, at each call the next."""

    positions: int | None = None
    in_flight = waiting = version = 0

    def __init__(self, tokenizer: Any, *texts: str) -> None:
        self.texts = [tokenizer(text)["input_ids"] for text in texts]
        self.admission = Admission()

    async def stream(self, prompt: Any, params: Any, seed: int, **_: Any) -> AsyncGenerator[Any]:
        ids = self.texts.pop(0)
        for token in ids[:-1]:
            yield Tokens("", [token], [-1.0], 0)
            await asyncio.sleep(0.005)
        yield Sampled(ids, [-1.0] * len(ids), [0] * len(ids), "stop")


def test_the_official_client_gets_tool_calls_whole_and_in_a_stream(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = 'I look.\n<tool_call>{"name": "look", "arguments": {"place": "here"}}</tool_call>'
    tokenizer: Any = served.service.tokenizer
    monkeypatch.setattr(served.service, "source", Scripted(tokenizer, said, said, "A tree."))
    messages: list[Any] = [USER]
    asked: dict[str, Any] = {"model": "tiny", "tools": TOOLS, "extra_headers": {"X-Session-ID": "tools"}}
    whole = served.client.chat.completions.create(messages=messages, **asked).choices[0]
    (call,) = whole.message.tool_calls
    assert (whole.finish_reason, whole.message.content, call.function.name) == ("tool_calls", "I look.", "look")
    assert json.loads(call.function.arguments) == {"place": "here"}
    with served.client.chat.completions.stream(messages=messages, **asked) as stream:
        final = stream.get_final_completion().choices[0]
    (streamed,) = final.message.tool_calls
    assert (final.finish_reason, final.message.content, streamed.function.name) == ("tool_calls", "I look.", "look")
    assert json.loads(streamed.function.arguments) == {"place": "here"}
    messages += [
        whole.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "a tree"},
    ]
    last = served.client.chat.completions.create(messages=messages, **asked).choices[0]
    assert (last.finish_reason, last.message.content) == ("stop", "A tree.")
    session = served.service.close_session("tools")
    assert session is not None and session.splits == 0


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="only Linux says who holds a connection")
@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=WITH_IPV6)])
@pytest.mark.parametrize("owner_of", [owner_of, _ask_kernel, _look_up_owner])
def test_the_owner_of_a_connection_is_who_holds_its_end(owner_of: Any, host: str) -> None:
    with listen(host, 0) as server, socket.create_connection(server.getsockname()[:2]) as client:
        ends = client.getsockname()[:2], server.getsockname()[:2]
        assert owner_of(*ends) == os.geteuid()
        accepted, _ = server.accept()
        client.close()
        assert owner_of(*ends) is None, "an end that is closed belongs to nobody, not to root"
        accepted.close()
