"""What advantage estimators and losses declare about themselves, and where Podium's own are.

This module imports no torch: tables have the declarations of Podium's own functions, and a user's are loaded when
needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar

from pydantic import Field
from pydantic.dataclasses import is_pydantic_dataclass

from podium.config import section
from podium.errors import ConfigError
from podium.functions import load_function

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "ADVANTAGES",
    "ADVANTAGE_LOSSES",
    "CLIPPING_LOSSES",
    "COLUMNS",
    "CORRECTIONS",
    "DECLARED_DEFAULTS",
    "LOSSES",
    "RATIO_CORRECTIONS",
    "WEIGHING_CORRECTIONS",
    "CenteringOptions",
    "CriticOptions",
    "Declaration",
    "PartOptions",
    "PassOptions",
    "ReferenceOptions",
    "RouterOptions",
    "TeacherOptions",
    "advantage_declaration",
    "correction_declaration",
    "correction_ratio_to",
    "correction_weighs",
    "declaration_of",
    "loss_declaration",
    "loss_imitates",
    "loss_needs_teacher",
    "loss_ratio_to",
    "loss_scales_advantage",
]

F = TypeVar("F", bound=Callable[..., Any])

COLUMNS: Final = ("old_logprobs", "rollout_logprobs", "ref_logprobs", "entropy", "squared_probs")
"""Token columns that an advantage estimator may declare."""

DECLARED_DEFAULTS: Final = ("clip_low", "clip_high", "aggregation", "normalize_advantage")
"""Keys of the section algorithm that may be null, for which a loss or an advantage estimator may declare defaults."""

_ATTRIBUTE: Final = "podium_declaration"


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """Decorator that declares what an advantage estimator, a loss or a correction of your own needs beyond its inputs.

    >>> @Declaration(needs_groups=True)
    ... def best_of_group(inputs, config): ...

    Attributes:
        options: A class under ``@section("algorithm.options")`` with the options that the function reads by
            ``config.read_options``.
        needs_values: The estimator reads a critic's values, so that the trainer starts a critic.
        needs_groups: The estimator compares the completions of a prompt, so that each prompt needs two or more.
        needs_greedy: The estimator reads ``inputs.baseline_B``: the rewards of greedy completions, which are drawn and
            graded beside the others, and not trained.
        columns: The token columns of :data:`COLUMNS` that the estimator reads.
        data: The columns of the data that the estimator reads in ``inputs.data``.
        minibatch: The loss or the correction reads ``inputs.figures``, which this function computes from the tokens of
            a whole minibatch.
        ratio_to: The policy whose log-probabilities the loss reads as ``inputs.old_logprobs_N``: the policy before the
            update (old), or the generator (rollout). With rollout, no pass over the batch computes those of the old
            policy, and no importance weights apply, since the loss itself corrects for the difference.
        weighs_parts: The estimator weighs the parts of the reward by ``algorithm.options.part_weights``, so that
            ``reward.weights`` alone would have no effect, and is refused.
        judges_rewards: The estimator compares rewards with a bound, divides by them or reads their parts alone. A KL in
            the reward (``algorithm.kl_in = reward``) would change which completions pass, and is refused.
        needs_teacher: The loss reads ``inputs.teacher_logprobs_N``, so that the trainer starts a teacher, whose options
            are those of :class:`TeacherOptions`.
        scales_advantage: The advantage is a factor of the loss, so that loss and gradient are 0 where it is. An update
            whose advantages are all 0 then leads to the same bits without forward and backward passes.
        weighs: The weights of the correction lead from the generator to the old policy. It is then refused beside a
            loss or a correction whose ratio is to the generator already, where they would count twice.
        imitates: The loss learns from examples, not from rewards. Dropout is then on unless ``model.dropout`` is False.
        defaults: Values of the keys of :data:`DECLARED_DEFAULTS` with which the paper of the function runs it. They
            hold where the user sets no value; those of the loss before those of the estimator.
        source: The paper of the defaults, and where it has them. A dry run prints it beside their values.
    """

    options: type | None = None
    needs_values: bool = False
    needs_groups: bool = False
    needs_greedy: bool = False
    columns: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    minibatch: Callable[..., Mapping[str, Tensor]] | None = None
    ratio_to: Literal["old", "rollout"] = "old"
    weighs_parts: bool = False
    judges_rewards: bool = False
    needs_teacher: bool = False
    scales_advantage: bool = False
    weighs: bool = False
    imitates: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    source: str = ""

    def __post_init__(self) -> None:
        if unknown := set(self.columns) - set(COLUMNS):
            raise ConfigError(f"Declaration.columns has {sorted(unknown)}: expected some of {', '.join(COLUMNS)}")
        if unknown := set(self.defaults) - set(DECLARED_DEFAULTS):
            raise ConfigError(
                f"Declaration.defaults has {sorted(unknown)}: expected some of {', '.join(DECLARED_DEFAULTS)}"
            )
        if self.options is not None and not is_pydantic_dataclass(self.options):
            name = getattr(self.options, "__name__", repr(self.options))
            raise ConfigError(
                f"Declaration.options = {name}, which is no section: decorate the class {name} with "
                '@section("algorithm.options") from podium.config'
            )

    def __call__(self, function: F) -> F:
        """Attach this declaration to ``function``, and return ``function``."""
        setattr(function, _ATTRIBUTE, self)
        return function


# What Podium's own functions declare, so that it is known without importing torch. Each estimator itself normalizes as
# its declaration says, also where another function calls it.
@section("algorithm.options")
class PassOptions:
    """When a prompt counts as solved."""

    pass_k: int = Field(default=4, ge=1, le=10**6)
    """A prompt counts as solved if one of this many completions passes."""
    pass_reward: float = Field(default=1.0, ge=-1e9, le=1e9)
    """A completion passes if its reward is at least this."""


@section("algorithm.options")
class ReferenceOptions:
    """How the reference follows the policy: Gorbatovski et al. 2024, "Learn Your Reference Model", arXiv:2404.09656."""

    reference_refresh: int = Field(default=0, ge=0, le=10**9)
    """After every so many steps the policy becomes the reference. 0 keeps the model that the run began with."""
    reference_mix: float = Field(default=1.0, gt=0, le=1)
    """The reference moves this share of the way to the policy. 1 makes it the policy."""


@section("algorithm.options")
class RouterOptions:
    """What the routers of a mixture of experts choose, and how they are kept even: Fedus et al. 2021, arXiv:2101.03961,
    equations 4 to 6."""

    router_replay: Literal["none", "old", "rollout"] = "none"
    """Training sends tokens to the experts that the policy before the update (old) or the generator (rollout) chose.
    none lets the routers choose anew."""
    router_balance: float = Field(default=0.0, ge=0, le=1e6)
    """The auxiliary loss of the routers is multiplied by this coefficient and added to the policy's loss."""


