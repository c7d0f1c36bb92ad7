"""A conversation that goes on with other tools: the model reads those of the request."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.unit.rollout.service.scripted import FLY, LOOK, USER, say, scripted

NEXT = {"role": "user", "content": "and now?"}


@pytest.mark.parametrize(
    ("changed", "read"), [({"tools": [FLY]}, [FLY]), ({"tools": [LOOK], "tool_choice": "none"}, []), ({}, [])]
)
def test_the_prompt_has_the_tools_of_the_request(changed: dict[str, Any], read: list[Any]) -> None:
    service, source, _ = scripted("A.<|im_end|>", "B.<|im_end|>")

    async def talk() -> list[Any]:
        messages = [USER, await say(service, [USER], tools=[LOOK]), NEXT]
        await say(service, messages, **changed)
        return messages

    messages = asyncio.run(talk())
    assert source.prompts[1] == service.form.prompt(messages, read)
    session = service.sessions["s"]
    assert (session.splits, [len(row.turns) for row in session.rows]) == (1, [1, 1])


def test_equal_tools_go_on_in_the_row() -> None:
    service, _, _ = scripted("A.<|im_end|>", "B.<|im_end|>")
    again = {"function": dict(reversed(LOOK["function"].items())), "type": "function"}  # type: ignore[attr-defined]

    async def talk() -> None:
        await say(service, [USER, await say(service, [USER], tools=[LOOK]), NEXT], tools=[again])

    asyncio.run(talk())
    assert (service.sessions["s"].splits, len(service.sessions["s"].rows)) == (0, 1)


def test_of_equal_conversations_the_one_with_the_same_tools_goes_on() -> None:
    service, source, _ = scripted("A.<|im_end|>", "A.<|im_end|>", "B.<|im_end|>")

    async def talk() -> None:
        answer = await say(service, [USER], tools=[LOOK])
        await say(service, [USER], tools=[FLY])
        await say(service, [USER, answer, NEXT], tools=[LOOK])

    asyncio.run(talk())
    session = service.sessions["s"]
    assert (session.splits, [len(row.turns) for row in session.rows]) == (0, [2, 1])
    assert source.prompts[2][: len(source.prompts[0])] == source.prompts[0]
