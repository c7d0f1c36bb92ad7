"""Rows that a script passes to a trainer as an object."""

import datetime
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from podium.errors import ConfigError, DataError
from podium.rollout.tasks import load_examples
from podium.trainer import SFTConfig, SFTTrainer
from podium.trainer.data_objects import write_data
from tests.integration.training import tiny

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
    with pytest.raises(DataError, match="row 1 of data is a str; expected a mapping of columns"):
        write_data(["1="], settings(tmp_path))
    for wrong in ("train.jsonl", 5):
        with pytest.raises(ConfigError, match=r"expected a Dataset, an iterable of rows.*named by data\.train"):
            write_data(wrong, settings(tmp_path))
    with pytest.raises(ConfigError, match="the script passes data: give one of the two"):
        write_data(ROWS, settings(tmp_path, train="train.jsonl"))
    assert not [*(tmp_path / "runs/.data").glob("*.tmp")]


def test_a_trainer_reads_the_rows_again_when_it_resumes(tmp_path: Path) -> None:
    summary = SFTTrainer(settings(tmp_path), data=ROWS, cluster="inline", show=False).fit()
    assert summary.finished
    run = {"steps": 2, "resume": str(tmp_path / "runs/run")}
    config = tiny(SFTConfig, tmp_path, data={"train": "", "holdout": 0.0}, eval={"items": 0}, run=run)
    assert SFTTrainer(config, data=ROWS, cluster="inline", show=False).fit().steps == 2
