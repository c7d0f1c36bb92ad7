"""The configuration of a run: the trainer's own sections, and the sections of each recipe. Imports no torch.

All other sections stand beside the classes that they configure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

from pydantic import Field

from podium.algorithms import ADVANTAGES, LOSSES, AlgorithmConfig, advantage_declaration
from podium.algorithms.preference_config import PreferenceConfig, ScorerConfig
from podium.config import build_config, prefer, section
from podium.errors import ConfigError
from podium.functions import check_function_name
from podium.models import ModelConfig
from podium.rewards import RewardConfig
from podium.rollout.engines import EngineConfig
from podium.rollout.environments.config import EnvironmentConfig
from podium.rollout.sampling import SamplingParams
from podium.rollout.tasks import DataConfig
from podium.runs.named_code import check_source
from podium.runs.schedules import SCHEDULES, declaration_of, find_schedule
from podium.telemetry.held_out import ACCURACY, LOSS, REWARD, REWARD_MARGIN, TOKEN_ACCURACY, Metric
from podium.telemetry.metrics import REWARD_PART_PREFIX
from podium.training import OptimConfig, ParallelConfig
from podium.training.config import EndingOptim, check_dropout

__all__ = [
    "RECIPES",
    "CriticConfig",
    "DPOConfig",
    "EvalConfig",
    "ExampleBatch",
    "GRPOConfig",
    "InferenceConfig",
    "PPOConfig",
    "PlacementConfig",
    "PoolConfig",
    "PreferenceRun",
    "PromptBatch",
    "PromptChoice",
    "RMConfig",
    "RunConfig",
    "SFTConfig",
    "SaveConfig",
    "check_goal",
    "recipe_of",
]

DEFAULT_MODEL: Final = "Qwen/Qwen3-0.6B"
Role = Literal["policy", "reference", "critic", "reward", "estimator", "generator", "rollout"]
_METRICS: Final = {"auto": "auto", "reward": REWARD} | {
    name: name for name in (ACCURACY, LOSS, TOKEN_ACCURACY, REWARD_MARGIN)
}


Tracker: TypeAlias = Literal["tensorboard", "wandb", "trackio"]


@section("run.trackers")
class TrackerOptions:
    """Where wandb and trackio keep a run. They are the entries of a tracker in ``run.trackers``."""

    project: str = Field(default="podium", min_length=1)
    """The run belongs to this project."""
    entity: str = ""
    """wandb keeps the run for this user or team."""
    group: str = ""
    """Runs with the same group are shown together."""
    tags: tuple[str, ...] = ()
    """wandb shows these words beside the run."""

    def for_wandb(self) -> dict[str, Any]:
        """Arguments of ``wandb.init``."""
        options = {"entity": self.entity, "group": self.group, "tags": list(self.tags)}
        return {"project": self.project, **{name: value for name, value in options.items() if value}}

    def for_trackio(self) -> dict[str, Any]:
        """Arguments of ``trackio.init``."""
        return {"project": self.project, **({"group": self.group} if self.group else {})}


@section("run")
class RunConfig:
    """The run: its name, its length, and where it reports."""

    dir: str = "runs"
    """This directory holds the directories of runs."""
    name: str = ""
    """The run's directory has this name. An empty name is made from the recipe and the time."""
    seed: int = Field(default=0, ge=0, le=10**18)
    """All random numbers of the run follow from this seed: those of prompts, samples and the order of rows."""
    steps: int = Field(default=200, ge=0, le=10**9)
    """The run ends after this many training steps. Steps before a resume count."""
    epochs: float | None = Field(default=None, gt=0, le=10**6)
    """The run ends after this many passes over the training data, whatever run.steps says. null means run.steps."""
    schedule: str = "sync"
    """This function arranges the two halves of steps, collect and learn, in time: sync, one_step_off, asynchronous,
    module:function, or path/file.py:function."""
    max_staleness: int = Field(default=2, ge=1, le=1000)
    """With the schedule asynchronous, tokens for training come from weights that are at most this many updates older
    than with sync. The same holds for a schedule of your own that declares side_by_side."""
    resume: str = ""
    """The run in this directory is resumed from its latest checkpoint. auto resumes the run called run.name if it
    exists, and starts it otherwise."""
    timeout_s: float = Field(default=1800.0, gt=0, le=1e7)
    """A call to workers fails when it takes longer than this many seconds. Sessions of an environment that wait for a
    free place get this time once more for each wait, and at least their own time_limit_s."""
    max_restarts: int = Field(default=3, ge=0, le=10**6)
    """The run continues after the loss of a worker process at most this many times within an hour. Each generator in
    processes of its own is counted separately."""
    profile: tuple[str, ...] = ()
    """torch.profiler records the second call of each of these endpoints on rank 0, given as ROLE.ENDPOINT, such as
    policy.update."""
    show_samples: int = Field(default=0, ge=0, le=10**6)
    """The terminal shows this many completions after each step."""
    trackers: tuple[Tracker, ...] | Mapping[Tracker, Any] = ()
    """Metrics also go to these trackers, as in [wandb], or with options (project, entity, group, tags), as in
    {wandb: {project: sums}}. metrics.jsonl is always written."""

    def __post_init__(self) -> None:
        check_function_name(self.schedule, key="run.schedule", known=SCHEDULES)
        _ = self.tracking  # raises an error if an option is unknown

    @property
    def tracking(self) -> dict[Tracker, TrackerOptions]:
        """The trackers and the options of each. Raises ConfigError for an option that is wrong."""
        options_by_tracker: Mapping[Tracker, Any] = (
            self.trackers if isinstance(self.trackers, Mapping) else dict.fromkeys(self.trackers)
        )
        return {
            name: build_config(TrackerOptions, options or {}, key=f"run.trackers.{name}")
            for name, options in options_by_tracker.items()
        }

    @property
    def staleness(self) -> int | None:
        """The largest number of updates by which the weights that sample a token may be behind; None if the schedule
        does not declare it.

        A user's own schedule is loaded.
        """
        declared = declaration_of(find_schedule(self.schedule))
        return self.max_staleness if declared.side_by_side else declared.staleness


