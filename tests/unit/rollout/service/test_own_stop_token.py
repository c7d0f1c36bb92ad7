"""An answer that a client's own stop token has ended: the template's end of the turn follows it in the next prompt."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.unit.rollout.service.scripted import USER, say, scripted

NEXT = {"role": "user", "content": "and now?"}
GOES_ON = "\n<|im_start|>user\nand now?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("said", "read"),
    [
        ("A.<|eot|>", "A.<|eot|><|im_end|>"),  # the client's
        ("A.<|im_end|>", "A.<|im_end|>"),  # the template's
        ("A.<eos>", "A.<eos>"),  # the model's, instead of the template's
        ("A.", "A.<|im_end|>"),
    ],
)
def test_the_next_prompt_has_the_end_of_the_turn(said: str, read: str) -> None:
    service, source, tokenizer = scripted(said, "B.<|im_end|>")
    service.stop_token_ids = (*service.stop_token_ids, tokenizer.eos_token_id)
    own: list[Any] = [tokenizer.convert_tokens_to_ids("<|eot|>")]

    async def talk() -> None:
        answer = await say(service, [USER], stop_token_ids=own)
        assert answer["content"] == "A."
        await say(service, [USER, answer, NEXT], stop_token_ids=own)

    asyncio.run(talk())
    assert tokenizer.decode(source.prompts[1][len(source.prompts[0]) :]) == read + GOES_ON
    session = service.sessions["s"]
    assert (session.splits, len(session.rows)) == (0, 1)
