"""Estimators of advantages against their papers' formulas in NumPy, and what must not change them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from podium.algorithms import ADVANTAGES, AdvantageInputs, AlgorithmConfig, check_functions, compute_advantages
from podium.errors import ConfigError, DataError
from tests.unit.algorithms.oracles import Array

SEEDS = range(5)
Formula = Callable[[Array, Array], Array]  # rewards and lengths of one group in, advantages of its rows out
EPSILON = 1e-6


def opo(rewards: Array, lengths: Array) -> Array:
    """Hao et al. 2025: the baseline is the mean under the lengths."""
    return rewards - (lengths * rewards).sum() / max(lengths.sum(), 1)


def maxrl(rewards: Array, lengths: Array) -> Array:
    """Arxiv 2602.02710: the distance from the mean, as a share of it."""
    return (rewards - rewards.mean()) / rewards.mean() if rewards.mean() > 0 else 0 * rewards


def grpo_passk(rewards: Array, lengths: Array) -> Array:
    """Tang et al. 2025: how much the best reward of the group falls without the row."""
    return np.array(
        [rewards.max() - np.delete(rewards, i).max() if len(rewards) > 1 else 0.0 for i in range(len(rewards))]
    )


def pass_at(k: int) -> Formula:
    """Chen et al. 2025, before the closed form: the mean over all sets of k rows that have the row."""

    def formula(rewards: Array, lengths: Array) -> Array:
        if len(rewards) <= k:
            return 0 * rewards
        sets = list(itertools.combinations(range(len(rewards)), k))
        passed = np.array([max(rewards[list(rows)]) >= 1.0 for rows in sets], float)
        mean, deviation = passed.mean(), np.sqrt(passed.mean() * (1 - passed.mean()))
        own = [passed[[i in rows for rows in sets]].mean() for i in range(len(rewards))]
        return (np.array(own) - mean) / deviation if deviation > 0 else 0 * rewards

    return formula


def centered(rewards: Array, lengths: Array) -> Array:
    return rewards - rewards.mean()


GROUPS: dict[str, tuple[dict[str, Any], Formula]] = {
    "opo": ({}, opo),
    "maxrl": ({}, maxrl),
    "grpo_passk": ({}, grpo_passk),
    "pass_at_k": ({"options": {"pass_k": 3}}, pass_at(3)),
    "reinforce_pp_baseline": ({"normalize_advantage": False}, centered),
}
MINE = {*GROUPS, "gpg", "gdpo", "otb", "remax"}
CENTERED = sorted(MINE - {"maxrl", "pass_at_k", "otb", "remax"})  # the same for rewards that are all higher


def random_inputs(seed: int, rows: int = 24) -> AdvantageInputs:
    """Rows of 0 to 6 masked tokens, of groups of 1 to many; rewards with ties, parts of which some are missing."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 8, size=rows)
    mask = np.concatenate([np.arange(length) >= min(int(rng.integers(0, 3)), length) for length in lengths])
    parts = {name: torch.from_numpy(rng.integers(0, 3, size=rows) / 2) for name in ("right", "short")}
    parts["short"][:3] = torch.nan
    return AdvantageInputs(
        rewards_B=torch.from_numpy(np.concatenate([[1.5], rng.integers(0, 3, size=rows - 1) / 2])),
        group_B=torch.from_numpy(rng.choice([40, -3, 7, 7, 7, 12, 12], size=rows)),
        mask_N=torch.from_numpy(mask),
        offsets_B1=torch.tensor([0, *np.cumsum(lengths).tolist()]),
        parts_B=parts,
        **dict(zip(("old_logprobs_N", "squared_probs_N"), distributions(rng, len(mask)), strict=True)),
    )


