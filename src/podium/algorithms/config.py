"""The settings of the algorithm: which advantage, which loss, and their constants."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from podium.algorithms.advantages.resolve import check_advantage_name
from podium.algorithms.aggregation import AGGREGATIONS, Aggregation
from podium.algorithms.kl import KL_ESTIMATORS, KLEstimator
from podium.errors import ConfigError

__all__ = ["AlgorithmConfig", "KLPlace"]

KLPlace = Literal["none", "loss", "reward"]


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """What is optimised, from rewards to the loss of a token. The defaults are GRPO with DAPO's clip bounds.

    Raises:
        ConfigError: a value out of its range, or settings that contradict each other; names key, value and expectation.
    """

    advantage: str = "grpo"  # grpo, rloo, reinforce_pp, gae, or module:function, or path/file.py:function
    gamma: float = 1.0  # discount a token (gae, reinforce_pp)
    lam: float = 0.95  # lambda of gae: 0 trusts the critic, 1 the rewards
    normalise_advantage: bool | None = None  # divide by the std; null: as the estimator's paper does; false: Dr. GRPO
    kl_coef: float = 0.0  # of the KL to the reference policy; 0 with kl_in = loss or reward only measures it
    kl_in: KLPlace = "none"  # where the KL to the reference counts; none: no reference policy is kept
    kl_estimator: KLEstimator = "k3"  # k1 and k3 are unbiased, k2 and k3 of low variance; k1 cannot be a loss
    kl_target: float | None = None  # nats a token; set: kl_coef adapts to hold it there (kl_in = reward)
    clip_low: float = 0.2  # the ratio's lower bound is 1 - clip_low
    clip_high: float = 0.28  # the ratio's upper bound is 1 + clip_high
    dual_clip: float | None = None  # above 1: bounds the loss of tokens of negative advantage; 3 is usual
    value_clip: float | None = 0.2  # how far a critic's update may move a value; null: free
    aggregation: Aggregation = "token-mean"  # how tokens become one loss
    entropy_coef: float = 0.0  # of the entropy bonus
    importance_cap: float | None = None  # cap of the generator-to-trainer importance weights, 2 is usual; null: none
    epochs: int = 1  # times that a step's completions are gone through
    minibatches: int = 1  # optimizer steps an epoch

    def __post_init__(self) -> None:
        check_advantage_name(self.advantage)
        _check_choice("kl_in", self.kl_in, get_args(KLPlace))
        _check_choice("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        _check_choice("aggregation", self.aggregation, AGGREGATIONS)
        for name, valid, expected in self._ranges():
            if not valid:
                raise ConfigError(f"algorithm.{name} = {getattr(self, name)!r}: expected {expected}")
        self._check_kl()

    def _ranges(self) -> Iterator[tuple[str, bool, str]]:
        yield "gamma", 0 <= self.gamma <= 1, "a number from 0 to 1"
        yield "lam", 0 <= self.lam <= 1, "a number from 0 to 1"
        yield "kl_coef", 0 <= self.kl_coef < math.inf, "a finite number, at least 0"
        yield "kl_target", _unset_or(self.kl_target, 0, math.inf), "a positive number of nats, or null"
        yield (
            "clip_low",
            0 < self.clip_low <= 1,
            "a number above 0 and at most 1 (the ratio's lower bound is 1 minus it)",
        )
        yield "clip_high", 0 < self.clip_high < math.inf, "a positive number"
        yield "dual_clip", _unset_or(self.dual_clip, 1, math.inf), "a number above 1, or null"
        yield "value_clip", _unset_or(self.value_clip, 0, math.inf), "a positive number, or null"
        yield "entropy_coef", math.isfinite(self.entropy_coef), "a finite number"
        yield "importance_cap", _unset_or(self.importance_cap, 1, math.inf), "a number above 1, or null"
        yield "epochs", self.epochs >= 1, "at least 1"
        yield "minibatches", self.minibatches >= 1, "at least 1"

    def _check_kl(self) -> None:
        if self.kl_in == "none" and self.kl_coef > 0:
            raise ConfigError(
                f"algorithm.kl_coef = {self.kl_coef} with algorithm.kl_in = 'none': expected kl_coef 0, or kl_in set "
                "to where the KL counts, 'loss' or 'reward'"
            )
        if self.kl_in == "loss" and self.kl_estimator == "k1":
            raise ConfigError(
                "algorithm.kl_estimator = 'k1' with algorithm.kl_in = 'loss': expected 'k2' or 'k3', because the "
                "gradient of k1 is zero on average; k1 serves kl_in = 'reward'"
            )
        if self.kl_target is not None and (self.kl_in != "reward" or self.kl_coef == 0):
            raise ConfigError(
                f"algorithm.kl_target = {self.kl_target} with kl_in = {self.kl_in!r} and kl_coef = {self.kl_coef}: "
                "expected kl_in = 'reward' and a positive kl_coef to start from"
            )

    @property
    def needs_reference(self) -> bool:
        """Whether a reference policy takes part."""
        return self.kl_in != "none"

    @property
    def updates(self) -> int:
        """Optimizer steps on one batch. With 1 the old log-probabilities are those of the update itself."""
        return self.epochs * self.minibatches

    def normalises(self, *, default: bool) -> bool:
        """``normalise_advantage``, or what an estimator does by ``default`` when it is not set."""
        return default if self.normalise_advantage is None else self.normalise_advantage


def _unset_or(value: float | None, above: float, below: float) -> bool:
    return value is None or above < value < below


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value in choices:
        return
    near = difflib.get_close_matches(value, choices, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"algorithm.{name} = {value!r}: expected one of {', '.join(choices)}{hint}")
