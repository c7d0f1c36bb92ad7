"""The trainer's own sections of a configuration: the run, the batch, the placement, evaluation and saving."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from podium.errors import ConfigError

__all__ = ["CriticConfig", "EvalConfig", "ExampleBatch", "PlacementConfig", "PromptBatch", "RunConfig", "SaveConfig"]


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
class PromptBatch:
    """How much a GRPO or PPO step takes. Each prompt gets ``sampling.n`` completions; each completion is a row."""

    prompts: int = 16  # prompts a step

    def __post_init__(self) -> None:
        _at_least("batch", "prompts", self.prompts, 1)


@dataclass(frozen=True, kw_only=True)
class ExampleBatch:
    """How much an SFT step takes."""

    examples: int = 32  # examples a step, all of them in one optimizer step

    def __post_init__(self) -> None:
        _at_least("batch", "examples", self.examples, 1)


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The critic, where the advantage estimator reads values; what is not here it shares with the policy."""

    path: str = ""  # directory or hub name of its model; empty: as the policy starts
    lr: float = 1e-5  # its learning rate

    def __post_init__(self) -> None:
        if not self.lr >= 0:
            raise ConfigError(f"critic.lr = {self.lr}: expected a number that is not negative")


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """Which ranks hold which roles."""

    # the generator beside the policy; on its own, sent all weights; on its own, sent those that have changed
    layout: Literal["colocated", "split", "split-delta"] = "colocated"
    ranks: int = 1  # data-parallel ranks of the policy and the roles beside it
    generator_ranks: int | None = None  # ranks of the generator when split; null: 1 when split
    cpus: int | None = None  # cores that each host holds, and its threads; null: an equal share, held by nobody
    wait_s: float = 0.0  # seconds to wait for what others hold; the log says for what

    def __post_init__(self) -> None:
        _at_least("placement", "ranks", self.ranks, 1)
        _at_least("placement", "wait_s", self.wait_s, 0)
        if self.cpus is not None:
            _at_least("placement", "cpus", self.cpus, 1)
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
        return self.ranks if self.layout == "colocated" else self.ranks + self.generators


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Held-out evaluation: before the first step, after the last, and in between."""

    every: int = 0  # steps between evaluations; 0: only before the first and after the last step
    items: int = 500  # held-out prompts; 0: never evaluate
    temperature: float = 0.0  # of the sampler; 0 is greedy
    at_start: bool = True  # whether to evaluate before the first step
    stop_at: float | None = None  # end the run once an evaluation reaches this accuracy, in 0..1; null: never

    def __post_init__(self) -> None:
        _at_least("eval", "every", self.every, 0)
        _at_least("eval", "items", self.items, 0)
        _at_least("eval", "temperature", self.temperature, 0.0)
        if self.stop_at is not None and not 0 < self.stop_at <= 1:
            raise ConfigError(f"eval.stop_at = {self.stop_at}: expected a share above 0 and at most 1, or null")


@dataclass(frozen=True, kw_only=True)
class SaveConfig:
    """Checkpoints to go on from, and the model to take away."""

    every: int = 0  # steps between checkpoints; 0: only when the run ends or is stopped
    keep: int = 2  # newest checkpoints to keep; 0: all
    model: bool = True  # write the final model for transformers, with its tokenizer

    def __post_init__(self) -> None:
        _at_least("save", "every", self.every, 0)
        _at_least("save", "keep", self.keep, 0)
