"""What must not change an advantage, a loss or a correction, for every name that is registered: the next one, too.

Each property takes its names from the registries and its options from the declarations, and random batches by seed. An
estimator or a loss that cannot have a property says so in a table here, with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from podium.algorithms import (
    ADVANTAGES,
    CORRECTIONS,
    LOSSES,
    AdvantageInputs,
    AlgorithmConfig,
    LossInputs,
    check_functions,
    compute_advantages,
    loss_weights,
    policy_loss,
)
from podium.algorithms.config import Aggregation
from podium.algorithms.declarations import COLUMNS
from podium.errors import DataError
from podium_preferences.config import PREFERENCE_LOSSES, PreferenceConfig, ScorerConfig
from podium_preferences.objective import PreferenceInputs, differentiate

SEEDS = range(3)
ROWS = [field.name for field in fields(AdvantageInputs) if field.name.endswith("_B")]
TOKENS = [field.name for field in fields(AdvantageInputs) if field.name.endswith("_N")]
OUTCOMES = {"gdpo": "it refuses rewards of tokens, which are no part of any name"}

# -- advantages ----------------------------------------------------------------------------------------------------


def advantage_inputs(seed: int, *, by_token: bool, rows: int = 40) -> AdvantageInputs:
    """All that an estimator may declare. Groups have 1 to many rows, and rows have prompts, gaps and turns."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, size=rows)
    tokens = int(lengths.sum())
    mask = rng.random(tokens) < 0.7
    chances = rng.dirichlet(np.ones(6), size=tokens)
    rewards = torch.from_numpy(
        np.where(rng.random(rows) < 0.5, rng.integers(0, 3, size=rows) / 2, rng.random(rows) * 2)
    )
    turns = np.concatenate([np.sort(rng.integers(0, 3, size=length)) for length in lengths])
    return AdvantageInputs(
        rewards_B=rewards,
        group_B=torch.from_numpy(np.concatenate([[40], rng.choice([-3, 7, 12], size=rows - 1)])),
        mask_N=torch.from_numpy(mask),
        offsets_B1=torch.tensor([0, *np.cumsum(lengths).tolist()]),
        token_rewards_N=torch.from_numpy(rng.normal(size=tokens)) if by_token else None,
        turn_N=torch.from_numpy(turns),
        values_N=torch.from_numpy(rng.normal(size=tokens)),
        bootstrap_B=torch.from_numpy(rng.normal(size=rows) * (rng.random(rows) < 0.3)),
        baseline_B=torch.from_numpy(rng.random(rows)),
        truncated_B=torch.from_numpy(rng.random(rows) < 0.2),
        parts_B={"right": rewards, "short": torch.from_numpy(rng.random(rows))},
        old_logprobs_N=torch.from_numpy(np.log(chances[:, 0])),
        entropy_N=torch.from_numpy(-(chances * np.log(chances)).sum(1)),
        squared_probs_N=torch.from_numpy((chances**2).sum(1)),
        rollout_logprobs_N=torch.from_numpy(-rng.exponential(size=tokens)),
        ref_logprobs_N=torch.from_numpy(-rng.exponential(size=tokens)),
    )


def rows_of(inputs: AdvantageInputs, values_N: Tensor) -> Sequence[Tensor]:
    return torch.tensor_split(values_N, inputs.offsets_B1[1:-1])


def change(
    inputs: AdvantageInputs, of_rows: Callable[[Tensor], Tensor], of_tokens: Callable[[Tensor], Tensor], ends: Tensor
) -> AdvantageInputs:
    """Apply a change to every column that there is, whatever its name."""
    columns = {name: getattr(inputs, name) for name in (*ROWS, *TOKENS)}
    changed = {
        name: column if column is None or isinstance(column, dict) else (of_rows if name in ROWS else of_tokens)(column)
        for name, column in columns.items()
    }
    parts = {name: of_rows(part_B) for name, part_B in inputs.parts_B.items()}
    return replace(inputs, **{**changed, "parts_B": parts}, offsets_B1=ends)


def estimate(name: str, inputs: AdvantageInputs, *, normalize: bool | None = None, gamma: float = 0.9) -> Tensor:
    config = AlgorithmConfig(advantage=name, normalize_advantage=normalize, kl_in="loss", gamma=gamma)
    check_functions(config)
    declared = ADVANTAGES.declaration(name)
    hidden = dict.fromkeys(f"{column}_N" for column in COLUMNS if column not in declared.columns)
    outputs = compute_advantages(replace(inputs, **hidden), config.resolve())
    columns = [column for column in (outputs.advantages_N, outputs.returns_N) if column is not None]
    return torch.stack(columns, 1)


@pytest.fixture(params=[False, True], ids=["outcome", "tokens"])
def by_token(request: pytest.FixtureRequest) -> bool:
    return request.param


