"""The recipes of examples/agents over three seeds, beside the same models trained by single answers.

    python -m bench.recipes              runs all that is not in the folder yet (about 40 minutes on two quiet cores)
    python -m bench.recipes --out DIR    keeps and reads the runs there

Writes recipes.json beside this file, and the picture of docs/agents.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

RECIPES = {"calculator": 0.6, "search": 0.6, "nim": 0.6, "guess": 0.7}
"""Each recipe and its bar: the accuracy that every seed reaches on held-out tasks, drawn at temperature 1."""

ROOT = Path(__file__).parents[1]
SEEDS = (0, 1, 2)
TITLES = {
    "calculator": "products, with a calculator",
    "search": "questions, with two tools",
    "nim": "a game against an opponent",
    "guess": "three tries, each rewarded",
}
Curve = list[tuple[int, float]]


def run(recipe: str, seed: int, out: Path, *options: str) -> Curve:
    """Train a recipe in the directory ``out``, unless it was trained there, and return its accuracy by step.

    ``options`` are those of the recipe's command line, as ``--single``.
    """
    metrics = out / "grpo" / "metrics.jsonl"
    if not (out / "summary.json").exists():
        command = [sys.executable, f"examples/agents/{recipe}.py", "--seed", str(seed), "--out", str(out)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*command, *options], cwd=ROOT, env=environment, check=True)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [(row["step"], row["accuracy"]) for row in rows if row["kind"] == "eval"]


def draw(found: dict[str, dict[str, Curve]], path: Path) -> None:
    """Draw the curves of all recipes, side by side."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with matplotlib.rc_context({"svg.hashsalt": "podium", "svg.fonttype": "path", "font.size": 9}):
        figure, axes = pyplot.subplots(1, len(found), figsize=(11, 2.7), sharey=True)
        for axis, (recipe, curves) in zip(axes, found.items(), strict=True):
            for name, curve in curves.items():
                single = name == "single"
                steps, accuracy = zip(*curve, strict=True)
                style = {"color": "#9ca3af", "ls": "--"} if single else {"color": "#4f46e5", "alpha": 0.8}
                label = "single answers" if single else ("sessions" if name == "0" else None)
                axis.plot(steps, accuracy, lw=1.5, label=label, **style)
            axis.axhline(RECIPES[recipe], color="#16a34a", lw=0.8, ls=":")
            axis.set(title=TITLES[recipe], xlabel="step", ylim=(-0.02, 1.02))
            axis.spines[["top", "right"]].set_visible(False)
        axes[0].set_ylabel("held-out accuracy")
        axes[0].legend(frameon=False, loc="upper left")
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs") / "recipes")
    out: Path = parser.parse_args().out
    found: dict[str, dict[str, Curve]] = {}
    for recipe in RECIPES:
        curves = {str(seed): run(recipe, seed, out / f"{recipe}-{seed}") for seed in SEEDS}
        found[recipe] = {**curves, "single": run(recipe, 0, out / f"{recipe}-single", "--single")}
    (ROOT / "bench" / "recipes.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(found, ROOT / "docs" / "pictures" / "recipes.svg")


if __name__ == "__main__":
    main()
