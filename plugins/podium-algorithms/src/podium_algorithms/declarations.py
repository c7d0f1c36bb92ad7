"""What the functions of this package declare, and where they are: the entry points name these. Imports no torch."""

from collections.abc import Mapping
from typing import Annotated, Final

from pydantic import Field

from podium.algorithms.declarations import CriticOptions, Declaration, TruncateOptions
from podium.config import section


@section("algorithm.options")
class PassOptions:
    """When a prompt counts as solved."""

    pass_k: int = Field(default=4, ge=1, le=10**6)
    """A prompt counts as solved if one of this many completions passes."""
    pass_reward: float = Field(default=1.0, ge=-1e9, le=1e9)
    """A completion passes if its reward is at least this."""


@section("algorithm.options")
class PartOptions:
    """What the parts of a reward count."""

    part_weights: Mapping[str, Annotated[float, Field(ge=-1e6, le=1e6)]] = Field(default_factory=dict[str, float])
    """The parts of the reward with these names count, with these weights. Without a name each part has the weight 1."""


@section("algorithm.options")
class ClipCovOptions:
    """The tokens that Clip-Cov leaves out of the gradient."""

    cov_share: float = Field(default=2e-4, gt=0, le=1)
    """This share of a minibatch's tokens, and at least one token, is left out of the gradient."""
    cov_low: float = Field(default=1.0, ge=-1e9, le=1e9)
    """Tokens are left out only where their covariance is at least this."""
    cov_high: float = Field(default=5.0, ge=-1e9, le=1e9)
    """Tokens are left out only where their covariance is at most this."""


@section("algorithm.options")
class DroOptions:
    """How strongly DRO holds the policy."""

    dro_beta: float = Field(default=0.05, gt=0, le=1e6)
    """The squared log-ratio of the policy and the generator is multiplied by half of this."""


@section("algorithm.options")
class KlCovOptions:
    """The tokens that KL-Cov penalizes."""

    kl_cov_share: float = Field(default=2e-4, gt=0, le=1)
    """This share of a minibatch's tokens, and at least one token, is penalized. The authors take 2e-3 for models of 7
    billion parameters, and 2e-4 for 32 billion."""
    kl_cov_coef: float = Field(default=1.0, ge=0, le=1e6)
    """The penalty of these tokens is multiplied by this coefficient."""


@section("algorithm.options")
class SapoOptions:
    """How fast the gate of SAPO closes."""

    tau_pos: float = Field(default=1.0, gt=0, le=1e6)
    """The temperature of the gate of tokens with a positive advantage."""
    tau_neg: float = Field(default=1.05, gt=0, le=1e6)
    """The temperature of the gate of other tokens. A higher one dampens their gradient sooner."""


@section("algorithm.options")
class GeometricOptions:
    """The geometric means that are kept."""

    geometric_low: float = Field(default=0.999, ge=0, le=1)
    """A completion does not train if the geometric mean of its tokens' ratios is below this."""
    geometric_high: float = Field(default=1.001, ge=1, le=1e9)
    """A completion does not train if the geometric mean of its tokens' ratios is above this."""


@section("algorithm.options")
class HighEntropyOptions:
    """The tokens that train."""

    entropy_share: float = Field(default=0.2, gt=0, le=1)
    """This share of a minibatch's tokens trains, those at which the policy's entropy is the highest."""


@section("algorithm.options")
class IcepopOptions:
    """The weights that IcePop keeps."""

    icepop_low: float = Field(default=0.5, ge=0, le=1)
    """A token whose importance weight is below this does not train."""
    icepop_high: float = Field(default=5.0, ge=1, le=1e9)
    """A token whose importance weight is above this does not train."""


@section("algorithm.options")
class KpopOptions:
    """The divergence that KPop allows."""

    kpop_kl: float = Field(default=0.1, gt=0, le=1e6)
    """A token does not train if its binary divergence between generator and trainer is above this many nats."""


@section("algorithm.options")
class M2poOptions:
    """The second moment that M2PO allows."""

    m2_budget: float = Field(default=0.04, gt=0, le=1e6)
    """The mean of the squared log-ratios of the tokens that train is at most this."""


@section("algorithm.options")
class OpsmOptions:
    """How far the policy may be from a completion of negative advantage."""

    opsm_threshold: float = Field(default=0.5, ge=0, le=1e6)
    """A completion of negative advantage does not train if the generator's log-probability of its tokens is higher than
    the policy's by more than this, in nats a token."""


@section("algorithm.options")
class SequenceMaskOptions:
    """The weights of rows that are kept."""

    sequence_low: float = Field(default=0.0, ge=0, le=1)
    """A completion whose importance weight is below this does not train."""
    sequence_high: float = Field(default=3.0, ge=1, le=1e9)
    """A completion whose importance weight is above this does not train."""


