"""Requests as coding agents send them: Claude Code and its kin to the Messages API, Codex and its kin to the Responses
API. Their forms follow the documentation of both APIs and the agents' own code."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from podium.rollout.sampling import SamplingParams
from podium_agents.service.request_bodies import Refusal
from podium_serve.messages import Messages
from podium_serve.responses import Responses
from tests.unit.rollout.service.scripted import TOKEN
from tests.unit.rollout.service.test_dialects import CALL, END, FUNCTION, THINKS, THOUGHT, openai_client, serve

MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
BASH = {
    "name": "Bash",
    "description": "Run a command.",
    "input_schema": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
        "required": ["command"],
        "additionalProperties": False,
    },
}
CLAUDE: dict[str, Any] = {
    "model": "claude-sonnet-4-6",
    "max_tokens": 32000,
    "stream": False,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.0;"},
        {"type": "text", "text": "You are Claude Code, Anthropic's official CLI for Claude.", **MARK},
        {"type": "text", "text": "You are an interactive agent.", **MARK},
    ],
    "tools": [BASH, {**BASH, "name": "Read", **MARK}],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nToday is Thursday.\n</system-reminder>\n"},
                {"type": "text", "text": "What is there?", **MARK},
            ],
        }
    ],
    "metadata": {"user_id": "user_0_account__session_1"},
    "thinking": {"type": "enabled", "budget_tokens": 31999},
}
CALLED: list[Any] = [
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "EqQBCgIYAhIM"},
            {"type": "redacted_thinking", "data": "EmwKAhgBEgy"},
            {"type": "text", "text": "Let me look."},
            {
                "type": "tool_use",
                "id": "toolu_1",
                "name": "Bash",
                "input": {"command": "ls"},
                "caller": {"type": "direct"},
            },
            {"type": "tool_use", "id": "toolu_2", "name": "Read", "input": {"command": "a"}},
        ],
    },
]
RESULTS: list[Any] = [
    {"type": "tool_result", "tool_use_id": "toolu_1", "content": "a\nb"},
    {
        "type": "tool_result",
        "tool_use_id": "toolu_2",
        "is_error": True,
        "content": [{"type": "text", "text": "File does not exist."}],
        **MARK,
    },
]
ANSWERED = [*CLAUDE["messages"], *CALLED, {"role": "user", "content": RESULTS}]
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "A text."}, "title": "T"}
CLAUDE_SHAPES: dict[str, dict[str, Any]] = {
    "first": {},
    "results of parallel calls": {"messages": ANSWERED},
    "a reminder after results": {
        "messages": [*ANSWERED[:-1], {"role": "user", "content": [*RESULTS, {"type": "text", "text": "Go on."}]}]
    },
    "an empty result": {
        "messages": [*ANSWERED[:-1], {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1"}]}]
    },
    "adaptive thinking and an effort": {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}},
    "kept thinking": {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
    "no thinking, no tools": {"thinking": {"type": "disabled"}, "tools": [], "temperature": 1},
    "one call at a time": {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    "one call of many": {"tool_choice": {"type": "auto", "disable_parallel_tool_use": False}},
    "a title as JSON": {
        "tools": [],
        "thinking": None,
        "output_config": {
            "format": {
                "type": "json_schema",
                "schema": {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]},
            }
        },
    },
    "tools of its own kind": {
        "tools": [
            {"type": "custom", **BASH, "eager_input_streaming": True, "strict": True, "input_examples": [{}]},
            {"type": "bash_20250124", "name": "bash"},
            {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 10000},
        ]
    },
    "a document of text": {"messages": [{"role": "user", "content": [DOCUMENT, {"type": "text", "text": "Read."}]}]},
    "a system text": {"system": "You are a helper.", "stop_sequences": ["</done>"]},
    "a compact history": {
        "messages": [
            {"role": "user", "content": "This session is being continued."},
            {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]},
            {"role": "user", "content": "Go on."},
        ]
    },
}


def post(url: str, path: str, body: Any) -> Any:
    head = {"x-api-key": TOKEN, "anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219"}
    return httpx2.post(
        f"{url}/sessions/s/v1/{path}", json=body, headers=head, timeout=60, trust_env=False, verify=False
    )


@pytest.mark.each_value
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("shape", CLAUDE_SHAPES)
def test_a_request_of_claude_code_is_answered(shape: str, trains: bool) -> None:
    if "JSON" in shape:
        pytest.importorskip("llguidance")
    said = '{"title": "a"}' if "JSON" in shape else THOUGHT + "So." + CALL * (shape not in ("no thinking, no tools",))
    rules = SamplingParams(max_new_tokens=64) if trains else None
    with serve(said + END, said + END, rules=rules, template=THINKS) as (url, _, _):
        body = {**CLAUDE, **CLAUDE_SHAPES[shape]}
        body = body if trains else {**body, "model": "tiny"}
        answer = post(url, "messages?beta=true", body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["content"]
        counted = {name: value for name, value in body.items() if name not in ("max_tokens", "stream", "metadata")}
        count = post(url, "messages/count_tokens?beta=true", counted)
        assert count.status_code == 200, count.text
        usage = answer.json()["usage"]
        assert count.json()["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
        streamed = post(url, "messages", {**body, "stream": True})
        assert "event: message_stop" in streamed.text, streamed.text


SHELL = {
    "type": "function",
    "name": "shell_command",
    "description": "Run a command.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Use the `apply_patch` tool to edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" /.+/'},
}
CODEX: dict[str, Any] = {
    "model": "gpt-5.4-codex",
    "instructions": "You are Codex, based on GPT-5.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment_context>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What is there?"}]},
    ],
    "tools": [SHELL],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199",
    "text": {"verbosity": "medium"},
    "client_metadata": {"x-codex-installation-id": "0"},
}
LOOKED: list[Any] = [
    *CODEX["input"],
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}], "content": None}
    | {"encrypted_content": "gAAAA"},
    {
        "type": "message",
        "role": "assistant",
        "phase": "commentary",
        "content": [{"type": "output_text", "text": "So."}],
    },
    {"type": "function_call", "name": "shell_command", "arguments": '{"command": "ls"}', "call_id": "call_1"},
    {"type": "function_call", "name": "shell_command", "arguments": '{"command": "pwd"}', "call_id": "call_2"},
    {"type": "function_call_output", "call_id": "call_1", "output": "a\nb"},
    {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "/"}]},
]
PATCHED: list[Any] = [
    *CODEX["input"],
    {
        "type": "custom_tool_call",
        "status": "completed",
        "call_id": "call_3",
        "name": "apply_patch",
        "input": "*** Begin",
    },
    {"type": "custom_tool_call_output", "call_id": "call_3", "output": "Success."},
]
CODEX_SHAPES: dict[str, dict[str, Any]] = {
    "first": {},
    "results of parallel calls": {"input": LOOKED},
    "one call at a time": {"parallel_tool_calls": False},
    "a freeform tool": {"tools": [SHELL, PATCH], "input": PATCHED},
    "more to include": {"include": ["reasoning.encrypted_content", "web_search_call.action.sources"]},
    "truncation": {"truncation": "auto"},
    "no reasoning": {"reasoning": None, "include": [], "text": None},
    "a high effort": {"reasoning": {"effort": "xhigh", "summary": "detailed"}},
    "one text": {"input": "What is there?", "instructions": None, "tools": []},
    "allowed tools": {
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": SHELL["name"]}]}
    },
    "a form": {
        "tools": [],
        "text": {
            "format": {
                "type": "json_schema", "name": "codex_output_schema", "strict": True,
                "schema": {
                    "type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"],
                    "additionalProperties": False,
                },
            }
        },
    },
}  # fmt: skip


@pytest.mark.each_value
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("shape", CODEX_SHAPES)
def test_a_request_of_codex_is_answered(shape: str, trains: bool) -> None:
    if shape == "a form":
        pytest.importorskip("llguidance")
    said = '{"title": "a"}' if shape == "a form" else THOUGHT + "So." + CALL * (shape != "one text")
    rules = SamplingParams(max_new_tokens=64) if trains else None
    with serve(said + END, said + END, rules=rules, template=THINKS) as (url, _, _):
        body = {**CODEX, **CODEX_SHAPES[shape]}
        body = body if trains else {**body, "model": "tiny"}
        answer = post(url, "responses", body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["status"] == "completed"
        streamed = post(url, "responses", {**body, "stream": True})
        assert "event: response.completed" in streamed.text, streamed.text


def test_a_freeform_tool_is_called_and_its_call_is_recognized() -> None:
    """Codex's apply_patch: a text in, a text out."""
    call = '<tool_call>{"name": "apply_patch", "arguments": {"input": "*** Begin\\nend"}}</tool_call>'
    with serve(call + END, "Done." + END, rules=SamplingParams(max_new_tokens=200)) as (url, service, source):
        client = openai_client(url)
        asked: dict[str, Any] = {"model": "tiny", "tools": [SHELL, PATCH]}
        items: list[Any] = [{"role": "user", "content": "Patch it."}]
        with client.responses.stream(input=items, **asked) as stream:
            kinds = [event.type for event in stream]
            first = stream.get_final_response()
        assert "response.custom_tool_call_input.done" in kinds
        (called,) = first.output
        assert (called.type, called.name, called.input) == ("custom_tool_call", "apply_patch", "*** Begin\nend")
        assert "The input follows this grammar (lark)" in service.decode(source.prompts[0], special=True)
        items += [called.model_dump(exclude_none=True)]
        items += [{"type": "custom_tool_call_output", "call_id": called.call_id, "output": "Success."}]
        assert client.responses.create(input=items, **asked).output_text == "Done."
        session = service.sessions["s"]
        assert ([len(row.turns) for row in session.rows], session.splits, session.unrecognized) == ([2], 0, 0)


