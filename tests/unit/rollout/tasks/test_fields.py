"""Fields of messages and rows that the chat template does not write, with templates and fields of our own."""

from typing import Any

import pytest

from podium.errors import ConfigError, DataError
from podium.rollout.tasks import DataConfig, Example, encode_pairs, encode_prompts
from podium.rollout.tasks.fields import holds_speech
from tests.unit.rollout.tasks.test_chat import QWEN, TOOL, tokenizer_of
from tests.unit.rollout.tasks.test_encode import notes_of
from tests.unit.rollout.tasks.test_spans import CHATML, OPEN, TURN, learn, make_tokenizer, say

CALLS = (
    "{% for m in messages %}<|start|>{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[WRITTEN]{% endfor %}<|end|>{% endfor %}" + OPEN
)
NO_TOOLS = "{% for m in messages %}{% if m.role != 'tool' %}" + TURN + "<|end|>{% endif %}{% endfor %}" + OPEN
SKIPS_SYSTEM = (
    "{% if messages[0].role == 'system' %}{% set messages = messages[1:] %}{% endif %}" + CHATML
)  # as templates that know no system prompt, and raise nothing
NAMES = CHATML.replace("{{ m.role }}:", "{{ m.role }}{% if m.name %}({{ m.name }}){% endif %}:")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("working", "First I add 3 and 4, which gives 7."),  # a name that no convention knows
        ("plan", {"steps": ["look at the sum", "then say the result of it"]}),
        ("sql", "SELECT name FROM users WHERE age > 3"),
        ("code", "x = 3\nprint(x + 4)"),
        ("解説", "因为三加四等于七所以答案是七"),
        ("documents", [{"title": "A", "text": "The moon is made of old green cheese."}]),
        ("reasoning", "7"),
        ("thinking_blocks", [{"type": "thinking", "thinking": "because"}]),
        ("chainOfThought", "so 7"),
        ("refusal", "no"),
    ],
)
def test_what_somebody_said_is_refused_where_the_template_does_not_write_it(name: str, value: Any) -> None:
    for at in (0, 1):
        messages = [say("user", "3+4?"), say("assistant", "7")]
        messages[at][name] = value
        with pytest.raises(DataError, match=rf"line 1: message {at + 1} has {name} = "):
            learn(CHATML, messages)
        assert holds_speech(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("id", "msg_0a1b2c"),
        ("timestamp", "Mon Jan 3 12:00:00 2024"),
        ("name", "Ada of the house of Lovelace"),
        ("toxic", True),
        ("scores", {"helpful": 0.5, "safe": 1}),
        ("header", {"user-agent": "Mozilla/5.0 (Windows NT 10.0; Win64; x64) AppleWebKit/537.36 (KHTML, like Gecko)"}),
        ("hashed_ip", "22fd87ba9b98f848bce0"),
        ("license", "free for all to use and to share"),
        ("provenance", "The Stack v2"),
        ("thinking", True),
        ("annotations", [{"type": "url_citation", "url": "https://a.b/c", "title": "all that one has to know"}]),
    ],
)
def test_meta_data_that_the_template_does_not_write_are_told_once(name: str, value: Any) -> None:
    tokenizer, turn = make_tokenizer(CHATML), {"role": "assistant", "content": "7", name: value}
    examples = [Example([say("user", "a")], "7", {}, turns=[turn], whole=True) for _ in range(3)]
    (note,) = notes_of(lambda: encode_pairs(examples, tokenizer, DataConfig()))
    assert f"does not write {name!r} of 3 messages" in note
    assert not holds_speech(name, value)


def test_a_field_that_the_template_writes_is_not_told() -> None:
    messages = [say("user", "a", name="Ada"), say("assistant", "7")]
    example = Example(messages[:1], "7", {}, turns=messages[1:], whole=True)
    assert notes_of(lambda: encode_pairs([example], make_tokenizer(NAMES), DataConfig())) == []


@pytest.mark.parametrize("value", [None, "", [], {}, False, 0])
def test_an_empty_field_is_no_field(value: Any) -> None:
    example = Example([say("user", "a")], "7", {}, turns=[say("assistant", "7", reasoning=value)], whole=True)
    assert notes_of(lambda: encode_pairs([example], make_tokenizer(CHATML), DataConfig())) == []


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
SECOND = {"type": "function", "function": {"name": "take", "arguments": {"c": 3}}}


@pytest.mark.parametrize(
    ("written", "field"),
    [
        ("x", "tool_calls.function.arguments"),  # where each call changes the text, and nothing of it
        ("{{ c.function.name }}", "tool_calls.function.arguments"),
        ("{% if loop.first %}{{ c.function | tojson }}{% endif %}", "tool_calls"),  # the second is lost
        ("{{ c.function | tojson }}", None),
        ("{{ c.function.name }}{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}", None),
    ],
)
def test_each_call_of_a_tool_is_written_whole(written: str, field: str | None) -> None:
    messages = [
        say("user", "a"),
        say("assistant", None, tool_calls=[CALL, SECOND]),
        say("tool", "3"),
        say("assistant", "b"),
    ]
    template = CALLS.replace("[WRITTEN]", written).replace("{{ m.content }}", "{{ m.content or '' }}")
    if field is None:
        assert learn(template, messages)[1].endswith("<|end|>b<|end|>")
    else:
        with pytest.raises(DataError, match=rf"message 2 has {field} = "):
            learn(template, messages)


