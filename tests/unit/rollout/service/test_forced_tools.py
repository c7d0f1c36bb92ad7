"""Calls that a request forces, in the forms of six families' chat templates."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from podium.rollout.sampling import SamplingParams
from podium_agents.service.answer_forms import AnswerForms
from podium_agents.service.request_bodies import ChatRequest, Refusal
from podium_agents.service.service import Service
from podium_agents.service.structured import schema_rule
from podium_serve.texts import encode
from tests.unit.rollout.service.engine import random_service
from tests.unit.rollout.service.scripted import CHATML, SPECIAL, TOKEN, USER, posted
from tests.unit.rollout.service.spelling import KINDS, make_tokenizer
from tests.unit.rollout.service.test_masked_requests import recorded_logprobs, trained_logprobs
from tests.unit.rollout.service.test_structured import answers, json_schema, refusal
from tests.unit.rollout.test_templates import FAMILIES, Family, tokenizer_of

pytest.importorskip("llguidance")

WITH_TOOLS = [family for family in FAMILIES if family.tools]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool("look", place={"enum": ["here", "there"]}),
    tool("add-up", a={"type": "integer", "maximum": 99}, b={"type": "boolean"}),
]
SHORT = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
NAMED = {"type": "function", "function": {"name": "add-up"}}


def check_call(message: Any, names: set[str]) -> None:
    """The message is one call of one of these tools, with arguments by its schema."""
    (call,) = message["tool_calls"]
    assert call["function"]["name"] in names
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "look":
        assert {**arguments} in ({"place": "here"}, {"place": "there"})
    else:
        assert [*map(type, (arguments["a"], arguments["b"]))] == [int, bool]
    assert message["content"] is None


def family_service(family: Family, rules: SamplingParams | None = None) -> Service:
    ends = [family.end, *([family.end_of_call] if family.end_of_call else [])]
    return random_service(tokenizer_of(family), ends, rules=rules)


@pytest.mark.everyday("qwen2_5", "gpt_oss")
@pytest.mark.parametrize("family", WITH_TOOLS, ids=lambda family: family.name)
def test_a_forced_call_is_written_as_the_template_writes_it(family: Family) -> None:
    service = family_service(family)
    for choice, names in (("required", {"look", "add-up"}), (NAMED, {"add-up"})):
        drawn = answers(service, *({"tools": TOOLS, "tool_choice": choice, "seed": seed} for seed in range(4)))
        finished = [answer for answer in drawn if answer.finish_reason != "length"]
        assert len(finished) >= 2, [service.decode(answer.sampled.ids, special=True) for answer in drawn]
        for answer in finished:
            assert answer.finish_reason == "tool_calls"
            check_call(answer.message, names)


@pytest.mark.parametrize("kind", KINDS)
def test_a_forced_call_by_every_kind_of_tokenizer(kind: str) -> None:
    service = random_service(make_tokenizer(kind))
    (answer,) = answers(service, {"tools": TOOLS, "tool_choice": NAMED})
    check_call(answer.message, {"add-up"})


@pytest.mark.everyday("qwen2_5", "mistral")
@pytest.mark.parametrize("family", WITH_TOOLS, ids=lambda family: family.name)
def test_with_tools_and_a_schema_the_model_chooses_between_the_two(family: Family) -> None:
    service = family_service(family)
    drawn = answers(
        service, *({"tools": TOOLS, "response_format": json_schema(SHORT), "seed": seed} for seed in range(16))
    )
    calls = [answer for answer in drawn if answer.finish_reason == "tool_calls"]
    texts = [answer for answer in drawn if answer.finish_reason == "stop"]
    for answer in calls:
        check_call(answer.message, {"look", "add-up"})
    for answer in texts:
        assert json.loads(answer.message["content"])["ok"] in (True, False)
    assert calls or texts
    (alone,) = answers(service, {"tools": TOOLS, "tool_choice": "none", "response_format": json_schema(SHORT)})
    assert "tool_calls" not in alone.message


@pytest.mark.everyday("gpt_oss")
@pytest.mark.parametrize("family", WITH_TOOLS, ids=lambda family: family.name)
def test_forced_calls_go_on_as_a_conversation_and_are_trained_as_recorded(family: Family) -> None:
    service = family_service(family, SamplingParams(max_new_tokens=150))
    service.open_session("s", seed=2)

    async def talk() -> None:
        messages: list[Any] = [USER]
        for choice in (NAMED, "required", "auto"):
            wish: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice}
            answer = await service.answer(service.chat(ChatRequest(messages=messages, **wish), "s"))
            messages.append(dict(answer.message))
            for call in answer.message.get("tool_calls") or ():
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": "ok"})
            if messages[-1]["role"] == "assistant":
                messages.append(USER)

    asyncio.run(talk())
    session = service.close_session("s")
    assert session is not None
    for row in session.rows:
        assert trained_logprobs(service, row) == pytest.approx(recorded_logprobs(row), abs=1e-5)
    assert sum(sum(row.sampled) for row in session.rows) == sum(len(call) for call in map(_sampled, session.rows))


def _sampled(row: Any) -> list[int]:
    return [token for token, sampled in zip(row.ids, row.sampled, strict=True) if sampled]


def test_what_cannot_be_forced_is_refused_by_name() -> None:
    service = random_service(make_tokenizer("bytes"))
    with pytest.raises(ValueError, match="the request has no tools"):
        ChatRequest(messages=[USER], tool_choice="required")
    with pytest.raises(ValueError, match="this service knows auto, none, required"):
        ChatRequest(messages=[USER], tools=TOOLS, tool_choice={"type": "allowed_tools"})
    wrong = [tool("look", place={"type": "string", "format": "odd"})]
    refused = refusal(service, tools=wrong, tool_choice="required")
    assert refused.message == "tools.0.function.parameters.properties.place: Unknown format: odd"
    odd = CHATML.replace("{{ c.function | tojson }}", "{{ c.function.name | upper }}!")
    service = random_service(make_tokenizer("bytes", odd, SPECIAL))
    refused = refusal(service, tools=TOOLS, tool_choice="required")
    assert "cannot force a tool call of this model: its chat template writes a call as" in refused.message
    assert (refused.status, refused.param) == (400, "tool_choice")


THINKING = CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")


@pytest.mark.parametrize("special", [SPECIAL, (*SPECIAL, "<think>", "</think>")], ids=["text", "tokens"])
def test_reasoning_that_the_prompt_opens_comes_before_the_answer(special: tuple[str, ...]) -> None:
    service = random_service(make_tokenizer("bytes", THINKING, special))
    ends = encode(service, "</think>")[-1:] if len(special) > 3 else []
    bias = {"logit_bias": {str(end): 9 for end in ends}}
    drawn = answers(
        service,
        *({"response_format": json_schema(SHORT), "seed": seed, "max_tokens": 1500, **bias} for seed in range(6)),
    )
    finished = [answer for answer in drawn if answer.finish_reason == "stop"]
    for answer in finished:
        assert answer.message["reasoning_content"] is not None
        assert json.loads(answer.message["content"])["ok"] in (True, False)
    assert finished or not ends, "a random model rarely spells the end of its reasoning"


def test_a_model_that_knows_thinking_may_think_before_its_answer() -> None:
    service = random_service(make_tokenizer("bytes", CHATML, (*SPECIAL, "<think>", "</think>")))
    opener, closer = (encode(service, text)[-1] for text in ("<think>", "</think>"))
    wish = {"response_format": json_schema(SHORT), "max_tokens": 900}
    thought = {**wish, "logit_bias": {str(opener): 99, str(closer): 8}}
    (first, second) = answers(service, {**thought, "seed": 1}, {**wish, "seed": 1, "logit_bias": {str(opener): -100}})
    assert first.sampled.ids[0] == opener
    if first.finish_reason == "stop":
        assert first.message["reasoning_content"] is not None
    assert json.loads(second.message["content"])["ok"] in (True, False)


def test_a_form_keeps_what_stands_around_a_call() -> None:
    forms: AnswerForms = random_service(make_tokenizer("bytes")).form.forms
    text = forms.grammar(None, {'a"b': schema_rule({"type": "object"}, "x")}, thinks=False)
    assert r"a\\\"b" in text
    with pytest.raises(Refusal):
        schema_rule(None, "x")


@pytest.mark.everyday("gpt_oss")
@pytest.mark.parametrize(
    "family",
    (FAMILIES[0], FAMILIES[4], FAMILIES[5]),
    ids=lambda family: family.name,
)
def test_a_generator_elsewhere_draws_by_the_same_grammar(family: Family) -> None:
    pytest.importorskip("uvicorn")
    from podium_serve.app import make_app
    from podium_serve.generator_client import RemoteTokens
    from podium_serve.server import Server

    wishes = [{"tools": TOOLS, "tool_choice": NAMED}, {"response_format": json_schema(SHORT)}]

    async def talk(run: Service) -> list[Any]:
        run.open_session("s", seed=3)
        asked = [run.chat(ChatRequest(messages=[USER], **wish), "s") for wish in wishes]
        found = [await run.answer(question) for question in asked]
        return [(answer.message["content"], answer.sampled.ids, answer.sampled.masks) for answer in found]

    async def talk_remotely(run: Service, source: RemoteTokens) -> list[Any]:
        async with source.connected():
            return await talk(run)

    rules = SamplingParams(max_new_tokens=120)
    here = asyncio.run(talk(family_service(family, rules)))
    with Server(make_app(family_service(family), TOKEN)) as server:
        there = family_service(family, rules)
        there.source = source = RemoteTokens([server.url], TOKEN)  # type: ignore[assignment] - a source as any other
        assert asyncio.run(talk_remotely(there, source)) == here


def test_other_dialects_and_streams_have_forms_too() -> None:
    pytest.importorskip("uvicorn")
    from podium_serve.app import make_app
    from podium_serve.server import Server

    tool_of = {"name": "look", "parameters": TOOLS[0]["function"]["parameters"]}
    with Server(make_app(random_service(make_tokenizer("bytes")), TOKEN)) as server:

        def post(path: str, **body: Any) -> Any:
            status, answer = posted(f"{server.url}{path}", body)
            assert status == 200, answer
            return answer

        form = {"type": "json_schema", "name": "out", "schema": SHORT}
        said = json.loads(post("/v1/responses", input="x", text={"format": form}))
        assert json.loads(said["output"][-1]["content"][0]["text"])["ok"] in (True, False)
        called = json.loads(
            post("/v1/responses", input="x", tools=[{"type": "function", **tool_of}], tool_choice="required")
        )
        assert [item["name"] for item in called["output"] if item["type"] == "function_call"] == ["look"]
        used = json.loads(
            post(
                "/v1/messages",
                messages=[USER], max_tokens=300, tool_choice={"type": "any"},
                tools=[{"name": "look", "input_schema": tool_of["parameters"]}],
            )
        )  # fmt: skip
        assert [part["name"] for part in used["content"] if part["type"] == "tool_use"] == ["look"]
        streamed = post("/v1/chat/completions", messages=[USER], stream=True, response_format=json_schema(SHORT))
        chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
        text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
        assert json.loads(text)["ok"] in (True, False)
        status, answer = posted(
            f"{server.url}/v1/chat/completions",
            {"messages": [USER], "stream": True, "response_format": json_schema({"type": "foo"})},
        )
        assert (status, "Invalid type: foo" in answer) == (400, True), "a stream is refused before it begins"
        ids = json.loads(
            post(
                "/inference/v1/generate",
                token_ids=[70, 71],
                sampling_params={"structured_outputs": {"regex": "[0-9]{3}"}},
            )
        )
        assert len(ids["choices"][0]["masks"]["of"]) == len(ids["choices"][0]["token_ids"])
        status, answer = posted(
            f"{server.url}/v1/chat/completions",
            {"messages": [USER], "logprobs": True, "top_logprobs": 2, "response_format": json_schema(SHORT)},
        )
        assert (status, "top_logprobs: a form or logit_bias leaves out" in answer) == (400, True)
