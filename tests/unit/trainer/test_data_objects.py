"""Rows that a script passes to a trainer as an object."""

import datetime
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pandas
import pytest

from podium.errors import ConfigError, DataError
from podium.rollout.tasks import load_examples
from podium.trainer import SFTConfig, SFTTrainer
from podium.trainer.data_objects import write_data
from tests.integration.training import tiny
from tests.unit.rollout.tasks.test_encode import notes_of

ROWS: list[dict[str, Any]] = [{"prompt": f"{n:02d}=", "answer": f"{n:02d}", "n": n} for n in range(30)]


def settings(folder: Path, **data: Any) -> SFTConfig:
    return tiny(SFTConfig, folder, data={"train": "", "holdout": 0.0, **data}, eval={"items": 0}, run={"steps": 1})


def endless() -> Iterator[dict[str, Any]]:
    return (ROWS[n % len(ROWS)] for n in itertools.count())


@pytest.mark.parametrize(
    "data",
    [
        ROWS,
        tuple(ROWS),
        iter(ROWS),
        datasets.Dataset.from_list(ROWS),
        datasets.Dataset.from_list(ROWS).to_iterable_dataset(),
        datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}),
        {"train": ROWS},
    ],
    ids=lambda data: type(data).__name__,
)
def test_rows_of_any_object_become_examples(tmp_path: Path, data: Any) -> None:
    config = write_data(data, settings(tmp_path))
    examples = load_examples(config.data.train, config.data)
    assert [example.row["n"] for example in examples] == list(range(30))
    assert examples[1].place.startswith(str(tmp_path / "runs/.data")) and examples[1].place.endswith(" 2")


def test_splits_are_those_of_the_settings_and_the_same_rows_have_the_same_file(tmp_path: Path) -> None:
    config = write_data({"train": ROWS, "test": ROWS[:3]}, settings(tmp_path))
    assert len(load_examples("", config.data, "test")) == 3
    again = write_data({"train": ROWS, "test": ROWS[:3]}, settings(tmp_path))
    assert again == config and len([*(tmp_path / "runs/.data").iterdir()]) == 2
    with pytest.raises(DataError, match=r"data has no split 'train' but test; set data\.train_split"):
        write_data({"test": ROWS}, settings(tmp_path))


def test_of_rows_without_an_end_as_many_are_read_as_are_trained_on(tmp_path: Path) -> None:
    stream = datasets.IterableDataset.from_generator(endless)
    for data in (stream, endless()):
        config = write_data(data, settings(tmp_path, train_items=40))
        assert len(load_examples(config.data.train, config.data)) == 40
    config = write_data(endless(), settings(tmp_path, train_items=40, holdout=0.2))
    assert len(Path(str(config.data.train)).read_text().splitlines()) == 50


def test_values_of_libraries_become_plain_ones_and_others_are_refused_by_row_and_column(tmp_path: Path) -> None:
    row = {"prompt": "1=", "answer": np.int64(1), "when": datetime.date(2026, 11, 26), "list": np.arange(2)}
    config = write_data([row], settings(tmp_path))
    (example,) = load_examples(config.data.train, config.data)
    assert (example.row["answer"], example.row["when"], example.row["list"]) == (1, "2026-11-26", [0, 1])
    with pytest.raises(DataError, match="row 2 of data, column 'image': a object is no value that JSON can hold"):
        write_data([row, {"prompt": "1=", "image": object()}], settings(tmp_path))
    for value in ({1: "x"}, [{"a": {None: 2}}], ({"a": 1}, {True: 2}), np.array([{1: "x"}, None])):
        with pytest.raises(
            DataError, match=r"row 1 of data, column 'm': a mapping has the key \w+ of type \w+: give texts"
        ):
            write_data([{"prompt": "1=", "m": value}], settings(tmp_path))
    with pytest.raises(DataError, match="row 1 of data is a str; expected a mapping of columns"):
        write_data(["1="], settings(tmp_path))
    for wrong in ("train.jsonl", 5):
        with pytest.raises(ConfigError, match=r"expected a Dataset, an iterable of rows.*named by data\.train"):
            write_data(wrong, settings(tmp_path))
    with pytest.raises(ConfigError, match="the script passes data: give one of the two"):
        write_data(ROWS, settings(tmp_path, train="train.jsonl"))
    assert not [*(tmp_path / "runs/.data").glob("*.tmp")]


