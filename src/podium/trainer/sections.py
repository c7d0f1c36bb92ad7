"""The trainer's own sections of a configuration: the run, the batch, the placement, evaluation and saving."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from podium.errors import ConfigError

__all__ = ["BatchConfig", "EvalConfig", "PlacementConfig", "RunConfig", "SaveConfig"]


def _at_least(section: str, name: str, value: float, least: float) -> None:
    if value < least:
        raise ConfigError(f"{section}.{name} = {value}: expected at least {least}")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What the run is called, how long it goes on, and who watches."""

    dir: str = "runs"  # directory that holds the directories of runs
    name: str = ""  # of this run's directory; empty: made from recipe and time
    seed: int = 0  # of everything that is drawn: prompts, samples, order of rows
    steps: int = 200  # training steps in all, those before a resume included
    schedule: Literal["sync"] = "sync"  # how the stages of steps are arranged in time
    resume: str = ""  # a run's directory: go on from its latest checkpoint, in that directory
    timeout_s: float = 1800.0  # deadline of each call to workers
    show_samples: int = 0  # completions to show on the terminal after each step
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()  # besides metrics.jsonl, which is always kept

    def __post_init__(self) -> None:
        _at_least("run", "steps", self.steps, 0)
        _at_least("run", "show_samples", self.show_samples, 0)
        if not self.timeout_s > 0:
            raise ConfigError(f"run.timeout_s = {self.timeout_s}: expected a positive number of seconds")


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """How much data a step takes, and how it is cut. A row is one completion (GRPO, PPO) or one example (SFT)."""

    prompts: int = 16  # prompts a step (SFT: examples); each gets sampling.n completions
    minibatches: int = 1  # optimizer steps over the rows of one training step
    epochs: int = 1  # times that those minibatches are gone through

    def __post_init__(self) -> None:
        for name in ("prompts", "minibatches", "epochs"):
            _at_least("batch", name, getattr(self, name), 1)


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """Which ranks hold which roles."""

    layout: Literal["colocated", "split"] = "colocated"  # all roles on the same ranks, or the generator on its own
    ranks: int = 1  # data-parallel ranks of the policy and the roles beside it
    generator_ranks: int | None = None  # ranks of the generator when split; null: 1 when split
    strategy: Literal["replicate", "fsdp2"] = "replicate"  # each rank a whole model, or a shard of it

    def __post_init__(self) -> None:
        _at_least("placement", "ranks", self.ranks, 1)
        if self.generator_ranks is None:
            return
        _at_least("placement", "generator_ranks", self.generator_ranks, 1)
        if self.layout == "colocated":
            raise ConfigError(
                f"placement.generator_ranks = {self.generator_ranks} with placement.layout = colocated: the generator "
                "then shares the policy's ranks; leave it out, or set placement.layout to split"
            )

    @property
    def generators(self) -> int:
        """Ranks of the generator, wherever it lives."""
        return self.ranks if self.layout == "colocated" else self.generator_ranks or 1

    @property
    def slots(self) -> int:
        """Host processes in all."""
        return self.ranks + (self.generators if self.layout == "split" else 0)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Held-out evaluation: before the first step, after the last, and in between."""

    every: int = 0  # steps between evaluations; 0: only before the first and after the last step
    items: int = 500  # held-out prompts; 0: never evaluate
    temperature: float = 0.0  # of the sampler; 0 is greedy
    at_start: bool = True  # whether to evaluate before the first step

    def __post_init__(self) -> None:
        _at_least("eval", "every", self.every, 0)
        _at_least("eval", "items", self.items, 0)
        _at_least("eval", "temperature", self.temperature, 0.0)


@dataclass(frozen=True, kw_only=True)
class SaveConfig:
    """Checkpoints to go on from, and the model to take away."""

    every: int = 0  # steps between checkpoints; 0: only when the run ends or is stopped
    keep: int = 2  # newest checkpoints to keep; 0: all
    model: bool = True  # write the final model for transformers, with its tokenizer

    def __post_init__(self) -> None:
        _at_least("save", "every", self.every, 0)
        _at_least("save", "keep", self.keep, 0)
