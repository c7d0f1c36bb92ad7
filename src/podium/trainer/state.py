"""Checkpoints of a run: everything that the next step depends on, so that a resumed run goes on as if it had not ended.

checkpoints/step-000012/
  trainer.json      step, place among the prompts, coefficients, evaluations so far, time spent
  policy/ critic/   model, optimizer, step count and random state, by their workers
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from podium.errors import CheckpointError
from podium.telemetry import Sample
from podium.trainer.roles import Roles
from podium.trainer.run_dir import Checkpoint, RunDirectory

__all__ = ["Evaluation", "TrainerState", "load_checkpoint", "save_checkpoint"]

FILE = "trainer.json"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One held-out evaluation: ``correct`` of ``items`` prompts after ``step`` steps, and a few completions."""

    step: int
    correct: int
    items: int
    reward_mean: float
    samples: tuple[Sample, ...] = ()

    @property
    def accuracy(self) -> float:
        """In 0..1."""
        return self.correct / self.items if self.items else 0.0


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """What the controller itself must remember. What is drawn at a step depends on the seed and the step alone.

    Attributes:
        step: the last one that is finished.
        prompts: place in the stream of prompts or examples.
        kl_coef: of the controller of the KL coefficient.
        first, last, best: evaluations; ``last`` may be ``first``.
        wall_s: seconds of training so far.
        stage_s, stage_tokens: totals by stage, for the speeds in the summary.
        given: names of what a script gave the run beside its configuration.
    """

    step: int = 0
    prompts: Mapping[str, Any] = field(default_factory=dict)
    kl_coef: float = 0.0
    first: Evaluation | None = None
    last: Evaluation | None = None
    best: Evaluation | None = None
    wall_s: float = 0.0
    stage_s: Mapping[str, float] = field(default_factory=dict)
    stage_tokens: Mapping[str, float] = field(default_factory=dict)
    given: Mapping[str, str] = field(default_factory=dict)


def save_checkpoint(directory: RunDirectory, roles: Roles, state: TrainerState, *, keep: int) -> None:
    """Write a checkpoint of ``state.step``: it is there whole, or not at all.

    Raises:
        CheckpointError: the disk refuses, or is not the one that the workers write to.
    """
    with directory.checkpoint(state.step, keep=keep) as folder:
        whole = folder.absolute()  # a worker's working directory is its own
        for name, worker in (("policy", roles.policy), ("critic", roles.critic)):
            if worker is not None:
                worker.save(str(whole / name))
                if not (folder / name).is_dir():
                    raise CheckpointError(
                        f"{whole / name} was written on another machine and is not here: a run's directory must be on "
                        "a file system that all nodes share; set run.dir to one"
                    )
        (folder / FILE).write_text(json.dumps(asdict(state), indent=1), encoding="utf-8")


def load_checkpoint(checkpoint: Checkpoint, roles: Roles) -> TrainerState:
    """Bring the roles to where they were, and return the controller's own state.

    Raises:
        CheckpointError: the checkpoint does not fit the roles, or is not of a run of this kind.
    """
    path = checkpoint.path / FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        for name in ("first", "last", "best"):
            values[name] = None if values[name] is None else _evaluation(values[name])
        state = TrainerState(**values)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not the state of a training run: {error}") from error
    for name, worker in (("policy", roles.policy), ("critic", roles.critic)):
        if worker is None:
            continue
        if not (checkpoint.path / name).is_dir():
            raise CheckpointError(f"{checkpoint.path} holds no {name}, and this configuration has one")
        worker.load(str(checkpoint.path.absolute() / name))
    return state


def _evaluation(values: Mapping[str, Any]) -> Evaluation:
    return Evaluation(**{**values, "samples": tuple(Sample(**sample) for sample in values["samples"])})
