"""Metrics of a step from parts that add up over ranks and micro-batches.

A loss reports each metric token by token (:class:`~podium.algorithms.TokenLoss`). :func:`partial_metrics` sums them
under the batch's weights, sums of micro-batches and ranks are added, and ``means`` divides once, at the end. So a
metric is the same on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from podium.algorithms.records import TokenLoss
from podium.algorithms.token_rows import group_statistics, wide
from podium.errors import DataError

WEIGHT_MEAN: Final = "mismatch/weight_mean"  # mean of the weights of corrections
WEIGHT_SQUARE: Final = "mismatch/weight_square"  # mean of their squares, from which the next figure comes
EFFECTIVE_SIZE: Final = "mismatch/effective_size"  # effective sample size as a share: mean² / mean of squares


class Maximum(float):
    """A metric of an optimizer step of which a training step with several of them has the largest value, and not the
    mean."""


class TokenMean(float):
    """A metric of an optimizer step that is a mean over tokens. A training step with several of them has the mean over
    the tokens of all.

    Attributes:
        count: The number of those that the mean is over: tokens, or rows where each row counts the same.
    """

    count: float = 1.0

    @classmethod
    def over(cls, count: float, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the ``metrics`` of an optimizer step; each but a :class:`Maximum` becomes a mean over ``count``."""
        means = {
            name: value if isinstance(value, TokenMean) else cls(value)
            for name, value in metrics.items()
            if not isinstance(value, Maximum)
        }
        for mean in means.values():
            mean.count = count
        return {**metrics, **means}


class ExplainedVariance(TokenMean):
    """What :func:`explained_variance` returns. A training step with several of them has that of the tokens of all,
    which is not their mean.

    Attributes:
        moments: The sums of :func:`value_moments` that it was computed from.
    """

    moments: tuple[float, ...] = ()

    @classmethod
    def join(cls, parts: Sequence[ExplainedVariance]) -> ExplainedVariance:
        """Return that of the tokens of all parts, each of which has its ``count`` of them."""
        moments = torch.zeros(5, dtype=torch.float64)
        for part in parts:
            if part.moments[0]:
                moments += part.count / part.moments[0] * torch.tensor(part.moments, dtype=torch.float64)
        return explained_variance(moments)


@dataclass(frozen=True)
class PartialMetrics:
    """What some of the tokens contribute to a step's metrics, as scalars without gradient.

    Attributes:
        weight: The sum of the tokens' weights.
        sums: The sum of weight times metric, by name.
        maxima: The maximum over tokens of positive weight, by name; minus infinity where there are none.
    """

    weight: Tensor
    sums: Mapping[str, Tensor]
    maxima: Mapping[str, Tensor]

    def __add__(self, other: PartialMetrics) -> PartialMetrics:
        """Return the metrics of both. Raises DataError where their names differ."""
        if (self.sums.keys(), self.maxima.keys()) != (other.sums.keys(), other.maxima.keys()):
            names = sorted({*self.sums, *self.maxima} ^ {*other.sums, *other.maxima})
            raise DataError(
                f"the loss reports {', '.join(names)} in some micro-batches and not in others: return the same metrics "
                "for every micro-batch"
            )
        return PartialMetrics(
            self.weight + other.weight,
            {name: value + other.sums[name] for name, value in self.sums.items()},
            {name: torch.maximum(value, other.maxima[name]) for name, value in self.maxima.items()},
        )

    def means(self) -> dict[str, float]:
        """Return the weighted means and the maxima by name; nothing if no token had weight."""
        total = float(self.weight)
        if total == 0:
            return {}
        means = {name: float(value) / total for name, value in self.sums.items()}
        if (square := means.pop(WEIGHT_SQUARE, None)) is not None:
            means[EFFECTIVE_SIZE] = means.get(WEIGHT_MEAN, 0.0) ** 2 / square if square else 0.0
        return means | {name: Maximum(value) for name, value in self.maxima.items()}


@torch.no_grad()
def partial_metrics(loss: TokenLoss, weights_N: Tensor) -> PartialMetrics:
    """Sum a loss's metrics under ``weights_N``, the weights that also make its loss one number.

    >>> loss = TokenLoss(torch.zeros(2), {"a": torch.tensor([1.0, 3.0])}, {"b": torch.tensor([5.0, 9.0])})
    >>> one, other = partial_metrics(loss, torch.tensor([0.5, 0.0])), partial_metrics(loss, torch.tensor([0.0, 0.5]))
    >>> (one + other).means()
    {'a': 2.0, 'b': 9.0}
    """
    weights_N = wide(weights_N)
    counted = weights_N > 0
    lowest = torch.full_like(weights_N[:1], -torch.inf) if len(weights_N) else weights_N.new_full((1,), -torch.inf)
    return PartialMetrics(
        weight=weights_N.sum(),
        sums={n: torch.where(counted, weights_N * wide(v_N), 0.0).sum() for n, v_N in loss.metrics.items()},
        maxima={n: torch.cat([lowest, wide(v_N)[counted].to(lowest)]).amax() for n, v_N in loss.maxima.items()},
    )


@torch.no_grad()
def value_moments(values_N: Tensor, returns_N: Tensor, weights_N: Tensor) -> Tensor:
    """Weighted sums of (1, returns, returns², errors, errors²) with error = return - value, ``[5]``; ranks add theirs.

    The sums are in float64 where the device has it, because variances are differences of large numbers.
    """
    dtype = torch.float32 if values_N.device.type == "mps" else torch.float64
    weights_N = weights_N.to(dtype)
    counted = weights_N > 0
    returns_N = torch.where(counted, returns_N.to(dtype), 0.0)
    errors_N = torch.where(counted, returns_N - values_N.to(dtype), 0.0)
    columns = (torch.ones_like(weights_N), returns_N, returns_N.square(), errors_N, errors_N.square())
    return torch.stack([(weights_N * column_N).sum() for column_N in columns])


def explained_variance(moments: Tensor) -> ExplainedVariance:
    """``1 - Var(returns - values) / Var(returns)`` from the sums of :func:`value_moments`.

    A perfect critic has 1. A critic that is no better than the mean has 0, and a worse one is below 0. Returns without
    variance give 0.

    >>> returns_N, ones_N = torch.tensor([0.0, 1.0, 2.0]), torch.ones(3)
    >>> explained_variance(value_moments(returns_N - 7.0, returns_N, ones_N))
    1.0
    """
    weight, returns, returns2, errors, errors2 = sums = tuple(float(moment) for moment in moments)
    share = 0.0
    if weight > 0:
        variance = returns2 / weight - (returns / weight) ** 2
        if variance > 1e-12 * max(1.0, returns2 / weight):
            share = 1.0 - (errors2 / weight - (errors / weight) ** 2) / variance
    explained = ExplainedVariance(share)
    explained.moments = sums
    return explained


def flat_groups(rewards_B: Tensor, group_B: Tensor) -> float:
    """Return the share of groups whose rewards are all equal: they teach a group-relative estimator nothing.

    >>> flat_groups(torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([3, 5, 5, 3]))
    0.5
    """
    return float(group_statistics(rewards_B, group_B).flat_G.float().mean()) if len(group_B) else 0.0
