"""Tasks of an environment: whatever their rows hold, equal tasks have equal digests, in every process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podium.errors import DataError
from podium.rollout.environments import EnvironmentConfig
from podium.rollout.tasks import DataConfig, Example
from podium_agents.tasks import load_tasks, make_tasks
from tests.unit.rollout.tasks.test_encode import notes_of
from tests.warm_python import run_python

KEYS = {"nest": {5: "five", "a": 1, None: 0, (1, 2): "pair"}}


class Board:
    """A class of a user's, without a repr of its own."""

    def __init__(self, *cells: Any) -> None:
        self.cells = [*cells]


def looped() -> Any:
    board = Board()
    board.cells = [board]
    return board


def digest(**row: Any) -> str:
    return make_tasks([Example("p", None, row)]).digest


@pytest.mark.parametrize(
    "make",
    [
        lambda: KEYS,
        lambda: {"x": float("nan")},
        lambda: {"x": {"b", "a"}},
        lambda: {"x": Board(1, 2)},
        lambda: {"x": looped()},
        lambda: {"x": print, "y": lambda: 0, "z": Board},
        lambda: {"x": np.arange(3), "\ud800": b"\xff"},
    ],
)
def test_equal_rows_have_equal_digests(make: Callable[[], dict[str, Any]]) -> None:
    assert digest(**make()) == digest(**make())


def test_rows_that_differ_have_other_digests() -> None:
    long = np.zeros(5000)
    other = long.copy()
    other[2500] = 1  # in the part that numpy leaves out of a text
    found = [digest(x=each) for each in (long, other, Board(1), Board(2), {1: 2}, {"1": 2}, [1], ["1"], None)]
    assert len({*found}) == len(found)


def test_a_digest_is_the_same_in_another_process() -> None:
    code = "from tests.unit.trainer.test_tasks import *; print(digest(x={'a', 'b'}, y=Board(1), **KEYS), hash('a'))"
    other_digest, other_hash = run_python("-c", code).stdout.split()
    assert int(other_hash) != hash("a"), "the processes have the same hashes of texts, and so the same order in sets"
    assert other_digest == digest(x={"a", "b"}, y=Board(1), **KEYS)


class Odd:
    """An environment whose tasks have prompts of many kinds."""

    @classmethod
    def tasks(cls, split: str) -> list[dict[str, Any]]:
        talk = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "q"}]}]
        odd = (3, None, {"q": 1}, [1, 2])
        return [{"prompt": "p"}, {"prompt": talk}, *({"prompt": one} for one in odd), {"board": Board()}, KEYS["nest"]]

    def reset(self, task: Any) -> str:
        return "go"

    def step(self, answer: str) -> None: ...


def test_a_task_of_any_kind_has_a_text_for_people_that_is_the_same_in_every_process() -> None:
    tasks = load_tasks(DataConfig(train=""), EnvironmentConfig(name=f"{__name__}:Odd"), "train")
    odd = ['{"prompt": 3}', '{"prompt": null}', '{"prompt": {"q": 1}}', '{"prompt": [1, 2]}']
    board = f'{{"board": "<{__name__}.Board object>"}}'
    assert [task.text for task in tasks] == ["p", "system: s\nuser: q", *odd, board, repr(KEYS["nest"])]


class Games(Odd):
    """An environment of whole sessions, with as many tasks as an option says."""

    def __init__(self, held: int = 5, split: str = "") -> None: ...

    @classmethod
    def tasks(cls, split: str, held: int = 5) -> list[dict[str, Any]]:
        return [{"prompt": f"{split} {number}"} for number in range(held)]


class WholeGames(Games):
    """The same with ``play`` in place of steps."""

    async def play(self, task: Any, client: Any) -> float:
        return 1.0


@pytest.mark.parametrize("name", ["Games", "WholeGames"])
def test_tasks_are_made_with_the_options_that_they_have_parameters_for(name: str) -> None:
    environment = EnvironmentConfig(name=f"{__name__}:{name}", options={"held": 2, "split": "hard"})
    tasks = load_tasks(DataConfig(train=""), environment, "test")
    assert [task.text for task in tasks] == ["test 0", "test 1"]


def test_a_run_trains_on_as_many_tasks_of_an_environment_as_the_data_say() -> None:
    data, environment = DataConfig(train="", train_items=2), EnvironmentConfig(name=f"{__name__}:Games")
    assert [task.text for task in load_tasks(data, environment, "train")] == ["train 0", "train 1"]
    assert len(load_tasks(data, environment, "test")) == 5
    assert len(load_tasks(data, environment, "test", limit=3)) == 3


def test_a_session_begins_with_the_system_message_of_its_row(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps({"prompt": "1+1", "system": "Be brief.", "answer": ["2"]}) + "\n")
    environment = EnvironmentConfig(name=f"{__name__}:Odd")
    (task,) = load_tasks(DataConfig(train=str(file), holdout=0), environment, "train")
    assert [message["role"] for message in task.example.row["prompt"]] == ["system", "user"]
    assert task.example.row["answer"] == ["2"]


def test_an_environment_may_read_a_history(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps({"prompt": "1+1", "history": [["hi", "ho"]], "answer": "2"}) + "\n")
    (task,) = load_tasks(DataConfig(train=str(file), holdout=0), EnvironmentConfig(name=f"{__name__}:Odd"), "train")
    assert task.example.row["history"] == [["hi", "ho"]]


@pytest.mark.parametrize(
    "row", [{"image": "cat.png"}, {"frames": [{"bytes": "", "path": "a.mp4"}]}, {"prompt": "What is in <image>?"}]
)
def test_a_task_with_an_image_is_refused_or_left_out(tmp_path: Path, row: dict[str, Any]) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps({"prompt": "a", **fields}) + "\n" for fields in ({}, row)))
    environment = EnvironmentConfig(name=f"{__name__}:Odd")
    with pytest.raises(DataError, match=r"tasks\.jsonl, line 2: .*(image|frames)"):
        load_tasks(DataConfig(train=str(file), holdout=0, answer_column=None), environment, "train")
    config = DataConfig(train=str(file), holdout=0, answer_column=None, bad_rows="drop")
    notes = notes_of(lambda: load_tasks(config, environment, "train"))
    assert any(note.startswith("1 of 2 rows cannot be used and is left out: (1)") for note in notes)
