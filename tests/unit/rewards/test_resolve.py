"""The names of rewards, and what a mistake in one says. The forms of a name are tested with podium.functions."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from podium.errors import ConfigError
from podium.rewards import NAMED_REWARDS, resolve_reward
from podium.rewards.keys import declared_columns
from podium.rewards.resolve import columns_read


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


def test_a_reward_that_declares_nothing_or_is_of_a_module_reads_nobody_knows_what() -> None:
    assert columns_read(lambda completion, row: 1.0) is None
    assert columns_read("podium.rewards.text:exact") is None


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gsm8", r"did you mean 'gsm8k'\?"),
        ("zzz", f"expected one of {', '.join(NAMED_REWARDS)}, module:function"),
        ("podium.rewards.text:exacd", r"has no 'exacd'; did you mean 'exact'\?"),
        ("podium.rewards.text:__name__", "is not a function"),
    ],
)
def test_a_wrong_name_is_explained(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_reward(spec)
    assert f"reward.name = {spec!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "module", "library", "package"),
    [
        ("math", "podium.rewards.symbolic", "math_verify", "math-verify"),
        ("reasoning_gym", "podium.rewards.gym", "reasoning_gym", "reasoning-gym"),
    ],
)
def test_a_library_that_is_missing_is_named_with_its_remedy(
    name: str, module: str, library: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=rf"reward\.name = '{name}' needs .*pip install '{package}"):
        resolve_reward(name)
