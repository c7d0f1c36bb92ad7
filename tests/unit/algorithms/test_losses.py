"""Losses against their formulas, their gradients, and the whole loss of a policy worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from podium.algorithms import LOSSES, AlgorithmConfig, LossInputs, TokenLoss, policy_loss, value_loss
from podium.algorithms.corrections import truncate
from podium.algorithms.losses import ppo_clip
from podium.errors import DataError
from podium.telemetry import metrics as names
from tests.unit.algorithms import oracles

CAPPED: dict[str, Any] = {"correction": "truncate", "options": {"weight_cap": 1.5}}


def normal(seed: int, size: int = 40) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=size) / 2)


def one_row(**columns: Tensor) -> LossInputs:
    """All tokens in a row of their own batch."""
    return LossInputs(offsets_B1=torch.tensor([0, len(next(iter(columns.values())))]), columns=columns)


def clip(
    logprobs: Tensor, old: Tensor, advantages: Tensor, low: float = 0.2, high: float = 0.28, dual: float | None = None
) -> TokenLoss:
    inputs = one_row(logprobs=logprobs, old_logprobs=old, advantages=advantages)
    return ppo_clip(inputs, AlgorithmConfig(clip_low=low, clip_high=high, options={"dual_clip": dual}))


# -- clipped surrogate -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dual", [None, 1.5, 3.0])
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.28), (0.1, 0.1), (1.0, 5.0)])
def test_ppo_clip(low: float, high: float, dual: float | None) -> None:
    logp, old, advantages = normal(1), normal(2), normal(3)
    loss = clip(logp, old, advantages, low, high, dual)
    expected = [
        oracles.ppo_objective(float(new), float(before), float(advantage), low, high, dual)
        for new, before, advantage in zip(logp, old, advantages, strict=True)
    ]
    np.testing.assert_allclose(loss.loss_N, [-objective for objective, _ in expected], rtol=1e-12)
    np.testing.assert_array_equal(loss.metrics[names.CLIP_FRACTION], [float(bound) for _, bound in expected])


@pytest.mark.parametrize("dual", [None, 1.5])
def test_ppo_clip_gradients(dual: float | None) -> None:
    old, advantages = normal(2), normal(3)
    logp = normal(1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: clip(x, old, advantages, dual=dual).loss_N, (logp,))


def test_a_clipped_token_has_no_gradient_and_is_the_one_reported() -> None:
    logp, old, advantages = normal(1).requires_grad_(), normal(2), normal(3)
    loss = clip(logp, old, advantages, dual=1.5)
    (gradient,) = torch.autograd.grad(loss.loss_N.sum(), logp)
    assert torch.equal(gradient == 0, loss.metrics[names.CLIP_FRACTION].bool())
    assert 0 < float(loss.metrics[names.CLIP_FRACTION].mean()) < 1


def test_before_any_update_the_gradient_is_the_policy_gradient() -> None:
    """Ratio 1: the gradient of the loss is minus the advantage, whatever the clip bounds."""
    logp, advantages = normal(1).requires_grad_(), normal(3)
    loss = clip(logp, logp.detach(), advantages)
    (gradient,) = torch.autograd.grad(loss.loss_N.sum(), logp)
    torch.testing.assert_close(gradient, -advantages)


def test_a_ratio_that_would_overflow_stays_finite() -> None:
    logp = torch.tensor([300.0, 300.0], requires_grad=True)
    loss = clip(logp, torch.zeros(2), torch.tensor([1.0, -1.0]))
    assert bool(loss.loss_N.isfinite().all())
    (gradient,) = torch.autograd.grad(loss.loss_N.sum(), logp)
    assert bool(gradient.isfinite().all())


def test_gradients_reach_the_new_log_probabilities_only() -> None:
    logp, old, advantages = (normal(seed).requires_grad_() for seed in (1, 2, 3))
    loss = clip(logp, old, advantages)
    loss.loss_N.sum().backward()
    assert logp.grad is not None
    assert old.grad is None
    assert advantages.grad is None
    assert not any(column.requires_grad for column in (*loss.metrics.values(), *loss.maxima.values()))


# -- value loss and cross-entropy ------------------------------------------------------------------------------------


def critic_loss(values: Tensor, old: Tensor, returns: Tensor, held: float | None) -> TokenLoss:
    return value_loss(one_row(values=values, old_values=old, returns=returns), AlgorithmConfig(value_clip=held))


@pytest.mark.parametrize("held", [None, 0.2, 0.01])
def test_value_loss(held: float | None) -> None:
    values, old, returns = normal(4), normal(5), normal(6)
    loss = critic_loss(values, old, returns, held)
    new, before, target = values.numpy(), old.numpy(), returns.numpy()
    free = (new - target) ** 2
    near = free if held is None else (np.clip(new, before - held, before + held) - target) ** 2
    np.testing.assert_allclose(loss.loss_N, np.maximum(free, near) / 2, rtol=1e-12)
    np.testing.assert_array_equal(loss.metrics["value/clip_fraction"], (near > free).astype(float))
    np.testing.assert_array_equal(loss.metrics[names.VALUE_LOSS], loss.loss_N)


def test_value_loss_gradients() -> None:
    values, old, returns = normal(4).requires_grad_(), normal(5), normal(6)
    assert torch.autograd.gradcheck(lambda x: critic_loss(x, old, returns, 0.2).loss_N, (values,))


def test_cross_entropy() -> None:
    logits = torch.randn(6, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    targets = torch.tensor([0, 10, 3, 3, 7, 1])
    logprobs_N = logits.log_softmax(1).gather(1, targets[:, None]).squeeze(1)
    loss = policy_loss(one_row(logprobs=logprobs_N, entropy=torch.ones(6)), AlgorithmConfig(loss="cross_entropy"))
    torch.testing.assert_close(loss.loss_N, torch.nn.functional.cross_entropy(logits, targets, reduction="none"))
    assert {name: column.tolist() for name, column in loss.metrics.items()} == {names.ENTROPY: [1.0] * 6}


# -- the loss of a policy worker -------------------------------------------------------------------------------------


def policy_inputs(*without: str, **changes: Tensor) -> LossInputs:
    columns = {
        "logprobs": normal(1),
        "old_logprobs": normal(2),
        "advantages": normal(3),
        "rollout_logprobs": normal(4),
        "ref_logprobs": normal(5),
        "entropy": normal(6).abs(),
    }
    return one_row(**{name: column for name, column in (columns | changes).items() if name not in without})


def test_policy_loss_is_the_sum_of_its_parts() -> None:
    config = AlgorithmConfig(
        options={"dual_clip": 3.0, "weight_cap": 1.5},
        correction="truncate",
        kl_in="loss",
        kl_coef=0.1,
        kl_estimator="k3",
        entropy_coef=0.01,
    )
    loss = policy_loss(policy_inputs(), config)
    logp, old, advantages, rollout, ref, entropy = (normal(seed).numpy() for seed in range(1, 7))
    surrogate = [
        -oracles.ppo_objective(float(new), float(before), float(advantage), 0.2, 0.28, 3.0)[0]
        for new, before, advantage in zip(logp, old, advantages, strict=True)
    ]
    weights = np.minimum(np.exp(old - rollout), 1.5)
    kl = np.exp(ref - logp) - 1 - (ref - logp)
    ratio = np.exp(logp - old)
    np.testing.assert_allclose(loss.loss_N, weights * surrogate + 0.1 * kl - 0.01 * np.abs(entropy), rtol=1e-9)
    np.testing.assert_allclose(loss.metrics[names.RATIO_MEAN], ratio, rtol=1e-12)
    np.testing.assert_allclose(loss.maxima[names.RATIO_MAX], ratio, rtol=1e-12)
    np.testing.assert_allclose(loss.metrics["policy/approx_kl"], ratio - 1 - np.log(ratio), rtol=1e-9, atol=1e-15)
    np.testing.assert_allclose(loss.metrics[names.KL], kl, rtol=1e-9)
    np.testing.assert_allclose(loss.metrics[names.ENTROPY], np.abs(entropy))
    np.testing.assert_allclose(loss.metrics[names.MISMATCH_MEAN], np.abs(old - rollout))
    np.testing.assert_allclose(loss.maxima[names.MISMATCH_MAX], np.abs(old - rollout))
    np.testing.assert_allclose(loss.metrics["mismatch/weight_mean"], weights)
    np.testing.assert_array_equal(loss.metrics["mismatch/weight_capped"], (weights == 1.5).astype(float))
    assert not any(column.requires_grad for column in (*loss.metrics.values(), *loss.maxima.values()))


def test_the_share_of_capped_weights_is_that_of_truncate_beside_other_corrections() -> None:
    old, rollout = torch.tensor([0.0, 0.0, 0.0]), torch.log(torch.tensor([1 / 1.4, 1 / 1.4, 1 / 1.6]))
    columns = {"logprobs": old, "old_logprobs": old, "rollout_logprobs": rollout, "advantages": torch.ones(3)}
    for others, product in (("sequence_truncate", [2.1, 2.1, 2.25]), ("two_sided", [0.0, 0.0, 0.0])):
        options = {"weight_cap": 1.5, **({"ratio_high": 1.3} if others == "two_sided" else {})}
        config = AlgorithmConfig(correction=("truncate", others), options=options)
        loss = policy_loss(LossInputs(offsets_B1=torch.tensor([0, 3]), columns=columns), config)
        assert loss.metrics["mismatch/weight_mean"].tolist() == pytest.approx(product)
        assert loss.metrics["mismatch/weight_capped"].tolist() == [0.0, 0.0, 1.0]


def test_policy_loss_gradients() -> None:
    config = AlgorithmConfig(**CAPPED, kl_in="loss", kl_coef=0.1, kl_estimator="k2", entropy_coef=0.01)

    def loss(logprobs: Tensor, entropy: Tensor) -> Tensor:
        return policy_loss(policy_inputs(logprobs=logprobs, entropy=entropy), config).loss_N

    assert torch.autograd.gradcheck(loss, (normal(1).requires_grad_(), normal(6).abs().requires_grad_()))


@pytest.mark.parametrize("name", ["ppo_clip", "gspo"])
def test_policy_loss_moves_the_trained_policy_only(name: str) -> None:
    config = AlgorithmConfig(loss=name, **CAPPED, kl_in="loss", kl_coef=0.1, entropy_coef=0.01)
    columns = {name: column.clone().requires_grad_() for name, column in policy_inputs().columns.items()}
    policy_loss(one_row(**columns), config).loss_N.sum().backward()
    assert {name for name, column in columns.items() if column.grad is not None} == {"logprobs", "entropy"}


def test_without_old_log_probabilities_the_policy_is_its_own_predecessor() -> None:
    logp = normal(1).requires_grad_()
    fresh = policy_loss(policy_inputs("old_logprobs", logprobs=logp), AlgorithmConfig())
    given = policy_loss(policy_inputs(logprobs=logp, old_logprobs=logp.detach()), AlgorithmConfig())
    gradients = [torch.autograd.grad(loss.loss_N.sum(), logp)[0] for loss in (fresh, given)]
    assert torch.equal(fresh.loss_N, given.loss_N)
    assert torch.equal(*gradients)


def test_reference_and_generator_are_reported_without_taking_part() -> None:
    bare = policy_loss(policy_inputs("rollout_logprobs", "ref_logprobs", "entropy"), AlgorithmConfig())
    loss = policy_loss(policy_inputs(), AlgorithmConfig())
    assert torch.equal(loss.loss_N, bare.loss_N)
    assert {names.KL, names.MISMATCH_MEAN, names.ENTROPY} == loss.metrics.keys() - bare.metrics.keys() - {"mismatch/kl"}


@pytest.mark.parametrize(
    ("config", "column", "message"),
    [
        (AlgorithmConfig(kl_in="loss", kl_coef=0.1), "ref_logprobs", "'ref_logprobs'.*algorithm.kl_in = 'loss'"),
        (AlgorithmConfig(correction="truncate"), "rollout_logprobs", "reads rollout_logprobs_N, .* no column"),
        (AlgorithmConfig(entropy_coef=0.1), "entropy", "'entropy'.*algorithm.entropy_coef"),
        (AlgorithmConfig(), "advantages", "the loss reads advantages_N, .* no column 'advantages'"),
    ],
)
def test_a_missing_column_is_named(config: AlgorithmConfig, column: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        policy_loss(policy_inputs(column), config)


def test_ppo_clip_works_token_by_token() -> None:
    """Any split of the tokens gives the same losses: nothing in the loss looks across tokens."""
    config = AlgorithmConfig(kl_in="loss", kl_coef=0.1, **CAPPED, entropy_coef=0.01)
    inputs, whole = policy_inputs(), policy_loss(policy_inputs(), config)
    pieces = [
        policy_loss(one_row(**{name: column[part] for name, column in inputs.columns.items()}), config)
        for part in (slice(0, 1), slice(1, 17), slice(17, 40))
    ]
    torch.testing.assert_close(torch.cat([piece.loss_N for piece in pieces]), whole.loss_N, rtol=0, atol=0)
    for name, column in whole.metrics.items():
        torch.testing.assert_close(torch.cat([piece.metrics[name] for piece in pieces]), column, rtol=0, atol=0)


def test_half_precision_is_widened_and_keeps_its_gradient() -> None:
    for name in ("ppo_clip", "gspo", "cross_entropy"):
        logp = normal(1).bfloat16().requires_grad_()
        loss = LOSSES.load(name)(policy_inputs(logprobs=logp), AlgorithmConfig())
        loss.loss_N.sum().backward()
        assert logp.grad is not None
        assert loss.loss_N.dtype in (torch.float32, torch.float64)


# -- the generator and the trainer -----------------------------------------------------------------------------------


def truncated_weights(old: Tensor, rollout: Tensor, cap: float) -> Tensor:
    config = AlgorithmConfig(correction="truncate", options={"weight_cap": cap})
    return truncate(one_row(logprobs=old, old_logprobs=old, rollout_logprobs=rollout), config)


def test_importance_weights_are_truncated_ratios() -> None:
    rng = np.random.default_rng(0)
    old, rollout = rng.normal(size=200), rng.normal(size=200)
    weights_N = truncated_weights(torch.from_numpy(old), torch.from_numpy(rollout), cap=2.0)
    np.testing.assert_allclose(weights_N, np.minimum(np.exp(old - rollout), 2.0), rtol=1e-12)
    assert float(weights_N.max()) == 2.0


def test_importance_weights_correct_an_expectation() -> None:
    """With a cap out of reach, samples of the generator weighted stand for samples of the trainer, exactly."""
    rollout = torch.tensor([0.1, 0.4, -0.5], dtype=torch.float64).log_softmax(0)
    old = torch.tensor([0.2, 0.1, 0.0], dtype=torch.float64).log_softmax(0)
    score = torch.tensor([1.0, -2.0, 5.0], dtype=torch.float64)
    corrected = (rollout.exp() * truncated_weights(old, rollout, cap=1e9) * score).sum()
    torch.testing.assert_close(corrected, (old.exp() * score).sum())


def test_importance_weights_carry_no_gradient_and_stay_finite() -> None:
    old = torch.tensor([0.0], requires_grad=True)
    weights_N = truncated_weights(old, torch.tensor([-1e4]), cap=1e9)
    assert not weights_N.requires_grad
    assert bool(weights_N.isfinite().all())


@pytest.mark.parametrize("gap", [0.5, 0.0])
def test_the_mismatch_is_the_distance_and_the_divergence(gap: float) -> None:
    old_N = torch.tensor([-1.0, -2.0])
    loss = policy_loss(
        policy_inputs(
            *("ref_logprobs", "entropy"),
            logprobs=old_N,
            old_logprobs=old_N,
            advantages=torch.ones(2),
            rollout_logprobs=old_N - torch.tensor([gap, 0.0]),
        ),
        AlgorithmConfig(),
    )
    assert loss.metrics[names.MISMATCH_MEAN].tolist() == loss.maxima[names.MISMATCH_MAX].tolist() == [gap, 0.0]
    assert loss.metrics["mismatch/kl"].tolist() == pytest.approx([np.exp(gap) - 1 - gap, 0.0], rel=1e-6)


# -- what a loss returns ---------------------------------------------------------------------------------------------

WRONG = """
from podium.algorithms import TokenLoss

