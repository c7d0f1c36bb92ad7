"""The names of rewards, and what a mistake in one says. The forms of a name are tested with podium.functions."""

from __future__ import annotations

import sys

import pytest

from podium.errors import ConfigError
from podium.rewards import NAMED_REWARDS, resolve_reward


@pytest.mark.parametrize("name", sorted(NAMED_REWARDS))
def test_every_named_reward_resolves(name: str) -> None:
    assert callable(resolve_reward(name))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gsm8", r"did you mean 'gsm8k'\?"),
        ("zzz", "expected one of exact, fraction, gsm8k, overlong, model, math, reasoning_gym, module:function"),
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