@section("batch.prompts")
class PromptChoice:
    """Which prompts a step trains on. They are the entries of ``batch.prompts``, where that is a mapping."""

    count: int = Field(default=16, ge=1, le=10**9)
    """A step trains on this many prompts."""
    filter: Literal["none", "rewards", "accuracy"] = "rewards"
    """A prompt is dropped if all of its completions have the same reward (rewards), or all of them are correct or none
    is (accuracy)."""
    refills: int = Field(default=3, ge=0, le=1000)
    """A step draws others in place of dropped prompts at most this many times, and then trains with what it has."""

    @property
    def reason(self) -> str:
        """Why the ledger says that the filter has dropped a prompt."""
        return "all rewards are equal" if self.filter == "rewards" else "all completions are correct, or none is"


@section("batch")
class PromptBatch:
    """The amount of data in a GRPO or PPO step. Each of a prompt's sampling.n completions is a row."""

    prompts: Annotated[int, Field(ge=1, le=10**9)] | Mapping[str, Any] = 16
    """A step takes this many prompts. {count: 16, filter: rewards, refills: 3} drops prompts whose completions all have
    the same reward, and draws others in their place, at most three times a step; filter: accuracy compares whether
    completions are correct."""

    def __post_init__(self) -> None:
        _ = self.choice  # raises an error if an entry is unknown

    @property
    def choice(self) -> PromptChoice:
        """The prompts of a step. Raises ConfigError for an entry that is wrong."""
        if isinstance(self.prompts, int):
            return PromptChoice(count=self.prompts, filter="none")
        if not self.prompts:
            raise ConfigError("batch.prompts = {}: expected a number, or some of the entries count, filter and refills")
        return build_config(PromptChoice, self.prompts, key="batch.prompts")


@section("batch")
class ExampleBatch:
    """The amount of data in an SFT step."""

    examples: int = Field(default=32, ge=1, le=10**9)
    """A step takes this many examples, all in one optimizer step."""


@section("critic")
class CriticConfig:
    """The critic, for advantages that need values. It shares all other settings with the policy."""

    path: str = ""
    """The critic's model is loaded from this directory or hub name. An empty value means the policy's initial model."""
    lr: float = Field(default=1e-5, ge=0, le=10)
    """The critic trains with this learning rate."""


@section("placement.pools.NAME")
class PoolConfig:
    """A pool: worker processes that hold the same roles."""

    roles: tuple[Role, ...] = Field(min_length=1)
    """Each process of the pool holds these roles."""
    ranks: int = Field(default=1, ge=1, le=65536)
    """The pool has this many processes."""


