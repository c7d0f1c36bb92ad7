"""What a request says of single calls: that an answer has no more than one, and that the tool of one has failed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from podium_agents.service.request_bodies import ChatRequest, Refusal
from podium_serve.messages import Messages
from podium_serve.streaming import stream_answers
from tests.unit.rollout.service.scripted import CHATML, FLY, LOOK, USER, say, scripted

FIRST, SECOND = (f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>' for name in ("look", "fly"))
TOOLS = [LOOK, FLY]


def names_of(message: dict[str, Any]) -> list[str]:
    return [call["function"]["name"] for call in message["tool_calls"]]


@pytest.mark.parametrize(
    ("wish", "names", "sampled"),
    [
        ({"parallel_tool_calls": False}, ["look"], f"So.\n{FIRST}"),
        ({"parallel_tool_calls": True}, ["look", "fly"], f"So.\n{FIRST}\n{SECOND}<|im_end|>"),
        ({}, ["look", "fly"], f"So.\n{FIRST}\n{SECOND}<|im_end|>"),
    ],
)
def test_an_answer_ends_with_its_first_call_where_the_request_wants_one(
    wish: dict[str, Any], names: list[str], sampled: str
) -> None:
    service, source, tokenizer = scripted(f"So.\n{FIRST}\n{SECOND}<|im_end|>", "Done.<|im_end|>")

    async def talk() -> None:
        answer = await say(service, [USER], tools=TOOLS, **wish)
        assert names_of(answer) == names
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "a"} for call in answer["tool_calls"]]
        await say(service, [USER, answer, *results], tools=TOOLS, **wish)

    asyncio.run(talk())
    before, after = source.prompts
    assert tokenizer.decode(after[len(before) :]).startswith(f"{sampled.removesuffix('<|im_end|>')}<|im_end|>\n")
    session = service.sessions["s"]
    assert (session.splits, len(session.rows)) == (0, 1), "the next turn goes on with what was sampled"
    assert tokenizer.decode(session.rows[0].ids[len(before) :][: len(tokenizer.encode(sampled))]) == sampled


def test_a_stream_and_an_answer_with_one_call_are_as_they_were_drawn() -> None:
    service, _, _ = scripted(f"{FIRST}{SECOND}<|im_end|>", f"{FIRST}<|im_end|>")

    async def draw() -> list[Any]:
        request = ChatRequest(messages=[USER], tools=TOOLS, parallel_tool_calls=False)
        answers = list[Any]()
        for name in ("s", "t"):
            answers += [[piece async for _, piece in stream_answers(service, service.chat(request, name))][-1]]
        return answers

    cut, whole = asyncio.run(draw())
    assert [names_of(answer.message) for answer in (cut, whole)] == [["look"], ["look"]]
    assert cut.finish_reason == whole.finish_reason == "tool_calls"
    assert len(cut.sampled.ids) == len(whole.sampled.ids) - 1, "a turn of one call keeps its end"


def test_an_answer_that_a_text_ends_has_one_call_too() -> None:
    """What is trained is what the next prompt has."""
    service, _, tokenizer = scripted(f"{FIRST}{SECOND}So. And more<|im_end|>")

    async def draw() -> Any:
        request = ChatRequest(messages=[USER], tools=TOOLS, parallel_tool_calls=False, stop=["So."])
        return await service.answer(service.chat(request, "s"))

    answer = asyncio.run(draw())
    assert names_of(answer.message) == ["look"]
    assert tokenizer.decode(answer.sampled.ids) == FIRST


@pytest.mark.parametrize(
    ("written", "said", "sampled"),
    [
        (
            "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}",
            '[TOOL_CALLS]look[ARGS]{"a": {"b": 1}}[TOOL_CALLS]fly[ARGS]{}<|im_end|>',
            '[TOOL_CALLS]look[ARGS]{"a": {"b": 1}}',
        ),
        (
            "[TOOL_CALLS][{{ c.function | tojson }}]",
            '[TOOL_CALLS][{"name": "look"}, {"name": "fly"}]<|im_end|>',
            '[TOOL_CALLS][{"name": "look"}, {"name": "fly"}]<|im_end|>',  # in one list, of which the first is returned
        ),
    ],
)
def test_forms_whose_calls_have_no_end_give_the_first_one(written: str, said: str, sampled: str) -> None:
    call = "\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
    service, _, tokenizer = scripted(said, template=CHATML.replace(call, written))

    async def talk() -> None:
        request = ChatRequest(messages=[USER], tools=TOOLS, parallel_tool_calls=False)
        answer = await service.answer(service.chat(request, "s"))
        assert names_of(dict(answer.message)) == ["look"]
        assert tokenizer.decode(answer.sampled.ids) == sampled

    asyncio.run(talk())


@pytest.mark.parametrize(
    ("content", "failed", "read"),
    [
        ("No such file.", True, "error: No such file."),
        ([{"type": "text", "text": "No such file."}], True, "error: No such file."),
        ("Error: no such file.", True, "Error: no such file."),
        ("<tool_use_error>No such file.</tool_use_error>", True, "<tool_use_error>No such file.</tool_use_error>"),
        ("errors: 0", True, "error: errors: 0"),
        ("No such file.", False, "No such file."),
        ("No such file.", None, "No such file."),
    ],
)
def test_the_failure_of_a_tool_is_in_the_text_that_the_model_reads(
    content: Any, failed: bool | None, read: str
) -> None:
    result = {"type": "tool_result", "tool_use_id": "1", "content": content, "is_error": failed}
    call = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    messages = [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    request = Messages().read({"model": "m", "max_tokens": 9, "messages": messages})
    assert request["messages"][-1] == {"role": "tool", "tool_call_id": "1", "content": read}


def test_a_failure_that_is_neither_true_nor_false_is_refused() -> None:
    result = {"type": "tool_result", "tool_use_id": "1", "content": "a", "is_error": "yes"}
    with pytest.raises(Refusal, match=r"messages\.0\.content\.0\.is_error.*expected true or false"):
        Messages().read({"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": [result]}]})
