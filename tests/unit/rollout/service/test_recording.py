"""A call is recorded as a whole, or not at all."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest

from podium_agents.service.histories import message_key
from podium_agents.service.request_bodies import ChatRequest, Refusal
from podium_agents.service.session_recording import Sampled, Session
from tests.unit.rollout.service.scripted import LOOK, USER, say, scripted


def nested(depth: int) -> Any:
    found: Any = "x"
    for _ in range(depth):
        found = [found]
    return found


def test_a_call_whose_messages_cannot_be_compared_leaves_the_session_as_it_was() -> None:
    session = Session("deep")
    session.record([1], Sampled([2], [-1.0], [0], "stop"), [USER, {"role": "assistant", "content": "a"}])
    deep = {"role": "assistant", "content": nested(2 * sys.getrecursionlimit())}
    with pytest.raises(RecursionError):
        session.record([1, 2, 3], Sampled([4], [-1.0], [0], "stop"), [USER, deep])
    assert [row.ids for row in session.rows] == [[1, 2]]
    assert (len(session.calls), len(session.rows[0].turns), session.splits) == (1, 1, 0)


@pytest.mark.parametrize("depth", [10, 1500, 20_000])
def test_arguments_that_are_nested_too_deeply_are_compared_as_text(depth: int) -> None:
    arguments = "[" * depth + "]" * depth
    said = f'<tool_call>{{"name": "look", "arguments": {json.dumps(arguments)}}}</tool_call><|im_end|>'
    service, _, _ = scripted(said, "A tree.<|im_end|>")

    async def talk() -> list[str | None]:
        first = await say(service, [USER], tools=[LOOK])
        (call,) = first["tool_calls"]
        assert call["function"]["arguments"] == arguments
        result = {"role": "tool", "tool_call_id": call["id"], "content": "no"}
        return [first["content"], (await say(service, [USER, first, result], tools=[LOOK]))["content"]]

    assert asyncio.run(talk()) == [None, "A tree."]
    session = service.sessions["s"]
    assert (len(session.rows), session.splits) == (1, 0)
    assert [turn.call for turn in session.rows[0].turns] == [0, 1]


def test_a_request_of_any_depth_is_answered_or_refused() -> None:
    service, _, _ = scripted()
    for depth in (*range(10, sys.getrecursionlimit(), 10), 10 * sys.getrecursionlimit()):
        arguments: Any = {"x": nested(depth)}
        call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}
        messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
        for session in ("", "deep"):
            try:
                assert service.chat(ChatRequest(messages=messages), session).prompt
            except Refusal as refusal:
                assert (refusal.status, refusal.param) == (400, "messages")


def test_arguments_are_equal_as_an_object_and_as_its_text() -> None:
    def called(arguments: Any) -> str:
        return message_key({"role": "assistant", "tool_calls": [{"id": "1", "function": {"arguments": arguments}}]})

    assert called('{"b": 1,  "a": "ö"}') == called({"a": "ö", "b": 1})
    assert called('{"a": 1}') != called('{"a": "1"}')
    assert called("not JSON") != called('"not JSON"')
