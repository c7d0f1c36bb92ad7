"""The loss of a policy: what the configuration names, importance weights, KL divergence and entropy bonus."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, cast

import torch
from torch import Tensor

from podium.algorithms.centering import expected_scores
from podium.algorithms.config import AlgorithmConfig
from podium.algorithms.corrections import correction_weights, generator_log_ratio
from podium.algorithms.declarations import LOSSES, TruncateOptions
from podium.algorithms.entropy import EntropyController
from podium.algorithms.kl import bounded_exp, kl_estimate
from podium.algorithms.metrics import WEIGHT_MEAN, WEIGHT_SQUARE
from podium.algorithms.records import LossInputs, TokenLoss
from podium.algorithms.token_rows import wide
from podium.errors import DataError
from podium.telemetry.metrics import (
    APPROX_KL,
    ENTROPY,
    GRAD_NORM,
    KL,
    LEARNING_RATE,
    LOSS,
    MISMATCH_MAX,
    MISMATCH_MEAN,
    RATIO_MAX,
    RATIO_MEAN,
    SKIPPED_STEPS,
)

# Metrics that no display looks up by name; the others are in podium.telemetry.metrics.
MISMATCH_KL: Final = "mismatch/kl"  # KL(generator || trainer) by k3
WEIGHT_CAPPED: Final = "mismatch/weight_capped"  # share of tokens whose truncated weight was cut to the cap
LEFT_OUT: Final = "mismatch/left_out"  # share of tokens that corrections leave out
DRIFT: Final = "mismatch/drift"  # sum of |w q - p| over ids as score centering sees them
DRIFT_REST: Final = "mismatch/drift_rest"  # the generator's probability of all but its most probable tokens
ROUTER_BALANCE: Final = "policy/router_balance"  # auxiliary loss of a mixture of experts, 1 if its routers are even

_RESERVED: Final = frozenset({LOSS, GRAD_NORM, LEARNING_RATE, SKIPPED_STEPS})  # of the step, not of a token


def policy_loss(inputs: LossInputs, config: AlgorithmConfig) -> TokenLoss:
    """``w · loss + kl_coef · KL(policy || reference) - entropy_coef · entropy`` at each token, ``[N]``.

    With ``algorithm.options.router_balance`` the column ``router_balance`` is added, times that coefficient.

    With ``algorithm.options.score_centering`` the advantage times :func:`.expected_scores` is added.

    The loss is the one that ``config.loss`` names, or the sum of several with their weights, of which each is reported
    as ``loss/NAME``. If one declares ``ratio_to="rollout"``, its ``old_logprobs_N`` are those of the generator. w are
    :func:`.correction_weights`, or 1 without corrections. The KL divergence takes part if ``config.kl_in`` is "loss".
    Ratios, divergences and the entropy are reported wherever their columns are given.

    >>> columns = {"logprobs": torch.tensor([-1.0, -2.0]), "advantages": torch.tensor([1.0, -1.0])}
    >>> out = policy_loss(LossInputs(offsets_B1=torch.tensor([0, 2]), columns=columns), AlgorithmConfig())
    >>> out.loss_N.tolist(), sorted(out.metrics)
    ([-1.0, 1.0], ['policy/approx_kl', 'policy/clip_fraction', 'policy/ratio_mean'])

    Raises:
        ConfigError: The loss cannot be found.
        DataError: A column that the configuration asks for is missing; or the loss did not return one number a token
            with a gradient.
    """
    loss_N, metrics, maxima = _sum_losses(inputs, config)
    before = _replace_old_logprobs(inputs, config, *config.sampled_losses) if config.ratio_to == "rollout" else inputs
    logprobs_N, old_N = inputs.logprobs_N, inputs.old_logprobs_N
    if "advantages" in inputs.columns:
        with torch.no_grad():
            ratio_N = bounded_exp(wide(logprobs_N) - wide(before.old_logprobs_N))
            metrics |= {RATIO_MEAN: ratio_N, APPROX_KL: kl_estimate(before.old_logprobs_N, logprobs_N, "k3")}
            maxima[RATIO_MAX] = ratio_N
    if "rollout_logprobs" in inputs.columns:
        with torch.no_grad():
            difference_N = (wide(old_N) - wide(inputs.rollout_logprobs_N)).abs()
            gap_N = kl_estimate(inputs.rollout_logprobs_N, old_N, "k3")
            metrics |= {MISMATCH_MEAN: difference_N, MISMATCH_KL: gap_N}
            maxima[MISMATCH_MAX] = difference_N
    if (weights_N := correction_weights(inputs, config)) is not None:
        loss_N = loss_N * weights_N
        metrics |= {WEIGHT_MEAN: weights_N, WEIGHT_SQUARE: weights_N.square(), LEFT_OUT: (weights_N == 0).to(weights_N)}
        if "truncate" in config.corrections:
            ratio_N = bounded_exp(generator_log_ratio(inputs))  # of truncate alone, without other corrections
            capped_N = ratio_N >= config.read_options(TruncateOptions).weight_cap
            metrics[WEIGHT_CAPPED] = capped_N.to(weights_N.dtype)
    if config.kl_in == "loss":
        _require(inputs, "ref_logprobs", "algorithm.kl_in = 'loss'")
        kl_N = kl_estimate(logprobs_N, inputs.ref_logprobs_N.detach(), config.kl_estimator)
        loss_N = loss_N + config.kl_coef * kl_N
        metrics[KL] = kl_N.detach()
    elif "ref_logprobs" in inputs.columns:
        metrics[KL] = kl_estimate(logprobs_N.detach(), inputs.ref_logprobs_N.detach(), config.kl_estimator)
    if coef := EntropyController.of(config.entropy_coef).coef:
        _require(inputs, "entropy", "algorithm.entropy_coef is not 0")
        loss_N = loss_N - coef * wide(inputs.entropy_N)
    loss_N = _add_terms(loss_N, inputs, config, metrics)
    if "entropy" in inputs.columns:
        metrics[ENTROPY] = wide(inputs.entropy_N.detach())
    return TokenLoss(loss_N, metrics, maxima)


def _sum_losses(inputs: LossInputs, config: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Return the weighted sum of the losses, their metrics and their maxima.

    Where two losses report one name, the second one's has its own name behind it."""
    total_N: Tensor | None = None
    metrics, maxima = dict[str, Tensor](), dict[str, Tensor]()
    for name, weight in config.sampled_losses.items():
        by_generator = "rollout" in (config.ratio_to, LOSSES.declaration(name).ratio_to)
        loss = LOSSES.load(name)(_replace_old_logprobs(inputs, config, name) if by_generator else inputs, config)
        _check(loss, inputs, f"loss {name!r}")
        short = name.rpartition(":")[2]
        for figures, added in ((metrics, loss.metrics), (maxima, loss.maxima)):
            figures |= {f"{key}/{short}" if key in figures else key: value for key, value in added.items()}
        if not isinstance(config.loss, str):
            metrics[f"loss/{short}"] = wide(loss.loss_N.detach())
        loss_N = wide(loss.loss_N) if weight == 1.0 else wide(loss.loss_N) * weight
        total_N = loss_N if total_N is None else total_N + loss_N
    assert total_N is not None  # a configuration has a loss
    return total_N, metrics, maxima


