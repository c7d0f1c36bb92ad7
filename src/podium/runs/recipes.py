"""Recipes: the ways to train of ``podium train NAME``, Podium's own and those of installed packages.

This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from podium.errors import ConfigError
from podium.extras import explain_packages
from podium.functions import explain_raised, find_installed, load_function, nearest
from podium.installed import list_entry_points
from podium.runs.config import GRPOConfig, PPOConfig, SFTConfig
from podium.telemetry.held_out import LOSS

_GROUP: Final = "podium.recipes"


def _keep_metric(metric: str, model: str) -> str:
    del model
    return metric


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A way to train. A package has it as an entry point of the group ``podium.recipes``, whose name is that of the
    recipe. The module of the entry point imports no torch, so that mistakes in settings are answered at once.

    Attributes:
        config: The class of its configuration, a section derived from :class:`PPOConfig` or :class:`SFTConfig`.
        trainer: Its trainer, as ``module:Class``. The class takes ``config``, ``cluster`` and ``backend_options``, and
            derives from that of ``podium.trainer`` for a configuration of this kind.
        help: What it does, as the end of a sentence that begins with its name.
        recognizes: Whether a run with these settings is one of this recipe. It is only asked about runs that are of no
            recipe of Podium's own, or that somebody says to be of this one.
        words: What people may take for a recipe, such as the name of a loss, and the arguments that choose it here.
        choose_metric: The ``eval.metric`` with which ``podium eval`` evaluates a model of the recipe, from that of the
            run and the name of the model. Raises ConfigError for models that write no completions.
        pipeline: What a trained model is for, as the hub calls it.
    """

    config: type[Any]
    trainer: str
    help: str
    recognizes: Callable[[Mapping[str, Any]], bool]
    words: Mapping[str, str] = field(default_factory=dict[str, str])
    choose_metric: Callable[[str, str], str] = _keep_metric
    pipeline: Literal["text-generation", "text-classification"] = "text-generation"

    def load_trainer(self) -> Callable[..., Any]:
        """Return the class of the trainer. This imports torch."""
        return load_function(self.trainer, key="trainer of the recipe")


def _learns_answers(values: Mapping[str, Any]) -> bool:
    return _takes_examples(values) and values.get("algorithm") is None


def _choose_loss(metric: str, model: str) -> str:
    """The loss of answers judges the run by default, as any evaluation knows it."""
    del model
    return f"{LOSS}{metric.removeprefix('auto')}" if metric.split("/")[0] == "auto" else metric


def _takes_examples(values: Mapping[str, Any]) -> bool:
    batch = values.get("batch") or {}
    return "examples" in batch or ("prompts" not in batch and values.get("algorithm") is None)


def _samples(values: Mapping[str, Any]) -> bool:
    return not _takes_examples(values)


RECIPES: Final[Mapping[str, Recipe]] = {
    "grpo": Recipe(
        config=GRPOConfig, trainer="podium.trainer.ppo:PPOTrainer", help="learns from rewards", recognizes=_samples
    ),
    "ppo": Recipe(
        config=PPOConfig,
        trainer="podium.trainer.ppo:PPOTrainer",
        help="learns from rewards with a critic",
        recognizes=_samples,
    ),
    "sft": Recipe(
        config=SFTConfig,
        trainer="podium.trainer.sft:SFTTrainer",
        help="learns from answers",
        recognizes=_learns_answers,
        choose_metric=_choose_loss,
    ),
}
"""Podium's own recipes by name."""


def list_recipes() -> list[str]:
    """Return the names of all recipes: Podium's own, and those of installed packages. This loads no package."""
    return [*RECIPES, *sorted({entry.name for entry in list_entry_points(group=_GROUP)} - RECIPES.keys())]


def find_recipe(name: str) -> Recipe:
    """Return the recipe of a name.

    Raises:
        ConfigError: There is none, or the package that has it cannot be loaded.
    """
    if name in RECIPES:
        return RECIPES[name]
    entry = find_installed(_GROUP, name, "recipe")
    if entry is None:
        raise ConfigError(
            f"there is no recipe {name!r}{nearest(name.lower(), list_recipes(), _GROUP)}; the recipes are "
            f"{', '.join(list_recipes())}; {explain_packages(_GROUP, name)}"
        )
    package = entry.dist.name if entry.dist else "unknown"
    with explain_raised(f"the recipe {name} needs {entry.value} of the package {package}, which cannot be loaded"):
        recipe = entry.load()
    if not isinstance(recipe, Recipe):
        raise ConfigError(
            f"the recipe {name}: {entry.value} of the package {package} is of type {type(recipe).__name__}; expected a "
            "podium.runs.recipes.Recipe"
        )
    return recipe


def recipe_of(values: Mapping[str, Any], recipe: str = "grpo") -> str:
    """Return the name of the recipe of a run with these settings. It is ``recipe`` if it may be that one: grpo and ppo
    differ in defaults alone.

    Raises:
        ConfigError: The settings are those of no recipe here.
    """
    values = {name: value if isinstance(value, Mapping | None) else {} for name, value in values.items()}
    for name in (recipe, *RECIPES):
        if find_recipe(name).recognizes(values):
            return name
    for name in list_recipes():
        if find_recipe(name).recognizes(values):
            return name
    raise ConfigError(
        "the run was made by a recipe that is not installed here: its settings have batch.examples and the section "
        f"algorithm, and the recipes are {', '.join(list_recipes())}; {explain_packages(_GROUP)}"
    )
