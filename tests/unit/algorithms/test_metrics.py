"""Figures of a step: right, and the same on any number of ranks."""

from __future__ import annotations

from functools import reduce
from operator import add

import numpy as np
import pytest
import torch
from torch import Tensor

from podium.algorithms import (
    PartialMetrics,
    TokenLoss,
    explained_variance,
    flat_groups,
    partial_metrics,
    value_moments,
)


def token_loss(seed: int, tokens: int = 30) -> tuple[TokenLoss, Tensor]:
    rng = np.random.default_rng(seed)
    a_N, b_N = torch.from_numpy(rng.normal(size=(2, tokens)))
    weights_N = torch.from_numpy(rng.random(tokens) * (rng.random(tokens) < 0.8))
    return TokenLoss(torch.zeros(tokens), {"a": a_N, "b": b_N}, {"worst": a_N}), weights_N


def part_of(loss: TokenLoss, weights_N: Tensor, tokens: Tensor) -> PartialMetrics:
    share = TokenLoss(
        loss.loss_N[tokens],
        {name: column[tokens] for name, column in loss.metrics.items()},
        {name: column[tokens] for name, column in loss.maxima.items()},
    )
    return partial_metrics(share, weights_N[tokens])


def test_means_are_weighted_means() -> None:
    loss, weights_N = token_loss(0)
    means = partial_metrics(loss, weights_N).means()
    for name in ("a", "b"):
        assert means[name] == pytest.approx(np.average(loss.metrics[name], weights=weights_N))
    assert means["worst"] == pytest.approx(float(loss.maxima["worst"][weights_N > 0].max()))


@pytest.mark.parametrize("parts", [1, 2, 5, 40])
def test_parts_add_up_whatever_the_split(parts: int) -> None:
    """Empty parts, and parts all of whose weights are 0, among them."""
    loss, weights_N = token_loss(1)
    owner_N = torch.from_numpy(np.random.default_rng(parts).integers(0, parts, size=30))
    total = reduce(add, [part_of(loss, weights_N, owner_N == part) for part in range(parts)])
    assert total.means() == pytest.approx(partial_metrics(loss, weights_N).means())


def test_tokens_without_weight_may_hold_anything() -> None:
    loss = TokenLoss(torch.zeros(2), {"a": torch.tensor([1.0, torch.nan])}, {"worst": torch.tensor([1.0, torch.inf])})
    assert partial_metrics(loss, torch.tensor([0.25, 0.0])).means() == {"a": 1.0, "worst": 1.0}


def test_no_weight_no_figures() -> None:
    loss, weights_N = token_loss(2)
    assert partial_metrics(loss, torch.zeros_like(weights_N)).means() == {}


# -- explained variance ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_explained_variance(offset: float) -> None:
    rng = np.random.default_rng(0)
    returns = (rng.normal(size=400) + offset).astype(np.float32)
    values = (returns + rng.normal(size=400) / 2).astype(np.float32)
    expected = 1 - np.var(returns.astype(float) - values) / np.var(returns.astype(float))
    moments = value_moments(torch.from_numpy(values), torch.from_numpy(returns), torch.full((400,), 1 / 400))
    assert explained_variance(moments) == pytest.approx(expected, rel=1e-6)


def test_moments_of_ranks_add_up() -> None:
    rng = np.random.default_rng(1)
    values_N, returns_N, weights_N = torch.from_numpy(rng.random((3, 50)))
    whole = value_moments(values_N, returns_N, weights_N)
    parts = [value_moments(values_N[s], returns_N[s], weights_N[s]) for s in (slice(0, 7), slice(7, 7), slice(7, 50))]
    torch.testing.assert_close(torch.stack(parts).sum(0), whole)


def test_explained_variance_counts_weighted_tokens_only() -> None:
    returns_N = torch.tensor([0.0, 1.0, torch.nan])
    moments = value_moments(torch.tensor([0.0, 1.0, torch.nan]), returns_N, torch.tensor([1.0, 1.0, 0.0]))
    assert explained_variance(moments) == 1.0


@pytest.mark.parametrize("returns", [[], [3.0], [0.1, 0.1, 0.1], [1e5] * 4])
def test_returns_without_variance_leave_nothing_to_explain(returns: list[float]) -> None:
    returns_N = torch.tensor(returns)
    assert explained_variance(value_moments(returns_N + 1, returns_N, torch.ones_like(returns_N))) == 0.0


# -- groups without variance -----------------------------------------------------------------------------------------


def test_flat_groups() -> None:
    rewards_B = torch.tensor([0.1, 0.5, 0.1, 0.2, 0.1, 9.0])
    assert flat_groups(rewards_B, torch.tensor([4, 2, 4, 2, 4, 8])) == pytest.approx(2 / 3)
    assert flat_groups(rewards_B[:0], torch.zeros(0, dtype=torch.int64)) == 0.0
