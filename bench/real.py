"""Trains the published model of examples/real in each way over three seeds, and writes the figures of the pages.

    python -m bench.real                      runs what is not in runs/real yet: half an hour on two quiet cores
    python -m bench.real --only full lora     these ways alone
    python -m bench.real --seeds 2            this seed alone
    python -m bench.real --cpus 1             on a machine that is busy with other things
    python -m bench.real --report             runs nothing

What the finished runs wrote goes into bench/real.json, and from there into docs/real-model.md, its picture and README.
Figures of runs whose directories are gone stay there until their way and seed runs again.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, Final

from bench.report import put_section

ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = ROOT / "bench" / "real.json"
PICTURE: Final = ROOT / "docs" / "pictures" / "real.svg"
MARK: Final = "<!-- begin: python -m bench.real -->"
PAGES: Final = ("README.md", "docs/real-model.md")
SEEDS: Final = (0, 1, 2)
WAYS: Final[Mapping[str, tuple[str, Sequence[str], str]]] = {
    "full": ("GRPO, all weights", (), "#2563a8"),
    "lora": ("GRPO, adapters of rank 16", ("--lora",), "#d9730d"),
    "sft": ("fine-tuning on the answers", ("--sft",), "#8a8f98"),
    "dpo": ("DPO on preferences", ("--dpo",), "#2f8f4e"),
    "tool": ("GRPO of sessions with a tool", ("--tool",), "#8250c4"),
}
"""Each way: its title, the arguments of the example, and its color."""

Run = dict[str, Any]


def train(way: str, seed: int, out: Path, cpus: int | None) -> None:
    """Train in the directory ``out``, unless it was trained there."""
    if not (out / "cost.json").exists():
        arguments = [*WAYS[way][1], "--seed", str(seed), "--out", str(out), *(["--cpus", str(cpus)] if cpus else [])]
        subprocess.run([sys.executable, "examples/real/train.py", *arguments], cwd=ROOT, check=True)


def read_run(way: str, seed: int, out: Path) -> Run:
    """The figures of a finished run: held-out rewards by step, its cost, and the first held-out replies."""
    import pyarrow.parquet as pq

    rows = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    cost = json.loads((out / "cost.json").read_text())
    replies = list[list[str]]()
    files = sorted((out / "run" / "evaluations").glob("step-*.parquet"))
    first, last = (pq.read_table(file).to_pylist() for file in (files[0], files[-1])) if files else ([], [])
    for before, after in zip(first, last, strict=True):
        questions = re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", before["prompt"]) or [before["prompt"]]
        replies.append([questions[-1], _reply(before), _reply(after)])
    return {
        "way": way,
        "seed": seed,
        "items": next(row["items"] for row in rows if row["kind"] == "eval"),
        "steps": max(row["step"] for row in rows),
        "curve": [[row["step"], round(row["reward_mean"], 4)] for row in rows if "reward_mean" in row],
        "wall_s": round(cost["wall_s"]),
        "processor_s": round(cost["processor_s"]),
        "replies": replies[:: max(1, len(replies) // 6)][:6],
    }


def _reply(row: Mapping[str, Any]) -> str:
    """The reply of a row of an evaluation; of a session all replies."""
    return "\n".join(row.get("turn_said") or [row["completion"]])


def tables(runs: Sequence[Run]) -> str:
    """What the page says of the runs, in Markdown."""
    lines = [
        "| | seed | held-out reward before | after | gain | steps | processor time |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        before, after = run["curve"][0][1], run["curve"][-1][1]
        lines.append(
            f"| {WAYS[run['way']][0]} | {run['seed']} | {before:.3f} | {after:.3f} | {after - before:+.3f} "
            f"| {run['steps']} | {run['processor_s'] / 60:.1f} min |"
        )
    for what, ways in (
        (
            "Held-out sums before and after the first of these runs, each a reply at temperature 0",
            WAYS.keys() - {"tool"},
        ),
        ("Held-out products before and after the first session with a tool, the replies of a session", {"tool"}),
    ):
        if shown := next((run for run in runs if run["way"] in ways and run["replies"]), None):
            lines += ["", f"{what}:", "", "| question | before | after |", "|---|---|---|"]
            lines += [f"| {' | '.join(_cell(text) for text in reply)} |" for reply in shown["replies"]]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return f"`{text}`".replace("\n", "⏎").replace("|", "\\|") if text else ""


def sentence(runs: Sequence[Run]) -> str:
    """What the README says of the runs, in Markdown."""
    texts = list[str]()
    for way, words in (("full", "with all weights"), ("lora", "with adapters")):
        if some := [run for run in runs if run["way"] == way]:
            count = f"{len(some)} {'seed' if len(some) == 1 else 'seeds'}"
            minutes = mean(run["processor_s"] for run in some) / 60
            gain = f"{words} from {_mean(some, 0):.2f} to {_mean(some, -1):.2f}"
            texts.append(f"{gain} ({count}, {minutes:.1f} minutes of processor time a run)")
    return (
        "`make real` fetches a published model, [SmolLM2-135M-Instruct](docs/real-model.md), and trains it on sums by "
        f"GRPO on two cores. In {runs[0]['steps']} steps the reward on held-out sums rises {' and '.join(texts)}. "
        "`make real ARGS=--sft`, `--dpo` and `--tool` train it by answers, by preferences, and in sessions with a tool."
    )


def _mean(runs: Sequence[Run], place: int) -> float:
    return mean(run["curve"][place][1] for run in runs)


def with_figures(page: str, text: str, runs: Sequence[Run]) -> str:
    """The ``text`` of a page of PAGES, with the figures of ``runs``."""
    return put_section(text, sentence(runs) if page == "README.md" else tables(runs), MARK)


def draw(runs: Sequence[Run], path: Path) -> None:
    """Draw held-out rewards by step, a line for each run."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with matplotlib.rc_context({"svg.hashsalt": "podium", "svg.fonttype": "path", "font.size": 9}):
        figure, axis = pyplot.subplots(figsize=(6.5, 2.8))
        labels = set[str]()
        for run in runs:
            title, _, color = WAYS[run["way"]]
            steps, rewards = zip(*run["curve"], strict=True)
            axis.plot(steps, rewards, lw=1.5, color=color, label=None if title in labels else title, marker=".")
            labels.add(title)
        axis.set(xlabel="step", ylabel="reward on held-out prompts", ylim=(0, 1.02))
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, loc="lower right")
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Train what is missing, and write the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "real")
    parser.add_argument("--only", nargs="+", choices=[*WAYS], default=[*WAYS])
    parser.add_argument("--seeds", nargs="+", type=int, choices=SEEDS, default=SEEDS)
    parser.add_argument("--cpus", type=int)
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    recorded = {(run["way"], run["seed"]): run for run in json.loads(RESULTS.read_text())} if RESULTS.exists() else {}
    for way in WAYS:
        for seed in SEEDS:
            out = options.out / f"{way}-{seed}"
            if way in options.only and seed in options.seeds and not options.report:
                train(way, seed, out, options.cpus)
            if (out / "cost.json").exists():
                recorded[way, seed] = read_run(way, seed, out)
    runs = [recorded[way, seed] for way in WAYS for seed in SEEDS if (way, seed) in recorded]
    if not runs:
        sys.exit(f"there is no finished run in {options.out} or in {RESULTS}")
    RESULTS.write_text(json.dumps(runs, indent=1, ensure_ascii=False) + "\n")
    draw(runs, PICTURE)
    for page in PAGES:
        path = ROOT / page
        path.write_text(with_figures(page, path.read_text(), runs))


if __name__ == "__main__":
    main()
