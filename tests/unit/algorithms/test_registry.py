"""Estimators and losses by name, by module and by file; their declarations, options and results."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
import torch

from podium.algorithms import (
    ADVANTAGES,
    CORRECTIONS,
    LOSSES,
    AdvantageInputs,
    AdvantageOutputs,
    AlgorithmConfig,
    Declaration,
    LossInputs,
    NamedFunctions,
    check_functions,
    compute_advantages,
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
from podium.algorithms import AdvantageOutputs, Declaration

LIMIT = 3

def plain(inputs, config):
    return AdvantageOutputs(advantages_N=inputs.spread(inputs.rewards_B))

@Declaration(needs_values=True)
def with_critic(inputs, config):
    return plain(inputs, config)

def a_tensor(inputs, config):
    return inputs.rewards_B

def by_row(inputs, config):
    return AdvantageOutputs(advantages_N=inputs.rewards_B)

def unmasked(inputs, config):
    return AdvantageOutputs(advantages_N=torch.ones(3))

def listed(inputs, config):
    return AdvantageOutputs(advantages_N=[0.0] * 3)

def short_column(inputs, config):
    return AdvantageOutputs(advantages_N=torch.zeros(3), columns={"mine": torch.zeros(2)})

def taken_column(inputs, config):
    return AdvantageOutputs(advantages_N=torch.zeros(3), columns={"logprobs": torch.zeros(3)})

@Declaration(needs_values=True)
def without_returns(inputs, config):
    return AdvantageOutputs(advantages_N=torch.zeros(3))

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
    assert [*ADVANTAGES.own] == ["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gae"]
    assert [*LOSSES.own] == ["ppo_clip", "gspo", "cispo", "reinforce", "teacher_kl", "cross_entropy"]
    assert [*CORRECTIONS.own] == ["truncate", "bypass"]
    for functions in (ADVANTAGES, LOSSES, CORRECTIONS):
        assert [functions.load(name).__name__ for name in functions] == [*functions]


@pytest.mark.parametrize("form", ["{module}:plain", "{module}.py:plain", "{path}/{module}.py:plain"])
def test_a_users_function(form: str, module: str, tmp_path: Path) -> None:
    spec = form.format(module=module, path=tmp_path)
    outputs = compute_advantages(INPUTS, AlgorithmConfig(advantage=spec))
    assert outputs.advantages_N.tolist() == [0.0, 1.0, 2.0]


def test_what_estimators_and_losses_declare(module: str) -> None:
    declared = {name: ADVANTAGES.declaration(name) for name in ADVANTAGES}
    assert [name for name in ADVANTAGES if declared[name].needs_values] == ["gae", "gae_turns"]
    alone = {"reinforce_pp", "remax", "gae", "gae_turns"}
    assert {name for name in ADVANTAGES if not declared[name].needs_groups} == alone
    assert ADVANTAGES.declaration(f"{module}:with_critic") == Declaration(needs_values=True)
    assert ADVANTAGES.declaration(f"{module}:plain") == Declaration()
    assert {name for name in LOSSES if LOSSES.declaration(name).minibatch} == {"clip_cov", "kl_cov"}
    by_generator = {name for name in LOSSES if LOSSES.declaration(name).ratio_to == "rollout"}
    assert by_generator == {"dppo_tv", "dppo_kl", "dro"}


@pytest.mark.parametrize("functions", [ADVANTAGES, LOSSES, CORRECTIONS], ids=lambda functions: functions.key)
def test_a_function_declares_where_it_is_defined_what_its_name_declares(functions: NamedFunctions) -> None:
    for name in functions:
        declared = functions.declaration(name)
        assert functions.declaration(declared.function) is declared
        assert functions.load(declared.function) is functions.load(name)


def test_a_declaration_returns_the_function_itself() -> None:
    def estimator(inputs: AdvantageInputs, config: AlgorithmConfig) -> AdvantageOutputs:
        return AdvantageOutputs(advantages_N=inputs.spread(inputs.rewards_B))

    assert Declaration(needs_values=True)(estimator) is estimator


def test_declarations_of_podium_and_its_packages_import_no_torch() -> None:
    script = """
