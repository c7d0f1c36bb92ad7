"""From messages to ids and back, by any chat template."""

from __future__ import annotations

import json
from typing import Any

import pytest

from podium.models import char_tokenizer
from podium.rollout.tasks.chat_encoder import ChatEncoder
from podium.rollout.tasks.config import DataConfig
from podium_agents.service.chat_format import ChatFormat

ALPHABET = "".join(map(chr, range(32, 127))) + "\n"
CHATML = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETS = (  # leaves out the reasoning of all answers before the last user's message
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER = {"role": "user", "content": "What is 2+2?"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def make(template: str = CHATML) -> tuple[ChatFormat, Any]:
    tokenizer = char_tokenizer(ALPHABET, chat_template=template)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})  # type: ignore[arg-type]
    return ChatFormat(ChatEncoder(tokenizer, DataConfig()), tokenizer), tokenizer


def said(text: str, tokenizer: Any, *, end: bool = True) -> list[int]:
    return tokenizer.encode(text + ("<|im_end|>" if end else ""), add_special_tokens=False)


def test_a_bridge_keeps_what_was_sampled_and_adds_what_the_template_adds() -> None:
    form, tokenizer = make()
    prompt = form.prompt([USER])
    answer = said("It  is 4.", tokenizer)
    whole = form.bridge(
        prompt, answer, [USER, {"role": "assistant", "content": "It is 4."}], [{"role": "user", "content": "Sure?"}]
    )
    assert whole is not None
    assert whole[: len(prompt) + len(answer)] == [*prompt, *answer], "the two spaces that the model sampled stay"
    added = tokenizer.decode(whole[len(prompt) + len(answer) :])
    assert added == "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("blank", [" ", "{{ '\n\n' }}"])
def test_an_end_after_a_space_of_the_template_is_not_written_again(blank: str) -> None:
    """As Llama 2's template writes it: the model itself has ended its turn without the space."""
    form, tokenizer = make(
        CHATML.replace("<|im_end|>\n{% endfor %}{% if add", f"{blank}<|im_end|>\n{{% endfor %}}{{% if add")
    )
    answer, talk = said("4.", tokenizer), [USER, {"role": "assistant", "content": "4."}]
    for sampled, after in ((answer, "4.<|im_end|>\n<|im_start|>user"), (answer[:-1], "<|im_end|>\n<|im_start|>user")):
        whole = form.bridge(form.prompt([USER]), sampled, talk, [{"role": "user", "content": "Sure?"}])
        assert whole is not None
        text = tokenizer.decode(whole)
        assert after in text and text.count("<|im_end|>") == 3, "two questions and one answer"


def test_an_answer_that_was_cut_off_is_ended_by_the_template() -> None:
    form, tokenizer = make()
    prompt, answer = form.prompt([USER]), said("It is", tokenizer, end=False)
    whole = form.bridge(
        prompt, answer, [USER, {"role": "assistant", "content": "It is"}], [{"role": "user", "content": "?"}]
    )
    assert whole is not None
    assert tokenizer.decode(whole[len(prompt) :]).startswith("It is<|im_end|>\n<|im_start|>user")


def test_a_tool_call_is_read_and_bridged() -> None:
    form, tokenizer = make()
    prompt = form.prompt([USER], [TOOL])
    written = 'Let me add.\n<tool_call>\n{"name":"add",  "arguments": {"a": 2, "b": true}}\n</tool_call>'
    answer = said(written, tokenizer)
    reply = form.parse(prompt, answer, [TOOL])
    assert reply.content == "Let me add."
    ((call),) = reply.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 2, "b": True})
    message = {
        "role": "assistant",
        "content": reply.content,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}],
    }
    result = {"role": "tool", "tool_call_id": "c", "content": "3"}
    whole = form.bridge(prompt, answer, [USER, message], [result], [TOOL])
    assert whole is not None
    assert tokenizer.decode(whole[len(prompt) :]) == (
        written + "<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "written", ["<tool_call>{not json}</tool_call>", '<tool_call>["add"]</tool_call>', '{"name": "add"}']
)
def test_what_is_no_tool_call_stays_text(written: str) -> None:
    form, tokenizer = make()
    reply = form.parse(form.prompt([USER], [TOOL]), said(written, tokenizer), [TOOL])
    assert (reply.content, reply.tool_calls) == (written, ())


def test_without_tools_nothing_is_a_call() -> None:
    form, tokenizer = make()
    written = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert form.parse(form.prompt([USER]), said(written, tokenizer)).content == written


def test_reasoning_is_read_also_if_the_prompt_opened_it() -> None:
    form, tokenizer = make()
    reply = form.parse(form.prompt([USER]), said("<think>\nhm\n</think>\n\n4", tokenizer))
    assert (reply.reasoning, reply.content) == ("hm", "4")
    opened = [*form.prompt([USER]), *said("<think>\n", tokenizer, end=False)]
    reply = form.parse(opened, said("hm</think>4", tokenizer))
    assert (reply.reasoning, reply.content) == ("hm", "4")
    assert form.parse(opened, said("hm", tokenizer, end=False)).content == ""


def test_a_template_that_forgets_reasoning_is_not_bridged_over_a_user_but_over_a_tool() -> None:
    form, tokenizer = make(FORGETS)
    prompt, answer = form.prompt([USER]), said("<think>hm</think>4", tokenizer)
    replied = {"role": "assistant", "content": "4", "reasoning_content": "hm"}
    assert form.bridge(prompt, answer, [USER, replied], [{"role": "user", "content": "Sure?"}]) is None
    whole = form.bridge(prompt, answer, [USER, replied], [{"role": "tool", "content": "3"}])
    assert whole is not None and whole[: len(prompt) + len(answer)] == [*prompt, *answer]


def test_an_assistants_message_that_was_never_sampled_is_read_like_any_other() -> None:
    form, tokenizer = make()
    prompt, answer = form.prompt([USER]), said("4", tokenizer)
    new = [{"role": "assistant", "content": "made up"}, {"role": "user", "content": "?"}]
    whole = form.bridge(prompt, answer, [USER, {"role": "assistant", "content": "4"}], new)
    assert whole is not None
    assert whole[: len(prompt) + len(answer)] == [*prompt, *answer]
    assert "assistant\nmade up<|im_end|>" in tokenizer.decode(whole[len(prompt) + len(answer) :])


def test_special_tokens_that_mean_nothing_in_an_answer_are_not_said() -> None:
    form, tokenizer = make()
    special = [tokenizer.bos_token_id, tokenizer.convert_tokens_to_ids("<|im_start|>")]
    four = said("It is 4", tokenizer, end=False)
    reply = form.parse(form.prompt([USER]), [*special, *four, *special, *said(".", tokenizer)])
    assert reply.content == "It is 4."