def inputs_for(name: str, seed: int, by_token: bool) -> AdvantageInputs:
    if by_token and name in OUTCOMES:
        with pytest.raises(DataError):
            estimate(name, advantage_inputs(seed, by_token=True))
        pytest.skip(OUTCOMES[name])
    inputs = advantage_inputs(seed, by_token=by_token)
    if inputs.token_rewards_N is not None and ADVANTAGES.declaration(name).refuses_negative:
        return replace(inputs, token_rewards_N=inputs.token_rewards_N.abs())
    return inputs


@pytest.mark.each_value
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", [*ADVANTAGES])
def test_advantages_are_those_of_rows_in_any_order(name: str, seed: int, by_token: bool) -> None:
    inputs = inputs_for(name, seed, by_token)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(inputs.rewards_B)))
    moved = change(
        inputs,
        lambda values_B: values_B[order],
        lambda values_N: torch.cat([rows_of(inputs, values_N)[row] for row in order.tolist()]),
        torch.nn.functional.pad(inputs.offsets_B1.diff()[order].cumsum(0), (1, 0)),
    )
    rows = rows_of(inputs, estimate(name, inputs))
    expected = torch.cat([rows[row] for row in order.tolist()])
    torch.testing.assert_close(estimate(name, moved), expected)
    assert expected.any()


@pytest.mark.each_value
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", [*ADVANTAGES])
def test_the_numbers_of_groups_do_not_count(name: str, seed: int, by_token: bool) -> None:
    inputs = inputs_for(name, seed, by_token)
    renamed = replace(inputs, group_B=1000 - 3 * inputs.group_B)
    torch.testing.assert_close(estimate(name, renamed), estimate(name, inputs))


@pytest.mark.each_value
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", [*ADVANTAGES])
def test_tokens_that_the_policy_did_not_choose_do_not_count(name: str, seed: int, by_token: bool) -> None:
    """Neither their number, as of prompts and padding, nor their values."""
    inputs, rng = inputs_for(name, seed, by_token), np.random.default_rng(seed)
    own_P = np.concatenate([rng.permutation([True] * n + [False] * 3) for n in inputs.offsets_B1.diff().tolist()])
    place_P = torch.from_numpy(np.maximum(np.cumsum(own_P) - 1, 0))
    chosen_P = torch.from_numpy(own_P) & inputs.mask_N[place_P]

    def pad(values_N: Tensor) -> Tensor:
        if values_N.dtype == torch.bool:
            return chosen_P
        garbage = torch.tensor(torch.nan if values_N.is_floating_point() else -77, dtype=values_N.dtype)
        return torch.where(chosen_P, values_N[place_P], garbage)

    padded = change(
        inputs, lambda values_B: values_B, pad, inputs.offsets_B1 + 3 * torch.arange(len(inputs.offsets_B1))
    )
    found, expected = estimate(name, padded), estimate(name, inputs)
    torch.testing.assert_close(found[chosen_P], expected[inputs.mask_N])
    assert not found[~chosen_P].any()


@pytest.mark.each_value
@pytest.mark.parametrize("normalize", [None, False, True])
@pytest.mark.parametrize("name", [*ADVANTAGES])
def test_batches_without_rows_or_chosen_tokens_give_nothing(name: str, normalize: bool | None) -> None:
    inputs = advantage_inputs(0, by_token=False)
    empty = change(inputs, lambda values_B: values_B[:0], lambda values_N: values_N[:0], inputs.offsets_B1[:1])
    found = estimate(name, replace(empty, data={}), normalize=normalize)
    assert found.shape[0] == 0
    bare = replace(inputs, mask_N=torch.zeros_like(inputs.mask_N))
    assert not estimate(name, bare, normalize=normalize).any()


@pytest.mark.each_value
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1.0, 123456.7])
@pytest.mark.parametrize("name", [name for name in ADVANTAGES if ADVANTAGES.declaration(name).needs_groups])
def test_groups_of_equal_rewards_give_exact_zeros(name: str, reward: float) -> None:
    inputs = advantage_inputs(1, by_token=False)
    equal_B = torch.full_like(inputs.rewards_B, reward)
    equal = replace(inputs, rewards_B=equal_B, parts_B={"right": equal_B})
    assert not estimate(name, equal, gamma=1.0).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", [*ADVANTAGES])
