"""What is learned of conversations, with templates of our own that behave like those of the field."""

from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from podium.errors import ConfigError, DataError
from podium.rollout.tasks import DataConfig, Example, encode_pairs
from podium.rollout.tasks.spans import Span, check_learned, mask_tokens
from podium.telemetry import Note, subscribe

SIGNS = [
    "<unk>",
    "<s>",
    "</s>",
    "<|start|>",
    "<|end|>",
    "<|return|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<|stop|>",
]
TURN = "<|start|>{{ m.role }}:{{ m.content }}"
OPEN = "{% if add_generation_prompt %}<|start|>assistant:{% endif %}"
CHATML = "{% for m in messages %}" + TURN + "<|end|>{% endfor %}" + OPEN
LAST_TURN_RETURNS = (
    "{% for m in messages %}"
    + TURN
    + "{% if loop.last and m.role == 'assistant' %}<|return|>{% else %}<|end|>{% endif %}"
    "{% endfor %}" + OPEN
)
TWO_ENDS = (
    "{% for m in messages %}" + TURN + "{% if m.role == 'assistant' %}<|stop|>{% endif %}<|end|>{% endfor %}" + OPEN
)
NO_END = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
STRIPS_THINKING = (
    "{% for m in messages %}<|start|>{{ m.role }}:"
    "{% if loop.last or '</think>' not in m.content %}{{ m.content }}"
    "{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}"
    "<|end|>{% endfor %}" + OPEN
)
READS_REASONING = (
    "{% for m in messages %}<|start|>{{ m.role }}:{% if loop.last and m.reasoning %}({{ m.reasoning }}){% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}<|end|>{% endfor %}" + OPEN
)
ENDS_LAST_ONLY = (
    "{% for m in messages %}{% if m.role == 'user' %}<|start|>user:{{ m.content }}"
    "{% else %}<|start|>assistant:{{ m.content }}{% if loop.last %}<|end|>{% endif %}{% endif %}{% endfor %}" + OPEN
)
MARKS_USER = (
    "{% for m in messages %}{% generation %}<|start|>{{ m.role }}:{{ m.content }}<|end|>{% endgeneration %}{% endfor %}"
    + OPEN
)
MARKS_ASSISTANT = (
    "{% for m in messages %}<|start|>{{ m.role }}:{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}" + OPEN
)


