"""Fields of a request that the chat template does not write are refused as those of the data are."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from podium.rollout.service.wire import ChatRequest, Refusal
from tests.unit.rollout.service.scripted import USER, say, scripted

CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
END = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}" + END
WRITES_ALL = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.reasoning_content or m.reasoning or '' }}{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls else '' }}"
) + END


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
