"""Scans and sums over rows of a flat layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from podium.algorithms.token_rows import discounted_sums, ends_of_rows, row_sums, rows_of_tokens, whiten, wide


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.95, 1.0])
@pytest.mark.parametrize("lengths", [[1], [5], [3, 1, 8], [2, 2, 2], [1, 1, 1], [64, 1, 33]])
def test_discounted_sums_follow_the_recurrence(lengths: list[int], decay: float) -> None:
    row_N = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    values_N = torch.from_numpy(np.random.default_rng(0).normal(size=len(row_N)))
    expected, running = np.zeros(len(row_N)), 0.0
    for t in reversed(range(len(row_N))):
        if t + 1 < len(row_N) and row_N[t + 1] != row_N[t]:
            running = 0.0
        running = float(values_N[t]) + decay * running
        expected[t] = running
    np.testing.assert_allclose(discounted_sums(values_N, row_N, decay), expected, rtol=1e-12, atol=1e-12)


def test_discounted_sums_of_nothing() -> None:
    empty = discounted_sums(torch.empty(0), torch.empty(0, dtype=torch.int64), 0.9)
    assert empty.shape == (0,)


def test_discounted_sums_skip_rows_without_tokens() -> None:
    sums_N = discounted_sums(torch.ones(3), torch.tensor([0, 4, 4]), 1.0)
    assert sums_N.tolist() == [1.0, 2.0, 1.0]


def test_discounted_sums_keep_a_long_row_accurate() -> None:
    """Float32 by doubling errs less than the recurrence would: additions are pairwise."""
    length = 20_000
    sums_N = discounted_sums(torch.full((length,), 0.1), torch.zeros(length, dtype=torch.int64), 1.0)
    expected_N = torch.arange(length, 0, -1, dtype=torch.float64) * float(torch.tensor(0.1))
    assert torch.allclose(sums_N.double(), expected_N, rtol=1e-6)


def test_row_sums_widen_half_precision() -> None:
    """Ones beyond 256 cannot be counted in bfloat16."""
    sums_B = row_sums(torch.ones(1000, dtype=torch.bfloat16), torch.zeros(1000, dtype=torch.int64), 2)
    assert sums_B.dtype == torch.float32
    assert sums_B.tolist() == [1000.0, 0.0]


def test_rows_and_ends_with_empty_rows() -> None:
    row_N = rows_of_tokens(torch.tensor([0, 0, 2, 2, 3]))
    assert row_N.tolist() == [1, 1, 3]
    assert ends_of_rows(row_N).tolist() == [False, True, True]
    assert ends_of_rows(row_N[:0]).tolist() == []


def test_wide_keeps_float64_and_widens_the_rest() -> None:
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64)
    assert [wide(torch.ones(1, dtype=dtype)).dtype for dtype in dtypes] == [torch.float64] + [torch.float32] * 4


def test_whiten_gives_mean_zero_and_deviation_one() -> None:
    whitened = whiten(torch.tensor([3.0, 5.0, 10.0, 22.0]))
    assert float(whitened.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(whitened.std()) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("values", [[], [7.0], [0.1] * 3, [1e6 + 0.1] * 7])
def test_whiten_of_equal_values_is_exactly_zero(values: list[float]) -> None:
    assert whiten(torch.tensor(values)).tolist() == [0.0] * len(values)