def make_tokenizer(template: str | None, spaces: str = "none") -> PreTrainedTokenizerFast:
    """A tokenizer of single characters. With ``spaces`` it puts a space before each text that it encodes, as
    SentencePiece does."""
    characters = [chr(code) for code in range(32, 127)] + ["▁", "\n"]
    vocabulary = {token: index for index, token in enumerate([*SIGNS, *characters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", fuse_unk=True))
    if spaces == "legacy":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif spaces != "none":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=spaces, split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>",
        chat_template=template, additional_special_tokens=SIGNS[3:],
    )  # fmt: skip


def say(role: str, content: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


TALK = [say("user", "alpha"), say("assistant", "beta"), say("user", "gamma"), say("assistant", "delta")]


@pytest.fixture
def notes() -> Iterator[list[str]]:
    texts: list[str] = []
    stop = subscribe(lambda event: texts.append(event.text) if isinstance(event, Note) else None)
    yield texts
    stop()


def learn(template: str | None, messages: list[dict[str, Any]], spaces: str = "none") -> tuple[str, str, list[int]]:
    """The text that the model reads, the text that it learns, and the ids."""
    tokenizer = make_tokenizer(template, spaces)
    *before, last = messages
    example = Example(before, str(last["content"]), {}, turns=[last], whole=True, place="talk.jsonl, line 1")
    ((ids, mask),) = encode_pairs([example], tokenizer, DataConfig())
    learned = [token for token, flag in zip(ids, mask, strict=True) if flag]
    return str(tokenizer.decode(ids)), str(tokenizer.decode(learned)), ids


@pytest.mark.parametrize(
    ("template", "learned"),
    [
        (CHATML, "beta<|end|>delta<|end|>"),
        (LAST_TURN_RETURNS, "beta<|end|>delta<|return|>"),
        (TWO_ENDS, "beta<|stop|><|end|>delta<|stop|><|end|>"),
        (NO_END, "beta<|user|>delta</s>"),
        (MARKS_ASSISTANT, "beta<|end|>delta<|end|>"),
    ],
)
def test_each_turn_is_learned_once_with_its_end(template: str, learned: str) -> None:
    text, answer, _ = learn(template, TALK)
    assert answer == learned
    whole = make_tokenizer(template).apply_chat_template(TALK, tokenize=False)
    assert text.removesuffix("</s>") == whole


def test_a_tool_ends_a_turn_where_a_template_writes_no_end() -> None:
    messages = [say("user", "price"), say("assistant", "get"), say("tool", "5"), say("assistant", "five")]
    assert learn(NO_END, messages)[1] == "get<|tool|>five</s>"


def test_the_next_role_ends_a_turn_whose_end_is_written_only_at_the_last() -> None:
    assert learn(ENDS_LAST_ONLY, TALK)[1] == "beta<|start|>delta<|end|>"


CALLS_END_OTHERWISE = (
    "{% for m in messages %}<|start|>{{ m.role }}:"
    "{% if m.reasoning and loop.last %}({{ m.reasoning }})<|end|><|start|>assistant:{% endif %}"
    "{% if m.tool_calls %}[{{ m.tool_calls[0].function.name }}]<|stop|>"
    "{% else %}{{ m.content }}{{ '<|return|>' if m.role == 'assistant' and loop.last else '<|end|>' }}{% endif %}"
    "{% endfor %}" + OPEN
)


@pytest.mark.parametrize(
    ("messages", "learned"),
    [
        (
            [
                say("user", "a"),
                say("assistant", "", tool_calls=[{"function": {"name": "get"}}]),
                say("tool", "5"),
                TALK[3],
            ],
            "[get]<|stop|>delta<|return|>",
        ),
        ([say("user", "a"), say("assistant", "", tool_calls=[{"function": {"name": "get"}}])], "[get]<|stop|>"),
        (
            [
                say("user", "a"),
                say("assistant", "b", reasoning="c"),
                say("user", "d"),
                say("assistant", "e", reasoning="f"),
            ],
            "b<|end|>(f)<|end|><|start|>assistant:e<|return|>",
        ),
    ],
)
def test_a_call_ends_with_its_own_token_and_a_turn_without_its_reasoning_where_its_text_ends(
    messages: list[dict[str, Any]], learned: str
) -> None:
    """As gpt-oss does it."""
    assert learn(CALLS_END_OTHERWISE, messages)[1] == learned


STRIPS_AND_ENDS_TWICE = (
    "{% for m in messages %}<|start|>{{ m.role }}:{% if m.reasoning and loop.last %}({{ m.reasoning }}){% endif %}"
    "{{ m.content }}{{ '\n<|stop|>' if m.role == 'assistant' }}<|end|>{% endfor %}" + OPEN
)


def test_both_ends_of_a_turn_without_its_reasoning_are_learned() -> None:
    messages = [say("user", "a"), say("assistant", "b", reasoning="c"), say("user", "d"), say("assistant", "e")]
    assert learn(STRIPS_AND_ENDS_TWICE, messages)[1] == "b\n<|stop|><|end|>e\n<|stop|><|end|>"


def test_marks_of_a_template_that_cover_the_user_are_refused() -> None:
    with pytest.raises(DataError, match=r"^talk\.jsonl, line 1: .*message 1 of the role 'user'.*the assistant did not"):
        learn(MARKS_USER, TALK)


def test_reasoning_that_a_template_strips_from_earlier_turns_is_told(notes: list[str]) -> None:
    messages = [
        say("user", "a"),
        say("assistant", "<think>x</think>1"),
        say("user", "b"),
        say("assistant", "<think>y</think>2"),
    ]
    assert learn(STRIPS_THINKING, messages)[1] == "1<|end|><think>y</think>2<|end|>"
    assert any("changes the text of 1 of 2 turns of the assistant" in note for note in notes)


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content", "thinking", "thoughts"])
def test_a_field_that_the_template_does_not_write_is_refused(field: str) -> None:
    with pytest.raises(DataError, match=rf"^talk\.jsonl, line 1: message 2 has {field} = 'because'"):
        learn(CHATML, [say("user", "a"), say("assistant", "b", **{field: "because"})])


def test_reasoning_that_the_template_writes_is_learned(notes: list[str]) -> None:
    assert learn(READS_REASONING, [say("user", "a"), say("assistant", "b", reasoning="why")])[1] == "(why)b<|end|>"
    assert not notes
    messages = [say("user", "a"), say("assistant", "b", reasoning="why"), say("user", "c"), say("assistant", "d")]
    assert learn(READS_REASONING, messages)[1] == "b<|end|>d<|end|>"
    assert any("changes the text of 1 of 2 turns" in note for note in notes)


@pytest.mark.parametrize("content", [None, ""])
def test_a_function_call_of_the_older_form_is_a_tool_call(content: str | None) -> None:
    call = {"name": "get", "arguments": "{}"}
    messages = [
        say("user", "a"),
        say("assistant", content, function_call=call),
        say("function", "5", name="get"),
        say("assistant", "b"),
    ]
    assert learn(READS_REASONING, messages)[1] == "[get]<|end|>b<|end|>"
    with pytest.raises(DataError, match="message 2 has tool_calls"):
        learn(CHATML, messages)


@pytest.mark.parametrize(
    "mark", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"trainable": False}, {"loss_mask": 0}, {"loss": False}]
)
def test_a_turn_that_is_marked_is_not_learned(mark: dict[str, Any]) -> None:
    first = [TALK[0], {**TALK[1], **mark}, *TALK[2:]]
    assert learn(CHATML, first)[1] == "delta<|end|>"
    last = [*TALK[:3], {**TALK[3], **mark}]
    assert learn(CHATML, last)[:2] == ("<|start|>user:alpha<|end|><|start|>assistant:beta<|end|>", "beta<|end|>")


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([TALK[0], {**TALK[1], "weight": 0.5}], "message 2 has weight = 0.5; expected true or false"),
        ([TALK[0], {**TALK[1], "loss_mask": [1, 0]}], "message 2 has loss_mask"),
        ([{**TALK[0], "train": True}, TALK[1]], "message 1 of the role 'user' has train = True"),
        ([TALK[0], {**TALK[1], "weight": 0}], "no turn of the conversation is learned"),
    ],
)
def test_a_mark_that_cannot_be_honored_is_refused(messages: list[dict[str, Any]], error: str) -> None:
    with pytest.raises(DataError, match=error):
        learn(CHATML, messages)