import sys
import podium.functions, podium.errors
import importlib.util
spec = importlib.util.find_spec("podium")
import types
package = types.ModuleType("podium.algorithms")
package.__path__ = [spec.submodule_search_locations[0] + "/algorithms"]
sys.modules["podium.algorithms"] = package  # without what the package itself imports
from podium.algorithms.declarations import ADVANTAGES, CORRECTIONS, LOSSES
declared = [functions.declaration(name) for functions in (ADVANTAGES, LOSSES, CORRECTIONS) for name in functions]
assert len(declared) > 30 and ADVANTAGES.declaration("gae_turns").needs_values
print("torch" in sys.modules)
"""
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "False\n"
    )


OPTIONS = """
from pydantic import Field
from podium.algorithms import AdvantageOutputs, Declaration
from podium.config import section

@section("algorithm.options")
class Ours:
    power: float = Field(default=1.0, gt=0)
    kind: str = "even"

@Declaration(options=Ours)
def estimator(inputs, config):
    return AdvantageOutputs(advantages_N=inputs.spread(inputs.rewards_B ** config.read_options(Ours).power))
"""


def test_options_are_typed_beside_the_function_and_shared_by_estimator_and_loss(tmp_path: Path) -> None:
    (tmp_path / "with_options.py").write_text(OPTIONS)
    config = AlgorithmConfig(
        advantage=f"{tmp_path}/with_options.py:estimator", loss="clip_cov", options={"power": 2, "cov_share": 0.5}
    )
    check_functions(config)
    assert compute_advantages(INPUTS, config).advantages_N.tolist() == [0.0, 1.0, 4.0]
    for options, message in [
        ({"powr": 2}, r"unknown key algorithm\.options\.powr \(value 2\).*did you mean algorithm\.options\.power\?"),
        ({"zzz": 2}, r"the options are power, kind, cov_share, cov_low, cov_high"),
        ({"power": 0}, r"algorithm\.options\.power = 0.* 0"),
        ({"cov_share": "much"}, r"algorithm\.options\.cov_share = 'much'.* number"),
    ]:
        with pytest.raises(ConfigError, match=message):
            check_functions(replace(config, options=options))
    with pytest.raises(ConfigError, match=r"cov_share .* none of them declares options\. .*@Declaration\(options="):
        check_functions(AlgorithmConfig(correction="none", loss="cross_entropy", options={"cov_share": 0.5}))


def test_options_that_are_no_section_are_refused_at_decoration() -> None:
    class Plain:
        power = 1.0

    with pytest.raises(ConfigError, match=r"the class Plain with @section\(\"algorithm\.options\"\)"):
        Declaration(options=Plain)


ARGUMENTS = """
import functools

def three(inputs, config, step): ...
def keywords(inputs, *, config): ...
def defaults(inputs, config, step=0): ...
def any_number(*arguments): ...
bound = functools.partial(three, step=1)
class Callable:
    def __call__(self, inputs, config): ...