def test_narrow_columns_are_computed_in_float32_and_left_alone(name: str, dtype: torch.dtype) -> None:
    inputs = advantage_inputs(2, by_token=False)
    narrow = change(
        inputs,
        lambda values_B: values_B.to(dtype) if values_B.is_floating_point() else values_B,
        lambda values_N: values_N.to(dtype) if values_N.is_floating_point() else values_N,
        inputs.offsets_B1,
    )
    before = {column: getattr(narrow, column) for column in (*ROWS, *TOKENS)}
    before = {column: tensor.clone() for column, tensor in before.items() if isinstance(tensor, Tensor)}
    found = estimate(name, narrow)
    assert found.dtype == torch.float32
    wide = change(
        narrow,
        lambda values_B: values_B.double() if values_B.is_floating_point() else values_B,
        lambda values_N: values_N.double() if values_N.is_floating_point() else values_N,
        inputs.offsets_B1,
    )
    torch.testing.assert_close(found.double(), estimate(name, wide), atol=1e-4, rtol=1e-4)
    assert all(torch.equal(tensor, getattr(narrow, column)) for column, tensor in before.items())


# -- losses and corrections ----------------------------------------------------------------------------------------

KINDS = [*(("loss", name) for name in LOSSES), *(("correction", name) for name in CORRECTIONS)]
LOSS_COLUMNS = [
    name.removesuffix("_N") for name, entry in vars(LossInputs).items() if type(entry).__name__ == "_Column"
]
AGGREGATIONS: list[Aggregation] = ["token-mean", "sequence-mean", "sequence-sum-constant"]


def settings_of(kind: str, name: str) -> AlgorithmConfig:
    """Under bounds that take part, with all other terms of the loss."""
    teacher = {"teacher": "model"} if kind == "loss" and LOSSES.declaration(name).needs_teacher else {}
    config = AlgorithmConfig(
        options=teacher,
        loss=name if kind == "loss" else "ppo_clip",
        correction=name if kind == "correction" else "none",
        clip_low=0.1,
        clip_high=0.2,
        kl_in="loss",
        kl_coef=0.1,
        entropy_coef=0.01,
    )
    check_functions(config)
    return config.resolve()


def loss_inputs(seed: int, config: AlgorithmConfig, rows: int = 12) -> LossInputs:
    """Rows of one advantage each, with every column that a loss may read."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 8, size=rows)
    tokens = int(lengths.sum())
    old = -rng.exponential(size=tokens) - 0.05
    columns = {
        **{name: np.minimum(old + rng.normal(size=tokens) / 4, -0.01) for name in LOSS_COLUMNS},
        "old_logprobs": old,
        "advantages": np.repeat(rng.choice([-1.5, -0.5, 0.5, 2.0], size=rows), lengths),
        "entropy": rng.exponential(size=tokens),
    }
    tensors = {name: torch.from_numpy(column) for name, column in columns.items()}
    tensors["tokens"] = torch.from_numpy(rng.integers(0, 9, size=tokens))
    offsets = torch.tensor([0, *np.cumsum(lengths).tolist()])
    return with_figures(LossInputs(offsets_B1=offsets, columns=tensors, step=seed), config)


def with_figures(inputs: LossInputs, config: AlgorithmConfig) -> LossInputs:
    declared = [*map(LOSSES.declaration, config.losses), *map(CORRECTIONS.declaration, config.corrections)]
    figures: dict[str, Tensor] = {}
    with torch.no_grad():
        for declaration in declared:
            minibatch = declaration.load_minibatch()
            figures |= {} if minibatch is None else minibatch(inputs, config)
    return replace(inputs, figures=figures)


def take_rows(inputs: LossInputs, rows: Sequence[int], *, figures: bool = True) -> LossInputs:
    """A micro-batch of these rows. Figures are those of the whole minibatch."""

    def take(column_N: Tensor) -> Tensor:
        return torch.cat([torch.tensor_split(column_N, inputs.offsets_B1[1:-1])[row] for row in rows])

    return replace(
        inputs,
        offsets_B1=torch.nn.functional.pad(inputs.offsets_B1.diff()[list(rows)].cumsum(0), (1, 0)),
        columns={name: take(column_N) for name, column_N in inputs.columns.items()},
        figures={name: take(figure_N) for name, figure_N in inputs.figures.items()} if figures else {},
    )


def evaluate(inputs: LossInputs, config: AlgorithmConfig, weights_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of each token, and the gradients of the weighted sum by log-probabilities and entropies."""
    names = ("logprobs", "entropy")
    leaves = {name: inputs.columns[name].clone().requires_grad_() for name in names}
    others = {
        name: column.clone().requires_grad_(column.is_floating_point())
        for name, column in inputs.columns.items()
        if name not in names
    }
    loss = policy_loss(replace(inputs, columns={**others, **leaves}), config)
    (weights_N * loss.loss_N).sum().backward()
    assert all(column.grad is None for column in others.values()), "a loss moves the policy that is trained alone"
    by_logprobs, by_entropy = (
        leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves.values()
    )
    return loss.loss_N.detach(), by_logprobs, by_entropy


