"""The Kullback-Leibler divergence from samples: its estimators, the penalty in the reward, and the coefficient.

Estimators: Schulman 2020, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html. With tokens sampled
from p and ``d = log p - log q``, each of these has KL(p || q) as its mean, exactly or nearly:

- ``k1 = d``: unbiased, of high variance, may be negative;
- ``k2 = d² / 2``: biased by a little when p and q are near, of low variance;
- ``k3 = exp(-d) - 1 + d``: unbiased, of low variance, never negative;
- ``abs = |d|``: no estimator of the divergence, but of a distance in log-probability, which one token cannot dominate;
- ``k1+``, ``k3+``, ``abs+``: the values of these three with the gradient of k2, straight through.

As a *loss*, k1 is useless: its gradient is that of log p, whose mean is zero. k2 has the gradient of the KL itself, k3
that of the reversed KL (Tang and Munos 2025, arXiv:2506.09477). A ``+`` therefore makes any of them a loss with the
gradient of the KL, as verl's names do. In the *reward* nothing is differentiated, and k1 is
the usual choice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast, get_args

import torch
from torch import Tensor

from podium.algorithms.config import KLEstimator
from podium.algorithms.token_rows import wide
from podium.errors import ConfigError

# A larger log-ratio counts as this one, so that no single token turns a batch into infinities. exp(20) is 5e8.
LOG_RATIO_LIMIT = 20.0


def bounded_exp(log_ratio_N: Tensor) -> Tensor:
    """``exp`` of log-ratios up to 20; larger ones count as 20 and have no gradient."""
    return log_ratio_N.clamp(max=LOG_RATIO_LIMIT).exp()


def kl_estimate(logprobs_N: Tensor, other_logprobs_N: Tensor, estimator: KLEstimator = "k3") -> Tensor:
    """KL(p || q) at each token, in nats, ``[N]``; differentiable in both.

    >>> kl_estimate(torch.tensor([-1.0]), torch.tensor([-1.5]), "k2").tolist()
    [0.125]

    Args:
        logprobs_N: log p of tokens that were sampled from p.
        other_logprobs_N: log q of the same tokens.
        estimator: See the module.

    Raises:
        ConfigError: The estimator is unknown.
    """
    difference_N = wide(logprobs_N) - wide(other_logprobs_N)
    if estimator in ("k1+", "k3+", "abs+"):
        value_N = kl_estimate(logprobs_N, other_logprobs_N, cast("KLEstimator", estimator[:-1])).detach()
        slope_N = difference_N.square() / 2
        return value_N + (slope_N - slope_N.detach())
    if estimator == "abs":
        return difference_N.abs()
    if estimator == "k1":
        return difference_N
    if estimator == "k2":
        return difference_N.square() / 2
    if estimator == "k3":
        bounded_N = difference_N.clamp(min=-LOG_RATIO_LIMIT)
        return torch.expm1(-bounded_N) + bounded_N  # expm1 keeps the digits that exp(-d) - 1 loses near d = 0
    raise ConfigError(f"algorithm.kl_estimator = {estimator!r}: expected one of {', '.join(get_args(KLEstimator))}")


def penalize(token_rewards_N: Tensor, kl_N: Tensor, mask_N: Tensor, coef: float) -> Tensor:
    """``token_rewards - coef * kl`` at the mask's tokens, float ``[N]``, without gradient: the KL in the reward.

    Ziegler et al. 2019, arXiv:1909.08593, equation 2, which has k1.
    """
    return wide(token_rewards_N) - coef * torch.where(mask_N, wide(kl_N.detach()), 0.0)


@dataclass(frozen=True, kw_only=True)
class KLController:
    """The coefficient of the KL, which follows a target: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.

    ``e = clip(kl / target - 1, -0.2, 0.2)``, ``coef *= 1 + 0.1 e``. Without a target the coefficient stays.

    >>> round(KLController(coef=0.1, target=0.02).next(kl=0.5).coef, 6)
    0.102
    """

    coef: float
    target: float | None = None

    def next(self, kl: float | None) -> KLController:
        """Return the controller after a step whose mean KL a token was ``kl`` (nats); None if it was not measured."""
        if self.target is None or kl is None:
            return self
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        return replace(self, coef=self.coef * (1.0 + 0.1 * error))

    def restore(self, coef: float) -> KLController:
        """Return the controller that goes on from a checkpoint's ``coef``. Without a target the coefficient is a
        setting, and the one that the run has now holds."""
        return self if self.target is None else replace(self, coef=coef)
