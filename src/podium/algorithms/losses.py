"""Podium's losses. Each is a function ``(LossInputs, AlgorithmConfig) -> TokenLoss``.

:func:`policy_loss` is the whole loss of a policy: the loss that the configuration names, importance weights, the KL
divergence and the entropy bonus. :func:`value_loss` is the loss of a critic.
"""

from __future__ import annotations

from typing import Final

import torch
from pydantic import Field
from torch import Tensor

from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.kl import bounded_exp, kl_estimate
from podium.algorithms.named import Declaration, resolve_loss
from podium.algorithms.records import LossInputs, TokenLoss
from podium.algorithms.token_rows import wide
from podium.config import section
from podium.errors import DataError
from podium.telemetry.metrics import (
    CLIP_FRACTION,
    ENTROPY,
    KL,
    MISMATCH_MAX,
    MISMATCH_MEAN,
    RATIO_MAX,
    RATIO_MEAN,
    VALUE_LOSS,
)

__all__ = ["clip_cov", "cross_entropy", "gspo", "policy_loss", "ppo_clip", "truncated_weights", "value_loss"]

# Metrics that no display looks up by name; the others are in podium.telemetry.metrics.
APPROX_KL: Final = "policy/approx_kl"  # KL(policy before the update || policy) by k3
COV_FRACTION: Final = "policy/cov_fraction"  # share of tokens that Clip-Cov left out of the gradient
MISMATCH_KL: Final = "mismatch/kl"  # KL(generator || trainer) by k3
IMPORTANCE_MEAN: Final = "mismatch/weight_mean"  # mean of the truncated importance weights
IMPORTANCE_CAPPED: Final = "mismatch/weight_capped"  # share of tokens whose importance weight was cut to the cap
VALUE_CLIP_FRACTION: Final = "value/clip_fraction"  # share of tokens whose value was held near the old value


def policy_loss(inputs: LossInputs, config: AlgorithmConfig) -> TokenLoss:
    """``w · loss + kl_coef · KL(policy || reference) - entropy_coef · entropy`` at each token, ``[N]``.

    The loss is the one that ``config.loss`` names. w are :func:`truncated_weights` if ``config.importance_cap`` is
    set, else 1. The KL divergence takes part if ``config.kl_in`` is "loss". Ratios, divergences and the entropy are
    reported wherever their columns are given.

    >>> columns = {"logprobs": torch.tensor([-1.0, -2.0]), "advantages": torch.tensor([1.0, -1.0])}
    >>> out = policy_loss(LossInputs(offsets_B1=torch.tensor([0, 2]), columns=columns), AlgorithmConfig())
    >>> out.loss_N.tolist(), sorted(out.metrics)
    ([-1.0, 1.0], ['policy/approx_kl', 'policy/clip_fraction', 'policy/ratio_mean'])

    Raises:
        ConfigError: The loss cannot be found.
        DataError: A column that the configuration asks for is missing; or the loss returned something else than one
            number a token with a gradient.
    """
    given = resolve_loss(config.loss)(inputs, config)
    _check(given, inputs, f"loss {config.loss!r}")
    loss_N, metrics, maxima = wide(given.loss_N), dict(given.metrics), dict(given.maxima)
    logprobs_N, old_N = inputs.logprobs_N, inputs.old_logprobs_N
    if "advantages" in inputs.columns:
        with torch.no_grad():
            ratio_N = bounded_exp(wide(logprobs_N) - wide(old_N))
            metrics |= {RATIO_MEAN: ratio_N, APPROX_KL: kl_estimate(old_N, logprobs_N, "k3")}
            maxima[RATIO_MAX] = ratio_N
    if "rollout_logprobs" in inputs.columns:
        with torch.no_grad():
            difference_N = (wide(old_N) - wide(inputs.rollout_logprobs_N)).abs()
            gap_N = kl_estimate(inputs.rollout_logprobs_N, old_N, "k3")
            metrics |= {MISMATCH_MEAN: difference_N, MISMATCH_KL: gap_N}
            maxima[MISMATCH_MAX] = difference_N
    if config.importance_cap is not None:
        _require(inputs, "rollout_logprobs", "algorithm.importance_cap is set")
        weights_N = truncated_weights(old_N, inputs.rollout_logprobs_N, config.importance_cap)
        loss_N = loss_N * weights_N
        capped_N = (weights_N >= config.importance_cap).to(weights_N.dtype)
        metrics |= {IMPORTANCE_MEAN: weights_N, IMPORTANCE_CAPPED: capped_N}
    if config.kl_in == "loss":
        _require(inputs, "ref_logprobs", "algorithm.kl_in = 'loss'")
        kl_N = kl_estimate(logprobs_N, inputs.ref_logprobs_N.detach(), config.kl_estimator)
        loss_N = loss_N + config.kl_coef * kl_N
        metrics[KL] = kl_N.detach()
    elif "ref_logprobs" in inputs.columns:
        metrics[KL] = kl_estimate(logprobs_N.detach(), inputs.ref_logprobs_N.detach(), config.kl_estimator)
    if config.entropy_coef:
        _require(inputs, "entropy", "algorithm.entropy_coef is not 0")
        loss_N = loss_N - config.entropy_coef * wide(inputs.entropy_N)
    if "entropy" in inputs.columns:
        metrics[ENTROPY] = wide(inputs.entropy_N.detach())
    return TokenLoss(loss_N, metrics, maxima)


