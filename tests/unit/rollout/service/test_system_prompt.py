"""``data.system_prompt`` stands before a conversation in a session, as it stands before a single prompt."""

from __future__ import annotations

import asyncio

import pytest

from podium.rollout.tasks.chat_encoder import ChatEncoder
from podium.rollout.tasks.config import DataConfig
from podium.rollout.tasks.forms import Example
from tests.unit.rollout.service.scripted import USER, say, scripted

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
    (alone,) = ChatEncoder(tokenizer, DATA).prompts([Example("hello", None, {})])
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
    (alone,) = ChatEncoder(tokenizer, DATA).prompts([Example([own, USER], None, {})])
    assert service.form.prompt([own, USER]) == alone