@section("placement")
class PlacementConfig:
    """The worker processes, and which roles each of them holds."""

    layout: Literal["colocated", "split"] = "colocated"
    """The generator shares the policy's processes (colocated) or has its own (split)."""
    pools: Mapping[str, PoolConfig] = Field(default_factory=dict)
    """This table places roles on pools, in place of layout and ranks: each entry is a name, with roles and ranks. If no
    pool has the estimator, it is in the policy's pool."""
    delta_sync: bool = False
    """Only the weights that changed are sent to a generator in processes of its own."""
    ranks: int = Field(default=1, ge=1, le=65536)
    """The policy, and the roles that share its processes, have this many data-parallel ranks."""
    generator_ranks: int | None = Field(default=None, ge=1, le=65536)
    """A generator with processes of its own has this many ranks. null means 1."""
    cpus: int | None = Field(default=None, ge=1, le=512)
    """Each process reserves this many cores and uses as many threads. null means an equal share, which is not
    reserved."""
    wait_s: float = Field(default=0.0, ge=0, le=1e7)
    """The run waits at most this many seconds for resources that others hold. The log names these resources."""

    def __post_init__(self) -> None:
        if self.pools:
            self._check_pools()
        for name in ("generator_ranks", "delta_sync"):
            if getattr(self, name) and self.reads_policy:
                where = "with a pool of policy and generator" if self.pools else "with placement.layout = colocated"
                remedy = "give the generator another pool" if self.pools else "set placement.layout to split"
                raise ConfigError(
                    f"placement.{name} = {getattr(self, name)} {where}: the generator then shares the policy's ranks; "
                    f"leave it out, or {remedy}"
                )

    @property
    def reads_policy(self) -> bool:
        """Whether the generator shares the policy's processes and therefore reads the policy's own weights."""
        if self.pools:
            return any({"policy", "generator"} <= {*pool.roles} for pool in self.pools.values())
        return self.layout == "colocated"

    @property
    def generators(self) -> int:
        """Number of the generator's ranks."""
        return self.ranks_of("generator")

    def ranks_of(self, role: str) -> int:
        """Return the number of ranks of ``role``; 1 if no pool has it."""
        return next((ranks for _, ranks in self.processes((role,))), 1)

    def key_of(self, role: str) -> str:
        """Return the key that sets the number of ranks of ``role``."""
        pool_name = next((name for name, pool in self.pools.items() if role in pool.roles), None)
        short = "generator_ranks" if role == "generator" and self.layout == "split" else "ranks"
        return f"placement.{short}" if pool_name is None else f"placement.pools.{pool_name}.ranks"

    def processes(self, roles: Sequence[str]) -> list[tuple[tuple[str, ...], int]]:
        """Return the sets of ``roles`` that share worker processes, each with the number of its processes."""
        if self.pools:
            pool_of = {role: name for name, pool in self.pools.items() for role in pool.roles}
            pool_of.setdefault("estimator", pool_of.get("policy", ""))
            pool_of.setdefault("rollout", pool_of.get("generator", ""))
            groups = [([r for r in roles if pool_of.get(r) == name], pool.ranks) for name, pool in self.pools.items()]
        else:
            apart = {"generator": self.generator_ranks or 1, "rollout": 1} if self.layout == "split" else {}
            groups = [([role for role in roles if role not in apart], self.ranks)]
            groups += [([role], ranks) for role, ranks in apart.items() if role in roles]
        return [(tuple(roles), ranks) for roles, ranks in groups if roles]

    def _check_pools(self) -> None:
        for name, default in (("layout", "colocated"), ("ranks", 1), ("generator_ranks", None)):
            if getattr(self, name) != default:
                raise ConfigError(
                    f"placement.{name} = {getattr(self, name)} with placement.pools: the table has the ranks of each "
                    "pool; leave one of the two out"
                )
        placed = [role for pool in self.pools.values() for role in pool.roles]
        if twice := [role for role in dict.fromkeys(placed) if placed.count(role) > 1]:
            raise ConfigError(f"placement.pools has the role {twice[0]} more than once: a role has one pool")