def distributions(rng: np.random.Generator, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of tokens and the sums of squared probabilities, of random distributions over five ids."""
    chances = rng.dirichlet(np.ones(5), size=tokens)
    return torch.from_numpy(np.log(chances[:, 0])), torch.from_numpy((chances**2).sum(1))


def lengths_of(inputs: AdvantageInputs) -> Array:
    return np.array([row.sum() for row in torch.tensor_split(inputs.mask_N, inputs.offsets_B1[1:-1])], float)


def by_group(inputs: AdvantageInputs, rewards: Array, formula: Formula) -> Array:
    """Apply a formula to each group on its own."""
    found, lengths, groups = np.zeros(len(rewards)), lengths_of(inputs), inputs.group_B.numpy()
    for group in set(groups.tolist()):
        found[groups == group] = formula(rewards[groups == group], lengths[groups == group])
    return found


def spread(inputs: AdvantageInputs, advantages: Array) -> Array:
    return np.where(inputs.mask_N, np.repeat(advantages, inputs.offsets_B1.diff()), 0.0)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("seed", SEEDS)
def test_remax(seed: int, gamma: float) -> None:
    """Li et al. 2023: what is still earned from a token on, where the greedy completion's reward is paid at the end."""
    rng, inputs = np.random.default_rng(seed), random_inputs(seed)
    baselines, token_rewards = rng.random(len(inputs.rewards_B)), rng.normal(size=len(inputs.mask_N))
    inputs = replace(inputs, baseline_B=torch.from_numpy(baselines), token_rewards_N=torch.from_numpy(token_rewards))
    expected = np.zeros(len(inputs.mask_N))
    for row, score in enumerate(inputs.rewards_B.tolist()):
        left = score - baselines[row]
        for token in np.flatnonzero((inputs.mask_N & (inputs.row_N == row)).numpy())[::-1]:
            left += token_rewards[token]
            expected[token] = left
            left *= gamma
    found = estimate("remax", inputs, gamma=gamma).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-9)
    outcome = estimate("remax", replace(inputs, token_rewards_N=None)).numpy()
    np.testing.assert_allclose(outcome, spread(inputs, inputs.rewards_B.numpy() - baselines), atol=1e-9)


def otb(rows: list[dict[str, Array]], earned: list[float], groups: list[int]) -> list[Array]:
    """Li et al. 2026, token by token: the mean of the returns from here on under the energy of each row so far."""
    energy = [np.cumsum(1 - 2 * np.exp(row["logprobs"]) + row["squares"]) for row in rows]
    left = [np.cumsum(row["rewards"][::-1])[::-1] for row in rows]
    advantages: list[Array] = []
    for i, row in enumerate(rows):
        peers = [j for j, group in enumerate(groups) if group == groups[i]]
        flat = np.ptp([earned[j] for j in peers]) == 0
        found = left[i].copy()
        for t in range(len(row["rewards"])):
            reached = [j for j in peers if len(left[j]) > t]
            if len(reached) > 1:
                found[t] -= sum(energy[j][t] * left[j][t] for j in reached) / sum(energy[j][t] for j in reached)
        advantages.append(0 * found if flat else found)
    return advantages


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_optimal_token_baseline(seed: int, by_token: bool) -> None:
    inputs = random_inputs(seed)
    token_rewards_N = torch.from_numpy(np.random.default_rng(seed).normal(size=len(inputs.mask_N)))
    assert inputs.old_logprobs_N is not None
    assert inputs.squared_probs_N is not None
    rows: list[dict[str, Array]] = []
    for row in range(len(inputs.rewards_B)):
        chosen_N = inputs.mask_N & (inputs.row_N == row)
        rewards = token_rewards_N[chosen_N].numpy().copy() * by_token
        rewards[-1:] += float(inputs.rewards_B[row])
        columns = {"logprobs": inputs.old_logprobs_N, "squares": inputs.squared_probs_N}
        rows.append({"rewards": rewards, **{name: column_N[chosen_N].numpy() for name, column_N in columns.items()}})
    if by_token:
        inputs = replace(inputs, token_rewards_N=token_rewards_N)
    expected = np.zeros(len(inputs.mask_N))
    expected[inputs.mask_N.numpy()] = np.concatenate(otb(rows, inputs.row_rewards_B.tolist(), inputs.group_B.tolist()))
    found = estimate("otb", inputs).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-9)
    assert expected.any()


