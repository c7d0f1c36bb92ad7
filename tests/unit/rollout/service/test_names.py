"""The name of a message: that of a user counts, and what a client adds to the model's own answer does not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from podium_agents.service.histories import message_key
from tests.unit.rollout.service.scripted import CHATML, say, scripted

NAMES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ ' ' + m.name if m.name }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_another_name_is_another_message_if_the_template_writes_it(role: str) -> None:
    said = {"role": role, "content": "hello"}
    named = (said, {**said, "name": "ann"}, {**said, "name": "bob"})
    for template, count in ((NAMES, 3), (CHATML, 1)):
        form = scripted(template=template)[0].form
        assert len({message_key(one, template=form) for one in named}) == count


def test_the_models_own_answer_is_the_same_with_a_name() -> None:
    said = {"role": "assistant", "content": "hello"}
    assert message_key({**said, "name": "agent"}) == message_key(said)


def test_the_model_reads_the_name_of_the_user_who_asks() -> None:
    service, source, tokenizer = scripted("A.<|im_end|>", "B.<|im_end|>", template=NAMES)
    ann, bob = ({"role": "user", "content": "hello", "name": name} for name in ("ann", "bob"))

    async def talk() -> None:
        answer: Any = await say(service, [ann])
        await say(service, [bob, answer, {"role": "user", "content": "and now?", "name": "bob"}])

    asyncio.run(talk())
    assert "ann" not in tokenizer.decode(source.prompts[1])
    assert [row.parent for row in service.sessions["s"].rows] == [None, None]
