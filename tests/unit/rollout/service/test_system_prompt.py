"""``data.system_prompt`` stands before a conversation in a session, as it stands before a single prompt."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from podium.rollout.service.chat_format import RendererFormat, TemplateFormat
from podium.rollout.tasks.config import DataConfig
from podium.rollout.tasks.examples import Example
from podium.rollout.tasks.writer import Writer
from tests.unit.rollout.service.scripted import USER, say, scripted
from tests.unit.rollout.tasks.test_encode import byte_tokenizer

BRIEF = {"role": "system", "content": "Be brief."}
QWEN = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
QWEN_RESULTS = ("<tool_response>", "</tool_response>")
DATA = DataConfig(system_prompt="Be brief.")


def test_a_session_reads_what_a_single_prompt_reads() -> None:
    service, source, tokenizer = scripted("A.<|im_end|>", "B.<|im_end|>", system_prompt="Be brief.")

    async def talk() -> None:
        answer = await say(service, [USER])
        await say(service, [USER, answer, {"role": "user", "content": "and now?"}])

    asyncio.run(talk())
    (alone,) = Writer(tokenizer, DATA).prompts([Example("hello", None, {})])
    assert source.prompts[0] == alone
    assert tokenizer.decode(source.prompts[1]).count("Be brief.") == 1
    session = service.sessions["s"]
    assert (session.splits, len(session.rows)) == (0, 1)
    assert [message["role"] for message in session.calls[1].messages] == ["user", "assistant", "user", "assistant"]


@pytest.mark.parametrize("role", ["system", "developer"])
def test_an_own_system_message_counts_alone(role: str) -> None:
    service, _, tokenizer = scripted(system_prompt="Be brief.")
    own = {"role": role, "content": "Be long."}
    plain, _, _ = scripted()
    assert service.form.prompt([own, USER]) == plain.form.prompt([own, USER])
    (alone,) = Writer(tokenizer, DATA).prompts([Example([own, USER], None, {})])
    assert service.form.prompt([own, USER]) == alone


def test_a_renderer_puts_it_before_the_first_message_alone() -> None:
    pytest.importorskip("renderers")
    from renderers import base, configs

    tokenizer: Any = byte_tokenizer((Path(__file__).parents[1] / "templates" / "qwen3.jinja").read_text())
    tokenizer.add_special_tokens({"additional_special_tokens": [*QWEN, *QWEN_RESULTS]})
    renderer = base.create_renderer(tokenizer, configs.Qwen3RendererConfig())
    writers = [Writer(tokenizer, data) for data in (DATA, DataConfig())]
    form, plain = (RendererFormat(writer, renderer, TemplateFormat(writer, tokenizer)) for writer in writers)
    prompt = form.prompt([USER])
    assert prompt == plain.prompt([BRIEF, USER])
    answer: list[int] = tokenizer.encode("A.<|im_end|>", add_special_tokens=False)
    said = [USER, {"role": "assistant", "content": "A."}]
    whole = form.bridge(prompt, answer, said, [{"role": "tool", "content": "a tree"}])
    assert whole is not None and tokenizer.decode(whole).count("Be brief.") == 1