@section("algorithm.options")
class TrustRegionOptions:
    """The trust region of whole completions."""

    trust_kl: float = Field(default=0.05, gt=0, le=1e6)
    """A completion does not train if KL(generator || trainer) of any of its tokens is above this, in nats."""


@section("algorithm.options")
class TwoSidedOptions:
    """The ratios that are kept."""

    ratio_low: float = Field(default=0.5, ge=0, le=1)
    """A token does not train if the trainer's probability is less than this multiple of the generator's."""
    ratio_high: float = Field(default=2.0, ge=1, le=1e9)
    """A token does not train if the trainer's probability is more than this multiple of the generator's."""


_GRPO: Final = "Shao et al. 2024, arXiv:2402.03300, section 4.1.2"
_GAE: Final = "as in the code of the authors of PPO"

GAE_TURNS: Final = Declaration(
    options=CriticOptions,
    needs_values=True,
    defaults={"normalize_advantage": True},
    source=_GAE,
    reads=("gamma", "lam", "value_clip"),
    function="podium_algorithms.advantages.gae_turns:gae_turns",
)
GDPO: Final = Declaration(
    options=PartOptions,
    needs_groups=True,
    compares="parts",
    weighs_parts=True,
    judges_rewards=True,
    defaults={"normalize_advantage": True},
    source="Liu et al. 2026, GDPO, arXiv:2601.05242",
    reads=(),
    function="podium_algorithms.advantages.gdpo:gdpo",
)
GPG: Final = Declaration(
    needs_groups=True,
    defaults={"normalize_advantage": False},
    source="Chu et al. 2025, GPG, arXiv:2504.02546",
    reads=(),
    function="podium_algorithms.advantages.gpg:gpg",
)
GRPO_PASSK: Final = Declaration(
    needs_groups=True,
    defaults={"normalize_advantage": False},
    source="Tang et al. 2025, arXiv:2503.19595",
    reads=(),
    function="podium_algorithms.advantages.grpo_passk:grpo_passk",
)
GRPO_TURNS: Final = Declaration(
    needs_groups=True,
    compares="turns",
    defaults={"normalize_advantage": True},
    source=_GRPO,
    reads=("gamma",),
    function="podium_algorithms.advantages.grpo_turns:grpo_turns",
)
MAXRL: Final = Declaration(
    needs_groups=True,
    judges_rewards=True,
    refuses_negative=True,
    defaults={"normalize_advantage": True},
    source="Tajwar et al. 2026, MaxRL, arXiv:2602.02710",
    reads=(),
    function="podium_algorithms.advantages.maxrl:maxrl",
)
OPO: Final = Declaration(
    needs_groups=True,
    defaults={"normalize_advantage": False},
    source="Hao et al. 2025, OPO, arXiv:2505.23585",
    reads=(),
    function="podium_algorithms.advantages.opo:opo",
)
OTB: Final = Declaration(
    needs_groups=True,
    columns=("old_logprobs", "squared_probs"),
    defaults={"normalize_advantage": False},
    source="Li et al. 2026, OTB, arXiv:2602.07078",
    reads=("gamma",),
    function="podium_algorithms.advantages.otb:otb",
)
PASS_AT_K: Final = Declaration(
    options=PassOptions,
    needs_groups=True,
    below_n=("pass_k",),
    judges_rewards=True,
    defaults={"normalize_advantage": True},
    source="Chen et al. 2025, Pass@k Training, arXiv:2508.10751, equations 14 and 15",
    reads=(),
    function="podium_algorithms.advantages.pass_at_k:pass_at_k",
)
REMAX: Final = Declaration(
    needs_greedy=True,
    defaults={"normalize_advantage": False},
    source="Li et al. 2023, ReMax, arXiv:2310.10505",
    reads=("gamma",),
    function="podium_algorithms.advantages.remax:remax",
)