def test_marks_of_rows_and_of_the_template_are_not_mixed() -> None:
    with pytest.raises(ConfigError, match="marks the assistant's text itself"):
        learn(MARKS_ASSISTANT, [TALK[0], {**TALK[1], "weight": 0}, *TALK[2:]])


@pytest.mark.parametrize("spaces", ["legacy", "always", "first", "none"])
def test_a_text_is_encoded_as_a_whole(spaces: str) -> None:
    tokenizer = make_tokenizer(CHATML, spaces)
    encoding: Any = tokenizer.apply_chat_template(TALK, tokenize=True)
    assert learn(CHATML, TALK, spaces)[2] == encoding["input_ids"]
    plain = make_tokenizer(None, spaces)
    ((ids, mask),) = encode_pairs([Example("3+4=", "7", {})], plain, DataConfig(chat_template="none"))
    joined = plain("3+4=7", add_special_tokens=False)["input_ids"]
    assert [token for token in ids if token not in (1, 2)] == joined
    assert sum(mask) == 2


def test_an_answer_that_would_change_the_tokens_of_its_prompt_is_encoded_alone() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"</s>": 0, "a": 1, "b": 2, "ab": 3}, merges=[("a", "b")]))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    ((ids, mask),) = encode_pairs([Example("a", "b", {})], fast, DataConfig(chat_template="none"))
    assert (ids, mask) == ([1, 2, 0], [False, True, True])


