"""The recipes of examples/agents over three seeds, beside the same models trained by single answers.

    python -m bench.recipes                           runs all that is not in the folder yet (an hour on two cores)
    python -m bench.recipes --out DIR                 keeps and reads the runs there
    python -m bench.recipes --only ray,asynchronous   runs these, and keeps the other figures that recipes.json has
    python -m bench.recipes --report                  runs nothing, and writes what the runs in the folder have reached

One seed of each recipe also trains on the schedule asynchronous, and one on Ray. Writes recipes.json beside this file
as soon as a run has ended, and at the end the table and the picture of docs/agents.md. Fails where a run is below its
bar.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from bench.report import put_section

RECIPES = {"calculator": 0.6, "search": 0.6, "nim": 0.6, "guess": 0.7}
"""Each recipe and its bar: the accuracy that every seed reaches on held-out tasks, drawn at temperature 1."""

ROOT = Path(__file__).parents[1]
RESULTS: Final = ROOT / "bench" / "recipes.json"
PAGE: Final = ROOT / "docs" / "agents.md"
SEEDS = (0, 1, 2)
RUNS: Final[Mapping[str, tuple[str, ...]]] = {
    **{str(seed): ("--seed", str(seed)) for seed in SEEDS},
    "single": ("--single",),
    "asynchronous": ("--schedule", "asynchronous"),
    "ray": ("--backend", "ray"),
}
"""The runs of each recipe, by name, and what each adds to the command line. The last three have the seed 0."""

MARK: Final = "<!-- begin: python -m bench.recipes -->"
LEARNED: Final = {
    "calculator": "products of two numbers of two digits, by calling a calculator and copying its answer",
    "search": "questions about a corpus, by two tools: one finds a page, one reads it",
    "nim": "a game of Nim against an opponent that plays well half of the time",
    "guess": "a number from one to seven in three tries, with a reward for each and `grpo_turns`",
}
NOTES: Final = {"nim": " (one move, then at random)", "guess": " (one try; no more than 14 % can be known)"}
TITLES = {
    "calculator": "products, with a calculator",
    "search": "questions, with two tools",
    "nim": "a game against an opponent",
    "guess": "three tries, each rewarded",
}
Curve = list[tuple[int, float]]


def run(recipe: str, out: Path, *options: str) -> Curve:
    """Train a recipe in the directory ``out``, unless it was trained there, and return its accuracy by step.

    ``options`` are those of the recipe's command line, as ``--seed 1`` or ``--single``.
    """
    metrics = out / "grpo" / "metrics.jsonl"
    if not (out / "summary.json").exists():
        command = [sys.executable, f"examples/agents/{recipe}.py", "--out", str(out), *options]
        subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [(row["step"], row["accuracy"]) for row in rows if row["kind"] == "eval"]


def make_table(curves: Mapping[str, Mapping[str, Curve]]) -> str:
    """Return the table of docs/agents.md."""
    head = ("recipe", "what the model learns", "sessions, seeds 0, 1, 2", "`asynchronous`", "Ray", "single answers")
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for recipe, runs in curves.items():
        seeds = ", ".join(_describe(runs.get(str(seed))) for seed in SEEDS)
        single = f"{_round(runs['single'][-1][1])} %" if "single" in runs else "not run"
        others = (_describe(runs.get(name)) for name in ("asynchronous", "ray"))
        cells = (f"`{recipe}.py`", LEARNED[recipe], seeds, *others, single + NOTES.get(recipe, ""))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def find_missed(curves: Mapping[str, Mapping[str, Curve]]) -> list[str]:
    """Return a sentence for each run of sessions that is missing, or below the bar of its recipe."""
    sentences = []
    for recipe, bar in RECIPES.items():
        for name in [name for name in RUNS if name != "single"]:
            curve = curves.get(recipe, {}).get(name)
            if curve is None:
                sentences.append(f"{recipe} ({name}) was not run: python -m bench.recipes --only {name}")
            elif curve[-1][1] < max(bar, curve[0][1] + 0.2):
                sentences.append(
                    f"{recipe} ({name}) goes from {curve[0][1]:.0%} to {curve[-1][1]:.0%}, below {bar:.0%}"
                )
    return sentences


def _describe(curve: Curve | None) -> str:
    return f"{_round(curve[0][1])} to {_round(curve[-1][1])} %" if curve else "not run"


def _round(share: float) -> int:
    return int(100 * share + 0.5)


def draw(recipes: Mapping[str, Mapping[str, Curve]], path: Path) -> None:
    """Draw the curves of all recipes, side by side: those of all seeds, and of single answers."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with matplotlib.rc_context({"svg.hashsalt": "podium", "svg.fonttype": "path", "font.size": 9}):
        figure, axes = pyplot.subplots(1, len(recipes), figsize=(11, 2.7), sharey=True)
        for axis, (recipe, curves) in zip(axes, recipes.items(), strict=True):
            for name in [name for name in (*map(str, SEEDS), "single") if name in curves]:
                curve, single = curves[name], name == "single"
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
    parser.add_argument("--report", action="store_const", const=[], dest="only", help="run nothing")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[*RUNS], help=", ".join(RUNS))
    arguments = parser.parse_args()
    if unknown := set(arguments.only) - {*RUNS}:
        parser.error(f"--only has no {min(unknown)!r}: the runs are {', '.join(RUNS)}")
    figures: dict[str, dict[str, Curve]] = json.loads(RESULTS.read_text())
    for recipe, name in itertools.product(RECIPES, RUNS):
        folder = arguments.out / f"{recipe}-{name}"
        if name in arguments.only or (folder / "summary.json").exists():
            figures[recipe][name] = run(recipe, folder, *RUNS[name])
            RESULTS.write_text(json.dumps(figures, indent=1) + "\n")
    PAGE.write_text(put_section(PAGE.read_text(), make_table(figures), MARK))
    draw(figures, ROOT / "docs" / "pictures" / "recipes.svg")
    if missed := find_missed(figures):
        sys.exit("\n".join(missed))


if __name__ == "__main__":
    main()