CLIP_COV: Final = Declaration(
    scales_advantage=True,
    options=ClipCovOptions,
    minibatch="podium_algorithms.losses.clip_cov:high_covariance",
    defaults={"clip_low": 1.0, "clip_high": 1.0},
    source="Cui et al. 2025, arXiv:2505.22617, section 4.2, and the clip of its authors' scripts",
    reads=("clip_low", "clip_high"),
    function="podium_algorithms.losses.clip_cov:clip_cov",
)
DPPO_KL: Final = Declaration(
    scales_advantage=True,
    ratio_to="rollout",
    defaults={"clip_low": 0.05, "clip_high": 0.05},
    source="Qi et al. 2026, DPPO, arXiv:2602.04879, and the script of its authors",
    reads=("clip_low", "clip_high"),
    function="podium_algorithms.losses.dppo_kl:dppo_kl",
)
DPPO_TV: Final = Declaration(
    scales_advantage=True,
    ratio_to="rollout",
    defaults={"clip_low": 0.15, "clip_high": 0.15},
    source="Qi et al. 2026, DPPO, arXiv:2602.04879, and the script of its authors",
    reads=("clip_low", "clip_high"),
    function="podium_algorithms.losses.dppo_tv:dppo_tv",
)
DRO: Final = Declaration(
    options=DroOptions,
    ratio_to="rollout",
    source="Richemond et al. 2024, arXiv:2405.19107, token by token; dro_beta 0.05 is that of Tinker's example",
    reads=(),
    function="podium_algorithms.losses.dro:dro",
)
GMPO: Final = Declaration(
    scales_advantage=True,
    defaults={"clip_low": 0.4, "clip_high": 0.4, "aggregation": "sequence-mean"},
    source="Zhao et al. 2025, GMPO, arXiv:2507.20673, section 4",
    reads=("clip_low", "clip_high"),
    function="podium_algorithms.losses.gmpo:gmpo",
)
KL_COV: Final = Declaration(
    options=KlCovOptions,
    minibatch="podium_algorithms.losses.kl_cov:highest_covariance",
    flat_options=("kl_cov_coef",),
    source="Cui et al. 2025, arXiv:2505.22617, section 4.2, and its authors' code",
    reads=(),
    function="podium_algorithms.losses.kl_cov:kl_cov",
)
SAPO: Final = Declaration(
    scales_advantage=True,
    options=SapoOptions,
    defaults={"aggregation": "sequence-mean"},
    source="Gao et al. 2025, SAPO, arXiv:2511.20347",
    reads=(),
    function="podium_algorithms.losses.sapo:sapo",
)

GEOMETRIC: Final = Declaration(
    options=GeometricOptions,
    source="Li et al. 2025, geometric sequence masking; bounds of verl's documentation",
    function="podium_algorithms.corrections.geometric:geometric",
)
HIGH_ENTROPY: Final = Declaration(
    options=HighEntropyOptions,
    reads_ratio=False,
    minibatch="podium_algorithms.corrections.high_entropy:highest_entropy",
    source="Wang et al. 2025, Beyond the 80/20 Rule, arXiv:2506.01939",
    function="podium_algorithms.corrections.high_entropy:high_entropy",
)
ICEPOP: Final = Declaration(
    weighs=True,
    options=IcepopOptions,
    source="Ling Team 2025, Ring-1T, arXiv:2510.18855, and its blog IcePop",
    by_ratio=True,
    function="podium_algorithms.corrections.icepop:icepop",
)
KPOP: Final = Declaration(
    options=KpopOptions,
    source="Guo et al. 2026, KPop, ringtech.notion.site/kpop",
    function="podium_algorithms.corrections.kpop:kpop",
)
M2PO: Final = Declaration(
    options=M2poOptions,
    minibatch="podium_algorithms.corrections.m2po:mark_far_tokens",
    source="Zheng et al. 2025, M2PO, arXiv:2510.01161",
    function="podium_algorithms.corrections.m2po:m2po",
)
OPSM: Final = Declaration(
    options=OpsmOptions,
    source="DeepSeek-AI 2025, V3.2, arXiv:2512.02556; 0.5 is that of TRL's documentation",
    function="podium_algorithms.corrections.opsm:opsm",
)
SEQUENCE_MASK: Final = Declaration(
    weighs=True,
    options=SequenceMaskOptions,
    source="Liu et al. 2025, When Speed Kills Stability; bounds of TRL",
    function="podium_algorithms.corrections.sequence_mask:sequence_mask",
)
SEQUENCE_TRUNCATE: Final = Declaration(
    weighs=True,
    options=TruncateOptions,
    source="Liu et al. 2025, When Speed Kills Stability, sequence-level importance sampling",
    function="podium_algorithms.corrections.sequence_truncate:sequence_truncate",
)
TRUST_REGION: Final = Declaration(
    options=TrustRegionOptions,
    source="Li et al. 2025, Trust Region Masking, arXiv:2512.23075; the bound is Podium's",
    function="podium_algorithms.corrections.trust_region:trust_region",
)
TWO_SIDED: Final = Declaration(
    options=TwoSidedOptions,
    source="verl, docs/algo/rollout_corr_math.md, rejection by token",
    by_ratio=True,
    function="podium_algorithms.corrections.two_sided:two_sided",
)
