"""Losses against their formulas, their gradients, and the whole loss of a policy worker."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from torch import Tensor

from podium.algorithms import (
    AlgorithmConfig,
    PolicyLoss,
    PolicyLossInputs,
    SFTLoss,
    SFTLossInputs,
    ValueLoss,
    ValueLossInputs,
    clipped_value_loss,
    ppo_clip,
)
from podium.errors import DataError
from podium.telemetry import metrics as names
from tests.unit.algorithms import oracles


def normal(seed: int, size: int = 40) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=size) / 2)


# -- clipped surrogate -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dual", [None, 1.5, 3.0])
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.28), (0.1, 0.1), (1.0, 5.0)])
def test_ppo_clip(low: float, high: float, dual: float | None) -> None:
    logp, old, advantages = normal(1), normal(2), normal(3)
    loss = ppo_clip(logp, old, advantages, clip_low=low, clip_high=high, dual_clip=dual)
    expected = [
        oracles.ppo_objective(float(new), float(before), float(advantage), low, high, dual)
        for new, before, advantage in zip(logp, old, advantages, strict=True)
    ]
    np.testing.assert_allclose(loss.loss_N, [-objective for objective, _ in expected], rtol=1e-12)
    np.testing.assert_array_equal(loss.metrics[names.CLIP_FRACTION], [float(bound) for _, bound in expected])
    ratio = np.exp(logp.numpy() - old.numpy())
    np.testing.assert_allclose(loss.metrics[names.RATIO_MEAN], ratio, rtol=1e-12)
    np.testing.assert_allclose(loss.maxima[names.RATIO_MAX], ratio, rtol=1e-12)
    np.testing.assert_allclose(loss.metrics["policy/approx_kl"], ratio - 1 - np.log(ratio), rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("dual", [None, 1.5])
def test_ppo_clip_gradients(dual: float | None) -> None:
    old, advantages = normal(2), normal(3)
    logp = normal(1).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: ppo_clip(x, old, advantages, clip_low=0.2, clip_high=0.28, dual_clip=dual).loss_N, (logp,)
    )


def test_a_clipped_token_has_no_gradient_and_is_the_one_reported() -> None:
    logp, old, advantages = normal(1).requires_grad_(), normal(2), normal(3)
    loss = ppo_clip(logp, old, advantages, clip_low=0.2, clip_high=0.28, dual_clip=1.5)
    (gradient,) = torch.autograd.grad(loss.loss_N.sum(), logp)
    assert torch.equal(gradient == 0, loss.metrics[names.CLIP_FRACTION].bool())
    assert 0 < float(loss.metrics[names.CLIP_FRACTION].mean()) < 1


def test_before_any_update_the_gradient_is_the_policy_gradient() -> None:
    """Ratio 1: the gradient of the loss is minus the advantage, whatever the clip bounds."""
    logp, advantages = normal(1).requires_grad_(), normal(3)
    loss = ppo_clip(logp, logp.detach(), advantages, clip_low=0.2, clip_high=0.28)
    (gradient,) = torch.autograd.grad(loss.loss_N.sum(), logp)
    torch.testing.assert_close(gradient, -advantages)


def test_a_ratio_that_would_overflow_stays_finite() -> None:
    logp = torch.tensor([300.0, 300.0], requires_grad=True)
    loss = ppo_clip(logp, torch.zeros(2), torch.tensor([1.0, -1.0]), clip_low=0.2, clip_high=0.28)
    assert bool(loss.loss_N.isfinite().all())
    (gradient,) = torch.autograd.grad(loss.loss_N.sum(), logp)
    assert bool(gradient.isfinite().all())


def test_gradients_reach_the_new_log_probabilities_only() -> None:
    logp, old, advantages = (normal(seed).requires_grad_() for seed in (1, 2, 3))
    loss = ppo_clip(logp, old, advantages, clip_low=0.2, clip_high=0.28)
    loss.loss_N.sum().backward()
    assert logp.grad is not None
    assert old.grad is None
    assert advantages.grad is None
    assert not any(column.requires_grad for column in (*loss.metrics.values(), *loss.maxima.values()))


# -- value loss and cross-entropy ------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [None, 0.2, 0.01])
def test_clipped_value_loss(clip: float | None) -> None:
    values, old, returns = normal(4), normal(5), normal(6)
    loss = clipped_value_loss(values, old, returns, clip)
    new, before, target = values.numpy(), old.numpy(), returns.numpy()
    free = (new - target) ** 2
    near = free if clip is None else (np.clip(new, before - clip, before + clip) - target) ** 2
    np.testing.assert_allclose(loss.loss_N, np.maximum(free, near) / 2, rtol=1e-12)
    np.testing.assert_array_equal(loss.metrics["value/clip_fraction"], (near > free).astype(float))
    np.testing.assert_array_equal(loss.metrics[names.VALUE_LOSS], loss.loss_N)


def test_clipped_value_loss_gradients() -> None:
    values, old, returns = normal(4).requires_grad_(), normal(5), normal(6)
    assert torch.autograd.gradcheck(lambda x: clipped_value_loss(x, old, returns, 0.2).loss_N, (values,))


def test_value_loss_takes_its_clip_from_the_configuration() -> None:
    inputs = ValueLossInputs(values_N=normal(4), old_values_N=normal(5), returns_N=normal(6))
    for clip in (None, 0.05):
        loss = ValueLoss(AlgorithmConfig(value_clip=clip))(inputs)
        expected = clipped_value_loss(inputs.values_N, inputs.old_values_N, inputs.returns_N, clip)
        assert torch.equal(loss.loss_N, expected.loss_N)


def test_sft_is_cross_entropy() -> None:
    logits = torch.randn(6, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    targets = torch.tensor([0, 10, 3, 3, 7, 1])
    logprobs_N = logits.log_softmax(1).gather(1, targets[:, None]).squeeze(1)
    loss = SFTLoss()(SFTLossInputs(logprobs_N=logprobs_N, entropy_N=torch.ones(6)))
    torch.testing.assert_close(loss.loss_N, torch.nn.functional.cross_entropy(logits, targets, reduction="none"))
    assert loss.metrics[names.ENTROPY].tolist() == [1.0] * 6


# -- the loss of a policy worker -------------------------------------------------------------------------------------


def policy_inputs(**changes: Tensor | None) -> PolicyLossInputs:
    columns: dict[str, Tensor | None] = {
        "logprobs_N": normal(1),
        "old_logprobs_N": normal(2),
        "advantages_N": normal(3),
        "rollout_logprobs_N": normal(4),
        "ref_logprobs_N": normal(5),
        "entropy_N": normal(6).abs(),
    }
    return PolicyLossInputs(**(columns | changes))  # pyright: ignore[reportArgumentType] - only optional ones are None


def test_policy_loss_is_the_sum_of_its_parts() -> None:
    config = AlgorithmConfig(
        dual_clip=3.0, importance_cap=1.5, kl_in="loss", kl_coef=0.1, kl_estimator="k3", entropy_coef=0.01
    )
    inputs = policy_inputs()
    loss = PolicyLoss(config)(inputs)
    logp, old, advantages, rollout, ref, entropy = (normal(seed).numpy() for seed in range(1, 7))
    surrogate = [
        -oracles.ppo_objective(float(new), float(before), float(advantage), 0.2, 0.28, 3.0)[0]
        for new, before, advantage in zip(logp, old, advantages, strict=True)
    ]
    weights = np.minimum(np.exp(old - rollout), 1.5)
    kl = np.exp(ref - logp) - 1 - (ref - logp)
    np.testing.assert_allclose(loss.loss_N, weights * surrogate + 0.1 * kl - 0.01 * np.abs(entropy), rtol=1e-9)
    np.testing.assert_allclose(loss.metrics[names.KL], kl, rtol=1e-9)
    np.testing.assert_allclose(loss.metrics[names.ENTROPY], np.abs(entropy))
    np.testing.assert_allclose(loss.metrics[names.MISMATCH_MEAN], np.abs(old - rollout))
    np.testing.assert_allclose(loss.maxima[names.MISMATCH_MAX], np.abs(old - rollout))
    np.testing.assert_allclose(loss.metrics["mismatch/weight_mean"], weights)
    np.testing.assert_array_equal(loss.metrics["mismatch/weight_capped"], (weights == 1.5).astype(float))
    assert not any(column.requires_grad for column in (*loss.metrics.values(), *loss.maxima.values()))


def test_policy_loss_gradients() -> None:
    config = AlgorithmConfig(importance_cap=1.5, kl_in="loss", kl_coef=0.1, kl_estimator="k2", entropy_coef=0.01)

    def loss(logprobs_N: Tensor, entropy_N: Tensor) -> Tensor:
        return PolicyLoss(config)(policy_inputs(logprobs_N=logprobs_N, entropy_N=entropy_N)).loss_N

    assert torch.autograd.gradcheck(loss, (normal(1).requires_grad_(), normal(6).abs().requires_grad_()))


def test_policy_loss_moves_the_trained_policy_only() -> None:
    config = AlgorithmConfig(importance_cap=1.5, kl_in="loss", kl_coef=0.1, entropy_coef=0.01)
    inputs = policy_inputs(**{name: column.clone().requires_grad_() for name, column in vars(policy_inputs()).items()})
    PolicyLoss(config)(inputs).loss_N.sum().backward()
    moved = {name for name, column in vars(inputs).items() if column.grad is not None}
    assert moved == {"logprobs_N", "entropy_N"}


def test_without_old_log_probabilities_the_policy_is_its_own_predecessor() -> None:
    logp = normal(1).requires_grad_()
    fresh = PolicyLoss(AlgorithmConfig())(policy_inputs(logprobs_N=logp, old_logprobs_N=None))
    given = PolicyLoss(AlgorithmConfig())(policy_inputs(logprobs_N=logp, old_logprobs_N=logp.detach()))
    gradients = [torch.autograd.grad(loss.loss_N.sum(), logp)[0] for loss in (fresh, given)]
    assert torch.equal(fresh.loss_N, given.loss_N)
    assert torch.equal(*gradients)


def test_reference_and_generator_are_reported_without_taking_part() -> None:
    inputs = policy_inputs()
    bare = policy_inputs(rollout_logprobs_N=None, ref_logprobs_N=None, entropy_N=None)
    loss = PolicyLoss(AlgorithmConfig())(inputs)
    assert torch.equal(loss.loss_N, PolicyLoss(AlgorithmConfig())(bare).loss_N)
    assert {names.KL, names.MISMATCH_MEAN, names.ENTROPY} <= set(loss.metrics)


@pytest.mark.parametrize(
    ("config", "column", "message"),
    [
        (AlgorithmConfig(kl_in="loss", kl_coef=0.1), "ref_logprobs_N", "'ref_logprobs'.*algorithm.kl_in = 'loss'"),
        (AlgorithmConfig(importance_cap=2.0), "rollout_logprobs_N", "'rollout_logprobs'.*algorithm.importance_cap"),
        (AlgorithmConfig(entropy_coef=0.1), "entropy_N", "'entropy'.*algorithm.entropy_coef"),
    ],
)
def test_a_missing_column_is_named_with_the_setting_that_needs_it(
    config: AlgorithmConfig, column: str, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        PolicyLoss(config)(policy_inputs(**{column: None}))


def test_losses_work_token_by_token() -> None:
    """Any split of the tokens gives the same losses: nothing in a loss looks across tokens."""
    config = AlgorithmConfig(kl_in="loss", kl_coef=0.1, importance_cap=1.5, entropy_coef=0.01)
    whole = PolicyLoss(config)(policy_inputs())
    pieces = [
        PolicyLoss(config)(PolicyLossInputs(**{name: column[part] for name, column in vars(policy_inputs()).items()}))
        for part in (slice(0, 0), slice(0, 1), slice(1, 17), slice(17, 40))
    ]
    torch.testing.assert_close(torch.cat([piece.loss_N for piece in pieces]), whole.loss_N, rtol=0, atol=0)
    for name, column in whole.metrics.items():
        torch.testing.assert_close(torch.cat([piece.metrics[name] for piece in pieces]), column, rtol=0, atol=0)


def test_half_precision_is_widened_and_keeps_its_gradient() -> None:
    logp = normal(1).bfloat16().requires_grad_()
    loss = PolicyLoss(AlgorithmConfig())(policy_inputs(logprobs_N=logp))
    loss.loss_N.sum().backward()
    assert logp.grad is not None
    assert SFTLoss()(SFTLossInputs(logprobs_N=logp)).loss_N.dtype == torch.float32


def test_loss_objects_travel() -> None:
    for loss in (PolicyLoss(AlgorithmConfig(clip_low=0.1)), ValueLoss(AlgorithmConfig()), SFTLoss()):
        assert pickle.loads(pickle.dumps(loss)) == loss
