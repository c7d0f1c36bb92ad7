"""Rows that mean something else than their prompt and answer alone: they are read as they were meant, refused by field
and remedy, or told."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from podium.errors import DataError
from podium.rollout.tasks import DataConfig, encode_pairs
from tests.unit.rollout.tasks.test_chat import CHATML, LAST, QWEN, TOOL, USER, load, pieces, tokenizer_of
from tests.unit.rollout.tasks.test_encode import notes_of

TOOLS = CHATML.replace("{% for m", "{{ tools | tojson if tools else '' }}{% for m", 1)
OPENED = "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\n"
ARGUMENTS = {"a": 1}
CALL: dict[str, Any] = {"type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}


def learn(folder: Path, row: dict[str, Any], template: str = TOOLS, **settings: Any) -> list[tuple[bool, str]]:
    tokenizer = tokenizer_of(template)
    (pair,) = encode_pairs(load(folder, [row], **settings), tokenizer, DataConfig())
    return pieces(tokenizer, pair)


def turns(**fields: Any) -> list[dict[str, Any]]:
    return [USER, {**LAST, **fields}]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        # marks of rows, and of turns that are no marks of ours
        ({"prompt": "a", "answer": "b", "weight": 0}, "column 'weight' holds 0, which seems to say"),
        ({"prompt": "a", "answer": "b", "weight": "0.5"}, "column 'weight' holds 0.5"),
        ({"prompt": "a", "answer": "b", "weight": "heavy", "train": "ICE 5"}, None),
        ({"prompt": "a", "answer": "b", "sample_weight": 0.5}, "column 'sample_weight' holds 0.5"),
        ({"messages": [USER, LAST], "train": False}, "column 'train' holds False"),
        ({"messages": [USER, LAST], "is_train": "false"}, "column 'is_train' holds false"),
        ({"messages": [USER, LAST], "assistant_masks": [0, 1]}, r"column 'assistant_masks' holds \[0, 1\]"),
        ({"prompt": "a", "completion": "b", "labels": [-100, 5]}, r"column 'labels' holds \[-100, 5\]"),
        ({"prompt": "a", "completion": "b", "input_ids": [4, 5]}, r"column 'input_ids' holds \[4, 5\]"),
        ({"messages": turns(ignore=True)}, "message 2 has ignore = True, which seems to say"),
        ({"messages": turns(train_on=False)}, "message 2 has train_on = False"),
        ({"messages": turns(train_detail=[{"begin": 0, "train": False}])}, "message 2 has train_detail = "),
        ({"messages": turns(loss_weight=0.5)}, "message 2 has loss_weight = 0.5"),
        (
            {"prompt": "a", "answer": "b", "weight": 1, "train": True, "skip": False, "loss": 2.3, "training": None},
            None,
        ),
        # two answers, and options of one row
        (
            {"prompt": "a", "answer": "7", "completion": "3 + 4 = 7"},
            "column 'answer' holds '7' and column 'completion'",
        ),
        ({"prompt": "a", "answer": "7", "completion": "7"}, None),
        ({"prompt": "a", "completion": "7", "label": 0}, "column 'label' is 0, which marks"),
        (
            {"prompt": "a", "answer": "b", "chat_template_kwargs": '{"x": 1}'},
            "column 'chat_template_kwargs' sets x for",
        ),
        ({"prompt": "a", "answer": "b", "chat_template_kwargs": [["x", 1]]}, "column 'chat_template_kwargs' sets"),
        ({"prompt": "a", "answer": "b", "chat_template_kwargs": "{}"}, None),
        (
            {"instruction": "a", "prompt": "a", "answer": "b", "history": '[["c", "d"]]'},
            "'history' holds 1 earlier turn",
        ),
        ({"prompt": "a", "answer": "b", "history": [["c", "d"], ["e", "f"]]}, "'history' holds 2 earlier turns"),
        (
            {"prompt": "a", "answer": "b", "history": ["c", "d"]},
            "'history' holds 2 earlier turns, .* or rename the col",
        ),
        (
            {"prompt": "a", "answer": "b", "history": [{"from": "human", "value": "c"}]},
            "'history' holds 1 earlier turn",
        ),
        (
            {"prompt": "a", "answer": "b", "history": {"past_user_inputs": ["c"]}},
            "'history' holds earlier turns, which",
        ),
        ({"prompt": "a", "answer": "b", "history": "A text of history."}, None),
        ({"prompt": "a", "answer": "b", "history": []}, None),
        ({"prompt": "a", "answer": "b", "history": [[]]}, None),
        ({"prompt": "a", "answer": "b", "history": [3, 4]}, None),
        (
            {"prompt": "a", "answer": "b", "system": {"text": "Be brief."}},
            "column 'system' holds .*'Be brief.'.* .dict., which would be left out of the prompt: write the system",
        ),
        ({"prompt": "a", "answer": "b", "system_prompt": ["Be", "brief."]}, "column 'system_prompt' holds .* .list."),
        ({"prompt": "a", "answer": "b", "system": {}}, None),
        ({"prompt": "a", "answer": "b", "system": 3}, None),
        # parts, calls and messages
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}, LAST]},
            "message 1 .*text is None",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "content": "a"}]}, LAST]},
            "message 1 .*has the part",
        ),
        (
            {"messages": turns(tool_calls=[None])},
            "message 2 of column 'messages' has tool_calls = '.None.'; expected a",
        ),
        (
            {"messages": turns(tool_calls="add")},
            "message 2 of column 'messages' has tool_calls = 'add'; expected a list",
        ),
        ({"messages": None}, "column 'messages' holds 'None'"),
        ({"messages": [USER, None, LAST]}, r"column 'messages' holds .*None.*; expected text, or a list of messages"),
        (
            {"prompt": ['{"role": "user", "content": "a"}'], "answer": "b"},
            "column 'prompt' holds a conversation as text",
        ),
        (
            {"conversations": [{"from": "human", "value": "a", "content": "b"}, LAST]},
            "message 1 .*and another value, 'a'",
        ),
        # what the template writes itself
        ({"prompt": OPENED, "answer": "b"}, "message 1 of the role 'user' has '<.im_start.>', which the chat template"),
        ({"messages": [{**USER, "content": "a<|im_end|>"}, LAST]}, "message 1 of the role 'user' has '<.im_end.>'"),
        ({"prompt": "a", "answer": "b<|im_end|>c"}, "message 1 of the role 'assistant' has '<.im_end.>'"),
    ],
)
def test_a_row_of_which_something_would_be_dropped_is_refused_by_field(
    tmp_path: Path, row: dict[str, Any], said: str | None
) -> None:
    if said is None:
        assert learn(tmp_path, row)
        return
    with pytest.raises(DataError, match=rf"rows\.jsonl, line 1: .*{said}"):
        learn(tmp_path, row)


def test_calls_in_every_form_are_learned_as_objects_and_text_in_quotes_is_refused(tmp_path: Path) -> None:
    written = learn(tmp_path, {"messages": turns(tool_calls=[CALL])}, QWEN)
    assert json.dumps(CALL) in written[-1][1]
    for calls in (json.dumps([CALL]), CALL, json.dumps(CALL), [json.dumps(CALL)]):
        assert learn(tmp_path, {"messages": turns(tool_calls=calls)}, QWEN) == written
    for arguments in (ARGUMENTS, json.dumps(ARGUMENTS)):
        flat = learn(tmp_path, {"messages": turns(tool_calls=[{"name": "add", "arguments": arguments}])}, QWEN)
        assert '{"name": "add", "arguments": {"a": 1}}' in flat[-1][1]
    bare = learn(tmp_path, {"messages": turns(tool_calls=[{"name": "add", "arguments": None}])}, QWEN)
    assert '"arguments": {}}' in bare[-1][1]
    broken = {"name": "add", "arguments": "{a: 1"}
    with pytest.raises(
        DataError, match=r"line 1: message 2 calls 'add' with the arguments '{a: 1', which are no JSON obj"
    ):
        learn(tmp_path, {"messages": turns(tool_calls=[broken])}, QWEN)
    as_text = QWEN.replace("(m.tool_calls | tojson)", "m.tool_calls[0].arguments")
    assert "{a: 1<|im_end|>" in learn(tmp_path, {"messages": turns(tool_calls=[broken])}, as_text)[-1][1]


def test_tools_are_written_in_every_form_and_others_are_told(tmp_path: Path) -> None:
    for tools in ([TOOL], json.dumps([TOOL]), TOOL, json.dumps(TOOL), [json.dumps(TOOL)]):
        for row in ({"prompt": "the fox", "answer": "sleeps"}, {"messages": [USER, LAST]}):
            text = learn(tmp_path, {**row, "tools": tools})[0][1]
            assert text == json.dumps([TOOL]) + OPENED
    (note,) = notes_of(lambda: learn(tmp_path, {"prompt": "a", "answer": "b", "tools": ["hammer"]}))
    assert note.endswith(
        "column 'tools' of 1 row is not written, since it holds no JSON schemas of tools: \"['hammer']\""
    )


def test_messages_that_are_json_one_by_one_are_a_conversation(tmp_path: Path) -> None:
    for column in ("messages", "prompt"):
        row = {column: [json.dumps(message) for message in (USER, LAST)]}
        assert learn(tmp_path, row) == [(False, OPENED), (True, "sleeps<|im_end|>")]


@pytest.mark.parametrize("end", ["<|im_end|>", "</s>", "<|im_end|>\n"])
def test_an_end_that_the_data_have_is_learned_once(tmp_path: Path, end: str) -> None:
    for row in ({"prompt": "the fox", "answer": f"sleeps{end}"}, {"messages": turns(content=f"sleeps{end}")}):
        assert learn(tmp_path, row) == [(False, OPENED), (True, "sleeps<|im_end|>")]
    tokenizer = tokenizer_of(CHATML)
    tokenizer.chat_template = None
    ((ids, mask),) = encode_pairs(load(tmp_path, [{"prompt": "fox", "answer": "b</s>"}]), tokenizer, DataConfig())
    assert pieces(tokenizer, (ids, mask)) == [(False, "fox"), (True, "b</s>")]


@pytest.mark.parametrize(
    ("rows", "template", "said"),
    [
        ([{"prompt": "", "answer": "b"}, {"prompt": "a", "answer": "b"}], TOOLS, "1 of 2 prompts is empty"),
        ([{"prompt": "1+1", "answer": "1+1 = 2"}], TOOLS, "every answer begins with its prompt"),
        ([{"prompt": [USER, LAST]}], TOOLS, "1 row has a prompt that ends with the assistant's turn, which is the"),
        (
            [{"prompt": "a", "answer": "b", "messages": [USER, LAST]}],
            TOOLS,
            "column 'messages' of 1 row is not learned",
        ),
        (
            [{"prompt": "a", "answer": "b", "context": "c d"}],
            TOOLS,
            "column 'context' of 1 row is neither in the prompt nor",
        ),
        (
            [{"prompt": "a", "answer": "b", "documents": [{"title": "t", "text": "It was so."}]}],
            TOOLS,
            "column 'documents' of 1 row is neither in the prompt nor",
        ),
        (
            [{"prompt": "a", "answer": "b", "answer_choices": {"label": ["A", "B"], "text": ["b", "c"]}}],
            TOOLS,
            "column 'answer_choices' of 1 row is neither",
        ),
        ([{"prompt": "a: b or c?", "answer": "b", "choices": ["b", "c"], "options": {"n": 2}}], TOOLS, None),
        (
            [{"prompt": "A <b> c", "answer": "b"}],
            "| e",
            "writes messages with other characters .*, 1 of the role 'user'",
        ),
        (
            [{"prompt": "A long one", "answer": "b"}],
            "| truncate(5, True, '', 0)",
            "1 of the role 'user': the model reads",
        ),
        (
            [{"prompt": "[INST] a [/INST]", "answer": "b"}],
            TOOLS,
            r"1 of 1 prompt ends with '\[/INST\]', as if a template",
        ),
        ([{"prompt": "Add.\n### Response:\n", "answer": "b"}], TOOLS, "1 of 1 prompt ends with '### Response:', as if"),
        ([{"prompt": "What is [/INST] for?", "answer": "b"}], TOOLS, None),
        (
            [{"prompt": "a", "answer": "b"}],
            QWEN,
            r"writes '<think>.n.n</think>.n.n' before an answer that is a message, and 1",
        ),
        ([{"prompt": [USER], "completion": [LAST]}], QWEN, None),
        ([{"prompt": 'A "c"\nd', "answer": "b"}], "| tojson", None),
        ([{"prompt": " a ", "answer": "b"}], "| trim", None),
    ],
)
def test_what_a_person_may_not_expect_is_told(
    tmp_path: Path, rows: list[dict[str, Any]], template: str, said: str | None
) -> None:
    template = (
        template
        if template in (TOOLS, QWEN)
        else TOOLS.replace("m['content']", f"(m['content'] {template} if m.role == 'user' else m['content'])")
    )
    notes = notes_of(lambda: encode_pairs(load(tmp_path, rows), tokenizer_of(template), DataConfig()))
    assert len(notes) == (said is not None) and all(re.search(str(said), note) for note in notes)


def test_what_is_not_taken_of_columns_beside_templates_and_names_is_told(tmp_path: Path) -> None:
    row = {"problem": "3+4?", "answer": "7", "solution": "3 + 4 = 7", "prompt": None, "why": None}
    for settings, said in (
        (
            {"answer_column": "solution"},
            "a reward that reads 'answer' of 1 row gets what data.answer_column = ",
        ),
        ({"answer_column": "{answer}."}, None),
        (
            {"answer_column": "{why} {answer}"},
            "1 row has no value in 'why': the template data.answer_column leaves its place empty",
        ),
    ):
        notes = notes_of(lambda settings=settings: load(tmp_path, [row], prompt_column="problem", **settings))
        assert len(notes) == (said is not None) and all(str(said) in note for note in notes)
    row = {"problem": "3+4?", "why": "so", "answer": None}
    (note,) = notes_of(lambda: load(tmp_path, [row], prompt_column="problem", answer_column="{why}{answer}"))
    assert "1 row has no value in 'answer': the template data.answer_column leaves its place empty" in note


@pytest.mark.parametrize("nothing", [None, math.nan])
def test_an_answer_that_is_missing_is_told_whether_it_is_null_or_nan(tmp_path: Path, nothing: float | None) -> None:
    rows = [{"prompt": "3+4?", "answer": nothing, "why": nothing}, {"prompt": "1+1?", "answer": "2", "why": "so"}]
    (note,) = notes_of(lambda: load(tmp_path, rows))
    assert "1 of 2 rows has no answer in 'answer' (null or NaN): a reward gets None in its place" in note
    (note,) = notes_of(lambda: load(tmp_path, rows, prompt_column="{why}{prompt}", answer_column=None))
    assert "1 row has no value in 'why': the template data.prompt_column leaves its place empty" in note
    assert notes_of(lambda: load(tmp_path, rows[1:])) == []
    assert notes_of(lambda: load(tmp_path, [{"prompt": "3+4?"}], answer_column=None)) == []


@pytest.mark.parametrize(
    ("fields", "settings", "learned"),
    [
        ({"improved": "new"}, {"answer_column": "improved"}, "new"),
        ({"improved": ["new"]}, {"answer_column": "improved"}, "new"),
        ({"improved": [{"role": "assistant", "content": "new"}]}, {"answer_column": "improved"}, "new"),
        ({"final": "new", "why": "since"}, {"answer_column": "{why}: {final}"}, "since: new"),
        ({"completion": "new"}, {"answer_column": "completion"}, "new"),
        ({"completion": LAST["content"]}, {}, LAST["content"]),
        ({"completion": "new"}, {"answer_column": None}, LAST["content"]),
        ({"answer": "7"}, {}, LAST["content"]),  # what a reward compares with
        ({"answer": [{"role": "assistant", "content": "7"}]}, {}, LAST["content"]),
        ({"reward_model": {"ground_truth": "7"}}, {}, LAST["content"]),
        ({"reward_model": {"ground_truth": "new"}}, {"answer_column": "reward_model.ground_truth"}, "new"),
        ({"answer": "new"}, {"answer_column": "{answer}"}, "new"),
    ],
)
@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_the_answer_that_is_named_is_learned_in_place_of_the_last_turn(
    tmp_path: Path, fields: dict[str, Any], settings: dict[str, Any], learned: str, column: str
) -> None:
    texts = learn(tmp_path, {column: turns(), **fields}, **settings)
    assert texts == [(False, OPENED), (True, f"{learned}<|im_end|>")]


def test_an_answer_that_only_rewards_read_is_told_where_turns_are_learned(tmp_path: Path) -> None:
    notes = notes_of(lambda: learn(tmp_path, {"messages": turns(), "answer": "7"}))
    assert any(
        "column 'answer' of 1 row is not learned, but the last turn of the conversation: data." in n for n in notes
    )
    for row in ({"messages": turns(), "answer": LAST["content"]}, {"messages": turns()}):
        assert not any("is not learned" in note for note in notes_of(lambda row=row: learn(tmp_path, row)))


def test_a_template_may_write_the_history(tmp_path: Path) -> None:
    row = {"question": "so?", "history": [["hi", "ho"]], "answer": "b"}
    for column in ("{history.0.0} {history.0.1} {question}", "{history[0][0]} {question}"):
        assert "hi" in learn(tmp_path, row, prompt_column=column)[0][1]


def test_two_answers_and_a_missing_one_are_refused(tmp_path: Path) -> None:
    message = r"column 'messages' ends with the answer .*, and column 'completion' holds another, 'new': set data\.ans"
    for completion in ("new", [{"role": "assistant", "content": "new"}]):
        with pytest.raises(DataError, match=message):
            learn(tmp_path, {"messages": turns(), "completion": completion})
    with pytest.raises(DataError, match=r"there is no answer to learn; set data\.answer_column"):
        learn(tmp_path, {"messages": turns(), "improved": None}, answer_column="improved")


def test_a_system_message_is_a_text_a_message_or_parts(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "be "}, {"type": "text", "text": "kind"}]
    for system in (
        "be kind",
        {"role": "system", "content": "be kind"},
        parts,
        [{"role": "system", "content": "be kind"}],
        ["be kind"],
    ):
        for row in (
            {"prompt": "the fox", "answer": "b"},
            {"messages": [{"role": "system", "content": "be kind"}, *turns()]},
        ):
            text = learn(tmp_path, {**row, "system": system})[0][1]
            assert text == "<|im_start|>system\nbe kind<|im_end|>\n" + OPENED
