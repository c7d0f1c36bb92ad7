"""A history is known again by what the template reads of it, whatever a client has made of an answer on its way."""

from __future__ import annotations

import asyncio
import copy
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from podium_agents.service.histories import MessageReader, message_key
from podium_agents.service.session_recording import Session
from tests.unit.rollout.service.scripted import CHATML, USER, say, scripted

Change = Callable[[dict[str, Any]], object]

SAID = (
    "<think>hm</think>Let me look.\n<tool_call>\n"
    '{"name": "look", "arguments": {"place": "a", "far": null, "near": {"deep": 1.0}}}\n</tool_call>\n<tool_call>\n'
    '{"name": "look", "arguments": {"place": "b"}}\n</tool_call><|im_end|>'
)
SCHEMA = {
    "type": "object",
    "properties": {
        "place": {"type": "string"},
        "far": {"anyOf": [{"type": "boolean"}, {"type": "null"}], "default": None},
        "times": {"type": "integer", "default": 3},
        "unit": {"type": ["string", "null"]},
        "near": {"anyOf": [{"$ref": "#/$defs/Near"}, {"type": "null"}]},
    },
    "required": ["place"],
    "$defs": {"Near": {"type": "object", "properties": {"deep": {"type": "number"}, "wide": {"default": [1]}}}},
}
LOOK = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}


def rename(message: dict[str, Any]) -> None:
    for number, call in enumerate(message["tool_calls"]):
        call["id"] = f"toolu_{number}"


def arguments(change: Callable[[dict[str, Any]], object], dumps: Callable[[Any], Any] = json.dumps) -> Change:
    def apply(message: dict[str, Any]) -> None:
        function = message["tool_calls"][0]["function"]
        parsed = json.loads(function["arguments"])
        change(parsed)
        function["arguments"] = dumps(parsed)

    return apply