def estimate(name: str, inputs: AdvantageInputs, **settings: Any) -> torch.Tensor:
    config = AlgorithmConfig(advantage=name, **settings)
    check_functions(config)
    return compute_advantages(inputs, config.resolve()).advantages_N


def settings_of(name: str) -> dict[str, Any]:
    return GROUPS[name][0] if name in GROUPS else {}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", GROUPS)
def test_the_formula_of_a_group(name: str, seed: int) -> None:
    inputs, (settings, formula) = random_inputs(seed), GROUPS[name]
    expected = spread(inputs, by_group(inputs, inputs.rewards_B.numpy(), formula))
    np.testing.assert_allclose(estimate(name, inputs, **settings), expected, atol=1e-9)
    assert expected.any()


@pytest.mark.parametrize("name", ["opo", "gpg", "grpo_passk"])
def test_what_normalizes_only_if_the_user_says_so(name: str) -> None:
    inputs = random_inputs(2)
    rewards, groups = inputs.rewards_B.numpy(), inputs.group_B.numpy()
    deviation = by_group(
        inputs, rewards, lambda values, _: np.full(len(values), values.std(ddof=1) if len(values) > 1 else 1.0)
    )
    flat = np.array([np.ptp(rewards[groups == group]) == 0 for group in groups])
    plain = estimate(name, inputs).numpy()
    expected = np.where(spread(inputs, 1.0 - flat), plain / (spread(inputs, deviation) + EPSILON), 0.0)
    np.testing.assert_allclose(estimate(name, inputs, normalize_advantage=True), expected, atol=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_gpg_gives_groups_that_teach_the_weight_of_all(seed: int) -> None:
    """Chu et al. 2025: alpha = B / (B - M), where M rows are in groups without gradient."""
    inputs = random_inputs(seed)
    rewards, groups = inputs.rewards_B.numpy(), inputs.group_B.numpy()
    idle = sum(np.ptp(rewards[groups == group]) == 0 for group in groups)
    expected = len(rewards) / (len(rewards) - idle) * by_group(inputs, rewards, centered)
    np.testing.assert_allclose(estimate("gpg", inputs), spread(inputs, expected), atol=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_reinforce_pp_baseline_whitens_over_the_batch(seed: int) -> None:
    inputs = random_inputs(seed)
    plain = spread(inputs, by_group(inputs, inputs.rewards_B.numpy(), centered))
    chosen = plain[inputs.mask_N]
    expected = np.where(inputs.mask_N, (plain - chosen.mean()) / (chosen.std(ddof=1) + EPSILON), 0.0)
    np.testing.assert_allclose(estimate("reinforce_pp_baseline", inputs), expected, atol=1e-9)


@pytest.mark.parametrize("weights", [{}, {"right": 2.0}, {"right": 1.0, "short": 0.25}])
@pytest.mark.parametrize("seed", SEEDS)
def test_gdpo_normalizes_each_part_apart(seed: int, weights: dict[str, float]) -> None:
    """Liu et al. 2026: normalize within the group, add up under weights, normalize over the batch."""
    inputs = random_inputs(seed)
    total = np.zeros(len(inputs.rewards_B))
    for name, weight in (weights or {"right": 1.0, "short": 1.0}).items():
        part = inputs.parts_B[name].numpy()

        def formula(values: Array, _: Array) -> Array:
            there = ~np.isnan(values)
            if there.sum() < 2 or np.ptp(values[there]) == 0:
                return 0 * np.nan_to_num(values)
            return np.nan_to_num((values - values[there].mean()) / (values[there].std(ddof=1) + EPSILON))

        total += weight * by_group(inputs, part, formula)
    np.testing.assert_allclose(
        estimate("gdpo", inputs, options={"part_weights": weights}, normalize_advantage=False),
        spread(inputs, total),
        atol=1e-9,
    )
    expected = (total - total.mean()) / (total.std(ddof=1) + EPSILON)
    np.testing.assert_allclose(
        estimate("gdpo", inputs, options={"part_weights": weights}), spread(inputs, expected), atol=1e-9
    )


@pytest.mark.parametrize("rewards", [[1.0, 0.0, 0.0, -0.99], [1.0, -0.5, -0.5, -0.5], [-1.0]])
def test_maxrl_refuses_negative_rewards(rewards: list[float]) -> None:
    """It gave the advantages 399 and -397, or 0 for all."""
    rows = len(rewards)
    inputs = AdvantageInputs(
        rewards_B=torch.tensor(rewards),
        group_B=torch.zeros(rows, dtype=torch.int64),
        mask_N=torch.ones(rows, dtype=torch.bool),
        offsets_B1=torch.arange(rows + 1),
    )
    with pytest.raises(DataError, match=r"got the reward -.*must not be below 0.*Leave penalties such as overlong"):
        estimate("maxrl", inputs)
    rounded = replace(inputs, rewards_B=torch.tensor([1.0, -1e-17, 0.0, 0.0][:rows]))
    assert float(estimate("maxrl", rounded).max()) == (3.0 if rows == 4 else 0.0)


def test_gdpo_reads_a_part_by_any_name() -> None:
    """A reward function is often called score, and is a part like any other."""
    inputs = random_inputs(0)
    renamed = replace(inputs, parts_B={"score": inputs.parts_B["right"], "short": inputs.parts_B["short"]})
    torch.testing.assert_close(estimate("gdpo", renamed), estimate("gdpo", inputs))


def test_gdpo_learns_nothing_of_equal_rewards_without_parts() -> None:
    inputs = random_inputs(0)
    equal = replace(inputs, parts_B={}, rewards_B=torch.zeros_like(inputs.rewards_B), token_rewards_N=None)
    for options in ({}, {"part_weights": {"short": 1.0}}):
        assert not estimate("gdpo", equal, options=options).any()


def test_gdpo_says_which_part_is_missing() -> None:
    inputs = random_inputs(0)
    with pytest.raises(DataError, match=r"no part of shrt; there are \['right', 'short'\]"):
        estimate("gdpo", inputs, options={"part_weights": {"shrt": 1.0}})
    with pytest.raises(DataError, match=r"no part of any name.*reward\.name: \[a, b\]"):
        estimate("gdpo", replace(inputs, parts_B={}))
    penalized = replace(inputs, token_rewards_N=torch.full((len(inputs.mask_N),), 0.5))
    with pytest.raises(DataError, match=r"set algorithm\.kl_in to loss"):
        estimate("gdpo", penalized)


def test_pass_at_k_wants_groups_that_can_teach_it() -> None:
    inputs = replace(random_inputs(0, rows=4), group_B=torch.zeros(4, dtype=torch.int64))
    with pytest.raises(DataError, match=r"pass_k = 4 got groups of at most 4 completions.*below sampling\.n"):
        estimate("pass_at_k", inputs)
    with pytest.raises(ConfigError, match=r"did you mean algorithm\.options\.pass_k"):
        estimate("pass_at_k", inputs, options={"pas_k": 2})
    assert estimate("pass_at_k", inputs, options={"pass_k": 3}).shape == inputs.mask_N.shape


@pytest.mark.parametrize("name", CENTERED)
def test_an_offset_of_all_rewards_does_not_count(name: str) -> None:
    inputs, settings = random_inputs(1), settings_of(name)
    parts = {part: values_B + 3.0 for part, values_B in inputs.parts_B.items()}
    higher = replace(inputs, rewards_B=inputs.rewards_B + 3.0, parts_B=parts)
    torch.testing.assert_close(
        estimate(name, higher, **settings), estimate(name, inputs, **settings), atol=1e-9, rtol=1e-9
    )


def test_each_estimator_has_a_formula() -> None:
    elsewhere = {
        "grpo",
        "dr_grpo",
        "rloo",
        "reinforce_pp",
        "gae",
        "grpo_turns",
        "gae_turns",
    }  # test_advantages, test_turns
    assert {*ADVANTAGES} == MINE | elsewhere
