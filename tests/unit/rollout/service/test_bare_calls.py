"""Calls of tools that are a bare object, as Llama 3 writes them: what is one, and what is an answer that is JSON."""

from __future__ import annotations

from typing import Any

import pytest

from podium_agents.service.request_bodies import ChatRequest
from podium_agents.service.session_recording import Sampled
from podium_agents.service.tool_calls import Offer, read_bare
from tests.unit.rollout.service.scripted import CHATML, FLY, LOOK, USER, scripted

MARKED = "\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
TEMPLATE = CHATML.replace(
    MARKED, '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
)
PERSON = {"type": "json_schema", "json_schema": {"name": "person", "schema": {"type": "object"}}}

CALLS = [
    ('{"name": "look", "parameters": {"place": "a"}}', "look"),
    ('{"name": "look", "arguments": {"place": "a"}}', "look"),
    ('{"type": "function", "name": "look", "parameters": {}}', "look"),
    ('{"name": "look", "parameters": {}, "id": "call_1"}', "look"),
    ('{"name": "look", "parameters": "{\\"place\\": \\"a\\"}"}', "look"),
    ('{"name": "look", "parameters": ["a"]}', "look"),  # the model hears that these are no arguments
]
UNKNOWN = [
    ('{"name": "swim", "parameters": {"place": "a"}}', "swim"),  # the model hears that there is no such tool
    ('{"type": "function", "name": "swim", "arguments": "{}"}', "swim"),
]
NAMES = [('{"name": "look"}', "look"), ('{"name": "fly", "type": "function"}', "fly")]
ANSWERS = [
    '{"name": "Ada", "age": 36}',
    '{"name": "look", "age": 36}',
    '{"name": "Ada"}',
    '{"name": "Ada", "type": "person"}',
    '{"name": "look", "type": "verb"}',
    '{"name": "Ada", "arguments": "She found none."}',
    '{"name": "Ada", "parameters": ["height", "weight"]}',
    '{"name": "look", "parameters": {}, "age": 36}',
    '{"name": "look", "parameters": {}, "arguments": {}}',
    '{"name": ["look"], "parameters": {}}',
    '[{"name": "look", "parameters": {}}]',
    '{"age": 36}',
]


def names_of(text: str, **offer: Any) -> list[str]:
    reply = read_bare(text, Offer(["look", "fly"], **offer))
    assert reply.content == ("" if reply.tool_calls else text)
    return [call.name for call in reply.tool_calls]


@pytest.mark.parametrize(("text", "name"), [*CALLS, *UNKNOWN, *NAMES])
def test_an_object_with_the_keys_of_a_call_is_one(text: str, name: str) -> None:
    assert names_of(text) == [name]
    assert names_of(f"<|python_tag|>{text}") == [name]
    assert not read_bare(text, Offer()).tool_calls


@pytest.mark.parametrize("text", ANSWERS)
def test_an_object_with_other_keys_is_an_answer(text: str) -> None:
    assert names_of(text) == []
    assert names_of(text, has_form=True) == []


@pytest.mark.parametrize(("text", "name"), [*CALLS, *UNKNOWN, *NAMES])
def test_where_the_form_of_an_answer_is_prescribed_only_whole_calls_of_tools_are_calls(text: str, name: str) -> None:
    assert names_of(text, has_form=True) == ([name] if (text, name) in CALLS else [])


@pytest.mark.parametrize(
    ("text", "wishes", "is_call"),
    [
        (ANSWERS[0], {}, False),
        (ANSWERS[0], {"response_format": PERSON}, False),
        (UNKNOWN[0][0], {}, True),
        (UNKNOWN[0][0], {"response_format": PERSON}, False),
        (UNKNOWN[0][0], {"response_format": {"type": "json_object"}}, False),
        (UNKNOWN[0][0], {"structured_outputs": {"json": {"type": "object"}}}, False),
        (UNKNOWN[0][0], {"response_format": {"type": "text"}}, True),
        (CALLS[0][0], {"response_format": PERSON}, True),
        (NAMES[0][0], {"response_format": PERSON}, False),
        (NAMES[0][0], {}, True),
    ],
)
def test_a_service_reads_an_answer_as_its_request_lets_it_be(text: str, wishes: dict[str, Any], is_call: bool) -> None:
    service, _, tokenizer = scripted(template=TEMPLATE)
    question = service.chat(ChatRequest(messages=[USER], tools=[LOOK, FLY], **wishes), "s")
    ids = tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False)
    (answer,) = service.read(question, [Sampled(ids, [-1.0] * len(ids), [0] * len(ids), "stop")])
    assert ("tool_calls" in answer.message) == is_call == (answer.finish_reason == "tool_calls")
    assert answer.message["content"] == (None if is_call else text)
