"""The library ``renderers``: when it is taken for a model, and what sessions record with it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import pytest

from podium.rollout.tasks.chat_encoder import ChatEncoder
from podium.rollout.tasks.config import DataConfig
from podium.telemetry import Note, subscribe
from podium_agents.service.chat_format import ChatFormat, chat_format
from tests.unit.rollout.test_templates import (
    CHATML,
    FAMILIES,
    HERMES,
    TOOLS,
    Family,
    ask,
    by_template,
    differences,
    make,
    simulate,
    tokenizer_of,
)


@cache
def qwen3() -> Family:
    """Qwen3 with all of its special tokens, and with the library's words about tools in its template."""
    pytest.importorskip("renderers")
    from renderers import qwen3 as own

    def quoted(text: str) -> str:
        return text.replace("\n", "\\n")

    header, footer = quoted(vars(own)["_TOOLS_HEADER"]), quoted(vars(own)["_TOOLS_FOOTER"])
    old = '\\n</tools>\\n\\nCall one by <tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call>'
    special = ("<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
    return Family(
        *("qwen3", (*CHATML, *special, "<tool_response>", "</tool_response>"), HERMES, "<|im_end|>"),
        words=(("# Tools\\n\\n<tools>", header), (old, footer)),
    )


@cache
def by_renderer(family: Family) -> ChatFormat:
    tokenizer = tokenizer_of(family)
    return chat_format(ChatEncoder(tokenizer, DataConfig()), tokenizer)


def test_it_is_taken_where_it_writes_what_the_template_writes() -> None:
    assert by_renderer(qwen3()).library is not None
    other = next(one for one in FAMILIES if one.name == "qwen3")  # which has fewer special tokens, and other words
    assert by_renderer(other).library is None


def test_what_was_sampled_is_trained_as_it_was_sampled() -> None:
    turns, _, found = asyncio.run(simulate(qwen3(), 600, 1, by_renderer))
    assert turns >= 600
    assert found == []


@pytest.mark.parametrize(("form_of", "rows"), [(by_renderer, 1), (by_template, 2)])
def test_a_call_that_is_spelled_in_its_own_way_is_no_split(form_of: Callable[[Family], ChatFormat], rows: int) -> None:
    """The template writes an empty reasoning into the last answer alone. So its text says nothing of how to go on, and
    what it writes anew has other spaces than the model sampled."""

    async def live() -> tuple[int, int]:
        service, source, _ = make(qwen3(), 0, form_of=form_of)
        spelled = HERMES.replace("NAME", "look").replace("ARGS", '{"x":"a"}')
        source.said = [f"{spelled}<|im_end|>", "Yes.<|im_end|>"]
        session = service.open_session("s", 1)
        messages: list[Any] = [{"role": "user", "content": "the fox"}]
        answer = await ask(service, "s", messages, TOOLS)
        (call,) = answer.message["tool_calls"]
        messages += [dict(answer.message), {"role": "tool", "tool_call_id": call["id"], "content": "a tree"}]
        await ask(service, "s", messages, TOOLS)
        assert differences(session, source.log) == []
        return len(session.rows), session.splits

    assert asyncio.run(live()) == (rows, rows - 1)


@pytest.mark.parametrize(
    ("said", "content"),
    [
        ('I look. <tool_call>\n{"name": look}\n</tool_call>\nThe answer is 42.<|im_end|>', None),
        ("<think>draft</think>The answer is 42.<|im_end|>", "The answer is 42."),
        ('<tool_call>\n{"name": ["a"], "arguments": {}}\n</tool_call><|im_end|>', None),
        ("<tool_call>" + "[" * 3000 + "</tool_call><|im_end|>", None),
    ],
)
def test_answers_are_read_and_gone_on_with_by_the_template(said: str, content: str | None) -> None:
    async def live() -> None:
        service, source, _ = make(qwen3(), 0, form_of=by_renderer)
        source.said = [said, "Yes.<|im_end|>"]
        session = service.open_session("s", 1)
        messages: list[Any] = [{"role": "user", "content": "the fox"}]
        answer = await ask(service, "s", messages, TOOLS)
        assert answer.message["content"] == (said.removesuffix("<|im_end|>") if content is None else content)
        assert "tool_calls" not in answer.message
        messages += [dict(answer.message), {"role": "system", "content": "In French."}, messages[0]]
        await ask(service, "s", messages, TOOLS)
        assert differences(session, source.log) == []

    asyncio.run(live())


def test_a_library_that_cannot_be_imported_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, broken = tokenizer_of(qwen3()), ModuleType("renderers")  # made while the library can be imported

    def missing(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'httpx'", name="httpx")

    broken.__getattr__ = missing  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "renderers", broken)
    notes: list[str] = []
    unsubscribe = subscribe(lambda event: notes.append(event.text) if isinstance(event, Note) else None)
    try:
        assert chat_format(ChatEncoder(tokenizer, DataConfig()), tokenizer).library is None
    finally:
        unsubscribe()
    assert notes == ["the library renderers is installed, but cannot be used: No module named 'httpx'"]