@section("eval")
class EvalConfig:
    """Evaluation on held-out prompts."""

    every: int = Field(default=0, ge=0, le=10**9)
    """Evaluations are this many steps apart. 0 evaluates only before the first and after the last step."""
    items: int = Field(default=500, ge=0, le=10**12)
    """An evaluation takes at most this many held-out prompts. 0 turns evaluation off."""
    temperature: float = Field(default=0.0, ge=0, le=100)
    """Evaluation samples at this temperature. 0 always takes the most probable token."""
    at_start: bool = True
    """The run starts with an evaluation of the initial model."""
    metric: str = Field(default="auto", min_length=1)
    """This figure of held-out evaluations judges the run: reward, accuracy, reward_parts/NAME, loss, token_accuracy or
    reward_margin, with /SET behind it for another than the first set of data.eval. auto means loss for supervised
    fine-tuning, and accuracy for preferences. For other recipes auto means accuracy if reward.correct_at is set or all
    scores of the first evaluation are 0 or 1, and reward if not."""
    stop_at: float | None = Field(default=None, ge=-1e9, le=1e9)
    """The run ends once an evaluation reaches this value of eval.metric: this accuracy or reward or a higher one, or
    this loss or a lower one. null never ends it early."""
    patience: int = Field(default=0, ge=0, le=10**9)
    """The run ends after this many evaluations in a row without a new best value of eval.metric. 0 never ends it
    early."""


@section("save")
class SaveConfig:
    """Checkpoints, from which a run can resume, and the final model. A checkpoint is written beside the next steps."""

    every: int = Field(default=0, ge=0, le=10**9)
    """Checkpoints are this many steps apart, and one is written when the run ends or is stopped. A checkpoint waits
    until the one before is written. 0 writes none at fixed steps."""
    minutes: float = Field(default=15.0, ge=0, le=1e7)
    """A checkpoint is also written after the first step that ends this many minutes after the latest one. 0 turns this
    off."""
    keep: int = Field(default=2, ge=0, le=10**9)
    """The run keeps this many of its newest checkpoints. 0 keeps all."""
    keep_best: int = Field(default=0, ge=0, le=10**9)
    """The run also keeps this many of the best checkpoints by eval.metric, of those whose step was evaluated."""
    model: bool = True
    """The run writes the model and its tokenizer at its end, in the format of transformers."""


