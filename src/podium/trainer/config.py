"""The whole configuration of a run. Each section sits beside the class that it configures; this only joins them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from podium.algorithms import AlgorithmConfig, needs_values
from podium.errors import ConfigError
from podium.rewards import RewardConfig
from podium.rollout.engines import EngineConfig
from podium.rollout.sampling import SamplingParams
from podium.rollout.tasks import DataConfig
from podium.trainer.sections import (
    CriticConfig,
    EvalConfig,
    ExampleBatch,
    PlacementConfig,
    PromptBatch,
    RunConfig,
    SaveConfig,
)
from podium.workers import ModelConfig, OptimConfig, ParallelConfig

__all__ = ["RECIPES", "GRPOConfig", "InferenceConfig", "PPOConfig", "SFTConfig", "config_class"]

DEFAULT_MODEL = "Qwen/Qwen3-0.6B"


def _default_model() -> ModelConfig:
    return ModelConfig(path=DEFAULT_MODEL)


@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    """A model that is used and not trained: evaluated, or talked to."""

    RECIPE: ClassVar[Mapping[str, Any]] = {"sampling": {"max_new_tokens": 256}}
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=_default_model)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_new_tokens=256))
    engine: EngineConfig = field(default_factory=EngineConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)


@dataclass(frozen=True, kw_only=True)
class _TrainingConfig(InferenceConfig):
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    save: SaveConfig = field(default_factory=SaveConfig)

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the policy over the whole run."""
        return self.run.steps

    @property
    def ending_optim(self) -> OptimConfig:
        """``optim`` with a schedule that ends with the run, unless ``optim.total_steps`` ends it elsewhere."""
        if self.optim.schedule == "constant" or self.optim.total_steps:
            return self.optim
        return replace(self.optim, total_steps=max(1, self.optimizer_steps))

    def __post_init__(self) -> None:
        _ = self.ending_optim  # raises where the run is too short for the warm-up


@dataclass(frozen=True, kw_only=True)
class PPOConfig(_TrainingConfig):
    """A run of PPO, with a critic and generalised advantage estimation unless ``algorithm.advantage`` says otherwise.

    Raises:
        ConfigError: sections that contradict each other; names the keys and the remedy.
    """

    RECIPE: ClassVar[Mapping[str, Any]] = {
        "sampling": {"max_new_tokens": 256, "n": 1},
        "algorithm": {"advantage": "gae", "clip_high": 0.2, "kl_in": "reward", "kl_coef": 0.02, "kl_estimator": "k1"},
    }
    batch: PromptBatch = field(default_factory=PromptBatch)
    algorithm: AlgorithmConfig = field(default_factory=lambda: AlgorithmConfig(**PPOConfig.RECIPE["algorithm"]))
    critic: CriticConfig = field(default_factory=CriticConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        rows, cuts = self.rows, self.algorithm.minibatches
        if rows % cuts:
            raise ConfigError(
                f"batch.prompts x sampling.n = {self.batch.prompts} x {self.sampling.n} = {rows} completions do not "
                f"divide into algorithm.minibatches = {cuts}; a divisor of {rows} does, such as {_divisor(rows, cuts)}"
            )
        if rows // cuts < self.placement.ranks:
            raise ConfigError(
                f"a minibatch has {rows // cuts} completions (batch.prompts x sampling.n / algorithm.minibatches) for "
                f"placement.ranks = {self.placement.ranks}: each rank needs at least one"
            )
        if self.sampling.n < 2 and self.algorithm.advantage in ("grpo", "rloo"):
            raise ConfigError(
                f"sampling.n = {self.sampling.n} with algorithm.advantage = {self.algorithm.advantage!r}, which "
                "compares the completions of a prompt: expected at least 2"
            )
        if self.sampling.temperature == 0:
            raise ConfigError(
                "sampling.temperature = 0.0: expected above 0, because learning needs samples that differ "
                "(evaluation has its own, eval.temperature)"
            )

    @property
    def rows(self) -> int:
        """Completions a step."""
        return self.batch.prompts * self.sampling.n

    @property
    def has_critic(self) -> bool:
        """Whether the advantage estimator reads a critic's values."""
        return needs_values(self.algorithm.advantage)

    @property
    def optimizer_steps(self) -> int:
        return self.run.steps * self.algorithm.updates


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(PPOConfig):
    """A run of GRPO or another estimator without a critic: PPO's loop, several completions a prompt."""

    RECIPE: ClassVar[Mapping[str, Any]] = {"sampling": {"max_new_tokens": 256, "n": 8}}
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(**GRPOConfig.RECIPE["sampling"]))
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)


@dataclass(frozen=True, kw_only=True)
class SFTConfig(_TrainingConfig):
    """A run of supervised fine-tuning. ``sampling``, ``engine`` and ``reward`` serve its evaluation."""

    batch: ExampleBatch = field(default_factory=ExampleBatch)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch.examples < self.placement.ranks:
            raise ConfigError(
                f"batch.examples = {self.batch.examples} for placement.ranks = {self.placement.ranks}: each rank needs "
                "at least one"
            )


RECIPES: Mapping[str, type[PPOConfig] | type[SFTConfig]] = {"grpo": GRPOConfig, "ppo": PPOConfig, "sft": SFTConfig}


def config_class(recipe: str) -> type[PPOConfig] | type[SFTConfig]:
    """The configuration class of a recipe. Raises ConfigError for an unknown one."""
    if recipe not in RECIPES:
        raise ConfigError(f"no recipe {recipe!r}: expected one of {', '.join(RECIPES)}")
    return RECIPES[recipe]


def _divisor(rows: int, near: int) -> int:
    return min((cut for cut in range(1, rows + 1) if rows % cut == 0), key=lambda cut: abs(cut - near))