@section("algorithm.options")
class CenteringOptions:
    """How losses are centered: Marek and Ryabinin 2026, arXiv:2609.20807."""

    score_centering: int = Field(default=0, ge=0, le=65536)
    """The expected score of the generator's distribution, over this many most probable tokens and all others as one, is
    subtracted from the score of each sampled token. 0 subtracts nothing."""


@section("algorithm.options")
class CriticOptions:
    """What the critic is, and how it begins."""

    critic_warmup: int = Field(default=0, ge=0, le=10**9)
    """In this many steps at the beginning of a run only the critic is trained, and the policy stays as it is."""
    critic_trunk: Literal["separate", "shared", "detached"] = "separate"
    """The critic is a model of its own (separate), or a head on the policy's model, whose loss trains the policy's
    model too (shared) or the head alone (detached)."""
    value_coef: float = Field(default=0.5, ge=0, le=1e6)
    """The loss of a critic on the policy's model is multiplied by this coefficient and added to the policy's loss."""


@section("algorithm.options")
class PartOptions:
    """What the parts of a reward count."""

    part_weights: Mapping[str, Annotated[float, Field(ge=-1e6, le=1e6)]] = Field(default_factory=dict[str, float])
    """The parts of the reward with these names count, with these weights. Without a name each part has the weight 1."""


@section("algorithm.options")
class TeacherOptions:
    """The teacher, for losses that learn from its log-probabilities."""

    teacher: str = ""
    """The teacher's model is loaded from this directory, run or hub name. It has the vocabulary of model.path."""
    teacher_top_k: int = Field(default=0, ge=0, le=65536)
    """teacher_kl compares the policy with the teacher over the so many ids that the teacher finds most probable, and
    over all others as one. 0 compares at the sampled token alone."""
    teacher_divergence: Literal["reverse", "forward"] = "reverse"
    """With teacher_top_k the divergence is KL(policy || teacher) (reverse) or KL(teacher || policy) (forward)."""