def a_tensor(inputs, config):
    return inputs.logprobs_N

def a_mean(inputs, config):
    return TokenLoss((inputs.logprobs_N * inputs.advantages_N).mean())

def by_row(inputs, config):
    return TokenLoss(inputs.row_means(inputs.logprobs_N))

def a_metric_of_rows(inputs, config):
    return TokenLoss(-inputs.logprobs_N, {"rows": inputs.row_means(inputs.logprobs_N)})

def a_number(inputs, config):
    return TokenLoss(-inputs.logprobs_N, {"mean": 0.5})

def a_metric_of_podium(inputs, config):
    return TokenLoss(-inputs.logprobs_N, {"loss": inputs.advantages_N})

def no_metrics(inputs, config):
    return TokenLoss(-inputs.logprobs_N, None)

def detached(inputs, config):
    return TokenLoss(-inputs.old_logprobs_N * inputs.advantages_N)
"""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("a_tensor", "returned Tensor; expected TokenLoss"),
        ("a_mean", r"returned loss_N of shape \[\]; expected one value a token, \[40\]"),
        ("by_row", r"returned loss_N of shape \[1\]"),
        ("a_metric_of_rows", r"returned rows of shape \[1\]"),
        ("a_number", "returned mean as float; expected a tensor of one value a token"),
        ("a_metric_of_podium", "returned metrics with 'loss', which Podium itself reports"),
        ("no_metrics", "returned metrics as NoneType; expected tensors by name"),
        ("detached", r"loss_N without a gradient: it must be computed from inputs\.logprobs_N"),
    ],
)
def test_a_loss_is_checked_on_what_it_returns(tmp_path: Path, function: str, message: str) -> None:
    """Each of these would train on something else, or on nothing, and the entropy bonus would hide it."""
    (tmp_path / "wrong_losses.py").write_text(WRONG)
    spec = f"{tmp_path}/wrong_losses.py:{function}"
    inputs = policy_inputs("old_logprobs", logprobs=normal(1).requires_grad_(), entropy=normal(6).requires_grad_())
    with pytest.raises(DataError, match=message) as caught:
        policy_loss(inputs, AlgorithmConfig(loss=spec, entropy_coef=0.1))
    assert f"loss {spec!r}" in str(caught.value)