@pytest.mark.parametrize("path", ["messages", "responses"])
def test_reasoning_of_a_history_is_left_out_in_serving_where_the_template_writes_none(path: str) -> None:
    """As for a model that was trained so. A run refuses it, unless its session has drawn it."""
    body: Any = {**CLAUDE, "messages": ANSWERED} if path == "messages" else {**CODEX, "input": LOOKED}
    with serve("So." + END) as (url, service, source):
        head = {"x-api-key": TOKEN}
        body["model"] = service.model
        answer = httpx2.post(f"{url}/v1/{path}", json=body, headers=head, timeout=60, trust_env=False, verify=False)
        assert answer.status_code == 200, answer.text
        assert "hm" not in service.decode(source.prompts[0], special=True)
    with serve("So." + END, rules=SamplingParams(max_new_tokens=64)) as (url, _, _):
        assert "reasoning_content" in post(url, path, body).text


FIELDS_OF_CLIENTS: list[tuple[str, dict[str, Any]]] = [
    ("messages", {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}),
    (
        "messages",
        {"role": "assistant", "id": "m", "content": "a", "diagnostics": {"a": 1}, "context_management": {"a": 1}},
    ),
    (
        "messages",
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}, "toolset_name": "s", "caller": {}}],
        },
    ),
    (
        "messages",
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c", "content": "x", "toolset_name": "s"}],
        },
    ),
    (
        "responses",
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}}],
        },
    ),
    (
        "responses",
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "async": False, "namespace": None},
    ),
    ("responses", {"type": "function_call_output", "call_id": "c", "name": "f", "output": "4"}),
    ("responses", {"type": "custom_tool_call_output", "call_id": "c", "name": "f", "output": "4"}),
]