_GRPO: Final = "Shao et al. 2024, arXiv:2402.03300, section 4.1.2"
_REINFORCE_PP: Final = "Hu et al. 2025, arXiv:2501.03262"
_GAE: Final = "as in the code of the authors of PPO"
_OWN_ADVANTAGES: Final[Mapping[str, Declaration]] = {
    "grpo": Declaration(needs_groups=True, defaults={"normalize_advantage": True}, source=_GRPO),
    "dr_grpo": Declaration(
        needs_groups=True,
        defaults={"normalize_advantage": False, "aggregation": "sequence-sum-constant"},
        source="Liu et al. 2025, Dr. GRPO, arXiv:2503.20783, section 3.2",
    ),
    "rloo": Declaration(
        needs_groups=True, defaults={"normalize_advantage": False}, source="Ahmadian et al. 2024, arXiv:2402.14740"
    ),
    "reinforce_pp": Declaration(defaults={"normalize_advantage": True}, source=_REINFORCE_PP),
    "reinforce_pp_baseline": Declaration(
        needs_groups=True, defaults={"normalize_advantage": True}, source=_REINFORCE_PP
    ),
    "remax": Declaration(
        needs_greedy=True, defaults={"normalize_advantage": False}, source="Li et al. 2023, ReMax, arXiv:2310.10505"
    ),
    "opo": Declaration(
        needs_groups=True, defaults={"normalize_advantage": False}, source="Hao et al. 2025, OPO, arXiv:2505.23585"
    ),
    "gpg": Declaration(
        needs_groups=True, defaults={"normalize_advantage": False}, source="Chu et al. 2025, GPG, arXiv:2504.02546"
    ),
    "otb": Declaration(
        needs_groups=True,
        columns=("old_logprobs", "squared_probs"),
        defaults={"normalize_advantage": False},
        source="Li et al. 2026, OTB, arXiv:2602.07078",
    ),
    "gdpo": Declaration(
        options=PartOptions,
        needs_groups=True,
        weighs_parts=True,
        judges_rewards=True,
        defaults={"normalize_advantage": True},
        source="Liu et al. 2026, GDPO, arXiv:2601.05242",
    ),
    "maxrl": Declaration(
        needs_groups=True,
        judges_rewards=True,
        defaults={"normalize_advantage": True},
        source="Tajwar et al. 2026, MaxRL, arXiv:2602.02710",
    ),
    "pass_at_k": Declaration(
        options=PassOptions,
        needs_groups=True,
        judges_rewards=True,
        defaults={"normalize_advantage": True},
        source="Chen et al. 2025, Pass@k Training, arXiv:2508.10751, equations 14 and 15",
    ),
    "grpo_passk": Declaration(
        needs_groups=True, defaults={"normalize_advantage": False}, source="Tang et al. 2025, arXiv:2503.19595"
    ),
    "gae": Declaration(options=CriticOptions, needs_values=True, defaults={"normalize_advantage": True}, source=_GAE),
    "grpo_turns": Declaration(needs_groups=True, defaults={"normalize_advantage": True}, source=_GRPO),
    "gae_turns": Declaration(
        options=CriticOptions, needs_values=True, defaults={"normalize_advantage": True}, source=_GAE
    ),
}
_GENERATOR_LOSSES: Final = frozenset({"dppo_tv", "dppo_kl", "dro"})  # those whose ratio is to the generator
_OWN_LOSSES: Final[Mapping[str, bool]] = {  # whether it imitates
    "ppo_clip": False,
    "gspo": False,
    "gmpo": False,
    "cispo": False,
    "sapo": False,
    "dppo_tv": False,
    "dppo_kl": False,
    "clip_cov": False,
    "kl_cov": False,
    "dro": False,
    "reinforce": False,
    "teacher_kl": False,
    "cross_entropy": True,
}
_TEACHER_LOSSES: Final = frozenset({"teacher_kl"})

ADVANTAGES: Final[Mapping[str, str]] = {name: f"podium.algorithms.advantages.{name}:{name}" for name in _OWN_ADVANTAGES}
"""Podium's own advantage estimators by name, and where each is."""

