"""Advantage estimators against the papers' formulas in NumPy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from podium.algorithms import (
    ADVANTAGES,
    AdvantageInputs,
    AlgorithmConfig,
    compute_advantages,
    group_statistics,
)
from podium.errors import DataError
from tests.unit.algorithms import oracles
from tests.unit.algorithms.test_invariances import OUTCOMES, inputs_for

SEEDS = range(6)


def make(**columns: object) -> AdvantageInputs:
    """Inputs from plain lists."""
    types = {"group_B": torch.int64, "offsets_B1": torch.int64, "mask_N": torch.bool}
    tensors: dict[str, Any] = {
        name: torch.tensor(value, dtype=types.get(name, torch.float32)) for name, value in columns.items()
    }
    return AdvantageInputs(**tensors)


# -- GRPO, Dr. GRPO, RLOO --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("std", [True, False])
def test_grpo(seed: int, std: bool) -> None:
    rows = oracles.random_rows(seed)
    config = AlgorithmConfig(advantage="grpo", normalize_advantage=std)
    outputs = compute_advantages(oracles.to_inputs(rows), config)
    np.testing.assert_allclose(outputs.advantages_N, oracles.grpo(rows, std), atol=1e-9)
    assert outputs.returns_N is None


def test_grpo_divides_by_the_deviation_unless_told() -> None:
    rows = oracles.random_rows(0)
    inputs = oracles.to_inputs(rows)
    np.testing.assert_allclose(
        compute_advantages(inputs, AlgorithmConfig()).advantages_N, oracles.grpo(rows, std=True), atol=1e-9
    )


def test_dr_grpo_is_grpo_without_the_deviation_unless_the_user_divides() -> None:
    rows = oracles.random_rows(0)
    inputs = oracles.to_inputs(rows)
    for setting, std in ((None, False), (True, True)):
        config = AlgorithmConfig(advantage="dr_grpo", normalize_advantage=setting)
        advantages_N = compute_advantages(inputs, config).advantages_N
        np.testing.assert_allclose(advantages_N, oracles.grpo(rows, std), atol=1e-9)


@pytest.mark.parametrize("advantage", [*ADVANTAGES])
def test_an_estimator_normalizes_as_it_declares_and_so_where_another_function_calls_it(advantage: str) -> None:
    inputs = inputs_for(advantage, 0, advantage not in OUTCOMES)
    config = AlgorithmConfig(advantage=advantage)
    expected = compute_advantages(inputs, config).advantages_N
    assert torch.equal(compute_advantages(inputs, config.resolve()).advantages_N, expected)
    declared = ADVANTAGES.declaration(advantage).defaults["normalize_advantage"]
    explicit = replace(config, normalize_advantage=declared)
    assert torch.equal(compute_advantages(inputs, explicit).advantages_N, expected)
    if advantage != "dr_grpo":  # which is grpo in other hands
        wrapped = replace(config, advantage="statistics:mean")
        assert torch.equal(ADVANTAGES.load(advantage)(inputs, wrapped).advantages_N, expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_rloo(seed: int) -> None:
    rows = oracles.random_rows(seed)
    outputs = compute_advantages(oracles.to_inputs(rows), AlgorithmConfig(advantage="rloo"))
    np.testing.assert_allclose(outputs.advantages_N, oracles.rloo(rows), atol=1e-9)


def test_rloo_whitens_when_asked() -> None:
    rows = oracles.random_rows(1)
    inputs = oracles.to_inputs(rows)
    outputs = compute_advantages(inputs, AlgorithmConfig(advantage="rloo", normalize_advantage=True))
    expected = oracles.whitened(oracles.rloo(rows), inputs.mask_N.numpy())
    np.testing.assert_allclose(outputs.advantages_N, expected, atol=1e-9)


@pytest.mark.parametrize("advantage", ["grpo", "rloo"])
def test_groups_of_one_row_give_no_signal(advantage: str) -> None:
    inputs = make(rewards_B=[1.0, 0.5], group_B=[3, 1], mask_N=[True, True, True], offsets_B1=[0, 1, 3])
    assert compute_advantages(inputs, AlgorithmConfig(advantage=advantage)).advantages_N.tolist() == [0.0] * 3


def test_a_row_without_masked_tokens_still_counts_in_its_group() -> None:
    inputs = make(rewards_B=[1.0, 0.0], group_B=[0, 0], mask_N=[True, True, False], offsets_B1=[0, 2, 3])
    config = AlgorithmConfig(normalize_advantage=False)
    assert compute_advantages(inputs, config).advantages_N.tolist() == [0.5, 0.5, 0.0]


def test_group_statistics() -> None:
    stats = group_statistics(torch.tensor([1.0, 4.0, 3.0, 4.0]), torch.tensor([8, 2, 8, 2]))
    by_row = {name: getattr(stats, name)[stats.index_B].tolist() for name in ("size_G", "mean_G", "flat_G")}
    assert by_row == {"size_G": [2] * 4, "mean_G": [2.0, 4.0] * 2, "flat_G": [False, True] * 2}
    assert stats.std_G[stats.index_B].tolist() == pytest.approx([2**0.5, 0.0] * 2)


# -- REINFORCE++ and GAE ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_reinforce_pp(seed: int, gamma: float) -> None:
    rows = oracles.random_rows(seed)
    inputs = oracles.to_inputs(rows)
    to_go = oracles.rewards_to_go(rows, gamma)
    plain = AlgorithmConfig(advantage="reinforce_pp", gamma=gamma, normalize_advantage=False)
    np.testing.assert_allclose(compute_advantages(inputs, plain).advantages_N, to_go, atol=1e-9)
    usual = AlgorithmConfig(advantage="reinforce_pp", gamma=gamma)
    expected = oracles.whitened(to_go, inputs.mask_N.numpy())
    np.testing.assert_allclose(compute_advantages(inputs, usual).advantages_N, expected, atol=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.97, 0.0)])
def test_gae(seed: int, gamma: float, lam: float) -> None:
    rows = oracles.random_rows(seed)
    inputs = oracles.to_inputs(rows)
    advantages, returns = oracles.gae(rows, gamma, lam)
    plain = AlgorithmConfig(advantage="gae", gamma=gamma, lam=lam, normalize_advantage=False)
    outputs = compute_advantages(inputs, plain)
    assert outputs.returns_N is not None
    np.testing.assert_allclose(outputs.advantages_N, advantages, atol=1e-9)
    np.testing.assert_allclose(outputs.returns_N, returns, atol=1e-9)

    whitened = compute_advantages(inputs, AlgorithmConfig(advantage="gae", gamma=gamma, lam=lam))
    assert whitened.returns_N is not None
    expected = oracles.whitened(advantages, inputs.mask_N.numpy())
    np.testing.assert_allclose(whitened.advantages_N, expected, atol=1e-9)
    np.testing.assert_allclose(whitened.returns_N, returns, atol=1e-9, err_msg="returns are never whitened")


def test_gae_with_lambda_one_is_return_minus_value() -> None:
    rows = oracles.random_rows(3)
    for row in rows:
        row.bootstrap = 0.0
    inputs = oracles.to_inputs(rows)
    config = AlgorithmConfig(advantage="gae", gamma=1.0, lam=1.0, normalize_advantage=False)
    outputs = compute_advantages(inputs, config)
    assert outputs.returns_N is not None
    np.testing.assert_allclose(outputs.returns_N, oracles.rewards_to_go(rows, 1.0), atol=1e-9)


def test_gae_bootstraps_only_where_a_value_follows() -> None:
    """Two equal rows; the second was cut off, and the critic expects 4 more."""
    columns = {"rewards_B": [1.0, 1.0], "group_B": [0, 0], "mask_N": [True] * 4, "offsets_B1": [0, 2, 4]}
    inputs = make(**columns, values_N=[0.0] * 4, bootstrap_B=[0.0, 4.0])
    config = AlgorithmConfig(advantage="gae", gamma=0.5, lam=1.0, normalize_advantage=False)
    outputs = compute_advantages(inputs, config)
    assert outputs.advantages_N.tolist() == [0.5, 1.0, 0.5 + 0.25 * 4, 1.0 + 0.5 * 4]


def test_gae_of_a_single_token() -> None:
    inputs = make(rewards_B=[2.0], group_B=[0], mask_N=[True], offsets_B1=[0, 1], values_N=[0.5])
    outputs = compute_advantages(inputs, AlgorithmConfig(advantage="gae", normalize_advantage=False))
    assert outputs.returns_N is not None
    assert (outputs.advantages_N.tolist(), outputs.returns_N.tolist()) == ([1.5], [2.0])


def test_gae_without_values_says_what_is_missing() -> None:
    inputs = make(rewards_B=[2.0], group_B=[0], mask_N=[True], offsets_B1=[0, 1])
    with pytest.raises(DataError, match="needs the critic's values: add a critic"):
        compute_advantages(inputs, AlgorithmConfig(advantage="gae"))


# -- all of them -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards_B": [1.0]}, r"AdvantageInputs.rewards_B has shape \[1\]; expected \[2\]"),
        ({"group_B": [1, 1, 1]}, r"AdvantageInputs.group_B has shape \[3\]"),
        ({"values_N": [0.0]}, r"AdvantageInputs.values_N has shape \[1\]; expected \[3\]"),
        ({"offsets_B1": [0, 1, 2]}, r"offsets_B1 must end at the 3 tokens"),
    ],
)
def test_shapes_that_do_not_fit_are_named(change: dict[str, object], message: str) -> None:
    columns: dict[str, object] = {
        "rewards_B": [1.0, 0.0],
        "group_B": [0, 0],
        "mask_N": [True] * 3,
        "offsets_B1": [0, 1, 3],
    }
    with pytest.raises(DataError, match=message):
        make(**(columns | change))


def test_a_mask_of_another_type_is_named() -> None:
    with pytest.raises(DataError, match=r"mask_N is torch\.float32; expected torch.bool"):
        AdvantageInputs(
            rewards_B=torch.ones(1), group_B=torch.zeros(1), mask_N=torch.ones(1), offsets_B1=torch.tensor([0, 1])
        )
