"""KL estimators, the penalty in the reward, coefficient controllers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from podium.algorithms import KLController, kl_estimate, penalize
from podium.algorithms.config import KLEstimator
from podium.errors import ConfigError

ESTIMATORS: list[KLEstimator] = ["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_schulmans_formulas(estimator: KLEstimator) -> None:
    rng = np.random.default_rng(0)
    logp, logq = rng.normal(size=50), rng.normal(size=50)
    ratio = np.exp(logq - logp)  # r = q / p in the blog post
    expected = {"k1": -np.log(ratio), "k2": np.log(ratio) ** 2 / 2, "k3": (ratio - 1) - np.log(ratio)}
    expected |= {"abs": np.abs(np.log(ratio))}
    expected |= {f"{name}+": expected[name] for name in ("k1", "k3", "abs")}
    result = kl_estimate(torch.from_numpy(logp), torch.from_numpy(logq), estimator)
    np.testing.assert_allclose(result, expected[estimator], rtol=1e-12)


@pytest.mark.parametrize(("estimator", "exact"), [("k1", True), ("k2", False), ("k3", True)])
def test_their_mean_is_the_divergence(estimator: KLEstimator, exact: bool) -> None:
    """Expectations taken over a whole vocabulary, not sampled."""
    logits_p = torch.tensor([0.3, -1.0, 0.7, 0.1], dtype=torch.float64)
    logp, logq = logits_p.log_softmax(0), (logits_p + torch.tensor([0.2, 0.1, -0.1, 0.0])).log_softmax(0)
    divergence = float((logp.exp() * (logp - logq)).sum())
    mean = float((logp.exp() * kl_estimate(logp, logq, estimator)).sum())
    assert mean == pytest.approx(divergence, rel=1e-9 if exact else 0.1)


def expected_gradient(estimator: KLEstimator) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean gradient of the estimator used as a loss, and the gradient of the divergence itself."""
    logits = torch.tensor([0.3, -1.0, 0.7], dtype=torch.float64, requires_grad=True)
    logq = torch.tensor([0.1, -0.6, 0.5], dtype=torch.float64).log_softmax(0)
    logp = logits.log_softmax(0)
    sampled = (logp.exp().detach() * kl_estimate(logp, logq, estimator)).sum()
    divergence = (logp.exp() * (logp - logq)).sum()
    return torch.autograd.grad(sampled, logits, retain_graph=True)[0], torch.autograd.grad(divergence, logits)[0]


def test_what_each_is_worth_as_a_loss() -> None:
    """The module's claim: k1 has no gradient on average, k2 that of the divergence, k3 that of the reversed one."""
    k1, divergence = expected_gradient("k1")
    torch.testing.assert_close(k1, torch.zeros_like(k1), atol=1e-12, rtol=0)
    k2, _ = expected_gradient("k2")
    torch.testing.assert_close(k2, divergence, atol=1e-12, rtol=0)
    k3, _ = expected_gradient("k3")
    logits = torch.tensor([0.3, -1.0, 0.7], dtype=torch.float64, requires_grad=True)
    logq = torch.tensor([0.1, -0.6, 0.5], dtype=torch.float64).log_softmax(0)
    reversed_divergence = (logq.exp() * (logq - logits.log_softmax(0))).sum()
    torch.testing.assert_close(k3, torch.autograd.grad(reversed_divergence, logits)[0], atol=1e-12, rtol=0)


@pytest.mark.parametrize("estimator", ["k1+", "k3+", "abs+"])
def test_a_plus_has_the_gradient_of_the_divergence(estimator: KLEstimator) -> None:
    gradient, divergence = expected_gradient(estimator)
    torch.testing.assert_close(gradient, divergence, atol=1e-12, rtol=0)


@pytest.mark.parametrize("estimator", ESTIMATORS[:4])
def test_gradients(estimator: KLEstimator) -> None:
    logp = torch.tensor([-1.0, -0.2, -3.0], dtype=torch.float64, requires_grad=True)
    logq = torch.tensor([-0.5, -0.9, -2.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda p, q: kl_estimate(p, q, estimator), (logp, logq))


def test_k3_is_never_negative_and_exact_near_equality() -> None:
    logp = torch.full((3,), -2.0)
    logq = logp + torch.tensor([0.0, 1e-3, -1e-3])
    kl = kl_estimate(logp, logq, "k3")
    assert kl[0] == 0
    assert torch.allclose(kl[1:], torch.tensor(5e-7), rtol=1e-2)


def test_an_absurd_token_stays_finite_and_never_pushes_the_wrong_way() -> None:
    logp = torch.tensor([-500.0, 0.0], requires_grad=True)
    kl = kl_estimate(logp, torch.tensor([0.0, -500.0]), "k3")
    assert bool(kl.isfinite().all())
    (gradient,) = torch.autograd.grad(kl.sum(), logp)
    assert gradient.tolist() == [0.0, 1.0]


def test_half_precision_is_widened() -> None:
    half = torch.tensor([-1.0], dtype=torch.bfloat16)
    assert kl_estimate(half, half, "k1").dtype == torch.float32


def test_an_unknown_estimator_is_named() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.kl_estimator = 'k4': expected one of k1, k2, k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")  # pyright: ignore[reportArgumentType] - the point of the test


def test_the_penalty_is_taken_from_masked_tokens_only() -> None:
    kl_N = torch.tensor([float("nan"), 1.0, 2.0], requires_grad=True)
    rewards_N = penalize(torch.tensor([0.0, 0.5, 0.0]), kl_N, torch.tensor([False, True, True]), coef=0.1)
    assert rewards_N.tolist() == pytest.approx([0.0, 0.4, -0.2])
    assert not rewards_N.requires_grad


# -- the controller --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kl", "factor"), [(9.0, 1.02), (6.6, 1.01), (6.0, 1.0), (5.4, 0.99), (0.0, 0.98)])
def test_the_controller_follows_ziegler(kl: float, factor: float) -> None:
    """e = clip((kl - target) / target, -0.2, 0.2); beta' = beta (1 + 0.1 e), so at most 2 % a step."""
    assert KLController(coef=0.2, target=6.0).next(kl).coef == pytest.approx(0.2 * factor)


def test_the_controller_settles_where_the_divergence_is_on_target() -> None:
    """A divergence that falls as the coefficient rises: kl = 0.1 / coef has the target 2 at coef 0.05."""
    controller = KLController(coef=0.5, target=2.0)
    for _ in range(400):
        controller = controller.next(0.1 / controller.coef)
    assert controller.coef == pytest.approx(0.05, rel=1e-3)


def test_the_coefficient_stays_without_a_target_and_without_a_measurement() -> None:
    assert KLController(coef=0.1).next(1e9) == KLController(coef=0.1)
    assert KLController(coef=0.1, target=2.0).next(None) == KLController(coef=0.1, target=2.0)
