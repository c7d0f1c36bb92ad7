"""Rows of chat messages: what the chat template writes of them, which tokens are learned, and what ends a turn."""

import itertools
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub import constants
from transformers import PreTrainedTokenizerFast

from podium.errors import ConfigError, DataError
from podium.models import ModelConfig
from podium.rewards import RewardConfig, reads, text
from podium.rollout.sampling import SamplingParams
from podium.rollout.tasks import DataConfig, Example, encode_pairs, encode_prompts, load_examples, templates
from podium.trainer.checks.preflight import check_answers, with_stop_tokens
from tests.unit.rollout.tasks.test_encode import CHATML, byte_tokenizer, notes_of
from tests.waits import wait_until

# Thinking is written for the last answer only, as Qwen3's template does, and switched off in the opening of an answer.
QWEN = (
    "{%- if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{- (m.content or '') + ((m.tool_calls | tojson) if m.tool_calls else '') + '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{%- for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + (m.content | trim) + '<|eot_id|>' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# The marked text is without the end of the turn, which is learned all the same.
MARKED = CHATML.replace(
    "{{ m['content'] }}",
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}",
)
# An answer is opened with <think>, which no conversation has afterwards: DeepSeek R1's template does so.
R1 = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")

USER, MODEL = {"role": "user", "content": "the fox"}, {"role": "assistant", "content": "jumps"}
AGAIN, LAST = {"role": "user", "content": "a dog"}, {"role": "assistant", "content": "sleeps"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer(template)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]}
    )
    return tokenizer


def load(path: Path, rows: list[dict[str, Any]], **settings: Any) -> list[Example]:
    file = path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(train=str(file), holdout=0, **settings)
    return load_examples(config.train, config)


def pieces(tokenizer: PreTrainedTokenizerFast, pair: tuple[list[int], list[bool]]) -> list[tuple[bool, str]]:
    """The text of each run of tokens that are learned, or are not."""
    runs = itertools.groupby(zip(*pair, strict=True), key=lambda one: one[1])
    return [(learned, str(tokenizer.decode([token for token, _ in run]))) for learned, run in runs]


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_every_turn_of_the_assistant_is_learned_up_to_its_end(tmp_path: Path, template: str) -> None:
    tokenizer = tokenizer_of(template)
    examples = load(tmp_path, [{"messages": [USER, MODEL, AGAIN, LAST]}])
    (pair,) = encode_pairs(examples, tokenizer, DataConfig(system_prompt="Be brief."))
    assert pieces(tokenizer, pair) == [
        (
            False,
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\n",
        ),
        (True, "jumps<|im_end|>"),
        (False, "\n<|im_start|>user\na dog<|im_end|>\n<|im_start|>assistant\n"),
        (True, "sleeps<|im_end|>"),
    ]


