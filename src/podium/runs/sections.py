"""The trainer's own sections of a configuration: run, batch, critic, placement, eval and save. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from podium.config import build_config, section
from podium.errors import ConfigError
from podium.functions import check_function_name
from podium.rollout.sampling import SamplingParams
from podium.runs.schedules import SCHEDULES, declaration_of, find_schedule

Role = Literal["policy", "reference", "teacher", "critic", "reward", "estimator", "generator", "rollout"]


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
    trackers: tuple[str, ...] | Mapping[str, Any] = ()
    """Metrics also go to these trackers of installed packages, as in [wandb], or with options (project, entity, group,
    tags), as in {wandb: {project: sums}}. metrics.jsonl is always written."""

    def __post_init__(self) -> None:
        check_function_name(self.schedule, key="run.schedule", known=SCHEDULES)
        _ = self.tracking  # raises an error if an option is unknown

    @property
    def tracking(self) -> dict[str, TrackerOptions]:
        """The trackers and the options of each. Raises ConfigError for an option that is wrong."""
        options_by_tracker: Mapping[str, Any] = (
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
    is (accuracy). The default is none where such prompts teach something, or have one completion."""
    refills: int = Field(default=3, ge=0, le=1000)
    """A step draws others in place of dropped prompts at most this many times, and then trains with what it has."""

    skip_solved: float | None = Field(default=None, gt=0, le=1)
    """A prompt is passed over once its running pass rate, the share of its completions that were correct, is at least
    this. null passes over none."""
    curriculum: Literal["none", "failures", "variance"] = "none"
    """A prompt whose running pass rate p is known is taken with the probability 1 - p (failures) or 4 p (1 - p)
    (variance), and with 0.05 at least."""

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
    completions are correct. skip_solved: 1.0 passes over prompts that are solved, and curriculum: failures or variance
    takes prompts by their running pass rate; filter: none leaves out the filter, and is the default of a mapping
    where the advantage estimator does not compare the completions of a prompt, or sampling.n is 1."""

    def __post_init__(self) -> None:
        _ = self.choice  # raises an error if an entry is unknown

    @property
    def names_filter(self) -> bool:
        """Whether the filter was chosen, and is not a default."""
        return isinstance(self.prompts, Mapping) and "filter" in self.prompts

    @property
    def choice(self) -> PromptChoice:
        """The prompts of a step, of which :attr:`.PPOConfig.prompt_choice` knows the default of the filter. Raises
        ConfigError for an entry that is wrong."""
        if isinstance(self.prompts, int):
            return PromptChoice(count=self.prompts, filter="none")
        if not self.prompts:
            raise ConfigError(
                "batch.prompts = {}: expected a number, or some of the entries count, filter, refills, skip_solved and "
                "curriculum"
            )
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
    """The critic trains with this learning rate, also where it is a head on the policy's model."""


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


@section("eval.temperature")
class EvalSampling:
    """How evaluations draw completions. These are the entries of ``eval.temperature``, where that is a mapping."""

    temperature: float = Field(default=0.0, ge=0, le=100)
    """Logits are divided by this value before a token is drawn. 0 always takes the most probable token."""
    n: int = Field(default=1, ge=1, le=65536)
    """Each held-out prompt gets this many completions, from which pass@k and maj@k are computed."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Tokens are drawn from the smallest set of the most probable tokens that holds this share of the probability."""
    top_k: int = Field(default=0, ge=0, le=10**9)
    """Tokens are drawn from this many most probable tokens. 0 keeps all tokens."""
    max_new_tokens: int | None = Field(default=None, ge=1, le=10**9)
    """A completion has at most this many tokens. null means sampling.max_new_tokens."""

    def __post_init__(self) -> None:
        if self.n > 1 and self.temperature == 0:
            raise ConfigError(
                f"eval.temperature has n = {self.n} at temperature 0, where all completions of a prompt are equal: set "
                "its temperature, as in {temperature: 0.6, n: " + f"{self.n}}}"
            )

    def apply(self, sampling: SamplingParams) -> SamplingParams:
        """Return ``sampling`` as evaluations draw."""
        return replace(
            sampling,
            n=self.n,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_new_tokens=self.max_new_tokens or sampling.max_new_tokens,
        )


@section("eval")
class EvalConfig:
    """Evaluation on held-out prompts."""

    every: int = Field(default=0, ge=0, le=10**9)
    """Evaluations are this many steps apart. 0 evaluates only before the first and after the last step."""
    items: int = Field(default=500, ge=0, le=10**12)
    """An evaluation takes at most this many held-out prompts. 0 turns evaluation off."""
    temperature: Annotated[float, Field(ge=0, le=100)] | Mapping[str, Any] = 0.0
    """Evaluation samples at this temperature. 0 always takes the most probable token. {temperature: 0.6, n: 8} draws
    eight completions of each prompt; its other entries are top_p, top_k and max_new_tokens."""
    at_start: bool = True
    """The run starts with an evaluation of the initial model."""
    metric: str = Field(default="auto", min_length=1)
    """This figure of held-out evaluations judges the run: reward, accuracy, pass@K, maj@K, reward_parts/NAME, loss,
    token_accuracy or reward_margin, with /SET behind it for another than the first set of data.eval. auto means loss
    for supervised fine-tuning, and accuracy for preferences. For other recipes auto means accuracy if reward.correct_at
    is set, or if there is one reward and all scores of the first evaluation are 0 or 1, and reward if not."""
    stop_at: float | None = Field(default=None, ge=-1e9, le=1e9)
    """The run ends once an evaluation reaches this value of eval.metric: this accuracy or reward or a higher one, or
    this loss or a lower one. null never ends it early."""
    patience: int = Field(default=0, ge=0, le=10**9)
    """The run ends after this many evaluations in a row without a new best value of eval.metric. 0 never ends it
    early."""

    def __post_init__(self) -> None:
        _ = self.sampling  # raises an error if an entry is wrong

    @property
    def sampling(self) -> EvalSampling:
        """How completions are drawn. Raises ConfigError for an entry of ``temperature`` that is wrong."""
        if isinstance(self.temperature, Mapping):
            if not self.temperature:
                raise ConfigError("eval.temperature = {}: expected a number, or entries such as temperature and n")
            return build_config(EvalSampling, self.temperature, key="eval.temperature")
        return EvalSampling(temperature=self.temperature)


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