UNCHANGED: dict[str, Change] = {
    "reasoning_details": lambda m: m.update(reasoning_details=[{"type": "reasoning.text", "text": "hm"}]),
    "reasoning left out": lambda m: m.pop("reasoning_content"),
    "reasoning summarized": lambda m: m.update(reasoning_content="It thought."),
    "thinking_blocks": lambda m: m.update(thinking_blocks=[{"type": "thinking", "thinking": "hm", "signature": "x"}]),
    "a thinking part": lambda m: m.update(
        content=[{"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "Let me look."}]
    ),
    "cache_control": lambda m: m.update(
        content=[{"type": "text", "text": "Let me look.", "cache_control": {"type": "ephemeral"}}]
    ),
    "cache_control of the message": lambda m: m.update(cache_control={"type": "ephemeral"}),
    "content in parts": lambda m: m.update(
        content=[{"type": "text", "text": "Let me "}, {"type": "output_text", "text": "look.", "annotations": []}]
    ),
    "id": lambda m: m.update(id="msg_1"),
    "phase": lambda m: m.update(phase="commentary"),
    "name": lambda m: m.update(name="clerk"),
    "status and type": lambda m: m.update(status="completed", type="message"),
    "usage": lambda m: m.update(response_metadata={"tokens": 3, "model_name": "policy"}, usage=[1, 2]),
    "null fields": lambda m: m.update(dict.fromkeys(("refusal", "audio", "function_call", "annotations", "x"))),
    "empty fields": lambda m: m.update(annotations=[], images=[], provider_specific_fields={}, prefix=""),
    "white space": lambda m: m.update(content=" Let me look.\n\n"),
    "index of calls": lambda m: [call.update(index=n) for n, call in enumerate(m["tool_calls"])],
    "more of calls": lambda m: [call.update(caller={"type": "direct"}, extra_content=1) for call in m["tool_calls"]],
    "a name beside the function": lambda m: m["tool_calls"][0].update(name="look", args={"place": "a"}),
    "no type of calls": lambda m: [call.pop("type") for call in m["tool_calls"]],
    "other ids of calls": rename,
    "arguments in another order": arguments(lambda a: a.update(place=a.pop("place"))),
    "arguments written anew": arguments(lambda a: None, lambda a: json.dumps(a, indent=2)),
    "arguments as an object": arguments(lambda a: None, lambda a: a),
    "a default added": arguments(lambda a: a.update(times=3)),
    "a null added": arguments(lambda a: a.update(unit=None)),
    "a null left out": arguments(lambda a: a.pop("far")),
    "a deep default added": arguments(lambda a: a["near"].update(wide=[1])),
    "a fraction of zero left out": arguments(lambda a: a["near"].update(deep=1)),
    "a fraction of zero added": arguments(lambda a: a.update(times=3.0)),
}
EDITS: dict[str, tuple[Change, str]] = {
    "text": (lambda m: m.update(content="Let me look again."), "content = 'Let me look again.'"),
    "text in a part": (lambda m: m.update(content=[{"type": "text", "text": "So."}]), "content = 'So.'"),
    "no text": (lambda m: m.update(content=None), "content = ''"),
    "a value": (arguments(lambda a: a.update(place="b")), r"tool_calls\[0\].function.arguments"),
    "a value in place of a null": (arguments(lambda a: a.update(far=False)), r"tool_calls\[0\].function.arguments"),
    "a deep value": (arguments(lambda a: a["near"].update(deep=2)), r"tool_calls\[0\].function.arguments"),
    "another type": (arguments(lambda a: a["near"].update(deep=True)), r"tool_calls\[0\].function.arguments"),
    "an argument less": (arguments(lambda a: a.pop("place")), r"tool_calls\[0\].function.arguments"),
    "an argument more": (arguments(lambda a: a.update(other=None)), r"tool_calls\[0\].function.arguments"),
    "another default": (arguments(lambda a: a.update(times=4)), r"tool_calls\[0\].function.arguments"),
    "a null for a default": (arguments(lambda a: a.update(times=None)), r"tool_calls\[0\].function.arguments"),
    "another tool": (lambda m: m["tool_calls"][0]["function"].update(name="fly"), r"tool_calls\[0\].function.name"),
    "a call less": (lambda m: m["tool_calls"].pop(), "tool_calls = "),
    "the order of calls": (lambda m: m["tool_calls"].reverse(), r"tool_calls\[0\].function.arguments"),
}


async def talk(change: Change, template: str = CHATML, tools: Any = (LOOK,)) -> tuple[Session, list[list[int]]]:
    """Two calls, of which the client sends the first answer back as ``change`` makes it, and a third one."""
    service, source, _ = scripted(SAID, "A tree.<|im_end|>", "A house.<|im_end|>", template=template)
    answer = copy.deepcopy(await say(service, [USER], tools=[*tools]))
    change(answer)
    history: list[Any] = [USER, answer]
    for call in answer["tool_calls"]:
        history.append({"role": "tool", "tool_call_id": call["id"], "content": "ok"})
    history.append(await say(service, history, tools=[*tools]))
    await say(service, [*history, {"role": "user", "content": "and now?"}], tools=[*tools])
    return service.sessions["s"], source.prompts


@pytest.mark.parametrize("form", UNCHANGED)
def test_an_unchanged_answer_goes_on_in_its_row(form: str) -> None:
    session, _ = asyncio.run(talk(UNCHANGED[form]))
    assert ([len(row.turns) for row in session.rows], session.splits, session.unrecognized) == ([3], 0, 0)
    assert session.departure == ""


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_begins_a_row_and_is_counted_and_described(edit: str) -> None:
    change, described = EDITS[edit]
    service, _, _ = scripted(SAID, "A tree.<|im_end|>")

    async def edited() -> Session:
        answer = copy.deepcopy(await say(service, [USER], tools=[LOOK]))
        change(answer)
        result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "ok"}
        await say(service, [USER, answer, result], tools=[LOOK])
        return service.sessions["s"]

    session = asyncio.run(edited())
    assert ([len(row.turns) for row in session.rows], session.unrecognized) == ([1, 1], 1)
    assert session.departure.startswith("message 2, of the role 'assistant', has ")
    assert re.search(described, session.departure)


WRITES_PHASE = CHATML.replace("{{ m.content }}", "{{ m.phase or '' }}{{ m.content }}")
WRITES_ITEMS = CHATML.replace("{{ m.content }}", "{% for k, v in m.items() %}{{ k }}={{ v }} {% endfor %}")
CALLS_ONLY = CHATML.replace("{{ m.content }}", "{{ m.content if not m.tool_calls }}")


def test_a_field_counts_if_the_template_writes_it() -> None:
    changes: Any = {"phase": "commentary"}
    for template, rows in ((WRITES_PHASE, [1, 2]), (WRITES_ITEMS, [1, 2]), (CHATML, [3])):
        session, _ = asyncio.run(talk(lambda m: m.update(changes), template))
        assert [len(row.turns) for row in session.rows] == rows
    assert "phase = 'commentary'" in asyncio.run(talk(lambda m: m.update(changes), WRITES_PHASE))[0].departure


def test_what_the_template_does_not_write_beside_calls_is_no_edit() -> None:
    """Llama's template writes a call without the text beside it, so another text there is read by nobody."""
    edit = EDITS["text"][0]
    session, _ = asyncio.run(talk(edit, CALLS_ONLY))
    assert ([len(row.turns) for row in session.rows], session.unrecognized) == ([3], 0)
    assert len(asyncio.run(talk(edit))[0].rows) == 2


def test_without_a_schema_each_argument_counts() -> None:
    bare = {"type": "function", "function": {"name": "look"}}
    session, _ = asyncio.run(talk(UNCHANGED["a default added"], tools=[bare]))
    assert (len(session.rows), session.unrecognized) == (2, 1)
    assert len(asyncio.run(talk(UNCHANGED["arguments written anew"], tools=[bare]))[0].rows) == 1


def test_results_name_the_calls_that_the_model_has_made() -> None:
    """The next prompt has the model's own ids of calls, and not those by which the client replaced them."""
    template = CHATML.replace("{{ m.content }}", "{{ m.tool_call_id or '' }} {{ m.content }}")
    _, prompts = asyncio.run(talk(rename, template))
    tokenizer = scripted()[2]
    assert "toolu" not in tokenizer.decode(prompts[1])
    assert "call_" in tokenizer.decode(prompts[1])


def test_a_result_of_another_call_is_another_message() -> None:
    calls = [{"id": name, "function": {"name": "f", "arguments": "{}"}} for name in "ab"]
    results = [{"role": "tool", "tool_call_id": name, "content": "1"} for name in "ab"]
    reader, said = MessageReader(), {"role": "assistant", "tool_calls": calls}
    assert reader.keys([said, *results]) != reader.keys([said, *results[::-1]])
    assert reader.keys([said, *results])[1:] == reader.keys([said, *({**r, "tool_call_id": None} for r in results)])[1:]


def test_an_earlier_message_that_the_client_changes_is_told() -> None:
    """A clock in the system prompt costs a row for each call, as an edited answer does."""
    service, _, _ = scripted("A.<|im_end|>", "B.<|im_end|>")

    async def tick() -> Session:
        clock = [{"role": "system", "content": f"It is {hour} o'clock."} for hour in (3, 4)]
        answer = await say(service, [clock[0], USER])
        await say(service, [clock[1], USER, answer, USER])
        return service.sessions["s"]

    session = asyncio.run(tick())
    assert (session.unrecognized, len(session.rows)) == (1, 2)
    assert "message 1, of the role 'system', has content = \"It is 4 o'clock.\"" in session.departure


def test_other_agents_and_examples_are_no_edits() -> None:
    service, _, _ = scripted(*["A.<|im_end|>"] * 4)
    example = [USER, {"role": "assistant", "content": "An example."}]

    async def talk_apart() -> Session:
        answer = await say(service, [USER])
        await say(service, [{"role": "user", "content": "Sub-agent."}])
        await say(service, [{"role": "system", "content": "Other."}, *example, USER])
        await say(service, [USER, answer, {"role": "user", "content": "More."}])
        return service.sessions["s"]

    assert asyncio.run(talk_apart()).unrecognized == 0


def test_keys_are_equal_for_old_and_new_forms_of_calls() -> None:
    old = {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}
    new = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]}
    assert message_key(old) == message_key(new)
