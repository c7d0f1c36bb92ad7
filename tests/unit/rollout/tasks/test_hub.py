"""Datasets through the `datasets` library: directories in the hub's layout, read as a hub name would be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from podium.errors import DataError
from podium.rollout.tasks import DataConfig, load_examples


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets import config as datasets_config

    monkeypatch.setattr(datasets_config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def write(path: Path, count: int) -> None:
    rows = [{"prompt": f"{path.stem} {n}", "answer": str(n)} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def config(folder: Path, **settings: Any) -> DataConfig:
    return DataConfig(train=str(folder), options={"cache_dir": str(folder.parent / "cache")}, **settings)


def test_a_directory_with_splits(tmp_path: Path) -> None:
    folder = tmp_path / "sums"
    folder.mkdir()
    write(folder / "train.jsonl", 30)
    write(folder / "test.jsonl", 10)
    settings = config(folder)
    train = load_examples(settings.train, settings)
    test = load_examples(settings.train, settings, "test")
    assert [example.prompt for example in train] == [f"train {n}" for n in range(30)], "nothing needs to be held out"
    assert [example.answer for example in test] == [str(n) for n in range(10)]
    with pytest.raises(DataError, match="has no split 'trian' but train, test; did you mean train"):
        load_examples(settings.train, config(folder, train_split="trian"))


def test_a_directory_without_a_test_split_holds_a_share_out(tmp_path: Path) -> None:
    folder = tmp_path / "sums"
    folder.mkdir()
    write(folder / "train.jsonl", 300)
    settings = config(folder, holdout=0.3)
    sides = [load_examples(settings.train, settings, split) for split in ("train", "test")]
    assert sum(map(len, sides)) == 300
    assert 60 < len(sides[1]) < 120


def test_what_is_neither_file_nor_dataset_says_so() -> None:
    settings = DataConfig(train="nobody/has-this-dataset")
    with pytest.raises(DataError, match="nobody/has-this-dataset: neither a file nor a dataset that can be loaded"):
        load_examples(settings.train, settings)
