"""Weights of the global batch: what they are, and that nothing depends on how rows are dealt out."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from podium.algorithms import Aggregation, loss_weights
from podium.errors import ConfigError
from tests.unit.algorithms import oracles

CONSTANT = 16.0


def random_masks(seed: int, rows: int = 11) -> list[NDArray[np.bool_]]:
    return [row.mask for row in oracles.random_rows(seed, rows)]


def flat(masks: list[NDArray[np.bool_]]) -> tuple[Tensor, Tensor]:
    offsets = np.concatenate([[0], np.cumsum([len(mask) for mask in masks])])
    return torch.from_numpy(np.concatenate(masks)), torch.from_numpy(offsets)


@pytest.mark.parametrize("mode", get_args(Aggregation))
@pytest.mark.parametrize("seed", range(5))
def test_weights(mode: Aggregation, seed: int) -> None:
    masks = random_masks(seed)
    weights_N = loss_weights(*flat(masks), mode, constant=CONSTANT)
    assert weights_N.dtype == torch.float32
    np.testing.assert_allclose(weights_N, oracles.loss_weights(masks, mode, CONSTANT), rtol=1e-6)


@pytest.mark.parametrize("mode", ["token-mean", "sequence-mean"])
def test_means_sum_to_one(mode: Aggregation) -> None:
    assert float(loss_weights(*flat(random_masks(7)), mode).sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("mode", get_args(Aggregation))
@pytest.mark.parametrize("parts", [1, 2, 3, 11])
def test_loss_and_gradient_do_not_depend_on_ranks_or_micro_batches(mode: Aggregation, parts: int) -> None:
    """Weights are made once; rows are then dealt to `parts` in any order, empty shares included."""
    masks = random_masks(1)
    mask_N, offsets_B1 = flat(masks)
    weights_N = loss_weights(mask_N, offsets_B1, mode, constant=CONSTANT)
    rng = np.random.default_rng(parts)
    logits_N = torch.from_numpy(rng.normal(size=len(mask_N))).float().requires_grad_()

    whole = (weights_N * logits_N.square()).sum()
    (whole_gradient,) = torch.autograd.grad(whole, logits_N)

    owner_B = torch.from_numpy(rng.integers(0, parts, size=len(masks)))
    owner_N = torch.repeat_interleave(owner_B, offsets_B1[1:] - offsets_B1[:-1])
    shares = [(weights_N[owner_N == p] * logits_N[owner_N == p].square()).sum() for p in range(parts)]
    gradients = [torch.autograd.grad(share, logits_N)[0] for share in shares]
    torch.testing.assert_close(torch.stack(shares).sum(), whole, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(torch.stack(gradients).sum(0), whole_gradient, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("mode", get_args(Aggregation))
def test_a_part_of_the_batch_has_its_part_of_the_weights(mode: Aggregation) -> None:
    mask_N, offsets_B1 = torch.tensor([0, 1, 0, 1, 1, 1, 0, 1, 1]).bool(), torch.tensor([0, 2, 6, 7, 9])
    whole_N = loss_weights(mask_N, offsets_B1, mode, constant=7)
    tokens, rows = torch.tensor(6), torch.tensor(3)
    for first, last in ((0, 2), (2, 4), (2, 3)):
        start, stop = int(offsets_B1[first]), int(offsets_B1[last])
        offsets = offsets_B1[first : last + 1] - start
        part_N = loss_weights(mask_N[start:stop], offsets, mode, constant=7, tokens=tokens, rows=rows)
        assert torch.equal(part_N, whole_N[start:stop])


@pytest.mark.parametrize("mode", get_args(Aggregation))
def test_rows_without_loss_change_nothing(mode: Aggregation) -> None:
    """A padded row, or one whose completion was masked out, is not a row."""
    masks = [np.array([False, True, True]), np.array([True])]
    padded = [masks[0], np.array([False, False]), masks[1]]
    weights_N = loss_weights(*flat(masks), mode, constant=CONSTANT)
    with_padding_N = loss_weights(*flat(padded), mode, constant=CONSTANT)
    assert with_padding_N[3:5].tolist() == [0.0, 0.0]
    assert torch.cat([with_padding_N[:3], with_padding_N[5:]]).tolist() == weights_N.tolist()


def test_the_rows_of_a_trajectory_share_the_weight_of_one() -> None:
    masks = [np.array([False, True, True, True]), np.array([True]), np.array([False, True, True])]
    whole = torch.tensor([4, 4, 2])  # the first two are one trajectory
    weights_N = loss_weights(*flat(masks), "sequence-mean", trajectory_tokens_B=whole)
    assert weights_N.tolist() == [0.0, 0.125, 0.125, 0.125, 0.125, 0.0, 0.25, 0.25]
    constant_N = loss_weights(*flat(masks), "sequence-sum-constant", constant=8, trajectory_tokens_B=whole)
    assert constant_N.tolist() == [0.0, *[1 / 16] * 4, 0.0, *[1 / 16] * 2]


def test_a_minibatch_with_a_part_of_a_trajectory_counts_that_part() -> None:
    masks = [np.array([True, True, True]), np.array([True, True])]
    weights_N = loss_weights(*flat(masks), "sequence-mean", trajectory_tokens_B=torch.tensor([12, 2]))
    assert float(weights_N.sum()) == pytest.approx(1.0)
    np.testing.assert_allclose(weights_N, [1 / 15] * 3 + [2 / 5] * 2, rtol=1e-6)  # a quarter, beside a whole one


@pytest.mark.parametrize("mode", get_args(Aggregation))
def test_an_empty_mask_gives_zeros_not_nan(mode: Aggregation) -> None:
    assert loss_weights(*flat([np.array([False, False])]), mode, constant=CONSTANT).tolist() == [0.0, 0.0]
    nothing = loss_weights(torch.zeros(0, dtype=torch.bool), torch.tensor([0]), mode, constant=CONSTANT)
    assert nothing.shape == (0,)


def test_a_constant_is_asked_for_by_name() -> None:
    for constant in (None, 0.0, -4.0):
        with pytest.raises(ConfigError, match=r"sequence-sum-constant.*sampling.max_new_tokens"):
            loss_weights(*flat(random_masks(0)), "sequence-sum-constant", constant=constant)


def test_an_unknown_mode_is_named() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.aggregation = 'mean': expected one of token-mean"):
        loss_weights(*flat(random_masks(0)), "mean")  # pyright: ignore[reportArgumentType] - the point of the test
