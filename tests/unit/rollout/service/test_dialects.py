"""The Responses API and the Messages API, as the official clients use them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from podium.rollout.sampling import SamplingParams
from podium_agents.service.service import Service
from tests.lazy_module import import_when_used
from tests.unit.rollout.service.scripted import CHATML, TOKEN, scripted

openai, anthropic = import_when_used("openai"), import_when_used("anthropic")
pytest.importorskip("uvicorn")

END = "<|im_end|>"
CALL = '<tool_call>{"name": "look", "arguments": {"place": "a"}}</tool_call>'
THOUGHT = "<think>hm</think>"
FUNCTION = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}
TOOL = {"name": "look", "description": "Look.", "input_schema": {"type": "object"}}
THINKS = CHATML.replace("assistant\n{% endif %}", "assistant\n{{ '<no>' if enable_thinking is false }}{% endif %}")
THINKS = THINKS.replace("{{ m.content }}", "{{ m.reasoning_content or '' }}{{ m.content }}")


@contextmanager
def serve(
    *answers: Any, template: str = CHATML, rules: SamplingParams | None = None, pause_s: float = 0.0
) -> Iterator[Any]:
    """Serve a model that says what is written down. Yields the address, the service and its source."""
    from podium_serve.app import make_app
    from podium_serve.server import Server

    service, source, tokenizer = scripted(*answers, template=template, pause_s=pause_s)
    if rules is not None:
        service = Service(
            source, service.form, tokenizer, model="policy", context=1 << 16,
            stop_token_ids=service.stop_token_ids, most_tokens=1 << 40, rules=rules,
        )  # fmt: skip
        service.open_session("s", 1)
    with Server(make_app(service, TOKEN)) as server, ExitStack() as CLIENTS[server.url]:
        yield server.url, service, source


CLIENTS: dict[str, ExitStack] = {}
"""Closes the clients of a served model, by its address."""


def openai_client(url: str, session: str = "s") -> Any:
    client = openai.OpenAI(base_url=f"{url}/sessions/{session}/v1", api_key=TOKEN, max_retries=0)
    return CLIENTS[url].enter_context(client)


def responses(url: str, session: str = "s") -> Any:
    return openai_client(url, session).responses


def messages(url: str, session: str = "s", key: str = TOKEN) -> Any:
    client = anthropic.Anthropic(base_url=f"{url}/sessions/{session}", api_key=key, max_retries=0)
    return CLIENTS[url].enter_context(client).messages


def test_an_agent_of_the_responses_api_is_one_row() -> None:
    with serve(THOUGHT + "Let me look." + CALL + CALL + END, "A tree." + END, "Yes." + END) as (url, service, source):
        create = responses(url).create
        asked: dict[str, Any] = {"model": "tiny", "instructions": "Be brief.", "tools": [FUNCTION], "store": False}
        items: list[Any] = [{"role": "user", "content": "What is there?"}]
        first = create(input=items, include=["reasoning.encrypted_content"], **asked)
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
        assert (first.output_text, first.status) == ("Let me look.", "completed")
        assert first.output[0].content[0].text == "hm"
        assert [json.loads(item.arguments) for item in first.output[2:]] == [{"place": "a"}] * 2
        assert first.usage.input_tokens == len(source.prompts[0])
        items += [item.model_dump() for item in first.output]
        items += [
            {"type": "function_call_output", "call_id": item.call_id, "output": "a tree"} for item in first.output[2:]
        ]
        second = create(input=items, **asked)
        items += [item.model_dump(exclude_none=True) for item in second.output]
        third = create(input=[*items, {"role": "user", "content": [{"type": "input_text", "text": "Sure?"}]}], **asked)
        assert (second.output_text, third.output_text) == ("A tree.", "Yes.")
        session = service.sessions["s"]
        assert ([len(row.turns) for row in session.rows], session.splits, session.unrecognized) == ([3], 0, 0)


def test_an_agent_of_the_messages_api_is_one_row() -> None:
    """Cache marks move from message to message, as Claude Code sets them."""
    with serve(THOUGHT + "Let me look." + CALL + CALL + END, "A tree." + END, "Yes." + END) as (url, service, source):
        create = messages(url).create
        marked = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
        asked: dict[str, Any] = {"model": "tiny", "max_tokens": 99, "system": [marked], "tools": [TOOL]}
        talk: list[Any] = [{"role": "user", "content": [{**marked, "text": "What is there?"}]}]
        first = create(messages=talk, metadata={"user_id": "x"}, **asked)
        assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert (first.content[0].thinking, first.content[1].text) == ("hm", "Let me look.")
        assert (first.content[2].input, first.stop_reason) == ({"place": "a"}, "tool_use")
        assert first.usage.input_tokens == len(source.prompts[0])
        talk[0]["content"][0].pop("cache_control")
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "a tree"}]}
            for block in first.content[2:]
        ]
        talk += [{"role": "assistant", "content": [block.model_dump() for block in first.content]}]
        talk += [{"role": "user", "content": [*results, {**marked, "text": "And now?"}]}]
        second = create(messages=talk, **asked)
        talk += [{"role": "assistant", "content": second.content}, {"role": "user", "content": "Sure?"}]
        third = create(messages=talk, **asked)
        assert (second.content[0].text, third.content[0].text) == ("A tree.", "Yes.")
        assert second.stop_reason == "end_turn"
        session = service.sessions["s"]
        assert ([len(row.turns) for row in session.rows], session.splits, session.unrecognized) == ([3], 0, 0)


@pytest.mark.parametrize("said", ["Hello there.", THOUGHT + "So." + CALL, CALL, "", THOUGHT], ids=repr)
def test_a_stream_of_responses_says_what_the_whole_says(said: str) -> None:
    with serve(said + END, said + END) as (url, _, _):
        asked: dict[str, Any] = {"model": "tiny", "input": "Hello", "tools": [FUNCTION]}
        whole = responses(url, "a").create(**asked)
        with responses(url, "b").stream(**asked) as stream:
            events = [*stream]
            final = stream.get_final_response()
        kinds = [event.type for event in events]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.completed"
        assert [event.sequence_number for event in events] == [*range(len(events))]
        assert [item.type for item in final.output] == [item.type for item in whole.output]
        assert final.output_text == whole.output_text
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
        arguments = [item.arguments for item in whole.output if item.type == "function_call"]
        assert [item.arguments for item in final.output if item.type == "function_call"] == arguments
        assert final.usage == whole.usage


@pytest.mark.parametrize("said", ["Hello there.", THOUGHT + "So." + CALL, CALL + CALL, "", THOUGHT], ids=repr)
def test_a_stream_of_messages_says_what_the_whole_says(said: str) -> None:
    with serve(said + END, said + END) as (url, _, _):
        asked: dict[str, Any] = {"model": "tiny", "max_tokens": 9, "tools": [TOOL]}
        asked["messages"] = [{"role": "user", "content": "Hello"}]
        whole = messages(url, "a").create(**asked)
        with messages(url, "b").stream(**asked) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_message()
        assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
        for message in (whole, final):
            for block in message.content:
                if block.type == "tool_use":
                    block.id = ""
        assert [block.model_dump() for block in final.content] == [block.model_dump() for block in whole.content]
        assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_the_tokens_that_a_client_has_to_allow_may_leave_the_context() -> None:
    """Claude Code always allows 32,000 tokens."""
    with serve("A." + END) as (url, service, _):
        service.context = 200
        talk: list[Any] = [{"role": "user", "content": "Go."}]
        assert messages(url).create(model="tiny", max_tokens=32_000, messages=talk, timeout=60).content[0].text == "A."
        with pytest.raises(openai.BadRequestError, match="max_tokens is 32000"):
            responses(url).create(model="tiny", input="Go.", max_output_tokens=32_000)


def test_a_stop_text_is_named() -> None:
    with serve("One. Two.", "One. Two.") as (url, _, _):
        asked: dict[str, Any] = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "Go."}]}
        answer = messages(url).create(**asked, stop_sequences=["x", "Two"])
        assert (answer.content[0].text, answer.stop_reason, answer.stop_sequence) == ("One. ", "stop_sequence", "Two")
        with messages(url, "b").stream(**asked, stop_sequences=["Two"]) as stream:
            assert stream.get_final_message().stop_sequence == "Two"


REFUSED_RESPONSES: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"background": True}, "background"),
    ({"truncation": "other"}, "truncation"),
    ({"tools": [{"type": "web_search"}]}, r"tools\[0\].type = web_search"),
    ({"tools": [{"type": "mcp", "server_label": "x"}]}, r"tools\[0\].type = mcp"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input_image"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
    ({"include": ["everything"]}, "include"),
    ({"prompt": {"id": "x"}}, "prompt"),
    ({"extra_body": {"bogus": 1}}, "bogus"),
    ({"extra_body": {"frequency_penalty": 1}}, "frequency_penalty"),
    ({"temperature": -1}, "temperature"),
]
REFUSED_MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "computer_20250124", "name": "computer"}]}, "tools.0.type = computer_20250124"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    ({"extra_body": {"mcp_servers": [{"url": "x"}]}}, "mcp_servers"),
    ({"extra_body": {"bogus": 1}}, "bogus"),
    ({"thinking": {"type": "other"}}, "thinking.type"),
    ({"tool_choice": {"type": "other"}}, "tool_choice.type"),
    ({"extra_body": {"temperature": -1}}, "temperature"),
    ({"messages": [{"role": "user", "content": "x" * (1 << 16)}]}, "prompt is too long: .*context_length_exceeded"),
]


@pytest.mark.parametrize(("changed", "named"), REFUSED_RESPONSES, ids=[named for _, named in REFUSED_RESPONSES])
def test_what_responses_cannot_say_is_refused_by_name(changed: Any, named: str) -> None:
    with serve() as (url, _, _), pytest.raises(openai.BadRequestError, match=named) as caught:
        responses(url).create(**{"model": "tiny", "input": "Hello", **changed})
    assert caught.value.body["message"]
    assert caught.value.request_id


@pytest.mark.parametrize(("changed", "named"), REFUSED_MESSAGES, ids=[named for _, named in REFUSED_MESSAGES])
def test_what_messages_cannot_say_is_refused_by_name(changed: Any, named: str) -> None:
    asked = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "Hello"}], **changed}
    with serve() as (url, _, _), pytest.raises(anthropic.BadRequestError, match=named) as caught:
        messages(url).create(**asked)
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert caught.value.request_id


def test_errors_of_the_service_have_the_form_of_the_dialect() -> None:
    with serve() as (url, _, _):
        stranger = messages(url, key="wrong")
        with pytest.raises(anthropic.AuthenticationError) as caught:
            stranger.create(model="tiny", max_tokens=1, messages=[{"role": "user", "content": "x"}])
        assert caught.value.body["error"]["type"] == "authentication_error"
        with pytest.raises(anthropic.NotFoundError, match="'claude' is not served") as caught:
            messages(url).create(model="claude", max_tokens=1, messages=[{"role": "user", "content": "x"}])
        assert caught.value.body["error"]["type"] == "not_found_error"


def test_a_stream_that_fails_ends_with_an_event_of_the_dialect() -> None:
    from podium.errors import GenerationError

    broken = GenerationError("the generator is lost")
    with serve(broken, broken) as (url, _, _):
        with responses(url, "a").stream(model="tiny", input="Hello") as stream:
            assert [event.type for event in stream][-1] == "response.failed"
        asked: dict[str, Any] = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "Hello"}]}
        with (
            pytest.raises(anthropic.APIStatusError, match="the generator is lost"),
            messages(url, "b").stream(**asked) as stream,
        ):
            stream.until_done()


def test_thinking_is_turned_off_where_the_template_can() -> None:
    with serve("A." + END, "B." + END, "C." + END, template=THINKS) as (url, service, source):
        asked: dict[str, Any] = {"model": "tiny", "max_tokens": 99, "messages": [{"role": "user", "content": "Go."}]}
        messages(url, "a").create(**asked, thinking={"type": "disabled"})
        messages(url, "b").create(**{**asked, "max_tokens": 2048}, thinking={"type": "enabled", "budget_tokens": 1024})
        responses(url, "c").create(model="tiny", input="Go.", reasoning={"effort": "none"})
        read = [service.decode(prompt, special=True) for prompt in source.prompts]
    assert ["<no>" in text for text in read] == [True, False, True]


def test_tokens_of_a_message_are_counted() -> None:
    with serve("A." + END) as (url, service, source):
        asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Go."}], "tools": [TOOL]}
        count = messages(url).count_tokens(**asked).input_tokens
        assert len(service.sessions) == 0, "a count begins no session"
        messages(url).create(**asked, max_tokens=9)
        assert count == len(source.prompts[0])


def test_a_run_answers_for_any_model_and_overrules_wishes() -> None:
    rules = SamplingParams(max_new_tokens=9, temperature=1.0)
    with serve("A." + END, "B." + END, "C." + END, rules=rules) as (url, service, _):
        talk: list[Any] = [{"role": "user", "content": "Go."}]
        messages(url).create(model="claude-x", max_tokens=9, messages=talk, extra_body={"temperature": 0.5})
        responses(url).create(model="gpt-x", input="Go.", reasoning={"effort": "low"}, text={"verbosity": "low"})
        chat = openai_client(url).chat.completions
        chat.create(model="gpt-x", messages=talk, frequency_penalty=0.5, presence_penalty=0)
        assert service.aliases == {"claude-x": 1, "gpt-x": 2}
        overruled = {name: count for name, count in service.overruled.items() if count}
        assert overruled == {"temperature": 1, "reasoning_effort": 1, "verbosity": 1, "frequency_penalty": 1}
        with pytest.raises(openai.BadRequestError, match="suffix"):
            chat.create(model="gpt-x", messages=talk, extra_body={"suffix": "x"})