def test_a_template_of_llama_3s_kind(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(LLAMA)
    (pair,) = encode_pairs(load(tmp_path, [{"messages": [USER, MODEL, AGAIN, LAST]}]), tokenizer, DataConfig())
    head = "<|start_header_id|>{}<|end_header_id|>\n\n"
    assert pieces(tokenizer, pair) == [
        (False, f"<s>{head.format('user')}the fox<|eot_id|>{head.format('assistant')}"),
        (True, "jumps<|eot_id|>"),
        (False, f"{head.format('user')}a dog<|eot_id|>{head.format('assistant')}"),
        (True, "sleeps<|eot_id|>"),
    ]


@pytest.mark.parametrize("thinking", [True, False])
def test_a_template_that_writes_earlier_answers_otherwise(tmp_path: Path, thinking: bool) -> None:
    tokenizer = tokenizer_of(QWEN)
    config = DataConfig(chat_template_kwargs={"enable_thinking": thinking})
    examples = load(tmp_path, [{"messages": [USER, MODEL, AGAIN, LAST]}])
    (pair,), (prompt,) = (
        encode_pairs(examples, tokenizer, config),
        encode_prompts(examples, tokenizer, config).token_ids,
    )
    learned = [text for learned, text in pieces(tokenizer, pair) if learned]
    empty = "<think>\n\n</think>\n\n"
    assert learned == ["jumps<|im_end|>", (empty if thinking else "") + "sleeps<|im_end|>"]
    assert str(tokenizer.decode(prompt)).endswith("assistant\n" + ("" if thinking else empty))
    assert pair[0][: len(prompt)] == prompt, "the prompt is encoded as for generation"


@pytest.mark.parametrize("template", [CHATML, MARKED, LLAMA, QWEN])
def test_pairs_of_messages_learn_the_completion_alone(tmp_path: Path, template: str) -> None:
    tokenizer = tokenizer_of(template)
    examples = load(tmp_path, [{"prompt": [USER, MODEL, AGAIN], "completion": [LAST], "level": 1}])
    (pair,) = encode_pairs(examples, tokenizer, DataConfig())
    (prompt,) = encode_prompts(examples, tokenizer, DataConfig()).token_ids
    end = "<|eot_id|>" if template is LLAMA else "<|im_end|>"
    (before, after) = pieces(tokenizer, pair)
    assert before == (False, tokenizer.decode(prompt))
    assert after == (True, ("<think>\n\n</think>\n\n" if template is QWEN else "") + "sleeps" + end)
    assert (examples[0].answer, examples[0].row["answer"]) == ("sleeps", [LAST])


def test_calls_of_tools_and_their_results_are_turns(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    tokenizer = tokenizer_of(QWEN)
    rows = [
        {"messages": [USER, call, {"role": "tool", "content": "3"}, LAST], "tools": tools} for tools in ([TOOL], "")
    ]
    rows[1]["tools"] = json.dumps([TOOL])
    with_list, with_text = encode_pairs(load(tmp_path, rows), tokenizer, DataConfig())
    assert with_list == with_text
    (_, system), (_, called), (_, result), _ = pieces(tokenizer, with_list)
    assert system.startswith('<|im_start|>system\n[{"type": "function"')
    assert called == '[{"name": "add"}]<|im_end|>'
    assert result == "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"


def test_tools_that_the_template_would_drop_are_refused(tmp_path: Path) -> None:
    rows = [{"messages": [USER, LAST], "tools": tools} for tools in ([TOOL], "a hammer")]
    with pytest.raises(
        ConfigError, match=r"rows\.jsonl, line 1: there are tools, and the chat template does not write them"
    ):
        encode_prompts(load(tmp_path, rows[:1]), tokenizer_of(CHATML), DataConfig())
    with pytest.raises(DataError, match=r"rows\.jsonl, line 1: the tools 'a hammer' are no list"):
        encode_prompts(load(tmp_path, rows[1:]), tokenizer_of(QWEN), DataConfig())
    plain = load(tmp_path, [{"prompt": "nail", "answer": "", "tools": "a hammer"}])
    assert encode_prompts(plain, tokenizer_of(CHATML), DataConfig()).kept == [0]


def test_parquet_rows_give_templates_no_keys_that_a_message_lacks(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    rows = [{"messages": [{**USER, "name": "x"}, LAST]}, {"messages": [USER, LAST]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    config = DataConfig(train=str(path), holdout=0)
    tokenizer = tokenizer_of("{% for m in messages %}{{ m.keys() | sort }}{{ m.content }}{% endfor %}")
    ids = encode_prompts(load_examples(config.train, config), tokenizer, config).token_ids
    assert [tokenizer.decode(row) for row in ids] == [
        "['content', 'name', 'role']the fox",
        "['content', 'role']the fox",
    ]


def test_parquet_rows_have_no_arguments_of_other_rows_tools(tmp_path: Path) -> None:
    path, config = tmp_path / "rows.parquet", DataConfig(train=str(tmp_path / "rows.parquet"), holdout=0)
    rows: list[dict[str, Any]] = []
    for name, argument in (("add", "left"), ("find", "text")):
        tool = {"type": "function", "function": {"name": name, "parameters": {"properties": {argument: {"type": "x"}}}}}
        call = {"role": "assistant", "content": None, "tool_calls": [{"name": name, "arguments": {argument: 1}}]}
        rows.append({"messages": [USER, call, AGAIN, LAST], "tools": [tool], "about": {argument: 1}})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    examples = load_examples(config.train, config)
    tokenizer = tokenizer_of(QWEN)
    written = [str(tokenizer.decode(ids)) for ids, _ in encode_pairs(examples, tokenizer, config)]
    assert written == [str(tokenizer.decode(i)) for i, _ in encode_pairs(load(tmp_path, rows), tokenizer, config)]
    assert "text" not in written[0] and "left" not in written[1]
    assert examples[0].row["about"] == {"left": 1, "text": None}  # a reward finds the columns as the file has them


def test_a_template_for_text_gets_parts_as_text(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "fox"}]
    written = "{% for m in messages %}{{ m.content }}{% endfor %}"
    examples = load(tmp_path, [{"messages": [{"role": "user", "content": parts}, LAST]}])
    prompts = encode_prompts(examples, tokenizer := tokenizer_of(written), DataConfig())
    assert tokenizer.decode(prompts.token_ids[0]) == "the fox"
    ((ids, _),) = encode_pairs(examples, tokenizer, DataConfig())
    assert tokenizer.decode(ids, skip_special_tokens=True) == f"the fox{LAST['content']}"
    assert examples[0].row["prompt"] == [{"role": "user", "content": parts}]  # a reward gets the row as it is


# -- the examples ----------------------------------------------------------------------------------------------------


def test_conversations_are_prompts_with_answers_for_rewards_too(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"messages": [USER, MODEL, AGAIN, LAST]},
        {"messages": [USER, MODEL], "answer": 72},
        {"prompt": [USER], "completion": [{"role": "assistant", "content": [{"type": "text", "text": "hops"}]}]},
        {"prompt": "the fox", "completion": "jumps"},
    ]
    first, second, third, fourth = load(tmp_path, rows)
    assert (first.prompt, first.answer, first.row["answer"]) == ([USER, MODEL, AGAIN], "sleeps", "sleeps")
    assert (second.prompt, second.answer, second.row["answer"]) == ([USER], "72", 72)
    assert (third.prompt, third.answer) == ([USER], "hops")
    assert (fourth.prompt, fourth.answer, fourth.turns) == ("the fox", "jumps", ())
    check_answers([first, second, third, fourth], RewardConfig(name="exact"))
    (named,) = load(tmp_path, [{"chat": [USER, LAST]}], prompt_column="chat", answer_column=None)
    assert (named.prompt, named.answer) == ([USER], "sleeps")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": [MODEL]}, "line 1: column 'messages' holds no message before the assistant's"),
        ({"messages": [USER]}, "line 1: no column 'answer' for the answer"),
        ({"messages": "hello"}, "no column 'answer'"),
        (
            {"messages": str([USER, LAST]), "answer": "x"},
            "line 1: column 'messages' holds a conversation as text, .* JSON Lines and Parquet can hold",
        ),
        ({"prompt": str([USER]), "answer": "x"}, "line 1: column 'prompt' holds a conversation as text"),
        (
            {"prompt": [USER, MODEL], "answer": "x"},
            "column 'prompt' ends with the assistant's turn, and column 'answer'",
        ),
        ({"prompt": [USER], "completion": [USER]}, "column 'completion' ends with a message of the role 'user'"),
        ({"messages": [USER, {"role": "assistant", "content": 5}]}, r"message 2 of column 'messages' .*'5' \(int\)"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}, LAST]},
            r"message 1 of column 'messages' has a part of the type 'image', .*expected text, or parts of the type",
        ),
    ],
)
def test_a_conversation_that_cannot_be_used_is_named(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        load(tmp_path, [row])


@pytest.mark.parametrize("answer", [["a", "b"], {"value": 1}, []])
def test_an_answer_that_is_neither_text_nor_messages_is_refused_by_name(tmp_path: Path, answer: object) -> None:
    examples = load(tmp_path, [{"prompt": "a", "answer": "b"}, {"prompt": "c", "answer": answer}])
    said = rf"the answer .*\({type(answer).__name__}\) is neither text nor messages.*data\.answer_column"
    with pytest.raises(DataError, match=rf"rows\.jsonl, line 2: {said}"):
        encode_pairs(examples, byte_tokenizer(), DataConfig())
    for name in ("exact", "fraction", "gsm8k"):
        with pytest.raises(DataError, match=rf"rows\.jsonl, line 2: reward\.name = '{name}': {said}"):
            check_answers(examples, RewardConfig(name=name))
    (tmp_path / "mine.py").write_text(Path(text.__file__).read_text())
    with pytest.raises(DataError, match=rf"rows\.jsonl, line 2: reward\.name = '.*mine\.py:exact': {said}"):
        check_answers(examples, RewardConfig(name=f"{tmp_path}/mine.py:exact"))
    check_answers(examples, RewardConfig(name="my_rewards:score"))  # a reward that declares nothing reads what it likes
    check_answers(examples, RewardConfig(name="exact", on_error="score"))
    assert examples[1].row["answer"] == answer


def test_a_column_that_a_reward_declares_and_a_row_lacks_is_named(tmp_path: Path) -> None:
    @reads("answer", "unit")
    def score(completion: str, row: dict[str, Any]) -> float:
        return float(completion == f"{row['answer']} {row['unit']}")

    examples = load(tmp_path, [{"prompt": "a", "answer": "1", "unit": "m"}, {"prompt": "c", "answer": "2"}])
    with pytest.raises(DataError, match=r"rows\.jsonl, line 2: reward\.name = '.*score' reads the column 'unit', and"):
        check_answers(examples, RewardConfig(), reward=score)
    check_answers(examples[:1], RewardConfig(), reward=["exact", score])
    check_answers(examples, RewardConfig(on_error="score"), reward=score)


def test_an_answer_that_is_not_a_number_is_missing(tmp_path: Path) -> None:
    (found,) = load(tmp_path, [{"prompt": "a", "answer": float("nan")}])  # as pandas writes a missing value
    assert (found.answer, found.row["answer"]) == (None, None)


def test_numbers_are_answers(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    examples = load(tmp_path, [{"prompt": "a", "answer": answer} for answer in (7, 0.5, True)])
    assert [pieces(tokenizer, p)[1][1] for p in encode_pairs(examples, tokenizer, DataConfig())] == [
        "7</s>",
        "0.5</s>",
        "True</s>",
    ]


# -- the template ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("template", "end"), [(CHATML, "<|im_end|>"), (LLAMA, "<|eot_id|>"), (MARKED, "<|im_end|>")])
def test_the_templates_end_of_turn_ends_generation(template: str, end: str) -> None:
    tokenizer = tokenizer_of(template)
    model = ModelConfig(config={"model_type": "qwen3", "vocab_size": 400}, tokenizer="chars:x")
    params = with_stop_tokens(SamplingParams(max_new_tokens=4), model, tokenizer, DataConfig())
    assert params.stop_token_ids == (tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(end))
    plain = with_stop_tokens(SamplingParams(max_new_tokens=4), model, tokenizer, DataConfig(chat_template="none"))
    assert plain.stop_token_ids == (tokenizer.eos_token_id,)
    given = with_stop_tokens(SamplingParams(max_new_tokens=4, stop_token_ids=(9,)), model, tokenizer, DataConfig())
    assert given.stop_token_ids == (9,)


def test_a_template_whose_answers_are_opened_otherwise_than_they_are_learned_is_refused(tmp_path: Path) -> None:
    examples = load(tmp_path, [{"messages": [USER, LAST]}])
    with pytest.raises(ConfigError, match=r"opens an answer with '<think>'.*data\.chat_template_kwargs"):
        encode_pairs(examples, tokenizer_of(R1), DataConfig())
    with pytest.raises(ConfigError, match=r"opens an answer with '<think>'.*data\.chat_template to another file"):
        encode_pairs(
            examples,
            tokenizer_of(MARKED.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")),
            DataConfig(),
        )
    with pytest.raises(ConfigError, match=r"marks nothing of .* as the assistant's text"):
        encode_pairs(examples, tokenizer_of(CHATML + "{% generation %}{% endgeneration %}"), DataConfig())


@pytest.mark.parametrize(
    ("template", "given", "said"),
    [
        (QWEN, {"enable_thinkin": False}, r"data\.chat_template_kwargs\.enable_thinkin: the chat template reads no"),
        (QWEN, {"tokenize": True}, r"data\.chat_template_kwargs\.tokenize: Podium sets this argument"),
        (
            None,
            {"enable_thinking": False},
            r"data\.chat_template_kwargs\.enable_thinking: this run has no chat template",
        ),
    ],
)
def test_a_variable_that_no_template_reads_is_refused(template: str | None, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        encode_prompts([Example("a", "b", {})], byte_tokenizer(template), DataConfig(chat_template_kwargs=given))


def test_a_template_that_loops_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "_PATIENCE_S", 0.3)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    for encode in (encode_prompts, encode_pairs):
        with pytest.raises(ConfigError, match=r"seems to loop: set data\.chat_template to another"):
            encode([Example("a", "b", {})], tokenizer_of(loop), DataConfig())
        assert wait_until(lambda: not list_template_threads())


def test_a_thread_that_is_given_up_gives_up_the_thread_for_which_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that encodes rows waits for the first text of the template, for as long as it has itself."""
    monkeypatch.setattr(templates, "_PATIENCE_S", 0.3)
    zeros = itertools.repeat(0)
    for _ in range(5):
        with pytest.raises(ConfigError, match="seems to loop"):
            templates.run_in_time(lambda: templates.run_in_time(lambda: sum(zero for zero in zeros)))
        assert wait_until(lambda: not list_template_threads())


def list_template_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "chat template"]


def test_arguments_of_a_call_that_are_json_text_are_written_as_the_object_that_they_are(tmp_path: Path) -> None:
    """OpenAI's form has text there, which a template writes as a string in quotes."""
    written: list[list[tuple[bool, str]]] = []
    tokenizer = tokenizer_of(QWEN)
    for arguments in ({"a": 1}, '{"a": 1}'):
        call = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "add", "arguments": arguments}}],
        }
        rows = [{"messages": [USER, call, {"role": "tool", "content": "3"}, LAST]}]
        (pair,) = encode_pairs(load(tmp_path, rows), tokenizer, DataConfig())
        written.append(pieces(tokenizer, pair))
    assert written[0] == written[1]
    assert any('"arguments": {"a": 1}' in text for _, text in written[1])


ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("encode", [encode_prompts, encode_pairs])
@pytest.mark.parametrize(
    ("row", "template", "said"),
    [
        ({"messages": [USER, USER, LAST]}, ALTERNATING, "the chat template cannot write .*roles must alternate"),
        ({"messages": [LAST, USER, LAST]}, ALTERNATING, "the chat template cannot write .*roles must alternate"),
        ({"prompt": "", "completion": "a"}, None, "the prompt '' has no tokens"),
        ({"messages": [USER, LAST], "tools": [TOOL]}, ALTERNATING, "there are tools, and the chat template"),
        ({"messages": [USER, LAST]}, None, "the prompt is a conversation, and there is no chat template"),
    ],
)
def test_an_error_about_an_example_names_its_row(
    tmp_path: Path, encode: Any, row: dict[str, Any], template: str | None, said: str
) -> None:
    good = {"messages": [USER, LAST]} if template else {"prompt": "a", "completion": "b"}
    examples = load(tmp_path, [good, good, row])
    assert [example.place for example in examples] == [f"{tmp_path}/rows.jsonl, line {n}" for n in (1, 2, 3)]
    with pytest.raises((ConfigError, DataError), match=rf"^\S*rows\.jsonl, line 3: {said}"):
        encode(examples, byte_tokenizer(template), DataConfig())