@pytest.mark.parametrize(("path", "sent"), FIELDS_OF_CLIENTS)
def test_fields_of_clients_that_change_no_answer_are_taken(path: str, sent: dict[str, Any]) -> None:
    """Marks of caches, and what says of a result or an answer only whence it came."""
    if path == "messages":
        body = Messages().read({"model": "m", "max_tokens": 9, "messages": [sent]})
    else:
        body = Responses().chat({"model": "m", "input": [sent]})
    assert len(body["messages"]) == 1


def in_user(block: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [block]}]}


def in_answer(block: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": [block]}, {"role": "user", "content": "hi"}]}


RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "x"}
UNREAD_FIELDS: list[tuple[str, dict[str, Any], str]] = [
    ("messages", in_user({**RESULT, "structured": {"a": 1}}), "messages.0.content.0.structured"),
    ("messages", in_user({**RESULT, "content": [{"type": "text", "text": "x", "context": "y"}]}), "content.context"),
    ("messages", in_user({"type": "text", "text": "hi", "lang": "en"}), "messages.0.content.0.lang"),
    ("messages", in_user({**DOCUMENT, "citations": {"enabled": True}}), "messages.0.content.0.citations"),
    ("messages", in_user({**DOCUMENT, "abstract": "A"}), "messages.0.content.0.abstract"),
    ("messages", in_answer({"type": "thinking", "thinking": "hm", "plan": "x"}), "messages.0.content.0.plan"),
    (
        "messages",
        in_answer({"type": "tool_use", "id": "a", "name": "f", "input": {}, "arguments": {}}),
        "messages.0.content.0.arguments",
    ),
    ("responses", {"input": [{"role": "user", "content": "hi", "name": "Ann"}]}, "input[0].name"),
    (
        "responses",
        {"input": [{"type": "function_call_output", "call_id": "a", "output": "4", "is_error": True}]},
        "input[0].is_error",
    ),
    (
        "responses",
        {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}", "namespace": "crm"}]},
        "input[0].namespace = crm: chat templates write the name alone; join both in name",
    ),
    (
        "responses",
        {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}", "async": True}]},
        "input[0].async = True: this service does not support it; leave it out",
    ),
]