def test_what_a_reward_gets_in_place_of_values_that_json_has_not_is_told(tmp_path: Path) -> None:
    pair = NamedTuple("Pair", [("x", int)])(1)
    rows = [
        {"prompt": "1=", "span": {"at": [(0, 1)]}, "when": None, "at": pandas.NaT},
        {"prompt": "2=", "span": pair, "when": pandas.Timestamp("2026-11-26"), "at": datetime.time(12)},
        {"prompt": "3=", "span": [1], "when": datetime.datetime(2026, 11, 26), "at": "12:00"},
    ]
    notes = notes_of(lambda: write_data(rows, settings(tmp_path)))
    assert [text.partition(", and so")[0] for text in notes] == [
        "the column 'span' of data holds a tuple, which is read as a list",
        "the column 'span' of data holds a Pair, which is read as a list",
        "the column 'when' of data holds a Timestamp, which is read as a text",
        "the column 'at' of data holds a time, which is read as a text",
        "the column 'when' of data holds a datetime, which is read as a text",
    ]
    assert not notes_of(lambda: write_data(ROWS, settings(tmp_path)))


def test_a_trainer_reads_the_rows_again_when_it_resumes(tmp_path: Path) -> None:
    summary = SFTTrainer(settings(tmp_path), data=ROWS, cluster="inline", show=False).fit()
    assert summary.finished
    run = {"steps": 2, "resume": str(tmp_path / "runs/run")}
    config = tiny(SFTConfig, tmp_path, data={"train": "", "holdout": 0.0}, eval={"items": 0}, run=run)
    assert SFTTrainer(config, data=ROWS, cluster="inline", show=False).fit().steps == 2


def test_a_dataset_is_read_in_its_format_with_its_functions_hidden_columns_and_json(tmp_path: Path) -> None:
    data = datasets.Dataset.from_list([{"prompt": "1=", "completion": "1", "answer": "hidden"}])

    def double(batch: dict[str, list[str]]) -> dict[str, list[str]]:
        return {name: [text * 2 for text in batch[name]] for name in ("prompt", "completion")}

    features = datasets.Features({"messages": datasets.List(datasets.Json()), "tools": datasets.Json()})
    turns = [{"role": "user", "content": "1="}, {"role": "assistant", "content": "1", "n": None}]
    mixed = datasets.Dataset.from_dict({"messages": [turns], "tools": [[{"name": "f"}]]}, features=features)
    for rows, prompt, answer in (
        (data.with_format("torch", columns=["prompt", "completion"]), "1=", "1"),
        (data.with_transform(double), "1=1=", "11"),
        (mixed, turns[:1], "1"),
    ):
        config = write_data(rows, settings(tmp_path))
        (example,) = load_examples(config.data.train, config.data)
        assert (example.prompt, example.answer) == (prompt, answer)
    assert (example.row["tools"], [*example.turns]) == ([{"name": "f"}], turns[1:])


def test_what_pandas_marks_as_missing_is_missing_and_what_would_be_dropped_is_told(tmp_path: Path) -> None:
    config = write_data([{"prompt": "1=", "answer": gone} for gone in (pandas.NaT, pandas.NA)], settings(tmp_path))
    assert [example.answer for example in load_examples(config.data.train, config.data)] == [None, None]
    with pytest.raises(ConfigError, match=r"data is a DataFrame.*are frame\.to_dict\('records'\)"):
        write_data(pandas.DataFrame(ROWS), settings(tmp_path))
    with pytest.raises(DataError, match="row 1 of data has two columns that are called '1'; rename one"):
        write_data([{1: "a", "1": "b"}], settings(tmp_path))
    (note,) = notes_of(lambda: write_data({"train": ROWS, "validation": ROWS}, settings(tmp_path)))
    assert note.startswith("data has no split 'test', and 'validation' beside 'train' is not read: data.eval_split")