callable_object = Callable()
"""


@pytest.mark.parametrize("key", ["loss", "advantage"])
def test_a_function_of_other_arguments_is_refused_before_the_start(key: str, tmp_path: Path) -> None:
    (tmp_path / "arguments.py").write_text(ARGUMENTS)
    for name in ("defaults", "any_number", "bound", "callable_object"):
        check_functions(replace(AlgorithmConfig(), **{key: f"{tmp_path}/arguments.py:{name}"}))
    for name, argument in (("three", "step"), ("keywords", "config")):
        with pytest.raises(
            ConfigError, match=rf"algorithm\.{key} = .*:{name}'.* two positional .* \(inputs, .*{argument}"
        ):
            check_functions(replace(AlgorithmConfig(), **{key: f"{tmp_path}/arguments.py:{name}"}))


def test_a_loss_that_reads_the_missing_reference_is_told_the_key() -> None:
    inputs = LossInputs(offsets_B1=torch.tensor([0, 1]), columns={"logprobs": torch.zeros(1)})
    with pytest.raises(DataError, match=r"no column 'ref_logprobs'; set algorithm\.kl_in to 'loss'"):
        _ = inputs.ref_logprobs_N
    with pytest.raises(DataError, match=r"no column 'rollout_logprobs'$"):
        _ = inputs.rollout_logprobs_N


def test_columns_that_cannot_be_had_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"columns has \['entropi'\]: expected some of old_logprobs, .*, entropy"):
        Declaration(columns=("entropi",))
    (tmp_path / "needs_reference.py").write_text(
        "from podium.algorithms import Declaration\n\n"
        "@Declaration(columns=('ref_logprobs',))\ndef estimator(inputs, config): ...\n"
    )
    config = AlgorithmConfig(advantage=f"{tmp_path}/needs_reference.py:estimator")
    with pytest.raises(ConfigError, match=r"reads ref_logprobs with algorithm.kl_in = 'none'"):
        check_functions(config)
    check_functions(replace(config, kl_in="loss"))


def test_a_users_functions_are_found_before_anything_starts(module: str) -> None:
    check_functions(AlgorithmConfig(advantage=f"{module}:plain"))
    with pytest.raises(ConfigError, match=r"algorithm\.loss = .* has no 'plian'; did you mean plain"):
        check_functions(AlgorithmConfig(loss=f"{module}:plian"))


def test_a_wrong_name_is_told_with_the_key_and_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.advantage = 'reinforce\+\+'.*did you mean reinforce_pp\?"):
        ADVANTAGES.load("reinforce++")
    with pytest.raises(ConfigError, match=r"algorithm\.loss = 'ppo_clp'.*did you mean ppo_clip"):
        AlgorithmConfig(loss="ppo_clp")
    with pytest.raises(ConfigError, match=r"your own function is path/file\.py:vespo or module:vespo"):
        AlgorithmConfig(loss="vespo")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a_tensor", "returned Tensor; expected AdvantageOutputs"),
        ("by_row", r"advantages_N of shape \[2\]; expected one value a token, \[3\]"),
        ("unmasked", "not 0 outside mask_N"),
        ("infinite", "not finite, first in row 1"),
        ("listed", "returned advantages_N as list; expected a tensor"),
        ("short_column", r"returned the column 'mine' of shape \[2\]; expected one value a token, \[3\]"),
        ("taken_column", "returned the column 'logprobs', which is a name of Podium's: choose another one"),
        ("without_returns", "returned no returns_N, which are the critic's targets"),
    ],
)
def test_wrong_results_are_refused_by_name(name: str, message: str, module: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        compute_advantages(INPUTS, AlgorithmConfig(advantage=f"{module}:{name}"))
    assert f"'{module}:{name}'" in str(caught.value)


def test_an_option_of_the_clipped_surrogate_is_refused_with_a_loss_that_does_not_clip() -> None:
    for loss in ("ppo_clip", "gspo"):
        check_functions(AlgorithmConfig(loss=loss, options={"dual_clip": 3.0}))
        with pytest.raises(ConfigError, match=r"algorithm\.options\.dual_clip = 1: expected a number above 1"):
            check_functions(AlgorithmConfig(loss=loss, options={"dual_clip": 1}))
    with pytest.raises(ConfigError, match=r"unknown key algorithm\.options\.dual_clip"):
        check_functions(AlgorithmConfig(loss="clip_cov", options={"dual_clip": 3.0}))


@pytest.mark.parametrize(
    ("losses", "bounds"),
    [
        (("ppo_clip", "gspo"), r"clip_low .* 0\.2 of ppo_clip and 0\.0003 of gspo: set it"),
        (("cispo", "dppo_tv"), r"clip_low .* 1 of cispo and 0\.15 of dppo_tv: set it"),
        (("gspo", "teacher_kl"), ""),
        (("ppo_clip", "reinforce", "cross_entropy"), ""),
    ],
)
def test_losses_of_a_sum_that_clip_otherwise_by_default_are_refused_without_bounds(
    losses: tuple[str, ...], bounds: str
) -> None:
    """ppo_clip beside gspo was clipped at 3e-4."""
    config = AlgorithmConfig(
        loss=dict.fromkeys(losses, 0.5), options={"teacher": "x"} if "teacher_kl" in losses else {}
    )
    with pytest.raises(ConfigError, match=bounds) if bounds else nullcontext():
        check_functions(config)
    if bounds:
        with pytest.raises(ConfigError, match="clip_high is one bound for all of them"):
            check_functions(replace(config, clip_low=0.1))
    check_functions(replace(config, clip_low=0.1, clip_high=0.2))


def test_a_function_of_a_package_takes_two_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = EntryPoints([EntryPoint("short", "builtins:len", LOSSES.group)])
    for module in ("functions", "algorithms.declarations"):
        monkeypatch.setattr(f"podium.{module}.list_entry_points", lambda group, **wanted: entries.select(**wanted))
    monkeypatch.setattr("podium.algorithms.declarations.is_installed", lambda entry: True)
    with pytest.raises(ConfigError, match=r"algorithm\.loss = 'short': the function is called with two positional"):
        check_functions(AlgorithmConfig(loss="short"))