def _add_terms(loss_N: Tensor, inputs: LossInputs, config: AlgorithmConfig, metrics: dict[str, Tensor]) -> Tensor:
    """Return the loss with the terms of options that all losses have. Adds to ``metrics``."""
    if config.score_centering:
        _require(inputs, "rollout_top", "algorithm.options.score_centering is not 0")
        _require(inputs, "at_rollout_top", "algorithm.options.score_centering is not 0")
        centered = expected_scores(inputs, lambda tokens: correction_weights(tokens, config))
        losses = ((LOSSES.declaration(name), weight) for name, weight in config.sampled_losses.items())
        factor = sum(weight for loss, weight in losses if loss.scales_advantage)
        loss_N = loss_N + factor * wide(inputs.advantages_N) * centered.scores_N
        metrics |= {DRIFT: centered.drift_N, DRIFT_REST: centered.rest_N}
    if balance := config.router_balance:
        _require(inputs, "router_balance", "algorithm.options.router_balance is not 0")
        balance_N = wide(inputs.columns["router_balance"])
        loss_N = loss_N + balance * balance_N
        metrics[ROUTER_BALANCE] = balance_N.detach()
    return loss_N


def _replace_old_logprobs(inputs: LossInputs, config: AlgorithmConfig, *losses: str) -> LossInputs:
    """The inputs with the log-probabilities of the generator in the place of those before the update."""
    _require(inputs, "rollout_logprobs", f"the ratio of the loss {', '.join(losses)!r} is to the generator")
    return replace(inputs, columns={**inputs.columns, "old_logprobs": inputs.rollout_logprobs_N})


def _require(inputs: LossInputs, name: str, reason: str) -> None:
    if name not in inputs.columns:
        raise DataError(f"the policy loss needs the column {name!r}, because {reason}; the batch has none")


def _check(loss: object, inputs: LossInputs, who: str) -> None:
    if not isinstance(loss, TokenLoss):
        raise DataError(f"{who} returned {type(loss).__name__}; expected TokenLoss")
    expected = inputs.logprobs_N.shape
    for name, figures in (("metrics", loss.metrics), ("maxima", loss.maxima)):
        if not isinstance(cast("object", figures), Mapping):
            raise DataError(f"{who} returned {name} as {type(figures).__name__}; expected tensors by name")
        if reserved := sorted(_RESERVED & figures.keys()):
            raise DataError(
                f"{who} returned {name} with {reserved[0]!r}, which Podium itself reports: choose another name"
            )
    columns: dict[str, object] = {"loss_N": loss.loss_N, **loss.metrics, **loss.maxima}
    for name, column_N in columns.items():
        if not isinstance(column_N, Tensor):
            raise DataError(
                f"{who} returned {name} as {type(column_N).__name__}; expected a tensor of one value a token"
            )
        if column_N.shape != expected:
            raise DataError(
                f"{who} returned {name} of shape {list(column_N.shape)}; expected one value a token, {list(expected)}"
            )
    if inputs.logprobs_N.requires_grad and torch.is_grad_enabled() and not loss.loss_N.requires_grad:
        raise DataError(
            f"{who} returned loss_N without a gradient: it must be computed from inputs.logprobs_N, not detached"
        )
