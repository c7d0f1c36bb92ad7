"""Names of variables in the code of a reward: a variable that is withheld from it is named, where its code names it."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from podium.rewards import Grader, RewardConfig, resolve_reward
from podium.rewards.reached_texts import list_reached_names
from podium.telemetry import Note, subscribe

CODE = {
    "the function": "def score(completion, row):\n    return len(os.environ.get('JUDGE_KEY', ''))",
    "an error that it catches": "def score(completion, row):\n    try:\n        return len(os.environ['JUDGE_KEY'])\n"
    "    except Exception:\n        return 0.0",
    "a function of the file": "def ask():\n    return os.getenv('JUDGE_KEY')\n"
    "def score(completion, row):\n    return ask()",
    "a statement of the file": "KEY = os.getenv('JUDGE_KEY')\ndef score(completion, row):\n    return 0.0",
    "a constant": "NAME = 'JUDGE_KEY'\ndef score(completion, row):\n    return os.environ.get(NAME, 0)",
    "a method": "class Judge:\n    def ask(self):\n        return os.getenv('JUDGE_KEY')\n"
    "def score(completion, row):\n    return Judge().ask()",
    "an object": "class Judge:\n    def __init__(self): self.name = 'JUDGE' + chr(95) + 'KEY'\n"
    "    def __call__(self, completion, row):\n        return os.environ.get(self.name, 0)\nscore = Judge()",
    "a property and a static method": "class Judge:\n    @staticmethod\n    def name(): return 'JUDGE_KEY'\n"
    "    @property\n    def key(self): return os.getenv(self.name())\n"
    "def score(completion, row):\n    return Judge().key",
    "a wrapped function": "@functools.lru_cache\ndef ask():\n    return os.getenv('JUDGE_KEY')\n"
    "def score(completion, row):\n    return ask()",
    "a wrapper": "def retried(function):\n    def call(*args): return function(*args)\n    return call\n"
    "@retried\ndef score(completion, row):\n    return os.getenv('JUDGE_KEY')",
    "a partial": "def grade(completion, row, name):\n    return os.getenv(name)\n"
    "score = functools.partial(grade, name='JUDGE_KEY')",
    "a default": "def score(completion, row, *, name='JUDGE_KEY'):\n    return os.getenv(name)",
    "a function within": "def score(completion, row):\n    def ask(): return os.getenv('JUDGE_KEY')\n    return ask()",
    "a module beside it": "import helpers_of_judge as helpers\ndef score(completion, row):\n    return helpers.ask()",
    "a name of that module": "from helpers_of_judge import ask\ndef score(completion, row):\n    return ask()",
    "a module that is imported late": "def score(completion, row):\n    import late_of_judge\n"
    "    return late_of_judge.ask()",
}
OTHER = {
    "another reward of the file": "def other(completion, row):\n    return os.getenv('JUDGE_KEY')\n"
    "def score(completion, row):\n    return 0.0",
    "a longer text": "def score(completion, row):\n    'Reads JUDGE_KEY.'\n    return len('no JUDGE_KEY')",
    "a comment": "def score(completion, row):\n    return 0.0  # JUDGE_KEY",
    "another name": "def score(completion, row):\n    return len(os.environ.get('JUDGE_KEY_FILE', ''))",
}
HELPER = "import os\ndef ask():\n    return len(os.environ.get('JUDGE_KEY', ''))\n"


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Loads a reward of a file, beside which are modules that it may import."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "helpers_of_judge", raising=False)
    for name in ("helpers_of_judge", "late_of_judge"):
        (tmp_path / f"{name}.py").write_text(HELPER)

    def load_code(code: str) -> Any:
        (tmp_path / "judges.py").write_text(f"import functools\nimport os\n{code}\n")
        return resolve_reward(f"{tmp_path}/judges.py:score")

    return load_code


@pytest.mark.parametrize("where", CODE)
def test_a_name_is_found_in_all_code_of_the_user_that_a_reward_reaches(where: str, load: Callable[[str], Any]) -> None:
    assert "JUDGE_KEY" in list_reached_names(load(CODE[where]))


@pytest.mark.parametrize("where", OTHER)
def test_a_name_elsewhere_is_not_the_rewards(where: str, load: Callable[[str], Any]) -> None:
    assert "JUDGE_KEY" not in list_reached_names(load(OTHER[where]))


def test_code_of_python_and_an_object_that_raises_are_left_alone() -> None:
    class Odd:
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError(name)

    odd = Odd()

    def score(completion: str, row: Any) -> float:
        os.path.expandvars(completion)
        return float(bool(odd) and "JUDGE_KEY" in os.environ)

    assert {"JUDGE_KEY"} <= {*list_reached_names(score)}
    assert list_reached_names(functools.partial(len)) == []


def read_quietly(completion: str, row: Any) -> float:
    """A judge that says nothing of a key that it does not have."""
    try:
        return float(len(os.environ["JUDGE_API_KEY"]) + len(os.environ["JUDGE_TOKEN"]))
    except KeyError:
        return 0.0


def read_limit(completion: str, row: Any) -> float:
    """A score that depends on a number of the environment."""
    return float(os.environ.get("REWARD_MAX_TOKENS", 0))


def test_a_reward_whose_code_names_a_withheld_variable_is_named_once_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"JUDGE_API_KEY": "a-key", "JUDGE_TOKEN": "b", "REWARD_MAX_TOKENS": "512"}.items():
        monkeypatch.setenv(name, value)
    notes: list[str] = []
    unsubscribe = subscribe(lambda event: notes.append(event.text) if isinstance(event, Note) else None)
    try:
        with Grader(RewardConfig(), reward=[read_quietly, read_limit]) as grader:
            assert [grade.score for grade in grader.grade(["", ""], [{"a": 1}] * 2)] == [512.0, 512.0]
        (note,) = [note for note in notes if "JUDGE" in note or "REWARD_MAX_TOKENS" in note]
        assert note.startswith("the reward read_quietly names JUDGE_API_KEY and JUDGE_TOKEN, which do not reach it")
        assert "set --reward.env '[JUDGE_API_KEY, JUDGE_TOKEN]' if the reward reads them" in note
        notes.clear()
        with Grader(RewardConfig(env=("JUDGE_API_KEY", "JUDGE_TOKEN")), reward=read_quietly) as grader:
            assert grader.grade([""], [{"a": 1}])[0].score == 6.0
        assert not [note for note in notes if "JUDGE" in note]
    finally:
        unsubscribe()