ADVANTAGE_LOSSES: Final = frozenset(_OWN_LOSSES) - {"kl_cov", "dro", "cross_entropy", "teacher_kl"}
"""Podium's losses that declare ``scales_advantage``."""

CLIPPING_LOSSES: Final = ("ppo_clip", "gspo", "gmpo", "cispo", "dppo_tv", "dppo_kl", "clip_cov")
"""Podium's losses that read ``clip_low`` and ``clip_high``."""

_OWN_CORRECTIONS: Final = (
    *("truncate", "sequence_truncate", "icepop", "sequence_mask"),
    *("two_sided", "geometric", "trust_region", "opsm", "m2po", "kpop", "high_entropy", "bypass"),
)
WEIGHING_CORRECTIONS: Final = frozenset(_OWN_CORRECTIONS[:4])
"""Podium's corrections that declare ``weighs``; the others only leave tokens out."""

RATIO_CORRECTIONS: Final = ("truncate", "icepop", "two_sided")
"""Podium's corrections whose weight of a token depends on the token's own ratio alone."""

CORRECTIONS: Final[Mapping[str, str]] = {
    name: f"podium.algorithms.corrections.{name}:{name}" for name in _OWN_CORRECTIONS
}
"""Podium's own corrections by name, and where each is."""

LOSSES: Final[Mapping[str, str]] = {name: f"podium.algorithms.losses.{name}:{name}" for name in _OWN_LOSSES}
"""Podium's own losses by name, and where each is."""


def advantage_declaration(spec: str) -> Declaration:
    """Return what the estimator declares. Raises ConfigError as :func:`podium.functions.load_function` does."""
    if spec in _OWN_ADVANTAGES:
        return _OWN_ADVANTAGES[spec]
    return declaration_of(load_function(spec, key="algorithm.advantage", known=ADVANTAGES))


def correction_declaration(spec: str) -> Declaration:
    """Return what the correction declares. Raises ConfigError as :func:`podium.functions.load_function` does."""
    return declaration_of(load_function(spec, key="algorithm.correction", known=CORRECTIONS))


def correction_ratio_to(spec: str) -> Literal["old", "rollout"]:
    """The policy that the loss's ratio is to under the correction. Raises ConfigError as the function above does."""
    if spec in CORRECTIONS:
        return "rollout" if spec == "bypass" else "old"
    return correction_declaration(spec).ratio_to


def correction_weighs(spec: str) -> bool:
    """Whether the correction declares ``weighs``. Raises ConfigError as :func:`correction_declaration` does."""
    return spec in WEIGHING_CORRECTIONS if spec in CORRECTIONS else correction_declaration(spec).weighs


def declaration_of(function: Callable[..., Any]) -> Declaration:
    """Return what a function declares; a declaration of nothing if it has none."""
    return getattr(function, _ATTRIBUTE, Declaration())


def loss_declaration(spec: str) -> Declaration:
    """Return what the loss declares. Raises ConfigError as :func:`podium.functions.load_function` does."""
    return declaration_of(load_function(spec, key="algorithm.loss", known=LOSSES))


def loss_imitates(spec: str) -> bool:
    """Whether the loss learns from examples. Raises ConfigError as :func:`loss_declaration` does."""
    if spec in _OWN_LOSSES:
        return _OWN_LOSSES[spec]
    return loss_declaration(spec).imitates


def loss_ratio_to(spec: str) -> Literal["old", "rollout"]:
    """The policy that the loss's ratio is to. Raises ConfigError as :func:`loss_declaration` does."""
    if spec in _OWN_LOSSES:
        return "rollout" if spec in _GENERATOR_LOSSES else "old"
    return loss_declaration(spec).ratio_to


def loss_needs_teacher(spec: str) -> bool:
    """Whether the loss reads a teacher's log-probabilities. Raises ConfigError as :func:`loss_declaration` does."""
    return spec in _TEACHER_LOSSES if spec in _OWN_LOSSES else loss_declaration(spec).needs_teacher


def loss_scales_advantage(spec: str) -> bool:
    """Whether the advantage is a factor of the loss. Raises ConfigError as :func:`loss_declaration` does."""
    return spec in ADVANTAGE_LOSSES if spec in _OWN_LOSSES else loss_declaration(spec).scales_advantage