@pytest.mark.each_value
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_losses_are_those_of_rows_in_any_order(kind: str, name: str, seed: int) -> None:
    config = settings_of(kind, name)
    inputs = loss_inputs(seed, config)
    order = np.random.default_rng(seed).permutation(len(inputs.offsets_B1) - 1).tolist()
    moved = with_figures(take_rows(inputs, order, figures=False), config)
    ones_N = torch.ones(len(inputs.columns["logprobs"]), dtype=torch.float64)
    for found, expected in zip(evaluate(moved, config, ones_N), evaluate(inputs, config, ones_N), strict=True):
        parts = torch.tensor_split(expected, inputs.offsets_B1[1:-1])
        torch.testing.assert_close(found, torch.cat([parts[row] for row in order]))


@pytest.mark.each_value
@pytest.mark.parametrize(("seed", "aggregation"), [*enumerate(AGGREGATIONS)])
@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_the_cut_into_ranks_and_micro_batches_does_not_count(
    kind: str, name: str, seed: int, aggregation: Aggregation
) -> None:
    """Neither for the loss of a token nor for any gradient; prompts and padding have no part in the weights."""
    config = settings_of(kind, name)
    inputs, rng = loss_inputs(seed, config), np.random.default_rng(seed)
    lengths = inputs.offsets_B1.diff()
    whole_N = loss_weights(
        torch.ones(int(lengths.sum()), dtype=torch.bool), inputs.offsets_B1, aggregation, constant=9.0
    ).double()
    expected = evaluate(inputs, config, whole_N)
    part_of_row = rng.integers(0, 4, size=len(lengths))
    for part in range(4):
        rows = [row for row in rng.permutation(len(lengths)).tolist() if part_of_row[row] == part]
        if not rows:
            continue
        micro = take_rows(inputs, rows)
        padded = [torch.tensor([True] * n + [False] * int(rng.integers(0, 3))) for n in lengths[rows].tolist()]
        mask_P = torch.cat(padded)
        weights_P = loss_weights(
            mask_P,
            torch.nn.functional.pad(torch.tensor([len(row) for row in padded]).cumsum(0), (1, 0)),
            aggregation,
            constant=9.0,
            tokens=lengths.sum(),
            rows=torch.tensor(float(len(lengths))),
        )
        for found, right in zip(evaluate(micro, config, weights_P[mask_P].double()), expected, strict=True):
            pieces = torch.tensor_split(right, inputs.offsets_B1[1:-1])
            torch.testing.assert_close(found, torch.cat([pieces[row] for row in rows]))


@pytest.mark.parametrize("gap", [30.0, 1e4])
@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_policies_that_are_far_apart_give_finite_numbers(kind: str, name: str, gap: float) -> None:
    config = settings_of(kind, name)
    inputs = loss_inputs(0, config)
    signs = torch.tensor([-1.0, 1.0, 0.0]).repeat(len(inputs.columns["logprobs"]))
    columns = dict(inputs.columns)
    others = [name for name in LOSS_COLUMNS if name.endswith("logprobs") and name != "old_logprobs"]
    for number, column in enumerate(others):
        shifts_N = signs.roll(number)[: len(columns["logprobs"])]
        columns[column] = (columns["old_logprobs"] + gap * shifts_N).clamp(max=0.0).float()
    far = with_figures(replace(inputs, columns=columns), config)
    for found in evaluate(far, config, torch.ones(len(columns["logprobs"]))):
        assert bool(found.isfinite().all())


# -- losses of preferences -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_losses_of_preferences_are_those_of_pairs_in_any_order(name: str, seed: int) -> None:
    rng, count = np.random.default_rng(seed), 6
    columns = {
        "values_A": torch.from_numpy(-10 * rng.random(2 * count)),
        "chosen_A": torch.tensor([True, False] * count),
        "reference_A": torch.from_numpy(-10 * rng.random(2 * count)),
        "lengths_A": torch.from_numpy(rng.integers(1, 9, 2 * count)),
    }
    others: dict[str, Any] = {
        "margins_P": torch.from_numpy(rng.random(count)),
        "mismatched_M": torch.from_numpy(rng.normal(size=3)),
    }
    config: ScorerConfig = ScorerConfig() if name == "bradley_terry" else PreferenceConfig(loss=name)  # type: ignore[arg-type]  # a name of the registry
    order_P = torch.from_numpy(rng.permutation(count))
    order_A = torch.stack([2 * order_P, 2 * order_P + 1], 1).flatten()
    _, expected_A = differentiate(config, PreferenceInputs(**columns, **others))
    moved = {column: values_A[order_A] for column, values_A in columns.items()}
    _, found_A = differentiate(
        config, PreferenceInputs(**moved, **{**others, "margins_P": others["margins_P"][order_P]})
    )
    torch.testing.assert_close(found_A, expected_A[order_A])
