"""One row for each turn of a conversation, by data.split_turns."""

from typing import Any

import pytest

from podium.errors import DataError
from podium.rollout.tasks import DataConfig, Example, encode_pairs
from podium.rollout.tasks.chat_encoder import ChatEncoder
from tests.unit.rollout.tasks.test_encode import notes_of
from tests.unit.rollout.tasks.test_spans import (
    CHATML,
    MARKS_ASSISTANT,
    NO_END,
    READS_REASONING,
    STRIPS_THINKING,
    TALK,
    make_tokenizer,
    say,
)

SPLIT = DataConfig(split_turns=True)
THINKING = [
    say("user", "a"),
    say("assistant", "<think>x</think>1"),
    say("user", "b"),
    say("assistant", "<think>y</think>2"),
    say("user", "c"),
    say("assistant", "<think>z</think>3"),
]


def conversation(messages: list[dict[str, Any]], **fields: Any) -> Example:
    return Example(messages[:-1], "", {}, turns=messages[-1:], whole=True, place="talk.jsonl, line 1", **fields)


def rows(template: str, example: Example, config: DataConfig = SPLIT) -> list[tuple[str, str]]:
    """What each row has before the learned text, and the learned text."""
    tokenizer = make_tokenizer(template)
    split: list[tuple[str, str]] = []
    for ids, mask in encode_pairs([example], tokenizer, config):
        first = mask.index(True)
        assert all(mask[first:])
        split.append((str(tokenizer.decode(ids[:first])), str(tokenizer.decode(ids[first:]))))
    return split


@pytest.mark.parametrize("template", [CHATML, STRIPS_THINKING])
def test_each_turn_is_learned_whole_after_the_prompt_that_a_server_sends(template: str) -> None:
    split = rows(template, conversation(THINKING))
    assert [learned for _, learned in split] == [f"{THINKING[at]['content']}<|end|>" for at in (1, 3, 5)]
    tokenizer = make_tokenizer(template)
    encoder = ChatEncoder(tokenizer, DataConfig())
    for at, (prompt, _) in zip((1, 3, 5), split, strict=True):
        assert prompt == str(tokenizer.decode(encoder.encode(encoder.text(THINKING[:at], opened=True))))


def test_reasoning_in_a_field_is_learned_with_each_turn() -> None:
    messages = [
        say("user", "a"),
        say("assistant", "1", reasoning="x"),
        say("user", "b"),
        say("assistant", "2", reasoning="y"),
    ]
    whole = rows(READS_REASONING, conversation(messages[:2]), DataConfig())
    assert [learned for _, learned in whole] == ["(x)1<|end|>"]
    assert [learned for _, learned in rows(READS_REASONING, conversation(messages))] == ["(x)1<|end|>", "(y)2<|end|>"]


def test_notes_tell_the_number_of_rows_and_no_stripped_turn() -> None:
    notes = notes_of(lambda: encode_pairs([conversation(THINKING)], make_tokenizer(STRIPS_THINKING), SPLIT))
    assert notes == ["data.split_turns makes 3 rows of 1, one for each turn that is learned"]
    (note,) = notes_of(lambda: encode_pairs([conversation(THINKING)], make_tokenizer(STRIPS_THINKING), DataConfig()))
    assert "changes the text of 2 of 3 turns of the assistant" in note
    assert "data.split_turns makes a row of each turn" in note


def test_a_template_that_marks_the_assistants_text_is_split_too() -> None:
    assert [learned for _, learned in rows(MARKS_ASSISTANT, conversation(TALK))] == ["beta<|end|>", "delta<|end|>"]
    assert [learned for _, learned in rows(NO_END, conversation(TALK))] == ["beta</s>", "delta</s>"]


def test_turns_that_are_marked_make_no_row() -> None:
    messages = [TALK[0], {**TALK[1], "weight": 0}, *TALK[2:]]
    ((prompt, learned),) = rows(CHATML, conversation(messages))
    assert learned == "delta<|end|>"
    assert "beta" in prompt
    with pytest.raises(DataError, match="no turn of the conversation is learned"):
        rows(CHATML, conversation([TALK[0], {**TALK[1], "train": False}]))
    with pytest.raises(DataError, match=r"message 2 has weight = 0\.5"):
        rows(CHATML, conversation([TALK[0], {**TALK[1], "weight": 0.5}]))


def test_the_turns_of_a_completion_are_split_and_those_of_its_prompt_are_not() -> None:
    example = Example(TALK[:2], "", {}, turns=[say("assistant", "x"), say("user", "y"), say("assistant", "z")])
    assert [learned for _, learned in rows(CHATML, example)] == ["x<|end|>", "z<|end|>"]
    text = Example("alpha", "", {}, turns=[TALK[1]])
    assert rows(CHATML, text) == [("<|start|>user:alpha<|end|><|start|>assistant:", "beta<|end|>")]
    assert rows(CHATML, Example("alpha", "beta", {})) == rows(CHATML, text)


def test_an_error_names_the_turn() -> None:
    messages = [*TALK, say("user", "e"), say("assistant", "f", reasoning="g")]
    with pytest.raises(DataError, match=r"^talk\.jsonl, line 1, message 6: message 6 has reasoning"):
        rows(CHATML, conversation(messages))
    first = Example([say("assistant", "hello"), *TALK[:1]], "", {}, turns=[TALK[1]], whole=True, place="line 3")
    with pytest.raises(DataError, match="line 3: a conversation begins with the assistant's turn"):
        rows(CHATML, first)


def test_a_prompt_that_is_too_long_leaves_its_turn_out() -> None:
    tokenizer = make_tokenizer(CHATML)
    config = DataConfig(split_turns=True, max_prompt_tokens=30)
    example = conversation([*TALK[:2], say("user", "long " * 20), TALK[3]])
    pairs = encode_pairs([example], tokenizer, config)
    assert [row.turns for row in pairs.examples] == [[TALK[1]]]


def test_turns_that_stand_after_another_opening_are_told() -> None:
    """The template opens an answer with empty thinking, and leaves this out of earlier turns."""
    template = (
        "{% for m in messages %}<|start|>{{ m.role }}:{{ '<t></t>' if m.role == 'assistant' and loop.last }}"
        "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant:<t></t>{% endif %}"
    )
    messages = [TALK[0], say("assistant", "<t>beta"), *TALK[2:]]  # whose text begins as the opening does
    tokenizer = make_tokenizer(template)
    (note,) = notes_of(lambda: encode_pairs([conversation(messages)], tokenizer, DataConfig()))
    assert "begins 1 of 2 turns of the assistant in another way" in note
    ((ids, mask),) = encode_pairs([conversation(messages)], tokenizer, DataConfig())
    learned = [token for token, flag in zip(ids, mask, strict=True) if flag]
    assert tokenizer.decode(learned) == "<t>beta<|end|>delta<|end|>"
    assert [text for _, text in rows(template, conversation(messages))] == ["<t>beta<|end|>", "delta<|end|>"]
    assert not any(
        "in another way" in text for text in notes_of(lambda: encode_pairs([conversation(messages)], tokenizer, SPLIT))
    )
