"""Files to examples: columns, templates, what is held out, and what a mistake in a file says."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from podium.errors import ConfigError, DataError
from podium.rewards.call_forms import Item
from podium.rewards.reward_functions import RewardFunctions, call_rewards
from podium.rollout.tasks import DataConfig, Example, check_data, load_examples
from podium.runs.config import GRPOConfig
from podium.runs.named_code import list_code
from podium.telemetry import Event, Note, subscribe

GSM8K = Path(__file__).resolve().parents[5] / "shared" / "data" / "gsm8k"


def write_jsonl(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def write_parquet(path: Path, rows: Sequence[Any]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def load(path: Path, split: Any = "train", limit: int | None = None, **settings: Any) -> list[Example]:
    config = DataConfig(train=str(path), **{"holdout": 0.0, **settings})
    return load_examples(config.train, config, split, 0, limit)


ROWS = [{"prompt": f"{n} + 1 = ?", "answer": n + 1, "level": n % 3} for n in range(200)]


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_rows_become_examples(tmp_path: Path, write: Callable[[Path, Sequence[Any]], Path]) -> None:
    path = write(tmp_path / f"train.{write.__name__.removeprefix('write_')}", ROWS)
    examples = load(path)
    assert [example.prompt for example in examples] == [row["prompt"] for row in ROWS]
    assert [example.answer for example in examples] == [str(row["answer"]) for row in ROWS]
    assert [dict(example.row) for example in examples] == ROWS
    assert load(path, train_items=7) == examples[:7]


def test_columns_are_mapped_and_the_reward_sees_both_names(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "1+1", "solution": "2", "id": 7}])
    (example,) = load(path, prompt_column="question", answer_column="solution")
    assert (example.prompt, example.answer) == ("1+1", "2")
    assert dict(example.row) == {"question": "1+1", "solution": "2", "id": 7, "prompt": "1+1", "answer": "2"}
    (example,) = load(path, prompt_column="question", answer_column=None)
    assert example.answer is None


@pytest.mark.parametrize(
    "value",
    ["7", 7, 0.5, True, ["7"], [7], ["Paris", "paris"], [], [["7"]], {"text": "7"}, [{"text": "7"}], '["7"]', None],
    ids=str,
)
@pytest.mark.parametrize("column", ["answer", "references"])
def test_the_reward_gets_the_answer_as_the_data_have_it(tmp_path: Path, value: Any, column: str) -> None:
    """A list of accepted answers stays a list where there is one: ``in`` and ``for`` read characters of a text."""
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1+1", column: value}])
    (example,) = load(path, answer_column=column)
    assert (example.row[column], type(example.row[column])) == (value, type(value))
    assert example.row["answer"] == value
    if isinstance(value, list) and len(value) == 1 and not isinstance(value[0], list | dict):
        assert example.answer == str(value[0]), "this is what is learned and compared"


def test_lists_of_one_answer_are_told_and_those_of_verl_stay_lists(tmp_path: Path, notes: list[str]) -> None:
    """``str(row["answer"])`` is the text of a list there, to which no completion is equal."""
    rows = [{"prompt": "1+1", "reward_model": {"ground_truth": truth}} for truth in (["2"], ["2", "two"], '["2"]', "2")]
    examples = load(write_jsonl(tmp_path / "a.jsonl", rows))
    assert [example.row["answer"] for example in examples] == [["2"], ["2", "two"], "2", "2"]
    (note,) = [note for note in notes if "of one" in note]
    assert "the answer of 1 row is a list of one: Podium's own rewards take the element, and row['answer'] of" in note


@pytest.mark.parametrize("system", ["Be brief.", "", None])
def test_a_prompt_of_text_is_text_for_the_reward_beside_a_system_message(tmp_path: Path, system: Any) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "1+1", "system": system, "answer": "2"},
        {"prompt": [{"role": "user", "content": "1+1"}], "system": system, "answer": "2"},
    ]
    text, messages = load(write_jsonl(tmp_path / "a.jsonl", rows))
    assert (text.row["prompt"], type(messages.row["prompt"])) == ("1+1", list)
    assert isinstance(text.prompt, list) == bool(system)

    def right(completions: list[Any], answer: list[str]) -> list[float]:
        return [float(completion == expected) for completion, expected in zip(completions, answer, strict=True)]

    functions = RewardFunctions([right], columns=frozenset(text.row))
    assert [call_rewards(functions, Item("2", example.row)).score for example in (text, messages)] == [1.0, 0.0]


def test_texts_that_the_model_does_not_see_are_told(tmp_path: Path, notes: list[str]) -> None:
    row = {
        "prompt": "1+1",
        "answer": "2",
        "advice": "think of the sum of both numbers",
        "level": "easy",
        "id": "a b c d",
    }
    assert load(write_jsonl(tmp_path / "a.jsonl", [{**row, "remark": "look at both of the numbers"}, row, row]))
    assert [note.partition(": ")[2] for note in notes] == [
        "the texts of the column 'advice' are in neither the prompt nor the answer: the model does not see them"
    ]
    notes.clear()
    assert load(tmp_path / "a.jsonl", prompt_column="{prompt}\n{advice}")
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1+1", "instruction": "Translate.", "answer": "2"}])
    assert load(tmp_path / "a.jsonl")
    assert len(notes) == 1
    assert "column 'instruction' of 1 row is neither in the prompt nor in the answer" in notes[0]


def test_a_template_writes_the_prompt_from_any_columns(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"q": "1+1", "meta": {"unit": "km"}, "answer": "2"}])
    (example,) = load(path, prompt_column="Q: {q} in {meta[unit]} {{}}\nA: ")
    assert example.prompt == example.row["prompt"] == "Q: 1+1 in km {}\nA: "
    with pytest.raises(DataError, match=r"line 1: data\.prompt_column = '\{qq\}' needs 'qq'; the columns are 'q'"):
        load(path, prompt_column="{qq}")
    with pytest.raises(DataError, match=r"line 1: data\.prompt_column = '\{q' cannot be filled"):
        load(path, prompt_column="{q")


def test_a_template_writes_the_answer_too_and_reads_fields_of_columns(tmp_path: Path) -> None:
    row = {"q": "1+1", "steps": ["1", "2"], "nested": {"truth": 2}, "hint": None, "pairs": [{"a": "b"}]}
    path = write_jsonl(tmp_path / "a.jsonl", [row])
    config: dict[str, Any] = {
        "prompt_column": "{q} {hint}{pairs[0][a]}",
        "answer_column": "{steps.1}\n#### {nested.truth:03d}",
    }
    (example,) = load(path, **config)
    assert (example.prompt, example.answer) == ("1+1 b", "2\n#### 002"), "a column without a value is empty"
    assert example.fields == ["q", "hint", "pairs.0.a", "steps.1", "nested.truth"]
    (example,) = load(path, prompt_column=r"{q}\nso\n\n{q} \neq \nu", answer_column=None)
    assert example.prompt == "1+1\nso\n\n1+1 \\neq \\nu", "a shell passes a new line on as two characters"
    for column, said in (
        ("{steps}", r"\['1', '2'\]\" is a list, of which a part is named as in \{choices\.0\}"),
        ("{nested}", "is an object, of which a part is named"),
        ("{hint}", "the columns that it names are empty"),
        ("{}", "needs"),
        ("{q.unit}", r"needs 'q\.unit'"),
        ("{steps.7}", r"needs 'steps\.7'"),
    ):
        with pytest.raises(DataError, match=rf"line 1: data\.answer_column = .*{said}"):
            load(path, prompt_column="q", answer_column=column)


def test_bytes_are_no_text_of_a_template(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"q": [b"1+1"], "answer": ["2"]}), path)
    with pytest.raises(DataError, match=r"row 1: data\.prompt_column = .* cannot be filled: b'1\+1' are bytes: write"):
        load(path, prompt_column="{q} =")


def test_a_text_in_any_column_is_learned_whole_if_there_is_no_prompt(tmp_path: Path, notes: list[str]) -> None:
    path = write_jsonl(
        tmp_path / "a.jsonl", [{"system": "Add.", "chat": "USER: 1+1 ASSISTANT: 2", "turns": ["a", "b"]}]
    )
    (example,) = load(path, prompt_column=None, answer_column="{system}\n{chat}")
    assert example.is_text and example.prompt == "Add.\nUSER: 1+1 ASSISTANT: 2"
    assert not any("no answer" in note for note in notes)
    with pytest.raises(DataError, match=r"line 1: column 'turns' holds .*\(list\); expected text, since data"):
        load(path, prompt_column=None, answer_column="turns")
    with pytest.raises(ConfigError, match=r"data\.prompt_column and data\.answer_column are null"):
        DataConfig(prompt_column=None, answer_column=None)


def test_conversations_are_prompts(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1"}]
    (example,) = load(write_jsonl(tmp_path / "a.jsonl", [{"prompt": messages, "answer": "2"}]))
    assert example.prompt == messages


def test_blank_lines_a_byte_order_mark_and_patterns_of_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(
        b'\xef\xbb\xbf{"prompt": "1", "answer": "1"}\n\n   \n{"prompt": "2", "answer": "2"}'
    )
    write_jsonl(tmp_path / "b.jsonl", [{"prompt": "3", "answer": "3"}])
    assert [example.prompt for example in load(tmp_path / "*.jsonl")] == ["1", "2", "3"]


def test_gsm8k_loads_as_it_is() -> None:
    if not GSM8K.is_dir():
        pytest.skip("the GSM8K files are not beside the repository (../shared/data/gsm8k)")
    settings: dict[str, Any] = {
        "prompt_column": "question",
        "answer_column": "answer",
        "eval": str(GSM8K / "test.jsonl"),
    }
    train = load(GSM8K / "train.jsonl", **settings)
    test = load(GSM8K / "train.jsonl", "test", **settings)
    assert (len(train), len(test)) == (7473, 1319)
    assert train[0].answer is not None and train[0].answer.endswith("#### 72")
    assert len(load(GSM8K / "train.jsonl", "test", 500, **settings)) == 500


# -- what is held out ------------------------------------------------------------------------------------------------


@pytest.fixture
def notes() -> Any:
    heard: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, Note):
            heard.append(event.text)

    unsubscribe = subscribe(listen)
    yield heard
    unsubscribe()


def test_a_share_of_the_training_file_is_held_out_by_default(tmp_path: Path, notes: list[str]) -> None:
    rows = [{"prompt": f"prompt {n}", "answer": ""} for n in range(5000)]
    path = write_jsonl(tmp_path / "train.jsonl", rows)
    config = DataConfig(train=str(path))
    train, test = (load_examples(config.train, config, split) for split in ("train", "test"))
    (note,) = notes
    assert note.startswith(f"{len(test)} of the 5,000 examples of {path} are held out for evaluation (data.eval names")
    prompts = [{str(example.prompt) for example in side} for side in (train, test)]
    assert not prompts[0] & prompts[1]
    assert len(train) + len(test) == 5000
    assert abs(len(test) - 500) < 100, "a share of 0.1, five standard deviations"
    # A row's side depends on nothing but its prompt: not on other rows, their order, or the seed.
    write_jsonl(path, rows[:100:-1])
    again = load_examples(config.train, config, "test", seed=5)
    assert {str(example.prompt) for example in again} <= prompts[1]


def test_a_conversation_is_on_the_side_of_its_beginning(tmp_path: Path) -> None:
    """Where a file has a row for each turn, an answer of one row is learned in the others as well."""
    rows: list[dict[str, Any]] = []
    for n in range(100):
        turns = [{"role": role, "content": f"{role} {n} {at}"} for at in range(3) for role in ("user", "assistant")]
        rows += [{"messages": turns[:stop]} for stop in (2, 4, 6)]
    path = write_jsonl(tmp_path / "train.jsonl", rows)
    train, test = (load(path, side, holdout=0.2) for side in ("train", "test"))
    beginnings = [{str(example.prompt[0]) for example in side} for side in (train, test)]
    assert not beginnings[0] & beginnings[1]
    assert len(train) + len(test) == 300
    assert len(test) % 3 == 0 and 30 <= len(test) <= 90


def test_a_limit_takes_a_fixed_choice_spread_over_the_held_out_data(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "test.jsonl", ROWS)
    some = load(path, "test", 50, eval=str(path))
    assert some == load(path, "test", 50, eval=str(path))
    places = [ROWS.index(dict(example.row)) for example in some]
    assert places == sorted(places)
    assert places[0] < 20 and places[-1] > 180, "not just the first rows"
    assert len(load(path, "test", 1000, eval=str(path))) == 200


def test_data_of_their_own_leave_the_training_file_whole(tmp_path: Path, notes: list[str]) -> None:
    train = write_jsonl(tmp_path / "train.jsonl", ROWS)
    test = write_jsonl(tmp_path / "test.jsonl", ROWS[:3])
    assert len(load(train, eval=str(test), holdout=0.5)) == 200
    assert len(load(train, "test", eval=str(test), holdout=0.5)) == 3
    assert notes == []


def test_nothing_to_evaluate_on_is_said_with_the_remedy(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS[:5])
    with pytest.raises(DataError, match=r"no held-out examples with data\.holdout = 0; set data\.eval"):
        load(path, "test")
    with pytest.raises(DataError, match=r"no examples to train on with data\.holdout = 0\.99: all"):
        load(path, holdout=0.99)
    with pytest.raises(DataError, match=r"empty\.jsonl holds no examples$"):
        load(write_jsonl(tmp_path / "empty.jsonl", []), holdout=0.3)


# -- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"prompt": "a", "answer": "b"}\n{"prompt": "a" "answer": "b"}\n',
            "line 2, column 16: expected ',' delimiter",
        ),
        ('{"prompt": "a", "answer": "b"\n', "line 1, column 30: expected ',' delimiter"),
        ('\n\n{"prompt": "a\n', "line 3, column 12: Unterminated string"),
        ("prompt,answer\n", "line 1, column 1: expected value, near 'prompt,answer'; each line must be one whole"),
        ('["a", "b"]\n', "line 1: expected a JSON object such as .* found an array; write one object a line"),
        ('"a"\n', "line 1: expected a JSON object such as .* found a string"),
        (
            '{"prompt": "a", "answer": "b", "answer": "c"}\n',
            "line 1 .* one object has the name 'answer' twice, with differ",
        ),
        (
            r'{"prompt": "q", "messages": [{"role": "assistant", "tool_calls": "[{\"a\": 1, \"a\": 2}]"}]}',
            "line 1: the JSON text .* one object has the name 'a' twice, with differ",
        ),
        (
            '{"messages": "[{\\"role\\": \\"user\\", \\"content\\": \\"q\\", \\"content\\": \\"r\\"}]"}\n',
            "line 1: the JSON text .* one object has the name 'content' twice, with differ",
        ),
        ('{"prompt": [{"role": "user", "role": "tool"}]}\n', "line 1 .* one object has the name 'role' twice"),
        ("[\n{}\n]\n", "line 1: a JSON array over many lines; write one object a line, or an array of objects into"),
    ],
)
def test_malformed_json_names_file_line_column_and_what_was_expected(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}, line")


@pytest.mark.parametrize("name", ["data", "train", "rows"])
def test_rows_within_an_object_are_told_from_its_columns(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"version": "1.1", name: [{"prompt": "q", "answer": "a"}] * 2}))
    with pytest.raises(DataError, match=rf"'{name}' holds a list of 2 objects: if these are the rows, write this list"):
        load(path)
    path.write_text(json.dumps({"tools": [{"name": "add"}], "turns": [{"from": "human", "value": "q"}]}))
    with pytest.raises(DataError, match="the columns are 'tools', 'turns'; set"):
        load(path)
    path.write_text(json.dumps({"question": "q", "passages": [{"title": "t", "text": "a"}]}))
    with pytest.raises(DataError, match="the columns are 'question', 'passages'; set"):
        load(path)


def test_token_ids_in_the_place_of_a_text_are_called_so(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": [1, 2, 3], "answer": "a"}\n')
    with pytest.raises(DataError, match=r"'prompt' holds .*token ids are not read: give the text that they stand for"):
        load(path)
    path.write_text('{"prompt": ["1", "2"], "answer": "a"}\n')
    with pytest.raises(DataError) as caught:
        load(path)
    assert "token ids" not in str(caught.value)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("tools", '[{"name": "f", "name": "g"}]'),
        ("tools", ['{"name": "f", "name": "g"}']),
        ("functions", '[{"name": "f", "name": "g"}]'),
        ("responses_create_params", '{"tools": [], "name": "f", "name": "g"}'),
        ("history", '[{"role": "user", "content": "q", "name": "f", "name": "g"}]'),
        ("reward_model", '{"ground_truth": "1", "name": "f", "name": "g"}'),
    ],
)
def test_text_with_a_name_twice_is_a_bad_row_of_its_column(tmp_path: Path, column: str, value: Any) -> None:
    answer = {} if column == "reward_model" else {"answer": "1"}
    rows = [{"prompt": "a", **answer, column: value}, {"prompt": "b", "answer": "2"}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match=f"line 1: column '{column}': the JSON text .* has the name 'name' twice"):
        load(path)
    assert [example.prompt for example in load(path, bad_rows="drop")] == ["b"]


def test_a_conversation_as_text_is_refused_with_a_name_twice_too(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "a.jsonl", [{"prompt": '{"role": "user", "role": "tool", "content": "x"}', "answer": "1"}]
    )
    with pytest.raises(DataError, match="column 'prompt' holds a conversation as text"):
        load(path)


def test_a_wrong_encoding_names_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes('{"prompt": "café", "answer": "1"}\n'.encode("latin-1"))
    with pytest.raises(DataError, match="line 1, byte 16: not UTF-8"):
        load(path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"prompt_column": "promt"},
            "row 1: no column 'promt' for the prompt; .* did you mean prompt\\?; set data.prompt_col",
        ),
        (
            {"answer_column": "anwser"},
            "no column 'anwser' for the answer; .* did you mean answer\\?; .*null if there is no",
        ),
        ({"prompt_column": "zzz"}, r"the columns are 'prompt', 'answer', 'level'; set data\.prompt_column"),
        ({"prompt_column": "level"}, r"row 1: column 'level' holds '0' \(int\); expected text, or a list of messages"),
    ],
)
def test_a_wrong_column_names_the_columns_that_exist(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    path = write_parquet(tmp_path / "a.parquet", ROWS[:2])
    with pytest.raises(DataError, match=message) as caught:
        load(path, **settings)
    assert str(path) in str(caught.value)


def test_a_column_that_one_row_lacks_names_that_row(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1", "answer": "1"}, {"prompt": "2"}])
    with pytest.raises(DataError, match="line 2: no column 'answer'"):
        load(path)


@pytest.mark.parametrize(("rows", "count"), [(50, 1), (1, 0)])
def test_held_out_rows_that_no_run_evaluates_are_told_where_there_are_some(
    tmp_path: Path, notes: list[str], rows: int, count: int
) -> None:
    path = write_jsonl(tmp_path / "train.jsonl", [{"prompt": f"prompt {n}", "answer": "a"} for n in range(rows)])
    config = DataConfig(train=str(path))
    kept = load_examples(config.train, config, "train", evaluates=False)
    said = f"1 of the {rows} examples of {path} is held out for podium eval, although the run evaluates none"
    assert len(kept) == rows - count
    assert len(notes) == bool(count) and all(note.startswith(said) for note in notes)


def test_a_mistyped_ending_and_a_link_to_nothing_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "train.jsonl", [{"prompt": "a", "answer": "b"}])
    (tmp_path / "link.jsonl").symlink_to("gone.jsonl")
    with pytest.raises(DataError, match=r"^train\.jsonll: neither a file nor .*; did you mean train\.jsonl\?"):
        load_examples("train.jsonll", DataConfig(train="train.jsonll"))
    with pytest.raises(DataError, match=r"^no file link\.jsonl: it is a link to gone\.jsonl, which does not exist$"):
        load_examples("link.jsonl", DataConfig(train="link.jsonl"))


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    with pytest.raises(DataError, match=r"no file .*trian\.jsonl; .* has train\.jsonl"):
        load(tmp_path / "trian.jsonl")
    with pytest.raises(DataError, match=r"no file .*has train\.jsonl"):
        load(tmp_path / "*.parquet")
    with pytest.raises(DataError, match=rf"no file .*; {tmp_path.parent} has .*{tmp_path.name}"):
        load(Path(f"{tmp_path}x") / "train.jsonl")
    with pytest.raises(DataError, match="no file"):
        load(tmp_path / "train")


def test_a_broken_parquet_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"a\.parquet cannot be read as Parquet"):
        load(path)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (b'{"prompt": "a\\ud800", "answer": "b"}', r"line 2: character 2 of 'a.ud800' is half of a surrogate pair"),
        (b'{"prompt": "a", "answer": "\\udfff"}', "line 2: character 1 of '.udfff' is half of a surrogate pair"),
        (
            b'{"prompt": [{"role": "user", "content": "\\ud800"}], "answer": ""}',
            "line 2: character 1 of '.ud800' is half of a surrogate pair",
        ),
        (b'{"prompt": "a", "answer": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", "line 2 .*: it is nested too deeply"),
        (
            b'{"prompt": "a", "answer": ' + b"1" * 5000 + b"}",
            "line 2 is no JSON that can be read: 'answer' holds a whole number of 5,000 digits, and at most 4,300 can",
        ),
    ],
)
def test_what_no_tokenizer_could_read_names_the_line(tmp_path: Path, row: bytes, said: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a", "answer": "b"}\n' + row + b"\n")
    with pytest.raises(DataError, match=said):
        load(path)


def test_all_rows_on_the_held_out_side_are_told_with_the_remedy(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "the same", "answer": "1"}] * 5)
    share = next(share for share in (0.5, 0.99) if not _trains(path, share))
    with pytest.raises(DataError, match=rf"data\.holdout = {share}: all of them are held out.*lower data\.holdout"):
        load(path, holdout=share)


def _trains(path: Path, share: float) -> bool:
    try:
        return bool(load(path, holdout=share))
    except DataError:
        return False


# -- other kinds of files --------------------------------------------------------------------------------------------


def csv_of(rows: Sequence[Any], delimiter: str = ",") -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def arrow_of(rows: Sequence[Any], new: Any) -> bytes:
    table, sink = pyarrow.Table.from_pylist(list(rows)), pyarrow.BufferOutputStream()
    with new(sink, table.schema) as file:
        file.write_table(table, max_chunksize=60)
    return sink.getvalue().to_pybytes()


LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("rows.csv", csv_of(ROWS)),
        ("rows.csv.gz", gzip.compress(csv_of(ROWS))),
        ("rows.json", b" \n" + json.dumps(ROWS, indent=1).encode()),
        ("rows.json.gz", gzip.compress(json.dumps(ROWS).encode())),
        ("rows.json", LINES),
        ("rows.jsonl.gz", gzip.compress(LINES)),
        ("rows.jsonl.bz2", bz2.compress(LINES)),
        ("rows.jsonl.xz", lzma.compress(LINES)),
        ("rows.jsonl.zst", pyarrow.compress(LINES, codec="zstd", asbytes=True)),
        ("rows.json.zst", pyarrow.compress(json.dumps(ROWS).encode(), codec="zstd", asbytes=True)),
        ("rows.tsv", csv_of(ROWS, "\t")),
        ("rows.tsv.xz", lzma.compress(csv_of(ROWS, "\t"))),
        ("rows.arrow", arrow_of(ROWS, pyarrow.ipc.new_file)),
        ("rows.arrow", arrow_of(ROWS, pyarrow.ipc.new_stream)),
    ],
)
def test_files_of_other_kinds_hold_the_same_rows(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    for spec in (name, "*.*"):
        examples = load(tmp_path / spec)
        assert [(example.prompt, example.answer) for example in examples] == [
            (row["prompt"], str(row["answer"])) for row in ROWS
        ]


def test_directories_of_save_to_disk_are_read(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_list([dict(row) for row in ROWS])
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": rows, "test": rows.select(range(3))}).save_to_disk(tmp_path / "both")
    assert [example.prompt for example in load(tmp_path / "one")] == [row["prompt"] for row in ROWS]
    config = DataConfig(train=str(tmp_path / "both"))
    assert [len(load_examples(config.train, config, side)) for side in ("train", "test")] == [len(ROWS), 3]
    assert load_examples(config.train, config)[1].place == f"{tmp_path}/both [train], row 2"
    with pytest.raises(DataError, match=r"both has no split 'trian' but train, test; did you mean train\?"):
        load(tmp_path / "both", train_split="trian")


def test_numbers_of_csv_are_told_to_be_texts(tmp_path: Path, notes: list[str]) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"prompt,answer,level,unit,size\n1+1,2,1,km,\n1+2,3.0,-2,cm,4\n")
    assert [example.row["answer"] for example in load(path)] == ["2", "3.0"]
    (note,) = [note for note in notes if "CSV" in note]
    assert "CSV has texts alone: the numbers in 'answer', 'level' are texts in each row; JSON Lines and" in note
    notes.clear()
    load(write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1+1", "answer": "2"}]))
    assert not notes


def test_fields_of_csv_are_the_text_that_is_there(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbfprompt,answer\r\n\r\n"1, ""2""\nthree",007\r\n' + b"x" * 200_000 + b",NA\r\n")
    first, second = load(path)
    assert (first.prompt, first.row["answer"]) == ('1, "2"\nthree', "007")
    assert (len(str(second.prompt)), second.answer) == (200_000, "NA")


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.jsonl.xz", b"nonsense", "cannot read .*a.jsonl.xz: Input format not supported"),
        ("a.jsonl.zst", b"nonsense", "cannot read .*a.jsonl.zst: ZSTD decompress failed"),
        ("a.csv", b"prompt,answer\n1,2\n1,2,3\n", "line 3: 3 fields where the header names 2 columns"),
        ("a.csv", b"prompt,prompt\n1,2\n", "line 1: the header names the column 'prompt' twice"),
        ("a.csv", b'prompt,answer\n"1,2\n', "line 2 is no CSV: unexpected end of data: a quote that"),
        ("a.csv", b"prompt,answer\n\xff,2\n", "line 2, byte 1: no CSV in UTF-8 .*; save the file"),
        ("a.json", b'[{"prompt": "1"},', "a.json is no JSON array: Expecting value: line 1 column 18"),
        ("a.json", b'[{"prompt": "1", "answer": "2"}, 3]', "a.json, item 2: expected a JSON object .* found a number"),
        ("a.json", b"[" * 10**5, "a.json is no JSON array: it is nested too deeply"),
        ("a.jsonl.gz", gzip.compress(LINES)[:-9], r"cannot read .*a\.jsonl\.gz: Compressed file ended"),
        ("a.jsonl.gz", b"{}\n", r"cannot read .*a\.jsonl\.gz: Not a gzipped file"),
        ("a.jsonl.gz", gzip.compress(LINES)[:40] + b"x" * 99, r"cannot read .*a\.jsonl\.gz"),
        ("a.arrow", b"ARROW1 and no more", "cannot be read as Arrow after row 0"),
        ("a.arrow", b"", "cannot be read as Arrow after row 0"),
    ],
)
def test_a_broken_file_of_another_kind_names_the_place(tmp_path: Path, name: str, data: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=said):
        load(tmp_path / name)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("holdout", 1.0),
        ("holdout", -0.1),
        ("train_items", 0),
        ("prompt_column", ""),
        ("answer_column", ""),
        ("chat_template", ""),
        ("max_prompt_tokens", 0),
        ("overlong", "truncate"),
    ],
)
def test_a_wrong_setting_is_named(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"data.{setting} = "):
        DataConfig(**{setting: value})


def test_no_data_at_all_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"data\.train is not set"):
        load_examples("", DataConfig())


def test_importing_the_package_imports_nothing_heavy() -> None:
    heavy = "torch transformers datasets pyarrow reasoning_gym math_verify pydantic rich"
    script = (
        f"import sys, podium.rollout.tasks, podium.rewards; print([m for m in {heavy!r}.split() if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.strip() == "[]"


def test_several_sources_are_read_one_after_the_other_and_each_row_knows_its_own(tmp_path: Path) -> None:
    sums = write_jsonl(tmp_path / "sums.jsonl", ROWS[:40])
    others = write_parquet(tmp_path / "others.parquet", [{"prompt": f"other {n}", "answer": n} for n in range(20)])
    for train in ((str(sums), str(others)), {str(sums): 3.0, str(others): 1.0}):
        config = DataConfig(train=train, holdout=0.0)
        examples = load_examples(config.train, config)
        assert [example.source for example in examples] == ["sums"] * 40 + ["others"] * 20
        assert (examples[0].place, examples[40].place) == (f"{sums}, line 1", f"{others}, row 1")
        assert config.weights == ({"sums": 3.0, "others": 1.0} if isinstance(train, dict) else {})
        limited = load_examples(config.train, replace(config, train_items=5))
        assert limited == examples[:5] + examples[40:45], "the limit is one of each source"
    alone = DataConfig(train=(str(sums),), holdout=0.0)
    assert [example.source for example in load_examples(alone.train, alone)] == [""] * 40


def test_what_is_held_out_of_several_sources_is_what_is_held_out_of_each(tmp_path: Path) -> None:
    parts = [write_jsonl(tmp_path / f"{name}.jsonl", ROWS[name::2]) for name in (0, 1)]
    config = DataConfig(train=tuple(map(str, parts)), holdout=0.2)
    train, test = (load_examples(config.train, config, side) for side in ("train", "test"))
    whole = load(write_jsonl(tmp_path / "whole.jsonl", ROWS), "test", holdout=0.2)
    assert {str(example.prompt) for example in test} == {str(example.prompt) for example in whole}
    assert len(train) + len(test) == len(ROWS)
    few = load_examples(config.train, config, "test", limit=9)
    assert {str(e.prompt) for e in few} == {
        str(e.prompt) for e in load(tmp_path / "whole.jsonl", "test", 9, holdout=0.2)
    }


def test_a_source_without_held_out_rows_is_no_reason_to_refuse_the_others(tmp_path: Path) -> None:
    small = write_jsonl(tmp_path / "small.jsonl", [{"prompt": "1 + 1 = ?", "answer": 2}])
    config = DataConfig(train=(str(write_jsonl(tmp_path / "a.jsonl", ROWS)), str(small)), holdout=0.1)
    assert {example.source for example in load_examples(config.train, config, "test")} == {"a"}
    none = DataConfig(train=(str(small), str(write_jsonl(tmp_path / "b.jsonl", ROWS[1:2]))), holdout=1e-9)
    with pytest.raises(DataError, match=r"small\.jsonl, .*b\.jsonl leaves no held-out examples"):
        load_examples(none.train, none, "test")
    write_jsonl(small, [])
    with pytest.raises(DataError, match=r"small\.jsonl holds no examples"):
        load_examples(config.train, config)


@pytest.mark.parametrize("train", [["a.jsonl", "b.jsonl"], {"a.jsonl": 1, "b.jsonl": 2}])
def test_a_missing_file_of_several_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train: Any) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(DataError, match=r"no file b\.jsonl"):
        check_data(DataConfig(train=train))


def test_each_source_may_have_options_of_its_own() -> None:
    options = {"reasoning_gym:chain_sum": {"min_terms": 3}, "openai/gsm8k": {"name": "main"}}
    config = DataConfig(train=("openai/gsm8k", "reasoning_gym:chain_sum", "a.jsonl"), options=options)
    assert [config.of_source(source).options for source in config.train_sources] == [
        {"name": "main"},
        {"min_terms": 3},
        {},
    ]
    common = DataConfig(train=("openai/gsm8k", "a.jsonl"), options={"name": "main"})
    assert common.of_source("openai/gsm8k").options == {"name": "main"}


@pytest.mark.parametrize(
    ("train", "reason"),
    [
        ([], "expected a source, or several"),
        (["a.jsonl", ""], "expected a source, or several"),
        (["a.jsonl", "a.jsonl"], "or comes twice"),
        ({}, "expected a source, or several"),
        ({"a.jsonl": 0}, r"a\.jsonl has the weight 0; expected a number above 0"),
        ({"a.jsonl": 1, "b.jsonl": -1}, r"b\.jsonl has the weight -1"),
    ],
)
def test_sources_that_mean_nothing_are_refused(train: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"data.train.*{reason}"):
        DataConfig(train=train)


def test_maps_of_parquet_are_mappings_and_those_with_two_values_of_one_name_are_refused(tmp_path: Path) -> None:
    text, path = pyarrow.string(), tmp_path / "a.parquet"
    message = pyarrow.map_(text, text)
    turns = [[("role", "user"), ("content", "2=")], [("role", "assistant"), ("content", "2")]]
    about = pyarrow.struct([("scores", pyarrow.map_(text, pyarrow.list_(message)))])
    for again in ("2", "3"):
        columns = {
            "messages": pyarrow.array([turns, [*turns[:1], [*turns[1], ("content", again)]]], pyarrow.list_(message)),
            "about": pyarrow.array([{"scores": [("a", [[("b", "c")]])]}, None], about),
        }
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
        if again == "2":
            first, second = load(path)
            assert first.row["about"] == {"scores": {"a": [{"b": "c"}]}} and second.row["about"] is None
            assert (first.prompt, first.answer, second.answer) == ([{"role": "user", "content": "2="}], "2", "2")
        else:
            with pytest.raises(DataError, match=r"a\.parquet, row 2: column 'messages' cannot be read: one object has"):
                load(path)


def test_a_package_generates_tasks_and_a_missing_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "squares_of_test.py").write_text(
        "from itertools import count\n"
        "def generate(spec, options, seed):\n"
        "    for n in count(seed):\n"
        "        yield f'{spec}, number {n}', {'question': f'{n} squared', 'answer': n * n + options.get('more', 0)}\n"
    )
    metadata = tmp_path / "squares-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: squares\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[podium.tasks]\nsquares = squares_of_test:generate\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = DataConfig(train="squares:small", options={"more": 1}, train_items=5, holdout=0.0)
    examples = load_examples(config.train, config, seed=3)
    assert [(e.prompt, e.answer) for e in examples] == [(f"{n} squared", str(n * n + 1)) for n in range(3, 8)]
    assert examples[0].place == "squares:small, number 3"
    assert (("data", "train"), "squares:small") in list_code(GRPOConfig(data=config)), "it is not where packages are"
    monkeypatch.setattr("podium.rollout.tasks.rows.find_installed", lambda *_: None)
    for spec, message in (
        ("reasoning_gym:gcd", "reasoning_gym:gcd needs a package .*group podium.tasks.*plugins/podium-rewards"),
        ("squares:small", "neither a file nor a dataset"),
    ):
        with pytest.raises((ConfigError, DataError), match=message):
            load_examples(spec, replace(config, train=spec))


MANY = "".join(f'{{"prompt": "{number}", "answer": "{number}"}}\n' for number in range(5000)).encode()


@pytest.mark.everyday("gz-compress")
@pytest.mark.parametrize(("ending", "pack"), [("bz2", bz2.compress), ("xz", lzma.compress), ("gz", gzip.compress)])
def test_packed_files_of_several_streams_are_read_whole_or_refused(
    tmp_path: Path, ending: str, pack: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / f"a.jsonl.{ending}"
    stream = pack(MANY)
    path.write_bytes(stream + stream)
    assert len(load_examples(str(path), DataConfig(train=str(path), holdout=0.0))) == 10_000
    for broken in (stream + b"x" + stream[1:], stream + stream[: len(stream) // 2], b""):
        path.write_bytes(broken)
        with pytest.raises(DataError, match=rf"cannot read .*a\.jsonl\.{ending}"):
            load_examples(str(path), DataConfig(train=str(path), holdout=0.0))


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.jsonl", gzip.compress(MANY), "is no text: it begins as a file of gzip"),
        ("a.csv", bz2.compress(MANY), "is no text: it begins as a file of bzip2"),
        ("a.json.gz", gzip.compress(lzma.compress(MANY)), "is no text: it begins as a file of xz"),
        ("a.jsonl.zip", b"PK\3\4...", "is no text: it begins as a ZIP archive"),
        ("a.csv", b"prompt;answer\n1;2\n", "the header is the one column 'prompt;answer': .* commas"),
        ("a.json", b'{\n"prompt": "1"}\n', "line 1: a JSON object over many lines"),
        ("a.jsonl", b'{"input_ids": [1], "labels": [1]}\n', "token ids, as 'input_ids' may hold them, are not read"),
        ("a.jsonl", b'{"promt": "1", "prompt_ids": ["a"]}\n', "'promt', 'prompt_ids'; did you mean promt"),
        ("a.jsonl", b'{"prompt": "1", "answer": 1, "answer": true}\n', "has the name 'answer' twice"),
        ("a.jsonl", b'{"prompt": "1", "answer": 1.0, "answer": 1}\n', "has the name 'answer' twice"),
        ("a.csv", b"prompt,answer\n" + b"1,2\n" * 3000 + b"\xe9,2\n", "line 3002, byte 1: no CSV in UTF-8"),
        ("a.csv", b'prompt,answer\n"a\nb",2\n1,2,3\n"a\nb\nc",1,2\n', "line 4: 3 fields where"),
        ("a.csv", b'prompt,answer\n1,2\n"3,4\n5,6\n', "line 3 to 4 is no CSV: .*a quote that opens there"),
    ],
)
def test_a_file_that_is_another_than_it_seems_is_named_for_what_it_is(
    tmp_path: Path, name: str, data: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=said):
        load_examples(str(tmp_path / name), DataConfig(train=str(tmp_path / name), holdout=0.0))


def test_a_directory_with_the_ending_of_a_file_is_read_as_a_directory(tmp_path: Path) -> None:
    folder = tmp_path / "train.jsonl"
    folder.mkdir()
    write_jsonl(folder / "part-0.jsonl", [{"prompt": "1", "answer": "1"}])
    write_jsonl(folder / "part-1.jsonl", [{"prompt": "2", "answer": "2"}])
    examples = load_examples(str(folder), DataConfig(train=str(folder), holdout=0.0))
    assert [example.prompt for example in examples] == ["1", "2"]
    (folder / "part-2.jsonl").write_text("{broken\n")
    with pytest.raises(DataError, match=r"(JSON parse error|Failed to parse)"):
        load_examples(str(folder), DataConfig(train=str(folder), holdout=0.0))


def test_token_ids_beside_texts_and_answers_beyond_all_numbers_are_told(tmp_path: Path) -> None:
    notes = list[str]()
    unsubscribe = subscribe(lambda event: notes.append(event.text) if isinstance(event, Note) else None)
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "1", "answer": 1e999, "input_ids": [3]}\n')
    load_examples(str(path), DataConfig(train=str(path), holdout=0.0))
    unsubscribe()
    assert any("numbers such as inf" in note for note in notes)
    assert any("column 'input_ids' of 1 row holds token ids" in note for note in notes)


@pytest.mark.parametrize("value", ["a", ["r-7"], [], [[]], 3, None, [1.5]])
def test_what_is_named_as_token_ids_and_holds_none_is_not_told(tmp_path: Path, value: Any) -> None:
    notes = list[str]()
    unsubscribe = subscribe(lambda event: notes.append(event.text) if isinstance(event, Note) else None)
    rows = [{"prompt": "1", "answer": "1", "response_ids": value, "completion_ids": [[4, 5], [6]]}]
    write_jsonl(tmp_path / "a.jsonl", rows)
    load_examples(str(tmp_path / "a.jsonl"), DataConfig(train=str(tmp_path / "a.jsonl"), holdout=0.0))
    unsubscribe()
    assert not any("'response_ids'" in note for note in notes), notes
    assert any("column 'completion_ids' of 1 row holds token ids" in note for note in notes), notes