@pytest.mark.parametrize(
    ("path", "change", "says"),
    [
        *UNREAD_FIELDS,
        ("messages", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ("messages", {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "url"}}]}]},
            "url",
        ),
        ("responses", {"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ("responses", {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools"),
        ("responses", {"include": ["everything"]}, "include"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_its_name(path: str, change: Any, says: str) -> None:
    with serve("So." + END, rules=SamplingParams(max_new_tokens=64), template=THINKS) as (url, _, _):
        refused = post(url, path, {**(CLAUDE if path == "messages" else CODEX), **change})
        assert refused.status_code == 400
        assert says in refused.json()["error"]["message"]


def test_examples_of_a_tool_are_written_for_the_model() -> None:
    tools: list[Any] = [
        {**BASH, "strict": True, "input_examples": [{"command": "ls"}, {"command": "pwd"}]},
        {
            "name": "Bare",
            "input_examples": [{}],
            "strict": False,
            "defer_loading": False,
            "allowed_callers": ["direct"],
        },
        {"type": "bash_20250124", "name": "bash", "input_examples": [{"command": "ls"}], "allowed_callers": []},
    ]
    request = Messages().chat({**CLAUDE, "tools": tools})
    first, second, third = (tool["function"] for tool in request["tools"])
    examples = 'Examples of its input:\n{"command": "ls"}'
    assert first["description"] == f'Run a command.\n\n{examples}\n{{"command": "pwd"}}'
    assert first["strict"] is True
    assert second == {"name": "Bare", "parameters": {}, "description": "Examples of its input:\n{}"}
    assert third["description"].endswith(f"start the shell anew.\n\n{examples}")


@pytest.mark.parametrize("base", [BASH, {"type": "bash_20250124", "name": "bash"}])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("defer_loading", True), ("allowed_callers", ["code_execution_20250825"]), ("strict", "yes")),
        *(("input_examples", {}), ("unknown", 1)),
    ],
)
def test_what_nothing_reads_of_a_tool_is_refused(base: dict[str, Any], name: str, value: Any) -> None:
    with pytest.raises(Refusal, match=rf"tools\.0\.{name}"):
        Messages().chat({**CLAUDE, "tools": [{**base, name: value}]})


@pytest.mark.parametrize("said", [f"{THOUGHT}So.{END}", f"So.{END}", f"{THOUGHT}{CALL}{END}"])
def test_a_response_counts_the_tokens_of_its_reasoning(said: str) -> None:
    with serve(said, said, template=THINKS) as (url, _, _):
        body = {"model": "tiny", "input": "Hm?", "tools": [FUNCTION]}
        answer = post(url, "responses", body).json()
        streamed = post(url, "responses", {**body, "stream": True}).text
        usage = answer["usage"]
        thinks = said.startswith(THOUGHT)
        assert (answer["output"][0]["type"] == "reasoning") == thinks
        count = usage["output_tokens_details"]["reasoning_tokens"]
        expected = len(said.partition("</think>")[0]) if thinks else 0  # a token is a character
        assert count == expected < usage["output_tokens"]
        assert f'"reasoning_tokens": {count}' in streamed
