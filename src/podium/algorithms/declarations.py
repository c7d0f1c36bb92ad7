"""What advantage estimators, losses and corrections declare about themselves, and where they are found.

This module imports no torch: tables have the declarations of Podium's own functions, those of packages are known by
their entry points, and a user's functions are loaded when needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from pydantic import Field
from pydantic.dataclasses import is_pydantic_dataclass

from podium.answers import load_answers
from podium.config import section
from podium.errors import ConfigError
from podium.functions import check_function_name, is_installed, load_function
from podium.installed import list_entry_points

if TYPE_CHECKING:
    from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])

COLUMNS: Final = ("old_logprobs", "rollout_logprobs", "ref_logprobs", "entropy", "squared_probs")
"""Token columns that an advantage estimator may declare."""

DECLARED_DEFAULTS: Final = ("clip_low", "clip_high", "aggregation", "normalize_advantage")
"""Keys of the section algorithm that may be null, for which a loss or an advantage estimator may declare defaults."""

_READABLE: Final = ("clip_low", "clip_high", "gamma", "lam", "value_clip")
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
        compares: What the estimator compares between them: their whole rewards, the parts of these, or what each of
            their turns still earns. A group in which all of it is equal is flat: a filter drops it, and
            ``reward/flat_groups`` counts it.
        below_n: Options of the estimator that must be below ``sampling.n``, because groups of no more
            completions than that teach it nothing.
        needs_greedy: The estimator reads ``inputs.baseline_B``: the rewards of greedy completions, which are drawn and
            graded beside the others, and not trained.
        columns: The token columns of :data:`COLUMNS` that the estimator reads.
        data: The columns of the data that the estimator reads in ``inputs.data``.
        minibatch: The loss or the correction reads ``inputs.figures``, which this function computes from the tokens of
            a whole minibatch. A declaration for an entry point may name it by ``module:function``.
        ratio_to: The policy whose log-probabilities the loss reads as ``inputs.old_logprobs_N``: the policy before the
            update (old), or the generator (rollout). With rollout, no pass over the batch computes those of the old
            policy, and no importance weights apply, since the loss itself corrects for the difference.
        weighs_parts: The estimator weighs the parts of the reward by ``algorithm.options.part_weights``, so that
            ``reward.weights`` alone would have no effect, and is refused.
        judges_rewards: The estimator compares rewards with a bound, divides by them or reads their parts alone. A KL in
            the reward (``algorithm.kl_in = reward``) would change which completions pass, and is refused.
        refuses_negative: The estimator takes no reward below 0. A ``reward.failure_score`` below 0 is refused, and so
            are rewards whose sum may be below 0 by what they declare.
        needs_teacher: The loss reads ``inputs.teacher_logprobs_N``, so that the trainer starts a teacher, whose options
            are those of :class:`TeacherOptions`.
        scales_advantage: The advantage is a factor of the loss, so that loss and gradient are 0 where it is. An update
            whose advantages are all 0 then leads to the same bits without forward and backward passes.
        reads: Those of the keys ``clip_low``, ``clip_high``, ``gamma``, ``lam`` and ``value_clip`` that the loss or the
            estimator reads. The setting of another one has no effect, which a run says. None says nothing of them.
        flat_options: Options of the loss whose term has no gradient where the ratio is 1, so that they have no effect
            in a step of one update, which a run says.
        weighs: The weights of the correction lead from the generator to the old policy. It is then refused beside a
            loss or a correction whose ratio is to the generator already, where they would count twice.
        by_ratio: The weight that the correction gives to a token depends on the token's own ratio alone, so that score
            centering knows it for tokens that were not sampled.
        reads_ratio: The correction compares the policy with the generator. Dropout, which is in the policy's update
            alone, would count as a difference, and is refused.
        imitates: The loss learns from examples, not from rewards. Dropout is then on unless ``model.dropout`` is False.
        defaults: Values of the keys of :data:`DECLARED_DEFAULTS` with which the paper of the function runs it. They
            hold where the user sets no value; those of the loss before those of the estimator.
        source: The paper of the defaults, and where it has them. A dry run prints it beside their values.
        function: Where the function is, ``module:function``, in a declaration that an entry point of a package names,
            so that it is known without importing the function and torch.
    """

    options: type | None = None
    needs_values: bool = False
    needs_groups: bool = False
    compares: Literal["rewards", "parts", "turns"] = "rewards"
    below_n: tuple[str, ...] = ()
    needs_greedy: bool = False
    columns: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    minibatch: Callable[..., Mapping[str, Tensor]] | str | None = None
    ratio_to: Literal["old", "rollout"] = "old"
    weighs_parts: bool = False
    judges_rewards: bool = False
    refuses_negative: bool = False
    needs_teacher: bool = False
    scales_advantage: bool = False
    reads: tuple[str, ...] | None = None
    flat_options: tuple[str, ...] = ()
    weighs: bool = False
    by_ratio: bool = False
    reads_ratio: bool = True
    imitates: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    source: str = ""
    function: str = ""

    def __post_init__(self) -> None:
        for name, allowed_names in (("columns", COLUMNS), ("defaults", DECLARED_DEFAULTS), ("reads", _READABLE)):
            if unknown := {*(getattr(self, name) or ())} - {*allowed_names}:
                raise ConfigError(
                    f"Declaration.{name} has {sorted(unknown)}: expected some of {', '.join(allowed_names)}"
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

    def may_read(self, key: str) -> bool:
        """Whether the function reads a key, or says nothing of what it reads."""
        return self.reads is None or key in self.reads

    def load_minibatch(self) -> Callable[..., Mapping[str, Tensor]] | None:
        """Return the function ``minibatch``. Raises ConfigError as :func:`podium.functions.load_function` does."""
        if not isinstance(self.minibatch, str):
            return self.minibatch
        return load_function(self.minibatch, key="Declaration.minibatch")


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
class ClipOptions:
    """A second bound of the clipped surrogate."""

    dual_clip: float | None = Field(default=None, gt=1, le=1e9)
    """The loss of a token with a negative advantage is at most this multiple of the advantage's size. 3 is usual; null
    means no bound."""


@section("algorithm.options")
class TruncateOptions:
    """The cap of importance weights."""

    weight_cap: float = Field(default=2.0, gt=1, le=1e9)
    """Importance weights are at most this."""


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


@dataclass(frozen=True, eq=False)
class NamedFunctions:
    """The functions that a key of the configuration may name: Podium's own, those of installed packages, and a user's.

    An entry point of a package names the function, or a :class:`Declaration` that says where the function is.

    Attributes:
        key: The key.
        group: The group of entry points.
        own: What Podium's own declare.
        words: What the key may be besides the name of a function.
    """

    key: str
    group: str
    own: Mapping[str, Declaration]
    words: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[str]:
        """The names of Podium's own and of trusted packages."""
        yield from self.own
        yield from (name for name in find_packaged(self.group) if name not in self.own and name in self)

    def __contains__(self, spec: object) -> bool:
        """Whether ``spec`` is a name of Podium's own or of a trusted package, and no file or module of a user's."""
        return spec in self.own or (
            isinstance(spec, str) and (entry := find_packaged(self.group).get(spec)) is not None and is_installed(entry)
        )

    def check_name(self, spec: str) -> None:
        """Check the form of ``spec`` and import nothing. Raises ConfigError as
        :func:`podium.functions.check_function_name` does, and for the name of another key's function."""
        names = dict.fromkeys((*self.words, *self.own), "")
        if spec in names:
            return
        if spec not in find_packaged(self.group) and not load_answers().find_translation(self.key, spec):
            for other in (ADVANTAGES, LOSSES, CORRECTIONS):
                if spec in (*other.own, *find_packaged(other.group)):
                    raise ConfigError(f"{self.key} = {spec!r} is a name for {other.key}: write --{other.key} {spec}")
        check_function_name(spec, key=self.key, known=names, group=self.group)

    def load(self, spec: str) -> Callable[..., Any]:
        """Return the function that ``spec`` names.

        Raises ConfigError as :func:`podium.functions.load_function` does.
        """
        if spec in self.own:
            return load_function(self.own[spec].function, key=self.key)
        named = self._find(spec)
        return load_function(named.function, key=self.key) if isinstance(named, Declaration) else named

    def declaration(self, spec: str) -> Declaration:
        """Return what the function declares; a declaration of nothing if it has none. Raises ConfigError as
        :meth:`load` does."""
        if spec in self.own:
            return self.own[spec]
        named = self._find(spec)
        return named if isinstance(named, Declaration) else declaration_of(named)

    def list_where(self, is_meant: Callable[[Declaration], bool]) -> list[str]:
        """Return the names whose declarations are meant, for a message. Those that cannot be imported are left out,
        because they are no concern of a configuration that names others."""
        names: list[str] = []
        for name in self:
            with suppress(ConfigError):
                names += [name] * is_meant(self.declaration(name))
        return names

    def _find(self, spec: str) -> Callable[..., Any]:
        """The function of a user's, or what the entry point of a package names."""
        return load_function(spec, key=self.key) if ":" in spec else _load_packaged(self, spec)


def find_packaged(group: str) -> Mapping[str, EntryPoint]:
    """The entry points of a group by name."""
    return {entry.name: entry for entry in list_entry_points(group)}


@cache
def _load_packaged(functions: NamedFunctions, name: str) -> Callable[..., Any]:
    words = dict.fromkeys((*functions.words, *functions.own), "")
    return load_function(name, key=functions.key, known=words, group=functions.group)


def declaration_of(function: Callable[..., Any]) -> Declaration:
    """Return what a function declares; a declaration of nothing if it has none."""
    return getattr(function, _ATTRIBUTE, Declaration())


def _place(module: str, **declarations: Declaration) -> Mapping[str, Declaration]:
    """Say where Podium's own functions are: in a module of this package, by their names."""
    place = f"{__package__}.{module}"
    return {name: replace(declared, function=f"{place}:{name}") for name, declared in declarations.items()}


_GRPO: Final = "Shao et al. 2024, arXiv:2402.03300, section 4.1.2"
_REINFORCE_PP: Final = "Hu et al. 2025, arXiv:2501.03262"

# Each estimator itself normalizes as its declaration says, also where another function calls it.
ADVANTAGES: Final = NamedFunctions(
    "algorithm.advantage",
    "podium.advantages",
    _place(
        "advantages",
        grpo=Declaration(needs_groups=True, reads=(), defaults={"normalize_advantage": True}, source=_GRPO),
        dr_grpo=Declaration(
            needs_groups=True,
            reads=(),
            defaults={"normalize_advantage": False, "aggregation": "sequence-sum-constant"},
            source="Liu et al. 2025, Dr. GRPO, arXiv:2503.20783, section 3.2",
        ),
        rloo=Declaration(
            needs_groups=True,
            reads=(),
            defaults={"normalize_advantage": False},
            source="Ahmadian et al. 2024, arXiv:2402.14740",
        ),
        reinforce_pp=Declaration(reads=("gamma",), defaults={"normalize_advantage": True}, source=_REINFORCE_PP),
        reinforce_pp_baseline=Declaration(
            needs_groups=True, reads=(), defaults={"normalize_advantage": True}, source=_REINFORCE_PP
        ),
        gae=Declaration(
            options=CriticOptions,
            needs_values=True,
            reads=("gamma", "lam", "value_clip"),
            defaults={"normalize_advantage": True},
            source="as in the code of the authors of PPO",
        ),
    ),
)
"""Advantage estimators."""

_CLIPS: Final = ("clip_low", "clip_high")

LOSSES: Final = NamedFunctions(
    "algorithm.loss",
    "podium.losses",
    _place(
        "losses",
        ppo_clip=Declaration(scales_advantage=True, options=ClipOptions, reads=_CLIPS),
        gspo=Declaration(
            scales_advantage=True,
            options=ClipOptions,
            reads=_CLIPS,
            defaults={"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence-mean"},
            source="Zheng et al. 2025, GSPO, arXiv:2507.18071, equation 5 and section 5.1",
        ),
        cispo=Declaration(
            scales_advantage=True,
            reads=_CLIPS,
            defaults={"clip_low": 1.0, "clip_high": 4.0, "aggregation": "token-mean"},
            source="MiniMax 2025, M1, arXiv:2506.13585, equations 4 and 5; weights up to 5 as in TRL's form of "
            "ScaleRL, arXiv:2510.13786",
        ),
        reinforce=Declaration(
            scales_advantage=True, reads=(), source="Williams 1992, Simple Statistical Gradient-Following Algorithms"
        ),
        teacher_kl=Declaration(needs_teacher=True, reads=()),
        cross_entropy=Declaration(imitates=True, reads=()),
    ),
)
"""Losses of policies."""

CORRECTIONS: Final = NamedFunctions(
    "algorithm.correction",
    "podium.corrections",
    _place(
        "corrections",
        truncate=Declaration(
            weighs=True,
            by_ratio=True,
            options=TruncateOptions,
            source="Yao et al. 2025, On the Rollout-Training Mismatch; IMPALA, arXiv:1802.01561",
        ),
        bypass=Declaration(ratio_to="rollout", source="verl, docs/algo/rollout_corr.md, bypass mode"),
    ),
    words=("auto", "none"),
)
"""Corrections for tokens that another policy drew."""
