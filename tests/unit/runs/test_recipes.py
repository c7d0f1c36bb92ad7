"""Recipes of packages: how they are found, refused, and recognized by the settings of a run."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest

from podium.cli import main
from podium.config import section
from podium.errors import ConfigError
from podium.runs import recipes
from podium.runs.config import GRPOConfig
from podium.runs.recipes import Recipe, find_recipe, list_recipes, recipe_of
from podium_completion import run_completion


@section()
class MineConfig(GRPOConfig):
    """A configuration of a package."""


class Trainer:
    """Stands for the trainer of a package."""


MINE = Recipe(
    config=MineConfig,
    trainer=f"{__name__}:Trainer",
    help="learns in another way",
    recognizes=lambda values: "mine" in str(values.get("run")),
    words={"other": "--algorithm.loss mine.py:other"},
)
SAMPLED: dict[str, Any] = {"batch": {"prompts": 4}, "algorithm": {"loss": "gspo"}}
EXAMPLES: dict[str, Any] = {"batch": {"examples": 4}}


def install(monkeypatch: pytest.MonkeyPatch, *entries: EntryPoint) -> None:
    def list_entries(group: str, name: str | None = None) -> list[EntryPoint]:
        return [entry for entry in entries if group == entry.group and name in (None, entry.name)]

    monkeypatch.setattr("podium.functions.list_entry_points", list_entries)
    monkeypatch.setattr(recipes, "list_entry_points", list_entries)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(
        monkeypatch,
        EntryPoint("mine", f"{__name__}:MINE", "podium.recipes"),
        EntryPoint("grpo", f"{__name__}:MINE", "podium.recipes"),
        EntryPoint("wrong", f"{__name__}:SAMPLED", "podium.recipes"),
        EntryPoint("gone", "no_such_module:RECIPE", "podium.recipes"),
    )


@pytest.mark.usefixtures("installed")
def test_a_recipe_of_a_package_has_its_configuration_and_its_trainer() -> None:
    assert list_recipes() == ["grpo", "ppo", "sft", "gone", "mine", "wrong"]
    assert find_recipe("mine").load_trainer() is Trainer
    assert find_recipe("grpo").config is GRPOConfig, "Podium's own come first"
    for name, error in (("wrong", "is of type dict; expected a"), ("gone", "no_such_module")):
        with pytest.raises(ConfigError, match=error):
            find_recipe(name)


def test_the_command_line_knows_recipes_of_packages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, EntryPoint("mine", f"{__name__}:MINE", "podium.recipes"))
    assert main(["train", "mine", "--keys"]) == 0
    assert "--algorithm.advantage grpo" in capsys.readouterr().out
    for words, error in (
        ("other", "podium train mine --algorithm.loss mine.py:other"),
        ("xyz", "mine learns in another"),
    ):
        with pytest.raises(SystemExit):
            main(["train", words])
        assert error in capsys.readouterr().err
    monkeypatch.setattr("podium.cli.find_commands", dict)
    assert run_completion(["bash"]) == 0
    assert '"train mine")' in capsys.readouterr().out


def test_a_recipe_that_is_not_installed_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch)
    with pytest.raises(SystemExit):
        main(["train", "dpo"])
    assert "pip install ./plugins/podium-NAME" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"recipe that is not installed here.*pip install ./plugins/podium-NAME"):
        recipe_of({**EXAMPLES, "algorithm": {"loss": "dpo"}})


@pytest.mark.parametrize(
    ("values", "asked", "recipe"),
    [
        (SAMPLED, "grpo", "grpo"),
        (SAMPLED, "ppo", "ppo"),
        (SAMPLED, "sft", "grpo"),
        (SAMPLED, "dpo", "grpo"),
        (SAMPLED, "rm", "grpo"),
        ({}, "grpo", "sft"),
        (EXAMPLES, "dpo", "sft"),
        ({**EXAMPLES, "algorithm": {"loss": "dpo"}}, "grpo", "dpo"),
        ({**EXAMPLES, "algorithm": {"loss": "kto"}}, "rm", "dpo"),
        ({**EXAMPLES, "algorithm": {}}, "dpo", "rm"),
        ({**EXAMPLES, "algorithm": {"options": {}}}, "sft", "rm"),
    ],
)
def test_a_run_is_recognized_by_its_settings(values: dict[str, Any], asked: str, recipe: str) -> None:
    assert recipe_of(values, asked) == recipe


@pytest.mark.usefixtures("installed")
def test_a_run_of_a_package_with_sampled_completions_is_recognized_where_it_is_asked_for() -> None:
    assert recipe_of({**SAMPLED, "run": {"name": "mine"}}, "mine") == "mine"
    assert recipe_of(SAMPLED, "mine") == "grpo"