def truncated_weights(old_logprobs_N: Tensor, rollout_logprobs_N: Tensor, cap: float) -> Tensor:
    """``min(exp(old - rollout), cap)``, float ``[N]``, without gradient: importance weights.

    Generator and trainer hold the same weights, and yet other kernels, another precision or an older version give other
    log-probabilities. Multiplied into the loss, these weights make samples of the generator stand for samples of the
    old policy. The cap bounds their variance at the price of a small bias: Ionides 2008; for token policies Espeholt et
    al. 2018, "IMPALA", arXiv:1802.01561, section 4.1; between a rollout engine and its trainer Yao et al. 2025, "On the
    Rollout-Training Mismatch in Modern RL Systems".

    >>> truncated_weights(torch.tensor([-1.0, 0.0]), torch.tensor([-1.0, -3.0]), cap=2.0).tolist()
    [1.0, 2.0]
    """
    return bounded_exp((wide(old_logprobs_N) - wide(rollout_logprobs_N)).detach()).clamp(max=cap)


def ppo_clip(inputs: LossInputs, config: AlgorithmConfig) -> TokenLoss:
    """``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`` with ``r = exp(logprobs - old_logprobs)``, ``[N]``.

    The clipped surrogate of PPO: Schulman et al. 2017, arXiv:1707.06347, equation 7. Two bounds instead of one: Yu et
    al. 2025, "DAPO", arXiv:2503.14476, section 3.1.

    >>> columns = {"logprobs": torch.tensor([0.5, -0.1]), "old_logprobs": torch.zeros(2), "advantages": torch.ones(2)}
    >>> loss = ppo_clip(LossInputs(offsets_B1=torch.tensor([0, 2]), columns=columns), AlgorithmConfig())
    >>> [round(x, 4) for x in loss.loss_N.tolist()], loss.metrics["policy/clip_fraction"].tolist()
    ([-1.28, -0.9048], [1.0, 0.0])
    """
    return _clipped_surrogate(bounded_exp(_log_ratio(inputs)), inputs, config)


def gspo(inputs: LossInputs, config: AlgorithmConfig) -> TokenLoss:
    """``-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)`` at every token of a row, ``[N]``.

    Group sequence policy optimization: Zheng et al. 2025, "GSPO", arXiv:2507.18071, equations 5 and 7.
    ``s = exp(mean over the row's tokens of logprobs - old_logprobs)`` is the row's ratio, normalized by its length.
    ``config.aggregation = "sequence-mean"`` makes the sum equation 5. Sequence ratios stay near 1, so that the paper
    clips at ``clip_low = 3e-4`` and ``clip_high = 4e-4``.
    """
    ratio_B = bounded_exp(inputs.row_means(_log_ratio(inputs)))
    return _clipped_surrogate(ratio_B[inputs.row_N], inputs, config)


def _log_ratio(inputs: LossInputs) -> Tensor:
    return wide(inputs.logprobs_N) - wide(inputs.old_logprobs_N.detach())


def _clipped_surrogate(ratio_N: Tensor, inputs: LossInputs, config: AlgorithmConfig) -> TokenLoss:
    """The surrogate for a ratio of tokens or of sequences, and the share of tokens whose gradient a bound took away.

    With ``config.dual_clip = c`` the loss of a token with negative advantage is at most ``-c A``: otherwise the force
    that lowers a token's probability grows with its ratio. Ye et al. 2020, "Mastering Complex Control in MOBA Games",
    arXiv:1912.09729.
    """
    advantages_N = wide(inputs.advantages_N.detach())
    free_N = -ratio_N * advantages_N
    bounded_N = -ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages_N
    loss_N = torch.maximum(free_N, bounded_N)
    clipped_N = bounded_N > free_N
    if config.dual_clip is not None:
        ceiling_N = -config.dual_clip * advantages_N
        runaway_N = (advantages_N < 0) & (loss_N > ceiling_N)
        loss_N = torch.where(runaway_N, ceiling_N, loss_N)
        clipped_N = clipped_N | runaway_N
    return TokenLoss(loss_N, {CLIP_FRACTION: clipped_N.to(loss_N.dtype)})


@section("algorithm.options")
class ClipCovOptions:
    """The tokens that Clip-Cov leaves out of the gradient."""

    cov_share: float = Field(default=2e-4, gt=0, le=1)
    """This share of a minibatch's tokens is left out of the gradient."""
    cov_low: float = Field(default=1.0, ge=-1e9, le=1e9)
    """Tokens are left out only where their covariance is at least this."""
    cov_high: float = Field(default=5.0, ge=-1e9, le=1e9)
    """Tokens are left out only where their covariance is at most this."""


