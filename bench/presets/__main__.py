"""`python -m bench.presets`: whether each preset and each recipe learns, with five seeds, and how TRL's GRPO does.

Each run is the command `podium train` on the backend inline, from the same model with a wrong habit. A run that has
finished is not run again, unless --again is there. After the last one, or with --report alone, the figures go to
docs/presets.md and its picture. The command fails where a seed was not run or did not learn.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.peer import PEERS
from bench.presets.page import MARK, draw, find_missed, make_section
from bench.presets.training import DRAWN, PARTICULAR, READ, SEEDS, SETTINGS, TRL, WARM_UP, Course, Run, list_arms
from bench.report import machine, put_section
from bench.schedules.campaign import read_results, write_results

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "presets.json"
PAGE = ROOT / "docs" / "presets.md"
PICTURE = "pictures/presets.svg"


def report(results: Path, page: Path) -> None:
    """Write the figures of ``results`` into ``page``, and draw the picture beside it."""
    values = read_results(results)
    page.write_text(put_section(page.read_text(), make_section(values, PICTURE), MARK))
    draw([Run.from_json(run) for run in values["runs"]], page.parent / PICTURE)


def measure(results: Path, folder: Path, arms: Sequence[str], *, again: bool) -> None:
    """Make the runs that are missing, a seed after the other, and write each into ``results`` as it ends."""
    values, course = read_results(results), Course(folder)
    parts = {"all": SETTINGS, "sampled": DRAWN, "read": READ, "particular": PARTICULAR, "warm_up": WARM_UP}
    settings = json.loads(json.dumps(parts))
    if values["runs"] and values["settings"] != settings:
        raise SystemExit(f"{results} is of other settings: remove it, or name another file with --results")
    if not values["runs"]:
        values |= {"settings": settings, "machine": machine(os.getloadavg()[0])}
    if again:
        values["runs"] = [run for run in values["runs"] if run["arm"] not in arms]
    if TRL in arms:
        values["machine"]["libraries"][TRL] = version_of_trl()
    done = {(run["arm"], run["seed"]) for run in values["runs"]}
    for seed in SEEDS:
        for name in arms:
            if (name, seed) in done:
                continue
            run = course.train_trl(seed) if name == TRL else course.train(list_arms()[name], seed)
            if run is None:
                say("trl: not installed, left out; `make bench-peers` installs it")
                continue
            values["runs"].append(run.as_json())
            write_results(results, values)
            first, last = run.points[0][1], run.points[-1][1]
            say(f"{name} {seed}: {first:.1%} to {last:.1%}, {run.processor_s:.1f} s of the processor")


def version_of_trl() -> str:
    """The version of TRL that `make bench-peers` installs."""
    lines = (PEERS / "trl.txt").read_text().splitlines()
    return next(line.removeprefix("trl==") for line in lines if line.startswith("trl=="))


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.presets", description=str(__doc__).partition("\n")[2])
    names = [*list_arms(), TRL]
    parser.add_argument("--arms", nargs="+", default=names, choices=names)
    parser.add_argument("--again", action="store_true", help="run what has finished again")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file of figures, which is continued")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page that gets them")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "bench" / "presets", help="of the runs")
    parser.add_argument("--report", action="store_true", help="run nothing: write the page from the figures")
    options = parser.parse_args(arguments)
    if not options.report:
        torch.set_num_threads(1)
        measure(options.results, options.folder, options.arms, again=options.again)
    report(options.results, options.page)
    runs = [Run.from_json(run) for run in read_results(options.results)["runs"]]
    if missed := find_missed(runs, list_arms()):
        say("\n".join(missed))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
