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
