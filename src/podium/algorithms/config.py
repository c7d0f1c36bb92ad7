"""The settings of the algorithm: which advantage, which loss, and their constants. This module imports no torch."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Annotated, Any, Final, Literal, NamedTuple, Self, TypeVar, cast

from pydantic import Field

from podium.algorithms.declarations import (
    ADVANTAGES,
    CORRECTIONS,
    DECLARED_DEFAULTS,
    LOSSES,
    CenteringOptions,
    CriticOptions,
    Declaration,
    ReferenceOptions,
    RouterOptions,
    TeacherOptions,
)
from podium.algorithms.entropy import EntropyController
from podium.config import build_config, section
from podium.errors import ConfigError

C = TypeVar("C")
Aggregation = Literal["token-mean", "sequence-mean", "sequence-sum-constant"]
KLEstimator = Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"]
KLPlace = Literal["none", "loss", "reward"]

_DAPO: Final = "default of the recipe: Yu et al. 2025, DAPO, arXiv:2503.14476, section"
_PPO: Final = "default with a critic: Schulman et al. 2017, PPO, arXiv:1707.06347, equation 7"


class Setting(NamedTuple):
    """The value of a key, and where it comes from: "yours", or the loss, the estimator or the recipe whose default it
    is."""

    value: Any
    origin: str


_RECIPE: Final = {
    "clip_low": Setting(0.2, f"{_DAPO} 3.1"),
    "clip_high": Setting(0.28, f"{_DAPO} 3.1"),
    "aggregation": Setting("token-mean", f"{_DAPO} 3.3"),
}


@section("algorithm.epochs")
class EpochChoice:
    """How often a step goes over its completions. They are the entries of ``algorithm.epochs``, where that is a
    mapping."""

    count: int = Field(default=1, ge=1, le=10**6)
    """Training goes at most this many times over the completions of a step."""
    max_kl: float | None = Field(default=None, gt=0, le=1e6)
    """The policy takes no further optimizer step in a training step once KL(old || new) is above this many nats a token
    on average over a minibatch. null sets no bound."""


@section("algorithm")
class AlgorithmConfig:
    """The objective: advantages, the loss and the KL penalty. The defaults are GRPO with DAPO's clip bounds.

    The keys ``clip_low``, ``clip_high``, ``aggregation`` and ``normalize_advantage`` are None where the defaults of the
    loss or of the estimator hold. :meth:`resolve` puts the values there, and workers pass it on to losses.
    """

    advantage: str = "grpo"
    """This function turns rewards into advantages: grpo, dr_grpo, rloo, reinforce_pp, reinforce_pp_baseline, gae, one
    of an installed package, such as opo, remax or grpo_turns, module:function, or path/file.py:function."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """gae and reinforce_pp discount rewards by this factor for each token, as otb and remax of packages do; gae_turns
    and grpo_turns for each turn."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """gae uses this lambda: 0 relies on the critic's values, 1 on the rewards."""
    normalize_advantage: bool | None = None
    """Advantages are divided by their standard deviation. null means as in the estimator's paper: rloo and
    dr_grpo do not divide."""
    kl_coef: float = Field(default=0.0, ge=0, le=1e6)
    """The KL divergence from the reference policy is multiplied by this coefficient. 0 only measures the divergence."""
    kl_in: KLPlace = "none"
    """The KL divergence is added to the loss or subtracted from the reward. none runs without a reference policy."""
    kl_estimator: KLEstimator = "k3"
    """The KL divergence is estimated by k1 or k3, which are unbiased, by k2, or by the absolute difference (abs). k2
    and k3 have low variance; k1 cannot be used in the loss. With a + the value is the same, and the gradient that of
    k2."""
    kl_target: float | None = Field(default=None, gt=0, le=1e6)
    """kl_coef adapts so that the KL divergence stays at this many nats a token. It needs kl_in = reward."""
    loss: str | Mapping[str, Annotated[float, Field(ge=0, le=1e6)]] = "ppo_clip"
    """This function is the policy's loss: ppo_clip, gspo, cispo, reinforce, teacher_kl, cross_entropy, one of an
    installed package, such as dppo_tv, gmpo or sapo, module:function, or path/file.py:function. A mapping of names to
    weights, such as {ppo_clip: 1, teacher_kl: 0.5}, is their sum, in which cross_entropy learns the data's answers to
    the step's prompts."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """These options belong to the advantage, the loss or the correction, which declares them."""
    clip_low: float | None = Field(default=None, gt=0, le=1)
    """The probability ratio is clipped below at 1 - clip_low. gmpo bounds the logarithm of the ratio instead, dppo_tv
    the probability, and dppo_kl the divergence. null means the default of the loss's paper, and else 0.2."""
    clip_high: float | None = Field(default=None, gt=0, le=1e9)
    """The probability ratio is clipped above at 1 + clip_high; losses that read clip_low differently read this
    likewise. null means the default of the loss's paper, and else 0.28, or 0.2 with a critic."""
    value_clip: float | None = Field(default=0.2, gt=0, le=1e9)
    """An update moves the critic's values by at most this amount. null means no bound."""
    aggregation: Aggregation | None = None
    """The losses of tokens become one number by this rule: each token counts the same (token-mean), each completion
    counts the same (sequence-mean), or sums over completions are divided by a constant (sequence-sum-constant). null
    means the default of the loss's paper, then that of the advantage's, such as sequence-mean for the loss gspo and
    sequence-sum-constant for the advantage dr_grpo, and else token-mean."""
    cut_off: Literal["learn", "leave_out"] = "learn"
    """Completions that were cut off at sampling.max_new_tokens, and sessions that were cut off at their budget, train
    like others (learn), or are left out of the loss and of its normalization (leave_out). They count in the statistics
    of their group in both cases."""
    entropy_coef: Annotated[float, Field(ge=-1e6, le=1e6)] | Mapping[str, Any] = 0.0
    """The policy's entropy, times this coefficient, is subtracted from the loss. {target: 0.2, delta: 1e-4, max: 0.005}
    lets the coefficient follow the entropy, which then stays near the target."""
    correction: str | tuple[str, ...] = "auto"
    """These weights or masks of tokens correct for differences between generator and trainer: truncate,
    bypass, one of an installed package, such as icepop, sequence_mask or geometric, module:function,
    path/file.py:function, or a list of these. auto means truncate where run.schedule lets
    older weights generate completions, and none otherwise."""
    max_mismatch: float | None = Field(default=0.5, gt=0, le=1e9)
    """The run ends if the generator's and the trainer's log-probabilities of a step's tokens differ by more than this
    many nats on average. null never ends the run."""
    epochs: Annotated[int, Field(ge=1, le=10**6)] | Mapping[str, Any] = 1
    """Training goes this many times over the completions of a step. {count: 4, max_kl: 0.02} ends the policy's updates
    of a step after the first one that measured a KL(old || new) above max_kl nats a token."""
    minibatches: int = Field(default=1, ge=1, le=10**6)
    """Each epoch has this many optimizer steps."""

    def __post_init__(self) -> None:
        _ = self.epoch_choice, EntropyController.of(self.entropy_coef)  # raises an error if an entry is unknown
        ADVANTAGES.check_name(self.advantage)
        if not self.sampled_losses:
            raise ConfigError(
                f"algorithm.loss = {self.loss!r}: expected the name of a loss, or some names with weights, one of "
                "them a loss of completions; podium train sft learns answers alone"
            )
        if not any(self.losses.values()):
            raise ConfigError(f"algorithm.loss = {self.loss!r}: all weights are 0, so that nothing is learned")
        for name in self.losses:
            LOSSES.check_name(name)
        if isinstance(self.correction, tuple) and not {"auto", "none"}.isdisjoint(self.correction):
            raise ConfigError(f"algorithm.correction = {list(self.correction)}: expected auto or none alone, or names")
        for name in self.corrections:
            CORRECTIONS.check_name(name)
        if self.kl_in == "none" and self.kl_coef > 0:
            raise ConfigError(
                f"algorithm.kl_coef = {self.kl_coef} with algorithm.kl_in = 'none': expected kl_coef 0, or kl_in set "
                "to where the KL counts, 'loss' or 'reward'"
            )
        if self.kl_in == "loss" and self.kl_estimator == "k1":
            raise ConfigError(
                "algorithm.kl_estimator = 'k1' with algorithm.kl_in = 'loss': expected 'k2', 'k3' or 'k1+', because "
                "the gradient of k1 is zero on average; k1 serves kl_in = 'reward'"
            )
        if self.kl_target is not None and (self.kl_in != "reward" or self.kl_coef == 0):
            raise ConfigError(
                f"algorithm.kl_target = {self.kl_target} with kl_in = {self.kl_in!r} and kl_coef = {self.kl_coef}: "
                "expected kl_in = 'reward' and a positive kl_coef to start from"
            )

    @property
    def corrections(self) -> tuple[str, ...]:
        """The corrections by name. There are none for "auto", whose meaning is up to the recipe."""
        names = (self.correction,) if isinstance(self.correction, str) else self.correction
        return tuple(name for name in names if name not in ("auto", "none"))

    @property
    def ratio_to(self) -> Literal["old", "rollout"]:
        """The policy that the ratio of the loss is to: see :class:`Declaration`. Functions of the user's own are
        loaded."""
        if any(CORRECTIONS.declaration(name).ratio_to == "rollout" for name in self.corrections):
            return "rollout"
        losses = map(LOSSES.declaration, self.sampled_losses)
        return "rollout" if all(loss.ratio_to == "rollout" for loss in losses) else "old"

    @property
    def compared_policy(self) -> str:
        """Whose log-probabilities, from another pass, an update compares with its own: those of the policy before the
        step's first update, or of the generator; "" if it compares none. Functions of the user's own are loaded."""
        if self.updates > 1:
            return "the policy before the update"
        by_losses = any(LOSSES.declaration(name).ratio_to == "rollout" for name in self.sampled_losses)
        by_weights = any(CORRECTIONS.declaration(name).reads_ratio for name in self.corrections)
        return "the generator" if by_losses or by_weights else ""

    @property
    def losses(self) -> Mapping[str, float]:
        """The weight of each loss by its name, in the order of the configuration."""
        return {self.loss: 1.0} if isinstance(self.loss, str) else self.loss

    @property
    def sampled_losses(self) -> Mapping[str, float]:
        """The losses of the policy's own completions: all but ``cross_entropy`` in a mapping."""
        return {name: weight for name, weight in self.losses.items() if name != "cross_entropy" or name == self.loss}

    @property
    def answer_weight(self) -> float:
        """The weight of the data's answers, which ``cross_entropy`` in a mapping of losses learns."""
        return 0.0 if isinstance(self.loss, str) else self.loss.get("cross_entropy", 0.0)

    @property
    def needs_reference(self) -> bool:
        """Whether a reference policy takes part."""
        return self.kl_in != "none"

    @property
    def needs_teacher(self) -> bool:
        """Whether a teacher takes part. A loss of the user's own is loaded."""
        return any(LOSSES.declaration(name).needs_teacher for name in self.losses)

    @property
    def teacher(self) -> TeacherOptions:
        """The options of the teacher."""
        return self.read_options(TeacherOptions)

    @property
    def reinforces(self) -> bool:
        """Whether rewards or a teacher train the policy, and not examples alone. A loss of the user's own is loaded."""
        return not all(LOSSES.declaration(name).imitates for name in self.sampled_losses)

    @property
    def updates(self) -> int:
        """Number of optimizer steps on one batch. With 1 the old log-probabilities are those of the update itself."""
        return self.epoch_choice.count * self.minibatches

    @property
    def reference(self) -> ReferenceOptions:
        """How the reference follows the policy."""
        return self.read_options(ReferenceOptions) if self.needs_reference else ReferenceOptions()

    @property
    def uses_routers(self) -> bool:
        """Whether an option is for mixtures of experts alone."""
        return self.router_balance != 0 or self.router_replay != "none"

    @property
    def router_balance(self) -> float:
        """The coefficient of the auxiliary loss of a mixture of experts."""
        return self.read_options(RouterOptions).router_balance

    @property
    def router_replay(self) -> Literal["none", "old", "rollout"]:
        """The pass of which a mixture of experts replays the choices."""
        return self.read_options(RouterOptions).router_replay

    @property
    def record_reasons(self) -> Mapping[str, str]:
        """What engines record, as fields of ``RequestParams``, and the option with its value that needs it."""
        needed = {"record_top": f"score_centering = {count}"} if (count := self.score_centering) else {}
        replays = self.router_replay == "rollout"
        return needed | ({"record_experts": "router_replay = 'rollout'"} if replays else {})

    @property
    def record_params(self) -> Mapping[str, Any]:
        """The same fields with their values."""
        values = {"record_top": self.score_centering, "record_experts": True}
        return {name: values[name] for name in self.record_reasons}

    @property
    def score_centering(self) -> int:
        """The number of the generator's most probable tokens over which losses are centered; 0 for none."""
        return self.read_options(CenteringOptions).score_centering

    @property
    def critic(self) -> CriticOptions:
        """What the critic is, and how it begins."""
        return self.read_options(CriticOptions)

    @property
    def has_value_head(self) -> bool:
        """Whether the critic is a head on the policy's model. An advantage of the user's own is loaded."""
        return self.critic.critic_trunk != "separate" and ADVANTAGES.declaration(self.advantage).needs_values

    @property
    def epoch_choice(self) -> EpochChoice:
        """How often a step goes over its completions. Raises ConfigError for an entry that is wrong."""
        entries = {"count": self.epochs} if isinstance(self.epochs, int) else self.epochs
        return build_config(EpochChoice, entries, key="algorithm.epochs")

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
        """``normalize_advantage``. Where it is not set: what the loss or the estimator that the configuration names
        declares, or else what an estimator does by ``default``."""
        if self.normalize_advantage is not None:
            return self.normalize_advantage
        return cast("bool", self.explain().get("normalize_advantage", Setting(default, "")).value)

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """``clip_low`` and ``clip_high``, or their defaults."""
        if self.clip_low is None or self.clip_high is None:
            return self.resolve().clip_bounds
        return self.clip_low, self.clip_high

    @property
    def aggregation_mode(self) -> Aggregation:
        """``aggregation``, or its default."""
        return self.aggregation or self.explain()["aggregation"].value

    def explain(self) -> dict[str, Setting]:
        """Return the value and the origin of each key that may be null. A key that no function declares is left out.

        A value of the user's comes before a default of the loss, and that before a default of the estimator and of the
        recipe. Functions of the user's own are loaded.

        >>> AlgorithmConfig(loss="gspo", clip_low=0.1).explain()["clip_low"]
        Setting(value=0.1, origin='yours')
        """
        estimator, settings = ADVANTAGES.declaration(self.advantage), dict(_RECIPE)
        if estimator.needs_values:
            settings["clip_high"] = Setting(0.2, _PPO)
        losses = [(f"loss {name}", LOSSES.declaration(name)) for name in self.losses]
        for name, declared in ((f"advantage {self.advantage}", estimator), *reversed(losses)):
            origin = " ".join(f"default of the {name}: {declared.source}".rstrip(": ").split())
            settings |= {key: Setting(value, origin) for key, value in declared.defaults.items()}
        values = {key: getattr(self, key) for key in DECLARED_DEFAULTS}
        return settings | {key: Setting(value, "yours") for key, value in values.items() if value is not None}

    def explain_options(self) -> dict[str, Setting]:
        """Return the options of estimator, loss and corrections, under ``options.NAME``, and where each comes from.

        >>> AlgorithmConfig(loss="gspo", options={"dual_clip": 3.0}).explain_options()["options.dual_clip"]
        Setting(value=3.0, origin='yours')
        """
        estimator = ADVANTAGES.declaration(self.advantage)
        named = [
            *([("critic", Declaration(options=CriticOptions))] if estimator.needs_values else []),
            (f"advantage {self.advantage}", estimator),
            *((f"loss {name}", LOSSES.declaration(name)) for name in self.losses),
            *((f"correction {name}", CORRECTIONS.declaration(name)) for name in self.corrections),
            *([("teacher", Declaration(options=TeacherOptions))] if self.needs_teacher else []),
            *([("router", Declaration(options=RouterOptions))] if self.uses_routers else []),
            *([("centering", Declaration(options=CenteringOptions))] if self.score_centering else []),
            *([("reference", Declaration(options=ReferenceOptions))] if self.reference.reference_refresh else []),
        ]
        settings: dict[str, Setting] = {}
        for name, declared in named:
            if declared.options is None:
                continue
            origin = " ".join(f"default of the {name}: {declared.source}".rstrip(": ").split())
            values = cast("object", self.read_options(declared.options))
            for option in (field.name for field in fields(cast("Any", declared.options))):
                is_set = option in self.options
                settings[f"options.{option}"] = Setting(getattr(values, option), "yours" if is_set else origin)
        return settings

    def resolve(self) -> Self:
        """Return the configuration with the defaults of loss, estimator and recipe in place of null, and with the
        coefficient of the entropy bonus that the first step has."""
        coef = EntropyController.of(self.entropy_coef).coef
        return replace(self, **{key: setting.value for key, setting in self.explain().items()}, entropy_coef=coef)