def test_spans_that_hold_what_others_said_are_refused() -> None:
    text = "<u>alpha<a>beta<u>gamma<a>delta"
    right = [Span(1, 11, 15, True), Span(3, 26, 31, True)]
    assert check_learned(text, TALK, right) == 0
    for wrong in (
        [Span(1, 11, 26, True), Span(3, 26, 31, True)],  # with the user's text
        [Span(1, 11, 31, True), Span(3, 26, 31, True)],  # the last answer twice
        [Span(1, 0, 15, True), Span(3, 26, 31, True)],
        [Span(1, 11, 14, True), Span(3, 26, 31, True)],  # a letter short
        [Span(3, 26, 31, True), Span(1, 11, 15, True)],
        [Span(1, 26, 31, True), Span(3, 11, 15, True)],
    ):
        with pytest.raises(DataError, match="the chat template writes message"):
            check_learned(text, TALK, wrong)


def test_a_token_on_the_border_of_a_span_is_not_masked_by_characters() -> None:
    assert mask_tokens([(0, 2), (2, 4), (4, 6)], [Span(1, 2, 4, True)]) == [False, True, False]
    assert mask_tokens([(0, 2), (2, 2), (2, 4)], [Span(1, 2, 4, True)]) == [False, True, True]
    assert mask_tokens([(0, 3), (3, 4), (4, 6)], [Span(1, 2, 4, True)]) is None
    assert mask_tokens([(0, 2), (2, 5), (5, 6)], [Span(1, 2, 4, True)]) is None


OPENS_AS_IT_STRIPS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
    "{% if m.reasoning and loop.last %}<|start|>{{ m.reasoning }}{% endif %}<|stop|>{% endif %}{{ m.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|><|start|>{% endif %}"
)


def test_a_turn_without_the_opening_of_an_answer_begins_with_a_whole_token() -> None:
    """Both tokens begin with the same letters, as those do that open and close reasoning. GLM and Cohere open an answer
    with the one, and write earlier turns after the other."""
    messages = [*TALK[:3], say("assistant", "delta", reasoning="why")]
    text, learned, ids = learn(OPENS_AS_IT_STRIPS, messages)
    assert learned == "<|stop|>beta<|end|>why<|stop|>delta<|end|>"
    tokenizer = make_tokenizer(OPENS_AS_IT_STRIPS)
    assert ids == tokenizer.encode(text, add_special_tokens=False), "the tokens are those of the text"


OPENS_ALWAYS = "{% for m in messages %}" + TURN + "<|end|>{% endfor %}<|start|>assistant:"
OPENS_ALWAYS_BY_WORDS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.mark.parametrize("template", [OPENS_ALWAYS, OPENS_ALWAYS_BY_WORDS])
def test_a_template_that_opens_an_answer_after_each_conversation_is_refused(template: str) -> None:
    with pytest.raises(ConfigError, match=r"opens an answer with .*assistant:.*where add_generation_prompt is false"):
        learn(template, TALK)
    with pytest.raises(ConfigError, match=r"put it between \{% if add_generation_prompt %\}"):
        encode_pairs([Example("alpha", "beta", {})], make_tokenizer(template), DataConfig())


def test_a_template_without_an_opening_is_not_refused_for_it() -> None:
    assert learn(CHATML.removesuffix(OPEN), TALK)[1] == "<|start|>assistant:beta<|end|><|start|>assistant:delta<|end|>"


NEEDS_TOOLS = "{% for t in tools %}[{{ t.function.name }}{{ t.function.description }}]{% endfor %}" + CHATML


def test_the_end_that_a_template_for_tools_alone_writes_is_learned_once() -> None:
    tools = [{"type": "function", "function": {"name": "get", "description": "Gets it."}}]
    row = {"tools": tools}
    example = Example(TALK[:3], "delta", row, turns=[TALK[3]], whole=True, place="talk.jsonl, line 1")
    tokenizer = make_tokenizer(NEEDS_TOOLS)
    ((ids, mask),) = encode_pairs([example], tokenizer, DataConfig())
    learned = [token for token, flag in zip(ids, mask, strict=True) if flag]
    assert tokenizer.decode(learned) == "beta<|end|>delta<|end|>"


STRIPS_BEFORE_CALLS = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|start|>{{ m.role }}:"
    "{% if m.reasoning and loop.index0 > ns.last %}({{ m.reasoning }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}<|end|>{% endfor %}" + OPEN
)