def high_covariance(inputs: LossInputs, config: AlgorithmConfig) -> dict[str, Tensor]:
    """Draw the tokens of a whole minibatch that are left out: ``floor(r N)`` of those in range, uniformly.

    ``Cov_i = (logp_i - mean logp) (A_i - mean A)``. The draw is made among places in the order of covariance, so that
    it does not depend on how the minibatch is spread over ranks.
    """
    options = config.read_options(ClipCovOptions)
    logprobs_N, advantages_N = wide(inputs.logprobs_N), wide(inputs.advantages_N)
    cov_N = (logprobs_N - logprobs_N.mean()) * (advantages_N - advantages_N.mean())
    places_M = cov_N.argsort(stable=True)
    cov_M = cov_N[places_M]
    places_M = places_M[(cov_M >= options.cov_low) & (cov_M <= options.cov_high)]
    drawn = torch.randperm(len(places_M), generator=torch.Generator().manual_seed(inputs.step))
    chosen_N = torch.zeros_like(cov_N)
    chosen_N[places_M[drawn[: int(options.cov_share * len(cov_N))].to(places_M.device)]] = 1.0
    return {"chosen": chosen_N}


@Declaration(options=ClipCovOptions, minibatch=high_covariance)
def clip_cov(inputs: LossInputs, config: AlgorithmConfig) -> TokenLoss:
    """``-r A`` with ``r = exp(logprobs - old_logprobs)``, and 0 at the tokens that were drawn, ``[N]``.

    Clip-Cov: Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models",
    arXiv:2505.22617, section 4.2. Entropy falls with the covariance of log-probabilities and advantages. A small random
    share of the tokens of high covariance is therefore left out of the gradient.
    """
    chosen_N = inputs.figures["chosen"]
    loss_N = -bounded_exp(_log_ratio(inputs)) * wide(inputs.advantages_N.detach()) * (1 - chosen_N)
    return TokenLoss(loss_N, {COV_FRACTION: chosen_N})


def cross_entropy(inputs: LossInputs, config: AlgorithmConfig) -> TokenLoss:
    """``-log p(target)`` at each token, in nats: supervised fine-tuning. Advantages take no part."""
    return TokenLoss(-wide(inputs.logprobs_N))


def value_loss(inputs: LossInputs, config: AlgorithmConfig) -> TokenLoss:
    """``max((V - R)², (clip(V, V_old - c, V_old + c) - R)²) / 2`` with ``c = config.value_clip``, ``[N]``.

    The squared error: Schulman et al. 2017, arXiv:1707.06347, equation 9. The second square, which
    ``value_clip = None`` leaves out, is not in that paper but in its authors' code: Engstrom et al. 2020,
    "Implementation Matters in Deep Policy Gradients", arXiv:2005.12729, section 3.

    >>> columns = {"values": torch.ones(1), "old_values": torch.zeros(1), "returns": torch.full((1,), 2.0)}
    >>> inputs = LossInputs(offsets_B1=torch.tensor([0, 1]), columns=columns)
    >>> value_loss(inputs, AlgorithmConfig(value_clip=0.5)).loss_N.tolist()
    [1.125]
    """
    values_N, returns_N = wide(inputs.values_N), wide(inputs.returns_N.detach())
    old_values_N, clip = wide(inputs.old_values_N.detach()), config.value_clip
    loss_N = (values_N - returns_N).square() / 2
    held_N = torch.zeros_like(loss_N, dtype=torch.bool)
    if clip is not None:
        near_N = old_values_N + (values_N - old_values_N).clamp(-clip, clip)
        near_loss_N = (near_N - returns_N).square() / 2
        held_N = near_loss_N > loss_N
        loss_N = torch.maximum(loss_N, near_loss_N)
    return TokenLoss(loss_N, {VALUE_LOSS: loss_N.detach(), VALUE_CLIP_FRACTION: held_N.to(loss_N.dtype)})


def _require(inputs: LossInputs, name: str, reason: str) -> None:
    if name not in inputs.columns:
        raise DataError(f"the policy loss needs the column {name!r}, because {reason}; the batch has none")


def _check(loss: object, inputs: LossInputs, who: str) -> None:
    if not isinstance(loss, TokenLoss):
        raise DataError(f"{who} returned {type(loss).__name__}; expected TokenLoss")
    expected = inputs.logprobs_N.shape
    for name, column_N in {"loss_N": loss.loss_N, **loss.metrics, **loss.maxima}.items():
        if column_N.shape != expected:
            raise DataError(
                f"{who} returned {name} of shape {list(column_N.shape)}; expected one value a token, {list(expected)}"
            )
    if inputs.logprobs_N.requires_grad and torch.is_grad_enabled() and not loss.loss_N.requires_grad:
        raise DataError(
            f"{who} returned loss_N without a gradient: it must be computed from inputs.logprobs_N, not detached"
        )
