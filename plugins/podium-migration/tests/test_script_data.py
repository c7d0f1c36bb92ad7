"""The data sets of a Python script of TRL are those that its trainer gets, and the others are listed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from podium.cli import main
from podium.config import load_config
from podium.runs.recipes import find_recipe

pytest.importorskip("podium_migration.script_data")

EVALUATES = "SFTTrainer(model='m', args=SFTConfig(eval_strategy='steps', packing=False), "


def convert(tmp_path: Path, text: str, *words: str) -> tuple[dict[str, Any], list[str]]:
    """The section of the data, and the lines at the end of the file."""
    source, target = tmp_path / "train.py", tmp_path / "run.yaml"
    source.write_text(f"from datasets import *\nfrom trl import *\n{text}\n")
    assert main(["config", "--from", "trl", str(source), *words, "--output", str(target)]) == 0
    written = target.read_text()
    load_config(find_recipe(written.split("podium train ")[1].split()[0]).config, target)
    lines = written.partition("# Without a counterpart")[2].replace("\n#   ", " ").splitlines()
    data = yaml.safe_load(written).get("data", {})
    return {name: value for name, value in data.items() if name != "max_prompt_tokens"}, lines


HELD_OUT = {"train": "a/b", "eval": "c/d", "eval_split": "test"}


@pytest.mark.parametrize(
    ("text", "data"),
    [
        (
            "x = load_dataset('a/b')\ny = load_dataset('c/d', split='test')\n{}train_dataset=x, eval_dataset=y)",
            HELD_OUT,
        ),
        (
            "y = load_dataset('c/d', split='test')\nx = load_dataset('a/b')\n{}train_dataset=x, eval_dataset=y)",
            HELD_OUT,
        ),
        (
            "y = load_dataset('c/d')\nz = y['test'].map(f)\n{}train_dataset=load_dataset('a/b'), eval_dataset=z)",
            HELD_OUT,
        ),
        (
            "x, y = load_dataset('a/b', split=['train', 'dev'])\n{}train_dataset=x, eval_dataset=y)",
            {"train": "a/b", "eval": "a/b", "train_split": "train", "eval_split": "dev"},
        ),
        (
            (
                "rows = load_dataset('a/b', 'main').filter(f).select(range(9))\n"
                "{}train_dataset=rows['train'].shuffle(), eval_dataset=rows['test'])"
            ),
            {"train": "a/b", "eval": "a/b", "train_split": "train", "eval_split": "test", "options": {"name": "main"}},
        ),
        (
            (
                "x = load_dataset('a/b', 'main')\ny = load_dataset('c/d', 'hard', split='test')\n"
                "{}train_dataset=x, eval_dataset=y)"
            ),
            {**HELD_OUT, "options": {"a/b": {"name": "main"}, "c/d": {"name": "hard"}}},
        ),
        (
            (
                "def prepare(rows, name):\n    rows = rows.map(name)\n    return rows\n"
                "def load():\n    x = load_dataset('a/b')\n"
                "    return prepare(x, 'x'), prepare(name='y', rows=load_dataset('c/d')['test'])\n"
                "def main():\n    x, y = load()\n    {}train_dataset=x, eval_dataset=y)"
            ),
            HELD_OUT,
        ),
        (
            (
                "def main(x):\n    {}train_dataset=x['a'], eval_dataset=x['b'])\n"
                "main({{'a': load_dataset('a/b'), 'b': load_dataset('c/d', split='test')}})"
            ),
            HELD_OUT,
        ),
        (
            (
                "class Data:\n    def __init__(self):\n"
                "        self.x = load_dataset('a/b')\n        self.y = load_dataset('c/d')\n"
                "    def train(self):\n        {}train_dataset=self.x, eval_dataset=self.y['test'])"
            ),
            HELD_OUT,
        ),
        (
            (
                "d = load_dataset('json', data_files={{'train': 't.jsonl', 'test': 'e.jsonl'}})\n"
                "{}train_dataset=d['train'], eval_dataset=d['test'])"
            ),
            {"train": "t.jsonl", "eval": "e.jsonl"},
        ),
        (
            (
                "x = load_dataset('a/b')\n"
                "z = {{'z': load_dataset('c/d', split='test'), 'y': load_dataset('e/f', split='test')}}\n"
                "{}train_dataset=x, eval_dataset=z)"
            ),
            {"train": "a/b", "eval": {"z": "c/d", "y": "e/f"}, "eval_split": "test"},
        ),
        (
            (
                "x = concatenate_datasets([load_dataset('a/b', split='train'), load_dataset('c/d', split='train')])\n"
                "{}train_dataset=x, eval_dataset=load_from_disk('held/out'))"
            ),
            {"train": ["a/b", "c/d"], "eval": "held/out", "train_split": "train"},
        ),
        (
            (
                "x = load_dataset('a/b', split=None)\n"
                "if y := load_dataset('c/d', split='test'):\n    {}train_dataset=x, eval_dataset=y)"
            ),
            HELD_OUT,
        ),
        (
            (
                "x = load_dataset('a/b')\nx = DatasetDict({{'train': x['train'].shuffle(), 'test': x['test']}})\n"
                "x = x.map(f, num_proc=4)\nrows, test = x['train'], x['test']\n"
                "if short:\n    rows = rows.filter(f)\n{}train_dataset=rows, eval_dataset=test)"
            ),
            {"train": "a/b", "eval": "a/b", "train_split": "train", "eval_split": "test"},
        ),
        (
            (
                "from datasets import load_dataset as ld\ndef get(split='train', name='a/b'):\n"
                "    rows = ld(name, 'main', split=split)\n    return rows.map(f)\n"
                "{}train_dataset=get(), eval_dataset=get(split='test'))"
            ),
            {"train": "a/b", "eval": "a/b", "train_split": "train", "eval_split": "test", "options": {"name": "main"}},
        ),
        (
            (
                "def get(name, *, split='x'):\n    return load_dataset(name)[split]\n"
                "{}train_dataset=get('a/b'), eval_dataset=get('c/d', split='test'))"
            ),
            {**HELD_OUT, "train_split": "x"},
        ),
        (
            "from datasets import load_dataset as ld\nld('a/b', 'main')\n{})",
            {"train": "a/b", "options": {"name": "main"}},
        ),
        ("x = load_dataset('c/d')\nx = load_dataset('a/b')\n{}train_dataset=x)", {"train": "a/b"}),
    ],
)
def test_the_data_of_the_trainer_are_followed_to_their_loads(text: str, data: dict[str, Any], tmp_path: Path) -> None:
    converted, lines = convert(tmp_path, text.format(EVALUATES))
    assert converted == data
    assert list(converted.get("eval", {})) == list(data.get("eval", {})), "the first set judges the run"
    assert not any("eval_dataset" in line for line in lines)
    assert any("neither data.train nor data.eval" in line for line in lines) == (
        "c/d" in text and "c/d" not in str(data)
    )


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("load_dataset('c/d')\n{}train_dataset=load_dataset('a/b'))", "load_dataset('c/d') (line 3): the script loads"),
        (
            "x = load_dataset('a/b').train_test_split(0.1)\n{}train_dataset=x['train'], eval_dataset=x['test'])",
            "eval_dataset (line 3): the script evaluates on rows that it takes from the training data",
        ),
        (
            "x = load_dataset('a/b', split='train')\n{}train_dataset=x.select(a), eval_dataset=x.select(b))",
            "eval_dataset (line 3): the script evaluates on rows that it takes from the training data",
        ),
        (
            "x, y = load_dataset('a/b', split=['train[:90%]', 'train[90%:]'])\n{}train_dataset=x, eval_dataset=y)",
            "eval_dataset (line 3): the script evaluates on rows that it takes from the training data",
        ),
        (
            (
                "x = load_dataset('json', data_files='a.jsonl', split='train[:90%]')\n"
                "{}train_dataset=x, eval_dataset=load_dataset('json', data_files='a.jsonl', split='train[90%:]'))"
            ),
            "eval_dataset (line 4): the script evaluates on rows that it takes from the training data",
        ),
        (
            "x = load_dataset('a/b')\n{}train_dataset=x, eval_dataset=Dataset.from_list(rows))",
            "eval_dataset (line 4): the rows that the script evaluates on are not followed",
        ),
        (
            (
                "x = load_dataset('a/b')\n"
                "y = {{'one': load_dataset('c/d', split='a'), 'two': load_dataset('e/f', split='b')}}\n"
                "{}train_dataset=x, eval_dataset=y)"
            ),
            "eval_dataset['two']: this set has another split",
        ),
        (
            "x = load_dataset('a/b')\n{}train_dataset=x, eval_dataset=load_dataset(sys.argv[1]))",
            "eval_dataset: the file does not decide this",
        ),
        (
            "x = load_dataset('a/b') if big else load_dataset('c/d')\n{}train_dataset=x)",
            "dataset_name: the file does not decide this",
        ),
        (
            "x = load_dataset('a/b')\n{}train_dataset=x, eval_dataset=load_dataset('a/b', split='test[:9]'))",
            "dataset_test_split=test[:9]: data.eval_split is the name of one split",
        ),
        (
            "x = load_dataset('a/b', 'x')\n{}train_dataset=x, eval_dataset=load_dataset('a/b', 'y', split='test'))",
            "eval_dataset_config=y: data.options has one configuration of a/b",
        ),
        (
            "load_dataset('a/b')\n{}train_dataset=Dataset.from_list(rows))",
            "train_dataset (line 4): the rows that the script trains on are not followed",
        ),
        (
            "def f(x):\n    return f(f(x), f(x))\n{}train_dataset=f(load_dataset('a/b')))",
            "train_dataset (line 5): the rows",
        ),
    ],
)
def test_what_is_not_followed_is_listed(text: str, line: str, tmp_path: Path) -> None:
    _, lines = convert(tmp_path, text.format(EVALUATES))
    assert [entry for entry in lines if entry.removeprefix("# - ").startswith(line)], lines


def test_names_that_the_command_line_decides_are_given_behind_the_file(tmp_path: Path) -> None:
    """As in the scripts of TRL itself."""
    text = f"""\
def main(script_args, training_args):
    dataset = load_dataset(script_args.dataset_name, name=script_args.dataset_config)
    {EVALUATES}train_dataset=dataset[script_args.dataset_train_split],
        eval_dataset=dataset[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None)
"""
    _, lines = convert(tmp_path, text)
    (line,) = [line for line in lines if "the file does not decide this" in line]
    names = line.removeprefix("# - ").partition(":")[0].split(", ")
    assert names == ["dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split"]
    (folder := tmp_path / "b").mkdir()
    data, lines = convert(folder, text, "dataset_name=a/b", "dataset_train_split=x", "dataset_test_split=y")
    assert data == {"train": "a/b", "train_split": "x", "eval_split": "y"}
