"""Prompts of long conversations, for which the template writes the last messages alone."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from podium.rollout.tasks.chat_encoder import ChatEncoder
from podium.rollout.tasks.config import DataConfig
from podium_agents.service.chat_format import ChatFormat, recent_messages
from podium_agents.service.session_recording import Sampled, Session
from tests.unit.rollout.test_templates import FAMILIES, Family, converse, make, tokenizer_of

TURN = "message.role + '\\n' + message.content"
"""What the template qwen2_5 writes of a message."""


def counting(written: str) -> Family:
    """The family qwen2_5 with a template that counts messages and writes something before those of users."""
    before = f"(({written}) | string if message.role == 'user' else '')"
    return replace(FAMILIES[0], words=((TURN, f"message.role + '\\n' + {before} + message.content"),), splits=True)


COUNTING = {
    "its number": counting("loop.index"),
    "every third": counting("'Be brief.' if loop.index % 6 == 1 else ''"),
    "every tenth": counting("'Be brief.' if loop.index % 20 == 1 else ''"),
    "how many": counting("messages | length"),
    "only late": counting("'Be brief.' if loop.index > 9 else ''"),
}


class Whole(ChatFormat):
    """Writes the whole history for each call."""

    def _recent(self, said: Any, new: Any, tools: Any) -> None:
        return None


def form_of(kind: type[ChatFormat], family: Family) -> ChatFormat:
    return kind(ChatEncoder(tokenizer_of(family), DataConfig()), tokenizer_of(family))


async def prompts_of(kind: type[ChatFormat], family: Family, seed: int, turns: int) -> tuple[list[Any], int, int]:
    """What the model was asked in a random conversation, the splits, and how often a history was written whole."""
    written = 0

    class Counted(kind):  # type: ignore[misc, valid-type]
        def _added(self, said: Any, new: Any, tools: Any) -> str | None:
            nonlocal written
            written += len(said) > 12
            return super()._added(said, new, tools)

    service, source, _ = make(family, seed, form_of=lambda family: form_of(Counted, family))
    session = service.open_session("s", 1)
    await converse(service, family, "s", random.Random(seed), turns)
    return [prompt for prompt, _ in source.log], session.splits, written


@pytest.mark.everyday("qwen3-0", "llama3-0", "every third-0", "only late-0")
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("family", [*FAMILIES, *COUNTING.values()], ids=[*(f.name for f in FAMILIES), *COUNTING])
def test_the_last_messages_give_the_prompt_that_the_whole_history_gives(family: Family, seed: int) -> None:
    mine = asyncio.run(prompts_of(ChatFormat, family, seed, 40))
    whole = asyncio.run(prompts_of(Whole, family, seed, 40))
    assert mine[:2] == whole[:2]


def say(form: ChatFormat, turns: int, *, tool: bool = False) -> tuple[int, int]:
    """Return how many messages were written for the first and the second half of a plain conversation."""
    counts = [0, 0]
    text = form._text

    def count(messages: Any, tools: Any, *, opened: bool) -> str:
        counts[len(said) > turns] += len(messages)
        return text(messages, tools, opened=opened)

    said: list[Any] = [{"role": "user", "content": "Go."}]
    ids = form.prompt(said)
    form._text = count  # type: ignore[method-assign, assignment]
    for turn in range(turns):
        sampled = form._encoder.encode(f"So {turn}.<|im_end|>")
        said = [*said, {"role": "assistant", "content": f"So {turn}."}]
        new: list[Any] = [{"role": "tool" if tool else "user", "content": f"And {turn}?"}]
        bridged = form.bridge(ids, sampled, said, new)
        assert bridged is not None
        ids, said = bridged, [*said, *new]
    assert ids == form.prompt(said)
    return counts[0], counts[1]


@pytest.mark.parametrize("tool", [False, True], ids=["users", "tools"])
def test_a_long_history_is_written_whole_only_when_its_length_has_doubled(tool: bool) -> None:
    first, second = say(form_of(ChatFormat, FAMILIES[0]), 256, tool=tool)
    assert second < 256 * 40, "a call writes a few dozen messages, and not the hundreds of its history"
    whole, _ = say(form_of(Whole, FAMILIES[0]), 64, tool=tool)
    assert whole > 64 * 32
    assert first


def test_a_template_that_counts_is_written_whole() -> None:
    form = form_of(ChatFormat, COUNTING["every tenth"])
    say(form, 30)
    assert form._trusted and set(form._trusted.values()) == {-1}


def test_what_followed_the_last_user_is_never_left_out_before_another_user() -> None:
    """Templates such as Qwen 3's take the reasoning out of all that was said since then."""
    said: list[Any] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    said += [{"role": "user", "content": "c"}]
    for _ in range(9):
        said += [{"role": "assistant", "content": "d"}, {"role": "tool", "content": "e"}]
    said += [{"role": "assistant", "content": "f"}]
    recent = recent_messages(said, [{"role": "user", "content": "g"}])
    assert recent is None, "nothing lies between the beginning and the last message of a user but one answer"
    recent = recent_messages(said, [{"role": "tool", "content": "g"}])
    assert recent is not None
    assert [message["content"] for message in recent.messages] == ["a", "d", "e", "f"]


def test_calls_are_found_by_their_conversation_as_by_comparing_all() -> None:
    dice = random.Random(0)
    for _ in range(200):
        session, histories = Session("s"), list[list[Any]]()
        for number in range(12):
            messages = [*dice.choice(histories)] if histories and dice.random() < 0.8 else []
            messages = [*messages, {"role": "user", "content": dice.choice("ab")}]
            call = session.find(messages)
            expected = [
                other
                for other in session.calls
                if [m["content"] for m in other.messages] == [m["content"] for m in messages[: len(other.messages)]]
            ]
            assert (call is None) == (not expected)
            if call is not None:
                assert len(call.messages) == max(len(other.messages) for other in expected)
            prompt = [ord(character) for m in messages for character in f"{m['role']}{m['content']}"]
            before = session._longest(prompt)
            beginnings = [c for c in session.calls if session.ids_of(c) == prompt[: c.stop] and c.stop <= len(prompt)]
            assert (before.stop if before else 0) == max((c.stop for c in beginnings), default=0)
            answer = [*map(ord, f"assistant{dice.choice('xy')}")]
            drawn = Sampled(answer, [-1.0] * len(answer), [0] * len(answer), "stop")
            said = {"role": "assistant", "content": chr(answer[-1])}
            session.record(prompt, drawn, [*messages, said], continues=call)
            histories.append([*messages, said])
            assert session.calls[number].number == number
