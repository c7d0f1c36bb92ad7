"""The configuration of a run: the trainer's own sections, and the sections of each recipe. Imports no torch.

All other sections stand beside the classes that they configure.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import count
from pathlib import Path
from typing import Final, Literal, Self

from pydantic import Field

from podium.algorithms import ADVANTAGES, CORRECTIONS, LOSSES, AlgorithmConfig, Declaration
from podium.config import prefer, section
from podium.errors import ConfigError
from podium.models import ModelConfig
from podium.rewards import RewardConfig
from podium.rollout.engines import EngineConfig
from podium.rollout.environments import EnvironmentConfig
from podium.rollout.sampling import SamplingParams
from podium.rollout.tasks import DataConfig
from podium.runs.named_code import check_source
from podium.runs.schedules import SCHEDULES
from podium.runs.sections import (
    CriticConfig,
    EvalConfig,
    ExampleBatch,
    PlacementConfig,
    PromptBatch,
    PromptChoice,
    RunConfig,
    SaveConfig,
)
from podium.spelling import write_count
from podium.telemetry.held_out import ACCURACY, LOSS, REWARD, REWARD_MARGIN, TOKEN_ACCURACY, Metric, count_draws
from podium.telemetry.metrics import REWARD_PART_PREFIX
from podium.training import OptimConfig, ParallelConfig
from podium.training.config import EndingOptim, check_dropout

DEFAULT_MODEL: Final = "Qwen/Qwen3-0.6B"
_METRICS: Final = {"auto": "auto", "reward": REWARD} | {
    name: name for name in (ACCURACY, LOSS, TOKEN_ACCURACY, REWARD_MARGIN)
}


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
        self._check_evaluated("items", "turns evaluation off")
        if (count := count_draws(figure)) > self.eval.sampling.n:
            raise ConfigError(
                f"eval.metric = {self.eval.metric!r} needs {write_count(count, 'completion')} of each held-out "
                f"prompt, and eval.temperature has n = {self.eval.sampling.n}: write "
                f"{{temperature: 0.6, n: {count}}}, for example"
            )
        if figure != "auto":
            check_goal(Metric(figure), self.eval.stop_at)

    def _check_evaluated(self, key: str, meaning: str) -> None:
        """Raise ConfigError if an evaluation is to end the run, and ``key`` is 0, with which there is none."""
        for name, off in {"stop_at": None, "patience": 0}.items():
            if (value := getattr(self.eval, name)) != off and not getattr(self.eval, key):
                raise ConfigError(
                    f"eval.{name} = {value:g} with eval.{key} = 0, which {meaning}, so that nothing would end the run: "
                    f"raise eval.{key}, or leave eval.{name} out ({'null' if off is None else off})"
                )

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
        dtype = choose_engine_dtype(self.parallel, self.model.dtype)
        return replace(self.engine, dtype=dtype) if dtype and self.engine.dtype is None else self.engine

    @property
    def worker_names(self) -> Mapping[str, str]:
        """The classes of workers that take the place of a role's usual one, as ``module:Class`` by role."""
        return {}

    @property
    def trained_model(self) -> ModelConfig:
        """``model``, as the policy trains it."""
        return self.model

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the policy over the whole run."""
        return self.run.steps

    def list_endpoints(self, role: str) -> dict[str, str]:
        """Return the endpoints that only this kind of run calls of a role, and what each is for, as the end of an error
        about a class that lacks it."""
        if role == "policy" and self.eval.items and self.scores_answers:
            return {"score_examples": f"by which eval.metric = {self.eval.metric} judges the run"}
        return {}

    def explain_objective(self) -> Iterator[str]:
        """Yield the lines of a dry run on what is trained. They may import torch."""
        yield from ()

    @property
    def ending_optim(self) -> OptimConfig:
        """``optim`` with a schedule that ends with the run."""
        return self._end_optim(self.optimizer_steps)

    def _end_optim(self, steps: int, first: int = 0) -> OptimConfig:
        """Return ``optim`` with a schedule that begins with the optimizer step ``first`` and ends after ``steps``."""
        if (self.optim.lr_schedule == "constant" and not first) or self.run.epochs is not None:
            return self.optim  # the number of steps of an epoch is known after the data are read
        values = {field.name: getattr(self.optim, field.name) for field in fields(OptimConfig)}
        return EndingOptim(**values, total_steps=max(1, steps), first_step=first)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_evaluated("every", "evaluates only before the first and after the last step")
        _ = self.ending_optim  # raises an error if the run is too short for the warm-up

    def check_roles(self) -> None:
        super().check_roles()
        spared = {"generator", "rollout", "reward"} if self.engine.replayed_run else set[str]()
        for name, pool in self.placement.pools.items():
            if unused := [role for role in pool.roles if role not in self.roles and role not in spared]:
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
        if self.replays and self.eval.items:
            raise ConfigError(
                f"eval.items = {self.eval.items} with engine.name = 'replay', which has no generator for evaluations: "
                "set eval.items to 0, and evaluate the run by podium eval"
            )
        if self.replays and self.run.epochs is not None:
            raise ConfigError(
                f"run.epochs = {self.run.epochs:g} with engine.name = 'replay', which trains steps that were recorded: "
                "set run.steps in place of it"
            )
        if all(name in LOSSES for name in self.algorithm.losses):  # each learner checks a function of the user's own
            named = self.run.schedule in SCHEDULES and all(name in CORRECTIONS for name in self.algorithm.corrections)
            algorithm = self.algorithm if named else replace(self.algorithm, correction="none")
            check_dropout(self.model, self._settle_correction(algorithm))
        rows, cuts = self.rows, self.algorithm.minibatches
        if rows % cuts:
            raise ConfigError(
                f"batch.prompts x sampling.n = {self.taken} x {self.sampling.n} = {write_count(rows, 'completion')} "
                f"do not divide into algorithm.minibatches = {cuts}; a divisor of {rows} does, such as "
                f"{_divisor(rows, cuts)}"
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
        return self._settle_correction(self.algorithm.resolve())

    def _settle_correction(self, algorithm: AlgorithmConfig) -> AlgorithmConfig:
        """``algorithm`` with the correction that "auto" means under this schedule."""
        if algorithm.correction != "auto":
            return algorithm
        on_policy = self.run.staleness == 0 or algorithm.ratio_to == "rollout"
        return replace(algorithm, correction="none" if on_policy else "truncate")

    def check_roles(self, *, load: bool = False) -> None:
        """Check that each role has a place and rows for each rank, and that the advantage gets groups if it needs them.

        Raises ConfigError. A user's own advantage or loss is loaded, and its demands are checked, only with ``load``.
        Building a configuration runs no code, because the configuration may come from somebody else.
        """
        names = self.algorithm.losses
        is_registered = self.algorithm.advantage in ADVANTAGES and all(name in LOSSES for name in names)
        if not is_registered and not load:
            return
        super().check_roles()
        rows = self.rows // self.algorithm.minibatches
        for role in {"policy", "critic"} & {*self.roles}:
            if rows < (ranks := self.placement.ranks_of(role)):
                raise ConfigError(
                    f"a minibatch has {write_count(rows, 'completion')} (batch.prompts x sampling.n / "
                    f"algorithm.minibatches) for {self.placement.key_of(role)} = {ranks}: each rank needs at least one"
                )
        self._check_critic()
        estimator = ADVANTAGES.declaration(self.algorithm.advantage)
        self._check_rewards(estimator)
        if self.algorithm.needs_teacher and self.algorithm.teacher.teacher_top_k and self.sampling.filtered:
            raise ConfigError(
                f"algorithm.options.teacher_top_k = {self.algorithm.teacher.teacher_top_k} with sampling.top_k "
                "or top_p, which leave the policy only some of the ids that the teacher finds most probable: set them "
                "to 0 and 1, or leave teacher_top_k out"
            )
        self._check_recording()
        together = any({"policy", "reference"} <= {*roles} for roles, _ in self.processes)
        if self.algorithm.reference.reference_refresh and (self.model.lora is not None or not together):
            why = "model.lora" if self.model.lora is not None else "placement.pools"
            expected = "a policy without adapters" if self.model.lora is not None else "both in the roles of one pool"
            raise ConfigError(
                f"algorithm.options.reference_refresh = {self.algorithm.reference.reference_refresh} with {why}: the "
                f"reference takes the weights of a policy in its own processes; expected {expected}"
            )
        if estimator.needs_greedy and self.replays:
            raise ConfigError(
                f"engine.name = {self.engine.name!r} with algorithm.advantage = {self.algorithm.advantage!r}, whose "
                "baseline is the reward of a greedy completion: none is recorded; choose another one, such as rloo"
            )
        if estimator.needs_greedy and self.environment.name:
            raise ConfigError(
                f"environment.name = {self.environment.name!r} with algorithm.advantage = "
                f"{self.algorithm.advantage!r}, whose baseline is the reward of a greedy completion: sessions "
                "have none; choose another estimator, such as rloo"
            )
        self._check_groups(estimator)

    def _check_groups(self, estimator: Declaration) -> None:
        """Check that each prompt has as many completions as the advantage estimator and a filter compare."""
        if self.sampling.n < 2 and self.prompt_choice.filter != "none" and not self.replays:
            raise ConfigError(
                f"batch.prompts.filter = {self.prompt_choice.filter!r} with sampling.n = {self.sampling.n}: a filter "
                "compares the completions of a prompt, and would drop every prompt; set batch.prompts.filter to none, "
                "or sampling.n to at least 2"
            )
        what = f"sampling.n = {self.sampling.n} with algorithm.advantage = {self.algorithm.advantage!r}"
        if self.sampling.n < 2 and estimator.needs_groups:
            raise ConfigError(f"{what}, which compares the completions of a prompt: expected at least 2")
        options = self.algorithm.read_options(estimator.options) if estimator.options is not None else None
        for name in estimator.below_n:
            if self.sampling.n <= (value := getattr(options, name)):
                raise ConfigError(
                    f"{what} and algorithm.options.{name} = {value}: {write_count(self.sampling.n, 'completion')} of a "
                    f"prompt teach it nothing; set sampling.n above {value}, or {name} below {self.sampling.n}"
                )

    def _check_rewards(self, estimator: Declaration) -> None:
        """Check that the advantage estimator reads rewards as they are meant."""
        if estimator.weighs_parts and self.reward.weights and not self.algorithm.options.get("part_weights"):
            raise ConfigError(
                f"reward.weights = {list(self.reward.weights)} with algorithm.advantage = "
                f"{self.algorithm.advantage!r}, which weighs the parts of the reward itself: set "
                "algorithm.options.part_weights too, a mapping of the names of the parts to their weights"
            )
        if estimator.judges_rewards and self.algorithm.kl_in == "reward":
            raise ConfigError(
                f"algorithm.kl_in = 'reward' with algorithm.advantage = {self.algorithm.advantage!r}, which needs "
                "rewards as they were graded: less a KL, a reward of 1 is not 1 any more; set algorithm.kl_in to loss"
            )

        if estimator.refuses_negative and self.reward.failure_score < 0:
            raise ConfigError(
                f"reward.failure_score = {self.reward.failure_score:g} with algorithm.advantage = "
                f"{self.algorithm.advantage!r}, which takes no rewards below 0: set it to 0"
            )

    def _check_critic(self) -> None:
        """Check that a critic that is a head on the policy's model has no model of its own."""
        if self.critic.path and self.algorithm.has_value_head:
            raise ConfigError(
                f"critic.path = {self.critic.path!r} with algorithm.options.critic_trunk = "
                f"{self.algorithm.critic.critic_trunk!r}, whose critic is a head on the policy's model: leave "
                "critic.path out, or set critic_trunk to separate"
            )

    def _check_recording(self) -> None:
        """Check that what the loss reads of the generator's distributions is recorded."""
        for what in self.algorithm.record_reasons.values():
            reasons = {
                "sampling.top_k or top_p": self.sampling.filtered and "centering" in what,
                f"environment.name = {self.environment.name!r}": self.environment.name,
                f"engine.name = {self.engine.name!r}": self.replays,
            }
            if why := next((reason for reason, holds in reasons.items() if holds), ""):
                raise ConfigError(
                    f"algorithm.options.{what} with {why}: the generator records what this option needs only for "
                    "single completions that are drawn from all tokens; leave one of the two out"
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
    def prompt_choice(self) -> PromptChoice:
        """The prompts of a step. A mapping that names no filter has none where prompts whose completions are equally
        good teach something, and where a prompt has one completion."""
        choice = self.batch.choice
        if self.batch.names_filter or not (self.learns_flat or self.sampling.n < 2):
            return choice
        return replace(choice, filter="none")

    @property
    def learns_flat(self) -> str:
        """What learns from a prompt whose completions are all equally good: an estimator that does not compare them, or
        losses without advantages; else "". Functions of the user's own are not loaded, and do not count."""
        algorithm = self.algorithm
        declared = [LOSSES.declaration(name) for name in algorithm.losses if name in LOSSES]
        without = [loss for loss in declared if (loss.needs_teacher or loss.imitates) and not loss.scales_advantage]
        if len(without) == len(algorithm.losses):
            return f"algorithm.loss = {algorithm.loss!r}"
        is_registered = algorithm.advantage in ADVANTAGES
        compares = not is_registered or ADVANTAGES.declaration(algorithm.advantage).needs_groups
        return "" if compares else f"algorithm.advantage = {algorithm.advantage!r}"

    @property
    def has_critic(self) -> bool:
        """Whether the advantage estimator reads a critic's values."""
        return ADVANTAGES.declaration(self.algorithm.advantage).needs_values

    def list_endpoints(self, role: str) -> dict[str, str]:
        if role == "policy" and self.algorithm.has_value_head:
            trunk = self.algorithm.critic.critic_trunk
            why = f"by which it is its own critic (algorithm.options.critic_trunk = {trunk})"
            return {**super().list_endpoints(role), "values": why}
        return super().list_endpoints(role)

    @property
    def replays(self) -> bool:
        """Whether the completions are those that another run has recorded."""
        return bool(self.engine.replayed_run)

    @property
    def keeps_apart(self) -> str:
        """Why the two halves of steps cannot run at the same time, and what to change; empty if they can."""
        if self.replays or not self.placement.reads_policy:
            return ""
        where, remedy = "placement.layout = colocated", "set placement.layout to split"
        if self.placement.pools:
            where, remedy = "policy and generator in one pool", "give the generator a pool of its own"
        return f"with {where} the generator reads the policy's own weights, which an update changes: {remedy}"

    @property
    def teacher_model(self) -> ModelConfig:
        """The teacher's model, with the policy's data type and without adapters."""
        path = self.algorithm.teacher.teacher
        return replace(self.model, path=path, tokenizer="", config={}, lora=None)

    @property
    def roles(self) -> tuple[str, ...]:
        optional = {"reference": self.algorithm.needs_reference, "teacher": self.algorithm.needs_teacher}
        optional |= {"critic": self.has_critic and not self.algorithm.has_value_head}
        optional |= {"reward": bool(self.reward.path) and not self.replays}
        last = ("estimator", "generator", "rollout") if self.environment.name else ("estimator", "generator")
        last = last[:1] if self.replays else last
        return ("policy", *(role for role, used in optional.items() if used), *last)

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the policy over the whole run: none of them while a critic with a model of its own warms
        up, unless the run has no steps after that."""
        critic = self.algorithm.critic
        warmup = critic.critic_warmup if critic.critic_trunk == "separate" else 0
        return (self.run.steps - warmup if warmup < self.run.steps else self.run.steps) * self.algorithm.updates

    @property
    def ending_optim(self) -> OptimConfig:
        """``optim`` with a schedule that begins when the policy does, which waits while its value head warms up, and
        ends with the run."""
        critic = self.algorithm.critic
        waits = self.algorithm.has_value_head and critic.critic_warmup < self.run.steps
        first = critic.critic_warmup * self.algorithm.updates if waits else 0
        try:
            return self._end_optim(self.optimizer_steps, first)
        except ConfigError as error:
            if not 0 < critic.critic_warmup < self.run.steps:
                raise
            steps, warmup = self.run.steps, critic.critic_warmup
            raise ConfigError(
                f"{error}; of {write_count(steps, 'step')} algorithm.options.critic_warmup = {warmup} leaves "
                f"{steps - warmup} to the policy"
            ) from None

    @property
    def critic_optim(self) -> OptimConfig:
        """The optimizer of a critic with a model of its own, with a schedule that ends with the run."""
        return replace(self._end_optim(self.run.steps * self.algorithm.updates), lr=self.critic.lr)


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


def choose_engine_dtype(parallel: ParallelConfig, model_dtype: str) -> Literal["float32", "float16"] | None:
    """Return the data type in which completions are drawn where training computes in it; None for the usual one."""
    precision = parallel.choice.compute
    if precision == "float32":
        return precision if model_dtype == precision else None
    return precision if precision == "float16" else None


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
        if count_draws(figure) or (figure.startswith(REWARD_PART_PREFIX) and figure != REWARD_PART_PREFIX):
            return figure, chosen
    set_names = ", ".join(filter(None, sets))
    raise ConfigError(
        f"eval.metric = {name!r}: expected auto, reward, accuracy, pass@K, maj@K, {REWARD_PART_PREFIX}NAME, loss or "
        "token_accuracy"
        + (f", or one of these with /SET behind it; the sets of data.eval are {set_names}" if set_names else "")
        + ("; the sets of data.eval have no names" if "/" in name and not set_names else "")
    )
