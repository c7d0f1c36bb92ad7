"""The recipes of agents learn, with every seed. `make recipes` runs this; it takes half an hour."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.recipes import RECIPES, SEEDS, run


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_learns(recipe: str, seed: int, tmp_path: Path) -> None:
    if not os.environ.get("PODIUM_RECIPES"):
        pytest.skip("the recipes take half an hour: make recipes")
    curve = run(recipe, seed, tmp_path / "run")
    assert curve[-1][1] >= curve[0][1] + 0.2
    assert curve[-1][1] >= RECIPES[recipe]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "options", [("--schedule", "asynchronous"), ("--backend", "ray")], ids=lambda options: options[1]
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_learns_also_elsewhere(recipe: str, options: tuple[str, str], tmp_path: Path) -> None:
    if not os.environ.get("PODIUM_RECIPES"):
        pytest.skip("the recipes take half an hour: make recipes")
    if "ray" in options:
        pytest.importorskip("ray")
    curve = run(recipe, 0, tmp_path / "run", *options)
    assert curve[-1][1] >= curve[0][1] + 0.2
    assert curve[-1][1] >= RECIPES[recipe]
