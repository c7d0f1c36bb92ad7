"""The names of rewards, and what a mistake in one says. The forms of a name are tested with podium.functions."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from podium.errors import ConfigError
from podium.rewards import NAMED_REWARDS, Grader, RewardConfig, resolve_reward
from podium.rewards.columns import declared_columns, declared_least
from podium.rewards.resolve import GROUP, columns_read, least_score
from tests.integration.test_environment_plugins import write_package


@pytest.mark.parametrize("name", sorted(NAMED_REWARDS))
def test_every_named_reward_resolves(name: str) -> None:
    assert callable(resolve_reward(name))


@pytest.mark.parametrize("name", sorted(NAMED_REWARDS))
def test_what_a_named_reward_reads_is_known_without_loading_it_and_is_what_a_copy_of_it_declares(
    name: str, tmp_path: Path
) -> None:
    module, _, function = NAMED_REWARDS[name].partition(":")
    path = tmp_path / "mine.py"
    path.write_text(Path(str(importlib.import_module(module).__file__)).read_text())
    assert columns_read(name) is not None
    assert columns_read(name) == declared_columns(resolve_reward(name)) == columns_read(f"{path}:{function}")
    assert least_score(name) == declared_least(resolve_reward(name)) == least_score(f"{path}:{function}")


def test_a_reward_that_declares_nothing_or_is_of_a_module_reads_nobody_knows_what() -> None:
    assert columns_read(lambda completion, row: 1.0) is None
    assert columns_read("podium.rewards.text:exact") is None


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gsm8", r"did you mean gsm8k\?"),
        ("zzz", rf"expected one of {', '.join(NAMED_REWARDS)}, .*module:function.* group podium\.rewards"),
        ("podium.rewards.text:exacd", r"has no 'exacd'; did you mean exact\?"),
        ("podium.rewards.text:__name__", "is not a function"),
    ],
)
def test_a_wrong_name_is_explained(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_reward(spec)
    assert f"reward.name = {spec!r}" in str(caught.value)


SCORE = "from podium.rewards import reads\n\n\n@reads('fen')\ndef score(completion, row):\n    return 0.25\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of installed packages."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"{tmp_path.name}_chess.py").write_text(SCORE)  # no module of another test has this name
    return tmp_path


def test_a_package_brings_a_reward_by_name(folder: Path) -> None:
    write_package(folder, "chess", {"chess": f"{folder.name}_chess:score", "exact": "os:getcwd"}, GROUP)
    assert columns_read("chess") == {"fen"}
    with Grader(RewardConfig(name=("chess", "exact"), processes=1), columns=["fen", "answer"]) as grader:
        assert grader.grade(["a"], [{"fen": "8/8", "answer": "a"}])[0].parts == {"chess": 0.25, "exact": 1.0}


def test_a_name_that_two_packages_have_is_refused(folder: Path) -> None:
    write_package(folder, "chess", {"chess": f"{folder.name}_chess:score"}, GROUP)
    write_package(folder, "checkers", {"chess": f"{folder.name}_chess:reads"}, GROUP)
    with pytest.raises(ConfigError, match=r"reward\.name = 'chess' is a name in the packages checkers and chess"):
        resolve_reward("chess")


@pytest.mark.parametrize(("value", "says"), [("absent:score", "No module named 'absent'"), ("os:sep", "of type str")])
def test_a_reward_of_a_package_that_cannot_be_loaded_is_one_error(folder: Path, value: str, says: str) -> None:
    write_package(folder, "chess", {"chess": value}, GROUP)
    with pytest.raises(ConfigError, match=rf"reward\.name = 'chess': {value} of the package chess .*{says}"):
        resolve_reward("chess")
