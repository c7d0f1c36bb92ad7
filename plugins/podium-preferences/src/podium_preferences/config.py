"""The configuration of runs that learn from preferences, and their recipes. This module imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal

from pydantic import Field

from podium.config import prefer, section
from podium.errors import ConfigError
from podium.models import ModelConfig
from podium.runs.config import SFTConfig
from podium.runs.recipes import Recipe
from podium.runs.sections import ExampleBatch
from podium.telemetry.held_out import ACCURACY, LOSS, REWARD_MARGIN, TOKEN_ACCURACY
from podium.training import OptimConfig

__all__ = [
    "DPO",
    "PREFERENCE_LOSSES",
    "RM",
    "DPOConfig",
    "PreferenceConfig",
    "PreferenceRun",
    "RMConfig",
    "ScorerConfig",
]

PREFERENCE_LOSSES: Final[Mapping[str, str]] = {
    name: f"podium_preferences.losses.{name}:{name}" for name in ("dpo", "ipo", "kto", "orpo", "simpo", "bradley_terry")
}
"""The losses of preferences by name, and where each is."""
_WITH_REFERENCE: Final = ("dpo", "ipo", "kto")


@section("algorithm")
class ScorerConfig:
    """The objective of a reward model: that of Bradley and Terry."""

    options: Mapping[str, Any] = Field(default_factory=dict)
    """These options belong to the loss, which declares them."""

    @property
    def loss_name(self) -> str:
        """The name of the loss."""
        return "bradley_terry"

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares the model with a reference."""
        return False

    @property
    def reads_labels(self) -> bool:
        """Whether the loss is one of single answers with labels, and compares them with mismatched answers."""
        return False


@section("algorithm")
class PreferenceConfig(ScorerConfig):
    """The objective of a policy that learns from preferences."""

    options: Mapping[str, Any] = Field(default_factory=dict)
    """These options belong to the loss, which declares them."""
    loss: Literal["dpo", "ipo", "kto", "orpo", "simpo"] = "dpo"
    """This function is the loss of preferences: dpo, ipo, orpo or simpo of pairs, or kto, of answers with labels
    or of pairs."""

    @property
    def loss_name(self) -> str:
        return self.loss

    @property
    def needs_reference(self) -> bool:
        return self.loss in _WITH_REFERENCE

    @property
    def reads_labels(self) -> bool:
        return self.loss == "kto"


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
    def trained_model(self) -> ModelConfig:
        return replace(self.model, dropout=False)  # the values of answers are computed without dropout

    def list_endpoints(self, role: str) -> dict[str, str]:
        needed = role in ("policy", "reference")
        return {"answer_values": "from which the loss of preferences is computed"} if needed else {}

    def explain_objective(self) -> Iterator[str]:
        from podium_preferences.objective import explain_options  # needs torch

        yield f"algorithm    loss = {self.algorithm.loss_name}"
        for key, setting in explain_options(self.algorithm).items():
            yield f"{'':12} options.{key} = {setting.value:g} ({setting.origin})"

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
                "data.prompt_column = null, and preferences compare the answers to a prompt: set it to a column"
            )
        if self.data.split_turns:
            raise ConfigError(
                "data.split_turns = true makes a row of each turn, and preferences compare whole answers: leave it out"
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

    @property
    def worker_names(self) -> Mapping[str, str]:
        return {"policy": "podium_preferences.scorer:Scorer"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model.lora is not None:
            raise ConfigError(
                "model.lora with the recipe rm, which trains a head beside the adapters: leave it out, and train all "
                "weights"
            )


def _has_objective(values: Mapping[str, Any], *, loss: bool) -> bool:
    """Whether settings have examples and an objective, with or without ``algorithm.loss``."""
    algorithm, batch = values.get("algorithm"), values.get("batch") or {}
    return "examples" in batch and algorithm is not None and ("loss" in algorithm) is loss


def _choose_figure(metric: str, model: str) -> str:
    """The figures of a run are those of preferences, and ``podium eval`` grades completions."""
    del metric, model
    return "auto"


def _refuse_evaluation(metric: str, model: str) -> str:
    raise ConfigError(
        f"{model} is a reward model, which writes no completions: --reward.name model --reward.path {model} scores "
        "those of another model by it"
    )


_TRAINER: Final = "podium_preferences.trainer:PreferenceTrainer"
DPO: Final = Recipe(
    config=DPOConfig,
    trainer=_TRAINER,
    help="learns from preferences between answers",
    recognizes=partial(_has_objective, loss=True),
    words={name: f"--algorithm.loss {name}" for name in PREFERENCE_LOSSES if name != "bradley_terry"},
    choose_metric=_choose_figure,
)
RM: Final = Recipe(
    config=RMConfig,
    trainer=_TRAINER,
    help="trains a reward model on preferences between answers",
    recognizes=partial(_has_objective, loss=False),
    choose_metric=_refuse_evaluation,
    pipeline="text-classification",
)