def test_a_message_that_the_template_leaves_out_is_refused() -> None:
    """The result 5 stands in the answer, so that looking for it in the text finds it."""
    messages = [say("user", "a"), say("assistant", "get"), say("tool", "5"), say("assistant", "it is 5")]
    for _ in range(2):
        with pytest.raises(DataError, match=r"message 3 of the role 'tool', '5', is not written by the chat template"):
            learn(NO_TOOLS, messages)
    prompt = [Example(messages[:3], "5", {})]
    with pytest.raises(DataError, match="message 3 of the role 'tool'"):
        encode_prompts(prompt, make_tokenizer(NO_TOOLS), DataConfig())


def test_a_system_prompt_that_the_template_leaves_out_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.system_prompt = 'Be brief' is not written"):
        encode_prompts([Example("a", "b", {})], make_tokenizer(SKIPS_SYSTEM), DataConfig(system_prompt="Be brief"))


def test_the_number_of_a_message_counts_those_of_the_row() -> None:
    example = Example([say("user", "a", reasoning="b")], "c", {})
    with pytest.raises(DataError, match="message 1 has reasoning = 'b'"):
        encode_prompts([example], make_tokenizer(CHATML), DataConfig(system_prompt="Be brief"))


def test_tools_that_the_template_names_and_does_not_write_are_refused() -> None:
    template = CHATML + "{% if tools and messages | length > 99 %}{{ tools }}{% endif %}"
    with pytest.raises(ConfigError, match="there are tools, and the chat template does not write them"):
        encode_prompts([Example([say("user", "a")], "b", {"tools": [TOOL]})], make_tokenizer(template), DataConfig())


def test_a_column_that_the_template_would_write_is_refused() -> None:
    template = "{% if documents %}({{ documents[0].text }}){% endif %}{% if quiet %}{% endif %}" + CHATML
    rows: list[dict[str, Any]] = [{"documents": [{"text": "old"}]}, {"documents": []}, {"quiet": True}, {"other": "x"}]
    examples = [Example("a", "b", row, place=f"line {at}") for at, row in enumerate(rows)]
    with pytest.raises(DataError, match=r"line 0: column 'documents' holds .*the chat template has a variable of this"):
        encode_prompts(examples, make_tokenizer(template), DataConfig())
    assert len(encode_prompts(examples[1:], make_tokenizer(template), DataConfig()).token_ids) == 3


def test_a_column_of_thoughts_that_is_not_learned_is_told() -> None:
    rows: list[dict[str, Any]] = [{"prompt": "a", "answer": "b", "reasoning": "c"}] * 2
    examples = [Example("a", "b", row, columns=("prompt", "answer")) for row in rows]
    (note,) = notes_of(lambda: encode_pairs(examples, make_tokenizer(CHATML), DataConfig()))
    assert note.startswith("column 'reasoning' of 2 rows is not learned")
    learned = [Example("a", "cb", row, columns=("prompt", "{reasoning}{answer}")) for row in rows]
    assert notes_of(lambda: encode_pairs(learned, make_tokenizer(CHATML), DataConfig())) == []


def test_rows_with_unwritten_fields_are_left_out() -> None:
    turns = [say("assistant", "7", reasoning="why"), say("assistant", "8")]
    examples = [Example([say("user", "a")], "", {}, turns=[turn], whole=True) for turn in turns]
    pairs = encode_pairs(examples, make_tokenizer(CHATML), DataConfig(bad_rows="drop"))
    assert [example.turns for example in pairs.examples] == [[turns[1]]]


def test_tools_of_a_template_that_writes_them_pass() -> None:
    example = Example([say("user", "a")], "b", {"tools": [TOOL]})
    assert encode_prompts([example], tokenizer_of(QWEN), DataConfig()).kept == [0]


@pytest.mark.parametrize(
    ("content", "takes_parts"),
    [
        ("{% for part in m.content %}{{ part.text }}{% endfor %}", True),
        ("{{ m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join }}", True),
        ("{{ m.content[0]['text'] + '' }}", True),
        ("{% if m.content is string %}{{ raise_exception('parts') }}{% endif %}{{ m.content[0].text }}", True),
        ("", False),
        ("{{ raise_exception('never') }}", False),
    ],
)
def test_a_template_that_takes_parts_alone_is_told_as_the_reason(content: str, takes_parts: bool) -> None:
    template = "{% for m in messages %}<|start|>{{ m.role }}:" + content + "<|end|>{% endfor %}" + OPEN
    with pytest.raises((ConfigError, DataError), match=r"chat template") as caught:
        learn(template, [say("user", "three and four"), say("assistant", "seven")])
    assert ("reads the content of a message as a list of parts alone" in str(caught.value)) == takes_parts
    assert ("also writes a content which is a text" in str(caught.value)) == takes_parts
