"""Fields of a request that the chat template does not write are refused as those of the data are."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from podium_agents.service.request_bodies import ChatRequest, Refusal
from tests.unit.rollout.service.scripted import USER, say, scripted

CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
END = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}" + END
WRITES_ALL = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.reasoning_content or m.reasoning or '' }}{{ m.content }}"
) + (CALLS + END)


def assistant(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "so", **fields}


@pytest.mark.parametrize(
    ("messages", "tools", "named"),
    [
        ([USER], [TOOL], "tools"),
        ([USER, assistant(tool_calls=[CALL]), {"role": "tool", "content": "1"}], None, "message 2 has tool_calls"),
        ([USER, assistant(reasoning_content="hm"), USER], None, "message 2 has reasoning_content"),
        ([USER, assistant(reasoning="hm"), USER], None, "message 2 has reasoning"),
        ([{**USER, "documents": ["all that one has to know"]}], None, "message 1 has documents"),
    ],
)
def test_what_the_template_cannot_write_is_refused_by_name(messages: list[Any], tools: Any, named: str) -> None:
    request = ChatRequest(messages=messages, tools=tools)
    for system_prompt in ("", "be brief"):
        service, _, _ = scripted(template=PLAIN, system_prompt=system_prompt)
        with pytest.raises(Refusal, match=rf"{named}.*chat template") as caught:
            service.chat(request, "s")
        assert (caught.value.status, caught.value.param) == (400, "messages")
    if "documents" not in named:
        scripted(template=WRITES_ALL)[0].chat(request, "s")


PROPERTIES = {
    "city": {"type": "string", "description": "Where to look.", "title": "City"},
    "unit": {"type": "string", "enum": ["celsius", "kelvin"]},
    "when": {"type": "object", "properties": {"day": {"type": "integer", "description": "From today on."}}},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["city"], "additionalProperties": False}
WEATHER = {"name": "weather", "description": "Tell the weather.", "parameters": PARAMETERS, "strict": True}
LISTED = (
    "{% for t in tools or [] %}{% set f = t.function %}NAME{{ f.name }} SAYS{{ f.description }}\n{% for n, p in "
    "f.parameters.properties.items() %}PARAM{{ n }} HELP{{ p.description }} ENUM{{ p.enum }} INNER{{ p.properties }}\n"
    "{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ("{{ f.name }}", "tool 1 has function.name = 'weather'"),
        ("{{ f.description }}", "tool 1 has function.description = 'Tell the weather.'"),
        ("{{ n }}", "tool 1 has function.parameters.properties = 'city'"),
        ("{{ p.description }}", "tool 1 has function.parameters.properties.city.description = 'Where to look.'"),
        ("{{ p.enum }}", "tool 1 has function.parameters.properties.unit.enum.0 = 'celsius'"),
        ("{{ p.properties }}", "tool 1 has function.parameters.properties.when.properties = 'day'"),
    ],
)
def test_each_part_of_a_tool_that_the_template_drops_is_refused_by_name(part: str, named: str) -> None:
    """The title, the type and what is strict are told to programs, and a template may leave them out."""
    request = ChatRequest(messages=[USER], tools=[{"type": "function", "function": WEATHER}])
    service, _, _ = scripted(template=LISTED + PLAIN)
    service.chat(request)
    service, _, _ = scripted(template=LISTED.replace(part, "") + PLAIN)
    with pytest.raises(Refusal, match=f"{named}, which the chat template does not write"):
        service.chat(request)


@pytest.mark.parametrize(
    ("writes", "passes"),
    [("loop.last and m.role == 'user'", True), ("loop.first", True), ("messages | length > 9", False)],
)
def test_tools_that_are_written_with_the_question_alone_pass(writes: str, passes: bool) -> None:
    """A template may leave them out once their results have come. One that never writes them is refused."""
    template = "{% for m in messages %}{% if tools and WRITES %}{{ tools }}{% endif %}<|im_start|>{{ m.role }}\n"
    template += "{{ m.content }}" + CALLS
    talk = [USER, assistant(tool_calls=[CALL]), {"role": "tool", "content": "1"}]
    service, _, _ = scripted(template=template.replace("WRITES", writes) + END)
    for messages in ([USER], talk):
        request = ChatRequest(messages=messages, tools=[TOOL])
        if passes:
            service.chat(request)
        else:
            with pytest.raises(Refusal, match="there are tools, and the chat template does not write them"):
                service.chat(request)


XML = (  # as Qwen3-Coder writes calls
    "{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>\n{% for n, v in "
    "c.function.arguments | items %}<parameter={{ n }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    "{% endfor %}"
)
MARKED = (  # as DeepSeek does
    "{% for c in m.tool_calls or [] %}<|calls|>function<|sep|>{{ c.function.name }}\n```json\n"
    "{{ c.function.arguments | tojson }}\n```{% endfor %}"
)
PYTHONIC = (
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}({% for n, v in c.function.arguments | items %}{{ n }}="
    "{{ v | tojson }}{% endfor %})]{% endfor %}"
)


@pytest.mark.parametrize("calls", [XML, MARKED, PYTHONIC, "{{ m.tool_calls | tojson if m.tool_calls else '' }}"])
def test_tools_are_refused_where_calls_are_written_in_a_form_that_nobody_reads(calls: str) -> None:
    """All that the model called would be text of its answer, and no tool would ever run."""
    tools = "{{ tools | tojson if tools else '' }}"
    service, _, _ = scripted(template=tools + PLAIN.replace(END, calls + END))
    with pytest.raises(
        Refusal, match=r"writes a call of a tool as .*look.*does not read this form.*data\.chat_template"
    ) as caught:
        service.chat(ChatRequest(messages=[USER], tools=[TOOL]))
    assert caught.value.status == 400
    service.chat(ChatRequest(messages=[USER], tools=[TOOL], tool_choice="none"))
    service.chat(ChatRequest(messages=[USER]))
    service, _, _ = scripted(template=tools + PLAIN)  # the system message says how calls are written, if anything does
    service.chat(ChatRequest(messages=[USER], tools=[TOOL]))


def test_meta_data_of_clients_are_no_matter() -> None:
    service, source, _ = scripted("A.<|im_end|>")
    asyncio.run(say(service, [{**USER, "name": "ann", "id": "m1", "annotations": [], "refusal": None, "audio": None}]))
    assert len(source.prompts) == 1


def test_reasoning_that_the_model_said_may_come_back() -> None:
    """Clients send it with the answer, also after they have edited its text. Another reasoning is refused."""
    service, source, _ = scripted("<think>hm</think>A.<|im_end|>", "B.<|im_end|>", "C.<|im_end|>", template=PLAIN)
    session: list[Any] = []

    async def talk() -> None:
        answer = await say(service, [USER])
        assert answer["reasoning_content"] == "hm"
        session.extend([USER, answer, USER])
        await say(service, session)
        await say(service, [USER, {**answer, "content": "edited"}, USER])
        with pytest.raises(Refusal, match="message 2 has reasoning_content"):
            await say(service, [USER, {**answer, "content": "edited", "reasoning_content": "edited too"}, USER])

    asyncio.run(talk())
    assert len(source.prompts) == 3