def test_the_first_bad_row_is_named_with_the_number_of_others(tmp_path: Path) -> None:
    good, bad = {"messages": [USER, LAST]}, {"messages": [USER, USER, LAST]}
    examples = load(tmp_path, [good, bad, good, bad, bad])
    with pytest.raises(ConfigError, match=r"line 2: .*alternate.*\(3 of the first 5 rows cannot be used; data\.b"):
        encode_pairs(examples, byte_tokenizer(ALTERNATING), DataConfig())
    with pytest.raises(DataError, match=r"line 2: no column 'prompt'.*\(2 of the first 3 rows cannot be used; data"):
        load(tmp_path, [good, {"question": "a"}, {"messages": "a"}])


def test_of_several_templates_one_is_the_default_one_is_for_tools_and_any_may_be_named(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    plain, called = load(tmp_path, [{"messages": [USER, LAST]}, {"messages": [USER, LAST], "tools": [TOOL]}])

    def write(example: Example, **settings: Any) -> str:
        (ids,) = encode_prompts([example], tokenizer, DataConfig(**settings)).token_ids
        return str(tokenizer.decode(ids))

    tokenizer.chat_template = {"default": CHATML, "tool_use": QWEN, "rag": "Q: {{ messages[-1].content }} A:"}
    assert write(plain) == "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\n"
    assert write(called).startswith('<|im_start|>system\n[{"type": "function"')
    assert write(plain, chat_template="rag") == "Q: the fox A:"
    assert len(encode_pairs([plain, called], tokenizer, DataConfig())) == 2
    tokenizer.chat_template = {"chat": CHATML, "rag": CHATML}
    said = "chat templates 'chat', 'rag', and none is called default: set data.chat_template to one of these names"
    with pytest.raises(ConfigError, match=said):
        write(plain)
    assert write(plain, chat_template="chat") == "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(ConfigError, match="expected auto, none, a file, or one of 'chat', 'rag'"):
        write(plain, chat_template="chatml")


def test_a_text_is_learned_token_by_token(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(CHATML, bos=True)
    ((ids, mask),) = encode_pairs(load(tmp_path, [{"text": "the fox", "url": "u"}]), tokenizer, DataConfig())
    assert tokenizer.decode(ids) == "<s>the fox</s>"
    assert mask == [False] + [True] * (len(ids) - 1), "nothing predicts the first token"
    for other in ({"label": 1}, {"summary": "a"}, {"code": "a"}):
        with pytest.raises(DataError, match="no column 'prompt' for the prompt"):
            load(tmp_path, [{"text": "the fox", **other}])


@pytest.mark.parametrize(
    ("row", "settings", "said"),
    [
        ({"prompt": "a", "completion": "b", "label": False}, {}, "column 'label' is false, which marks the completion"),
        ({"prompt": "a", "completion": "b", "label": "False"}, {}, "column 'label' is false"),
        ({"prompt": "a", "answer": "b", "history": [USER, LAST]}, {}, "column 'history' holds 2 earlier turns"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, {}, "'chosen' and 'rejected' are a preference pair"),
        (
            {"instruction": "a", "output": "b", "history": [["c", "d"]]},
            {"prompt_column": "instruction", "answer_column": "output"},
            "column 'history' holds 1 earlier turn",
        ),
        (
            {"messages": [USER, LAST], "chat_template_kwargs": {"enable_thinking": False}},
            {},
            "column 'chat_template_kwargs' sets enable_thinking for this row alone",
        ),
        (
            {"conversations": [{"from": "narrator", "value": "a"}]},
            {},
            "message 1 .* is from 'narrator'; expected human",
        ),
        (
            {"conversations": [{"from": "function_call", "value": "add"}]},
            {},
            "message 1 .* is a call of a function, 'add'",
        ),
        (
            {"prompt": "a", "chosen": [{"role": "user", "content": "b"}, LAST]},
            {"answer_column": "chosen"},
            "column 'chosen' begins with a message of the role 'user' that is not the prompt in column 'prompt'",
        ),
        ({"prompt": [USER], "a": {"b": "c"}}, {"answer_column": "a.d"}, r"no column 'a\.d' .*'a\.b'"),
        ({"prompt": [USER], "a": {"label": "c"}}, {"answer_column": "label"}, r"did you mean a\.label"),
    ],
)
def test_a_row_that_means_something_else_is_refused(
    tmp_path: Path, row: dict[str, Any], settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(DataError, match=rf"rows\.jsonl, line 1: .*{said}"):
        load(tmp_path, [row], **settings)


def test_a_column_of_conversations_may_hold_them_as_json(tmp_path: Path) -> None:
    (tmp_path / "rows.tsv").write_text("messages\n" + json.dumps([USER, LAST]) + "\n")
    config = DataConfig(train=str(tmp_path / "rows.tsv"), holdout=0)
    (example,) = load_examples(config.train, config)
    assert ([*example.prompt], example.answer) == ([USER], "sleeps")


def test_roles_of_other_names_and_an_answer_that_repeats_the_prompt_are_read_as_meant(tmp_path: Path) -> None:
    turns = [{"role": "human", "content": "the fox"}, {"role": "gpt", "content": "sleeps"}]
    (example,) = load(tmp_path, [{"messages": turns}])
    assert ([*example.prompt], [*example.turns]) == ([USER], [LAST])
    for prompt in ("the fox", [USER]):
        (example,) = load(tmp_path, [{"prompt": prompt, "chosen": [USER, LAST]}], answer_column="chosen")
        assert (example.prompt, [*example.turns], example.answer) == (prompt, [LAST], "sleeps")


def test_bad_rows_are_left_out_with_their_number_and_the_first_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of which no example can be made, those that the template cannot write, and those without an answer."""
    monkeypatch.setattr("podium.rollout.tasks.encode._FROM", 1)
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    tokenizer, config = byte_tokenizer(ALTERNATING), DataConfig(bad_rows="drop")
    good, bad = {"messages": [USER, LAST]}, {"messages": [USER, USER, LAST]}
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, [good, bad, bad, 5, good, bad, {"a": 1}, bad])))
    config = replace(config, train=str(tmp_path / "rows.jsonl"), holdout=0.0)
    examples: list[Example] = []
    kept: list[int] = []
    (note,) = notes_of(lambda: examples.extend(load_examples(config.train, config)))
    assert "2 of 8 rows cannot be used and are left out, the first of them: (1) " in note
    assert "rows.jsonl, line 4: expected a JSON object" in note and "(2) " in note and "line 7: no column" in note
    for encode in (encode_prompts, encode_pairs):
        for _ in range(2):  # the second time from the disk
            notes = notes_of(lambda encode=encode: kept.append(len(encode(examples, tokenizer, config).token_ids)))
            (note,) = notes
            assert note.startswith("4 of 6 rows cannot be used and are left out, the first of them: (1) ")
            assert all(f"({n}) {tmp_path}/rows.jsonl, line {at}: " in note for n, at in ((1, 2), (2, 3), (3, 6)))
            assert "(4)" not in note
    assert kept == [2] * 4
    with pytest.raises(ConfigError, match=r"rows\.jsonl, line 2: the chat template cannot write"):
        encode_pairs([example for example in examples if len(example.prompt) == 2], tokenizer, config)