def test_a_history_that_is_written_otherwise_later_names_the_remedy_that_helps() -> None:
    """A turn after a result of a tool, which reads the reasoning of the call until the next question, as of Qwen3."""
    messages = [
        *(say("user", "a"), say("assistant", "b", reasoning="why", tool_calls=[{"function": {"name": "get"}}])),
        *(say("tool", "5"), say("assistant", "c"), say("user", "d"), say("assistant", "e")),
    ]
    with pytest.raises(ConfigError, match=r"before message 4 in another way if later.*\(why\).*set data\.split_turns"):
        learn(STRIPS_BEFORE_CALLS, messages)
    example = Example(messages[:-1], "e", {}, turns=messages[-1:], whole=True)
    pairs = encode_pairs([example], make_tokenizer(STRIPS_BEFORE_CALLS), DataConfig(split_turns=True))
    assert len(pairs) == 3, "and it does help"


MARKS_LATE = MARKS_ASSISTANT.replace("{% generation %}", " {% generation %}").replace("{{ m.role }}: ", "{{ m.role }}:")


def test_what_stands_between_the_opening_of_an_answer_and_its_mark_is_told(notes: list[str]) -> None:
    assert learn(MARKS_LATE, TALK)[1] == "beta<|end|>delta<|end|>"
    assert any("marks 1 of 2 turns of the assistant by {% generation %} only in part" in note for note in notes)
    notes.clear()
    learn(MARKS_ASSISTANT, TALK)
    assert notes == []


def test_special_tokens_in_texts_are_told_and_those_of_the_template_in_answers_are_not(notes: list[str]) -> None:
    template = CHATML + "{# <|tool|> #}"
    talk = [say("user", "what is <|return|>"), say("assistant", "<|tool|>beta<|stop|>"), *TALK[2:]]
    learn(template, talk)
    (note,) = [note for note in notes if "special tokens" in note]
    assert "'<|return|>' in 1 of the role 'user'" in note and "'<|stop|>' in 1 of the role 'assistant'" in note
    assert "'<|tool|>'" not in note
    notes.clear()
    learn(CHATML, [say("user", "what is < |return|>"), *TALK[1:]])
    assert notes == []


MARKS_EARLY = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}"
    "{% generation %}:{{ m.content }}{% endgeneration %}{% else %}:{{ m.content }}{% endif %}<|end|>{% endfor %}" + OPEN
)
MARKS_WITHOUT_REASONING = (
    "{% for m in messages %}<|start|>{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}"
    "{{ '<t></t>' if loop.last }}{{ m.content.split('!')[-1] }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant:<t></t>{% endif %}"
)


def test_a_mark_that_covers_what_opens_an_answer_is_not_learned_there() -> None:
    assert learn(MARKS_EARLY, TALK)[1] == "beta<|end|>delta<|end|>"


def test_marked_turns_that_are_changed_or_opened_otherwise_are_told(notes: list[str]) -> None:
    messages = [TALK[0], say("assistant", "hm!beta"), *TALK[2:]]
    assert learn(MARKS_WITHOUT_REASONING, messages)[1] == "beta<|end|>delta<|end|>"
    assert any("changes the text of 1 of 2 turns" in note for note in notes)
    assert any("begins 1 of 2 turns of the assistant in another way" in note for note in notes)


@pytest.mark.parametrize("rest", ["{{ '\n' }}<|end|>", "<|end|>", "{{ '\n' }}<|return|>"])
def test_what_a_template_writes_after_the_end_of_the_last_turn_is_not_learned(rest: str) -> None:
    """As Phi-3's template, which writes the end-of-sequence token, which may be the one that ends a turn."""
    template = CHATML.removesuffix(OPEN) + OPEN.replace("{% endif %}", f"{{% else %}}{rest}{{% endif %}}")
    assert learn(template, TALK)[1] == "beta<|end|>delta<|end|>"
    ((ids, mask),) = encode_pairs([Example("alpha", "beta", {})], make_tokenizer(template), DataConfig())
    learned = [token for token, flag in zip(ids, mask, strict=True) if flag]
    assert make_tokenizer(template).decode(learned) == "beta<|end|>"
