"""Estimators by name, by module and by file, and what is checked in their results."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from podium.algorithms import (
    ESTIMATORS,
    AdvantageInputs,
    AdvantageOutputs,
    AlgorithmConfig,
    compute_advantages,
    needs_values,
    resolve_advantage,
    uses_values,
)
from podium.errors import ConfigError, DataError

INPUTS = AdvantageInputs(
    rewards_B=torch.tensor([1.0, 2.0]),
    group_B=torch.tensor([0, 0]),
    mask_N=torch.tensor([False, True, True]),
    offsets_B1=torch.tensor([0, 2, 3]),
)

SOURCE = """
import torch
from podium.algorithms import AdvantageOutputs, uses_values

LIMIT = 3

def plain(inputs, config):
    return AdvantageOutputs(advantages_N=inputs.spread(inputs.rewards_B))

@uses_values
def with_critic(inputs, config):
    return plain(inputs, config)

def a_tensor(inputs, config):
    return inputs.rewards_B

def by_row(inputs, config):
    return AdvantageOutputs(advantages_N=inputs.rewards_B)

def unmasked(inputs, config):
    return AdvantageOutputs(advantages_N=torch.ones(3))

def infinite(inputs, config):
    return AdvantageOutputs(advantages_N=inputs.spread(torch.tensor([0.0, float("nan")])))
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of estimators on sys.path, for this test only."""
    name = "estimators_under_test"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def test_names_of_our_own() -> None:
    assert set(ESTIMATORS) == {"grpo", "rloo", "reinforce_pp", "gae"}
    assert all(resolve_advantage(name) is estimator for name, estimator in ESTIMATORS.items())


@pytest.mark.parametrize("form", ["{module}:plain", "{module}.py:plain", "{path}/{module}.py:plain"])
def test_a_users_function(form: str, module: str, tmp_path: Path) -> None:
    spec = form.format(module=module, path=tmp_path)
    outputs = compute_advantages(INPUTS, AlgorithmConfig(advantage=spec))
    assert outputs.advantages_N.tolist() == [0.0, 1.0, 2.0]


def test_a_file_is_run_once(module: str, tmp_path: Path) -> None:
    spec = f"{tmp_path}/{module}.py:plain"
    assert resolve_advantage(spec) is resolve_advantage(spec)


def test_who_needs_a_critic(module: str) -> None:
    assert [name for name in ESTIMATORS if needs_values(name)] == ["gae"]
    assert needs_values(f"{module}:with_critic")
    assert not needs_values(f"{module}:plain")


def test_uses_values_returns_the_function_itself() -> None:
    def estimator(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutputs:
        return AdvantageOutputs(advantages_N=inputs.spread(inputs.rewards_B))

    assert uses_values(estimator) is estimator


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("grppo", "did you mean 'grpo'"),
        ("reinforce++", "did you mean 'reinforce_pp'"),
        ("nothing like it", "expected one of grpo, rloo, reinforce_pp, gae, or module:function"),
        ("module:", "expected one of"),
        (":function", "expected one of"),
        ("module:not a name", "expected one of"),
        ("estimators_under_tset:plain", "no module 'estimators_under_tset'.*did you mean 'estimators_under_test'"),
        ("estimators_under_test:plian", "'plian' in estimators_under_test does not exist; did you mean 'plain'"),
        ("estimators_under_test:LIMIT", "'LIMIT' in estimators_under_test is not a function"),
        ("estimators_under_tset.py:plain", "no file .*did you mean .*estimators_under_test.py"),
        ("nowhere/at_all.py:plain", "no file .*nowhere/at_all.py"),
    ],
)
@pytest.mark.usefixtures("module")
def test_wrong_names_are_told_with_the_nearest(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_advantage(spec)
    assert "algorithm.advantage" in str(caught.value)


def test_an_error_inside_the_users_module_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that cannot import something is not reported as missing itself."""
    (tmp_path / "needs_more.py").write_text("import something_not_installed_here")
    monkeypatch.syspath_prepend(str(tmp_path))
    for spec in ("needs_more:f", f"{tmp_path}/needs_more.py:f"):
        with pytest.raises(ModuleNotFoundError, match="something_not_installed_here"):
            resolve_advantage(spec)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a_tensor", "returned Tensor; expected AdvantageOutputs"),
        ("by_row", r"advantages_N of shape \[2\]; expected one value a token, \[3\]"),
        ("unmasked", "not 0 outside mask_N"),
        ("infinite", "not finite, first in row 1"),
    ],
)
def test_wrong_results_are_refused_by_name(name: str, message: str, module: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        compute_advantages(INPUTS, AlgorithmConfig(advantage=f"{module}:{name}"))
    assert f"'{module}:{name}'" in str(caught.value)
