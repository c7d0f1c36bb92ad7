"""Truncated importance weights and the measure of mismatch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from podium.algorithms import mismatch, truncated_weights


def test_weights_are_truncated_ratios() -> None:
    rng = np.random.default_rng(0)
    old, rollout = rng.normal(size=200), rng.normal(size=200)
    weights_N = truncated_weights(torch.from_numpy(old), torch.from_numpy(rollout), cap=2.0)
    np.testing.assert_allclose(weights_N, np.minimum(np.exp(old - rollout), 2.0), rtol=1e-12)
    assert float(weights_N.max()) == 2.0


def test_weights_correct_an_expectation() -> None:
    """With a cap out of reach, samples of the generator weighted stand for samples of the trainer, exactly."""
    rollout = torch.tensor([0.1, 0.4, -0.5], dtype=torch.float64).log_softmax(0)
    old = torch.tensor([0.2, 0.1, 0.0], dtype=torch.float64).log_softmax(0)
    score = torch.tensor([1.0, -2.0, 5.0], dtype=torch.float64)
    corrected = (rollout.exp() * truncated_weights(old, rollout, cap=1e9) * score).sum()
    torch.testing.assert_close(corrected, (old.exp() * score).sum())


def test_weights_carry_no_gradient_and_stay_finite() -> None:
    old = torch.tensor([0.0], requires_grad=True)
    weights_N = truncated_weights(old, torch.tensor([-1e4]), cap=1e30)
    assert not weights_N.requires_grad
    assert bool(weights_N.isfinite().all())


def test_mismatch() -> None:
    gap = mismatch(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.0]))
    assert gap.difference_N.tolist() == [0.5, 0.0]
    assert gap.kl_N.tolist() == pytest.approx([np.exp(0.5) - 1 - 0.5, 0.0], rel=1e-6)


def test_equal_engines_show_no_mismatch() -> None:
    logprobs_N = torch.randn(20, generator=torch.Generator().manual_seed(0))
    gap = mismatch(logprobs_N, logprobs_N.clone())
    assert not gap.difference_N.any()
    assert not gap.kl_N.any()
