"""Names to functions, and what a mistake in a name says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from podium.errors import ConfigError
from podium.rewards import NAMED_REWARDS, resolve_reward

SOURCE = """
from dataclasses import dataclass
from neighbour import BONUS

@dataclass
class Rule:
    bonus: float = BONUS

def score_length(completion, row):
    return len(completion) + Rule().bonus

THRESHOLD = 3
"""


@pytest.fixture
def rewards_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour.py").write_text("BONUS = 0.5\n")
    path = tmp_path / "my_rewards.py"
    path.write_text(SOURCE)
    for name in ("neighbour", "podium_reward_my_rewards"):
        sys.modules.pop(name, None)
    return path


@pytest.mark.parametrize("name", sorted(NAMED_REWARDS))
def test_every_named_reward_resolves(name: str) -> None:
    assert callable(resolve_reward(name))


def test_a_file_may_import_its_neighbours(rewards_file: Path) -> None:
    assert resolve_reward(f"{rewards_file}:score_length")("four", {}) == 4.5


def test_a_relative_path_is_seen_from_the_working_directory(
    rewards_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(rewards_file.parent)
    assert resolve_reward("my_rewards.py:score_length")("four", {}) == 4.5


def test_two_files_of_one_name_are_two_modules(rewards_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "my_rewards.py"
    other.parent.mkdir()
    other.write_text("def score_length(completion, row):\n    return 0.0\n")
    first = resolve_reward(f"{rewards_file}:score_length")
    second = resolve_reward(f"{other}:score_length")
    assert (first("four", {}), second("four", {})) == (4.5, 0.0)


def test_a_module_and_a_nested_name() -> None:
    assert resolve_reward("podium.rewards.text:exact")("a", {"answer": "a"}) == 1.0
    assert resolve_reward("builtins:str.count") is str.count


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gsm8", "did you mean gsm8k\\?"),
        ("zzz", "Podium has exact, fraction, gsm8k, math, reasoning_gym"),
        (":f", "expected module:function"),
        ("podium.rewards.text:", "expected module:function"),
        ("no_such_package.rewards:score", "no module 'no_such_package'"),
        ("podium.rewards.text:exacd", "has no 'exacd'; did you mean exact\\?"),
        ("podium.rewards.text:annotations", "is _Feature, and a reward is a function"),
    ],
)
def test_a_wrong_name_is_explained(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_reward(spec)
    assert f"reward.name = {spec!r}" in str(caught.value)


def test_a_wrong_file_or_function_names_the_nearest(rewards_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean .*my_rewards\.py\?"):
        resolve_reward(f"{tmp_path}/my_reward.py:score_length")
    with pytest.raises(ConfigError, match="nowhere is no directory"):
        resolve_reward(f"{tmp_path}/nowhere/my_reward.py:score_length")
    with pytest.raises(ConfigError, match="did you mean score_length"):
        resolve_reward(f"{rewards_file}:score_lenght")
    with pytest.raises(ConfigError, match="THRESHOLD is int"):
        resolve_reward(f"{rewards_file}:THRESHOLD")


def test_an_import_that_fails_inside_the_users_module_passes_through(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import not_installed_anywhere\n")
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        resolve_reward(f"{broken}:score")
    with pytest.raises(ModuleNotFoundError):  # a second time too: nothing half-loaded was left behind
        resolve_reward(f"{broken}:score")