@section()
class InferenceConfig:
    """A model that is evaluated or sampled, and not trained."""

    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelConfig = Field(default_factory=lambda: ModelConfig(path=DEFAULT_MODEL))
    data: DataConfig = Field(default_factory=DataConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    sampling: SamplingParams = prefer(SamplingParams, max_new_tokens=256)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    environment: EnvironmentConfig = Field(default_factory=EnvironmentConfig)
    placement: PlacementConfig = Field(default_factory=PlacementConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of the roles of this run, in the order in which they start."""
        optional = {"reward": self.reward.path, "generator": True, "rollout": self.environment.name}
        return tuple(role for role, used in optional.items() if used)

    @property
    def processes(self) -> list[tuple[tuple[str, ...], int]]:
        """The roles that share worker processes, and the number of those processes, as ``placement`` puts them."""
        return self.placement.processes(self.roles)

    @property
    def resolved_engine(self) -> EngineConfig:
        """``engine``, in float32 or float16 where the run asks training for that, so that both compute the same."""
        return self.engine

    @property
    def judged_by(self) -> tuple[str, str]:
        """The figure that ``eval.metric`` names, or "auto", and the evaluation set that judges the run."""
        return _split_metric(self.eval.metric, self.data.eval_sets)

    @property
    def eval_sets(self) -> dict[str, str]:
        """The places of held-out examples by name. The set that judges the run comes first."""
        _, first = self.judged_by
        return {first: self.data.eval_sets[first], **self.data.eval_sets}

    @property
    def scores_answers(self) -> bool:
        """Whether evaluations compute the loss of held-out answers. Otherwise they draw completions and grade them."""
        return self.judged_by[0] in (LOSS, TOKEN_ACCURACY)

    @property
    def usual_figure(self) -> str:
        """The figure that judges a run by default where evaluations score answers."""
        return LOSS

    def __post_init__(self) -> None:
        self.check_roles()
        figure, _ = self.judged_by
        for name in ("stop_at", "patience"):
            if (value := getattr(self.eval, name)) not in (None, 0) and not self.eval.items:
                raise ConfigError(
                    f"eval.{name} = {value:g} with eval.items = 0, which turns evaluation off, so that nothing would "
                    f"end the run: raise eval.items, or leave eval.{name} out"
                )
        if figure != "auto":
            check_goal(Metric(figure), self.eval.stop_at)

    def check_source(self, path: Path, given: Sequence[str]) -> Self:
        """Return this configuration, which was read from ``path``, with the current paths of its files if it is that of
        a run. Raises ConfigError as :func:`podium.runs.named_code.check_source` does."""
        return check_source(self, path, given)

    def check_roles(self) -> None:
        """Check that each role has a place. Raises ConfigError."""
        placed = {role for roles, _ in self.processes for role in roles}
        if missing := [role for role in self.roles if role not in placed]:
            raise ConfigError(
                f"placement.pools has no place for the {missing[0]}: write it into the roles of a pool, or leave "
                f"placement.pools out ({{}}); the roles here are {', '.join(self.roles)}"
            )


@section()
class _TrainingConfig(InferenceConfig):
    optim: OptimConfig = Field(default_factory=OptimConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    save: SaveConfig = Field(default_factory=SaveConfig)

    @property
    def roles(self) -> tuple[str, ...]:
        return ("policy", *super().roles) if self.eval.items and not self.scores_answers else ("policy",)

    @property
    def resolved_engine(self) -> EngineConfig:
        exact = self.parallel.precision == self.model.dtype == "float32"
        dtype = self.parallel.precision if exact or self.parallel.precision == "float16" else None
        return replace(self.engine, dtype=dtype) if dtype and self.engine.dtype is None else self.engine

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the policy over the whole run."""
        return self.run.steps

    @property
    def ending_optim(self) -> OptimConfig:
        """``optim`` with a schedule that ends with the run."""
        if self.optim.lr_schedule == "constant" or self.run.epochs is not None:
            return self.optim  # the number of steps of an epoch is known after the data are read
        values = {field.name: getattr(self.optim, field.name) for field in fields(OptimConfig)}
        return EndingOptim(**values, total_steps=max(1, self.optimizer_steps))

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.ending_optim  # raises an error if the run is too short for the warm-up

    def check_roles(self) -> None:
        super().check_roles()
        for name, pool in self.placement.pools.items():
            if unused := [role for role in pool.roles if role not in self.roles]:
                raise ConfigError(
                    f"placement.pools.{name}.roles has {unused[0]}, and the roles of this run are "
                    f"{', '.join(self.roles)}: leave it out"
                )


@section()
class PPOConfig(_TrainingConfig):
    """A run of PPO, with a critic and generalized advantage estimation unless ``algorithm.advantage`` names another.

    Raises:
        ConfigError: Sections contradict each other. The message names the keys and the remedy.
    """

    batch: PromptBatch = Field(default_factory=PromptBatch)
    algorithm: AlgorithmConfig = prefer(
        AlgorithmConfig, advantage="gae", kl_in="reward", kl_coef=0.02, kl_estimator="k1"
    )
    critic: CriticConfig = Field(default_factory=CriticConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scores_answers or self.judged_by[0] == REWARD_MARGIN:
            by = "dpo and rm" if self.judged_by[0] == REWARD_MARGIN else "sft"
            raise ConfigError(
                f"eval.metric = {self.eval.metric!r} is measured by podium train {by} and podium eval alone: expected "
                "auto, reward, accuracy or reward_parts/NAME"
            )
        if self.algorithm.loss in LOSSES:  # a user's own function is not loaded here, because each learner checks it
            check_dropout(self.model, self.algorithm)
        rows, cuts = self.rows, self.algorithm.minibatches
        if rows % cuts:
            raise ConfigError(
                f"batch.prompts x sampling.n = {self.taken} x {self.sampling.n} = {rows} completions do not "
                f"divide into algorithm.minibatches = {cuts}; a divisor of {rows} does, such as {_divisor(rows, cuts)}"
            )
        if self.sampling.temperature == 0:
            raise ConfigError(
                "sampling.temperature = 0.0: expected above 0, because learning needs samples that differ "
                "(evaluation has its own, eval.temperature)"
            )

    @property
    def resolved_algorithm(self) -> AlgorithmConfig:
        """``algorithm`` with the defaults of its functions, and the correction that "auto" means under this schedule.
        Functions and a schedule of the user's own are loaded."""
        algorithm = self.algorithm.resolve()
        if algorithm.correction != "auto":
            return algorithm
        on_policy = self.run.staleness == 0 or algorithm.ratio_to == "rollout"
        return replace(algorithm, correction="none" if on_policy else "truncate")

    def check_roles(self, *, load: bool = False) -> None:
        """Check that each role has a place and rows for each rank, and that the advantage gets groups if it needs them.

        Raises ConfigError. A user's own advantage is loaded, and its demands are checked, only if ``load`` is True.
        Building a configuration runs no code, because the configuration may come from somebody else.
        """
        if not load and self.algorithm.advantage not in ADVANTAGES:
            return
        super().check_roles()
        rows = self.rows // self.algorithm.minibatches
        for role in ("policy", "critic") if self.has_critic else ("policy",):
            if rows < (ranks := self.placement.ranks_of(role)):
                raise ConfigError(
                    f"a minibatch has {rows} completions (batch.prompts x sampling.n / algorithm.minibatches) for "
                    f"{self.placement.key_of(role)} = {ranks}: each rank needs at least one"
                )
        estimator = advantage_declaration(self.algorithm.advantage)
        if estimator.weighs_parts and self.reward.weights and not self.algorithm.options.get("part_weights"):
            raise ConfigError(
                f"reward.weights = {list(self.reward.weights)} with algorithm.advantage = "
                f"{self.algorithm.advantage!r}, which weighs the parts of the reward itself: set algorithm.options.part_weights too, a mapping of "
                "the names of the parts to their weights"
            )
        if self.sampling.n < 2 and estimator.needs_groups:
            raise ConfigError(
                f"sampling.n = {self.sampling.n} with algorithm.advantage = {self.algorithm.advantage!r}, which "
                "compares the completions of a prompt: expected at least 2"
            )

    @property
    def rows(self) -> int:
        """Completions a step."""
        return self.taken * self.sampling.n

    @property
    def taken(self) -> int:
        """Prompts of the data that a step takes at first."""
        return self.batch.choice.count

    @property
    def has_critic(self) -> bool:
        """Whether the advantage estimator reads a critic's values."""
        return advantage_declaration(self.algorithm.advantage).needs_values

    @property
    def roles(self) -> tuple[str, ...]:
        optional = {"reference": self.algorithm.needs_reference, "critic": self.has_critic, "reward": self.reward.path}
        last = ("estimator", "generator", "rollout") if self.environment.name else ("estimator", "generator")
        return ("policy", *(role for role, used in optional.items() if used), *last)

    @property
    def optimizer_steps(self) -> int:
        return self.run.steps * self.algorithm.updates


@section()
class GRPOConfig(PPOConfig):
    """A run of GRPO or another estimator without a critic: the loop of PPO with several completions for each prompt."""

    sampling: SamplingParams = prefer(SamplingParams, max_new_tokens=256, n=8)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)


@section()
class SFTConfig(_TrainingConfig):
    """A run of supervised fine-tuning.

    ``sampling``, ``engine`` and ``reward`` serve its evaluation where ``eval.metric`` is a figure of completions.
    """

    batch: ExampleBatch = Field(default_factory=ExampleBatch)

    @property
    def taken(self) -> int:
        """Examples of the data that a step takes."""
        return self.batch.examples

    @property
    def scores_answers(self) -> bool:
        return self.judged_by[0] in ("auto", LOSS, TOKEN_ACCURACY)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch.examples < (ranks := self.placement.ranks_of("policy")):
            raise ConfigError(
                f"batch.examples = {self.batch.examples} for {self.placement.key_of('policy')} = {ranks}: each rank "
                "needs at least one"
            )


@section()
class PreferenceRun(SFTConfig):
    """A run that learns from preferences between answers: the base of :class:`DPOConfig` and :class:`RMConfig`."""

    batch: ExampleBatch = prefer(ExampleBatch, examples=64)
    algorithm: ScorerConfig = Field(default_factory=ScorerConfig)

    @property
    def scores_answers(self) -> bool:
        return self.judged_by[0] in ("auto", ACCURACY, LOSS, REWARD_MARGIN)

    @property
    def usual_figure(self) -> str:
        return ACCURACY

    @property
    def roles(self) -> tuple[str, ...]:
        policy, *others = super().roles
        return (policy, "reference", *others) if self.algorithm.needs_reference else (policy, *others)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_figure()
        if self.model.dropout or (self.model.lora is not None and self.model.lora.dropout):
            raise ConfigError(
                "model.dropout and model.lora.dropout have to be off: the loss of a pair is computed from values "
                "without dropout; leave them out"
            )
        if self.data.prompt_column is None:
            raise ConfigError(
                "data.prompt_column = null, and a preference is one between the answers to a prompt: set it"
            )
        if self.data.split_turns:
            raise ConfigError(
                "data.split_turns = true makes a row of each turn, and a preference is one between whole answers: "
                "leave it out"
            )

    def check_figure(self) -> None:
        """Check that evaluations measure what ``eval.metric`` names. Raises ConfigError."""
        if not self.scores_answers:
            raise ConfigError(
                f"eval.metric = {self.eval.metric!r} is no figure of preferences between held-out answers: expected "
                "auto, accuracy, loss or reward_margin"
            )


@section()
class DPOConfig(PreferenceRun):
    """A run that trains a policy on preferences between answers, or on answers with labels.

    ``sampling``, ``engine`` and ``reward`` serve its evaluation where ``eval.metric`` is a reward.
    """

    algorithm: PreferenceConfig = Field(default_factory=PreferenceConfig)
    optim: OptimConfig = prefer(OptimConfig, lr=1e-6)

    def check_figure(self) -> None:
        if self.judged_by[0] == TOKEN_ACCURACY:
            super().check_figure()


@section()
class RMConfig(PreferenceRun):
    """A run that trains a reward model on preferences between answers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model.lora is not None:
            raise ConfigError(
                "model.lora with the recipe rm, which trains a head beside the adapters: leave it out, and train all "
                "weights"
            )


RECIPES: Mapping[str, type[PPOConfig] | type[SFTConfig]] = {
    "grpo": GRPOConfig,
    "ppo": PPOConfig,
    "sft": SFTConfig,
    "dpo": DPOConfig,
    "rm": RMConfig,
}


def recipe_of(values: Mapping[str, Any], recipe: str = "grpo") -> str:
    """Return the recipe of a run with these settings. It is ``recipe`` if it may be grpo or ppo, which differ in
    defaults alone."""
    algorithm, batch = values.get("algorithm"), values.get("batch") or {}
    if "examples" in batch or ("prompts" not in batch and algorithm is None):
        return "sft" if algorithm is None else "dpo" if "loss" in algorithm else "rm"
    return recipe if recipe in ("grpo", "ppo") else "grpo"


def _divisor(rows: int, near: int) -> int:
    """The divisor of ``rows`` that is nearest to ``near``."""
    return next(cut for away in count() for cut in (near - away, near + away) if cut > 0 and rows % cut == 0)


def check_goal(metric: Metric, goal: float | None) -> None:
    """Check that a run can reach ``eval.stop_at``. Raises ConfigError for a share above 1, which is never reached."""
    if goal is not None and metric.is_share and goal > 1:
        raise ConfigError(
            f"eval.stop_at = {goal:g}, and {metric.title} is a share from 0 to 1: write {goal / 100:g} for {goal:g} %"
        )


def _split_metric(name: str, sets: Mapping[str, str]) -> tuple[str, str]:
    """The figure and the evaluation set that a value of ``eval.metric`` names.

    Raises:
        ConfigError: There is no such figure, or no such set.
    """
    of_sets = [(name.removesuffix(f"/{key}"), key) for key in sets if key and name.endswith(f"/{key}")]
    for figure, chosen in (*of_sets, (name, next(iter(sets)))):
        if figure in _METRICS:
            return _METRICS[figure], chosen
        if figure.startswith(REWARD_PART_PREFIX) and figure != REWARD_PART_PREFIX:
            return figure, chosen
    known = ", ".join(filter(None, sets))
    raise ConfigError(
        f"eval.metric = {name!r}: expected auto, reward, accuracy, {REWARD_PART_PREFIX}NAME, loss or token_accuracy"
        + (f", or one of these with /SET behind it; the sets of data.eval are {known}" if known else "")
        + ("; the sets of data.eval have no names" if "/" in name and not known else "")
    )
