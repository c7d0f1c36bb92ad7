"""The settings of the algorithm: which advantage, which loss, and their constants. This module imports no torch."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import Field

from podium.algorithms.declarations import ADVANTAGES, LOSSES, loss_imitates
from podium.config import build_config, section
from podium.errors import ConfigError
from podium.functions import check_function_name

__all__ = ["Aggregation", "AlgorithmConfig", "KLEstimator", "KLPlace"]

C = TypeVar("C")
Aggregation = Literal["token-mean", "sequence-mean", "sequence-sum-constant"]
KLEstimator = Literal["k1", "k2", "k3"]
KLPlace = Literal["none", "loss", "reward"]


@section("algorithm")
class AlgorithmConfig:
    """The objective: advantages, the loss and the KL penalty. The defaults are GRPO with DAPO's clip bounds."""

    advantage: str = "grpo"
    """This function turns rewards into advantages: grpo, rloo, reinforce_pp, gae, grpo_turns, gae_turns,
    module:function, or path/file.py:function."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """gae and reinforce_pp discount rewards by this factor for each token, gae_turns and grpo_turns for each turn."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """gae uses this lambda: 0 relies on the critic's values, 1 on the rewards."""
    normalize_advantage: bool | None = None
    """Advantages are divided by their standard deviation. null means as in the estimator's paper; false is Dr. GRPO."""
    kl_coef: float = Field(default=0.0, ge=0, le=1e6)
    """The KL divergence from the reference policy is multiplied by this coefficient. 0 only measures the divergence."""
    kl_in: KLPlace = "none"
    """The KL divergence is added to the loss or subtracted from the reward. none runs without a reference policy."""
    kl_estimator: KLEstimator = "k3"
    """The KL divergence is estimated by k1 or k3, which are unbiased, or by k2. k2 and k3 have low variance; k1 cannot
    be used in the loss."""
    kl_target: float | None = Field(default=None, gt=0, le=1e6)
    """kl_coef adapts so that the KL divergence stays at this many nats a token. It needs kl_in = reward."""
    loss: str = "ppo_clip"
    """This function is the policy's loss: ppo_clip, gspo, clip_cov, cross_entropy, module:function, or
    path/file.py:function."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """These options belong to the advantage or the loss, which declares them."""
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """The probability ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(default=0.28, gt=0, le=1e9)
    """The probability ratio is clipped above at 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1, le=1e9)
    """The loss of a token with a negative advantage is bounded at this multiple of it. 3 is usual; null means no
    bound."""
    value_clip: float | None = Field(default=0.2, gt=0, le=1e9)
    """An update moves the critic's values by at most this amount. null means no bound."""
    aggregation: Aggregation = "token-mean"
    """The losses of tokens become one number by this rule: each token counts the same (token-mean), each completion
    counts the same (sequence-mean), or sums over completions are divided by a constant (sequence-sum-constant)."""
    entropy_coef: float = Field(default=0.0, ge=-1e6, le=1e6)
    """The policy's entropy, times this coefficient, is subtracted from the loss."""
    importance_cap: Annotated[float, Field(gt=1, le=1e9)] | Literal["auto"] | None = "auto"
    """Weights that correct for differences between generator and trainer are capped at this value. null means no such
    weights, and auto means 2 where run.schedule lets older weights generate completions, and null otherwise."""
    max_mismatch: float | None = Field(default=0.5, gt=0, le=1e9)
    """The run ends if the generator's and the trainer's log-probabilities of a step's tokens differ by more than this
    many nats on average. null never ends the run."""
    epochs: int = Field(default=1, ge=1, le=10**6)
    """Training goes this many times over the completions of a step."""
    minibatches: int = Field(default=1, ge=1, le=10**6)
    """Each epoch has this many optimizer steps."""

    def __post_init__(self) -> None:
        check_function_name(self.advantage, key="algorithm.advantage", known=ADVANTAGES)
        check_function_name(self.loss, key="algorithm.loss", known=LOSSES)
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
    def weight_cap(self) -> float | None:
        """The cap of importance weights, or None without them. What "auto" means is up to the recipe."""
        return None if self.importance_cap == "auto" else self.importance_cap

    @property
    def needs_reference(self) -> bool:
        """Whether a reference policy takes part."""
        return self.kl_in != "none"

    @property
    def reinforces(self) -> bool:
        """Whether rewards train the policy, and not examples. A loss of the user's own is loaded."""
        return not loss_imitates(self.loss)

    @property
    def updates(self) -> int:
        """Number of optimizer steps on one batch. With 1 the old log-probabilities are those of the update itself."""
        return self.epochs * self.minibatches

    def read_options(self, section: type[C]) -> C:
        """Return those of ``options`` that the keys of ``section`` name, checked.

        Raises:
            ConfigError: An option has the wrong type or is out of its range.
        """
        options = {
            option.name: self.options[option.name]
            for option in fields(cast("Any", section))
            if option.name in self.options
        }
        return build_config(section, options, key="algorithm.options")

    def normalizes(self, *, default: bool) -> bool:
        """``normalize_advantage``, or what an estimator does by ``default`` when it is not set."""
        return default if self.normalize_advantage is None else self.normalize_advantage
