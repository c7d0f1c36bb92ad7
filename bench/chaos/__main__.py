"""`python -m bench.chaos`: runs that are disturbed at random moments, in every schedule; what became of each prompt.

A small GRPO run trains on a copy task while faults strike it, which bench/chaos/faults.py lists with the outcome that
each must have. A run whose controller has ended is started again with `--resume auto`, as a cluster's scheduler would.
Then the books are checked (bench/chaos/books.py), and that nothing is left (bench/chaos/leftovers.py).

One line a fault is printed as it comes, then one line for each kind of fault, and what is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from bench.chaos.campaign import Campaign, Result, Strike
from bench.chaos.faults import FAULTS, OF_SESSIONS, OF_SINGLE_TURNS, ON_RAY
from bench.chaos.report import MARK, collect, merge, section, summary_path, write_campaigns
from bench.chaos.training import STALENESS
from bench.chaos.victim import Victim
from bench.report import machine, put_section

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "chaos" / "results.json"
PAGE = ROOT / "docs" / "reliability.md"
SMALL_DISK_MB = 192
BACKENDS: dict[str, tuple[dict[str, Any], float]] = {
    "local": ({}, 5.0),
    "ray": ({"init": {"object_store_memory": 100 << 20}}, 20.0),
}
"""Options of each backend, and the seconds within which nothing may be left of a run whose controller has ended."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.chaos", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--kills", type=int, default=2, help="faults of each kind, in each schedule")
    parser.add_argument("--a-run", type=int, default=10, help="faults of each run, one after another")
    parser.add_argument(
        "--minutes", type=float, default=math.inf,
        help="begin no fault after these; all kinds and schedules have had about as many",
    )  # fmt: skip
    parser.add_argument("--schedules", nargs="+", default=tuple(STALENESS), choices=tuple(STALENESS))
    parser.add_argument("--faults", nargs="+", choices=tuple(FAULTS), help="kinds of faults (default: all that can be)")
    parser.add_argument("--backend", default="local", choices=tuple(BACKENDS))
    parser.add_argument("--sessions", action="store_true", help="each prompt is a session of two turns")
    parser.add_argument(
        "--warm", action="store_true",
        help="fork the fork servers of local from the controller, so that no time is spent on imports",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--replay", nargs="+", type=Strike.parse, metavar="FAULT#NUMBER",
        help="let these faults strike one run, as they did in a campaign of the same seed and schedule",
    )  # fmt: skip
    parser.add_argument("--folder", help="keep everything here; a campaign that was interrupted here goes on")
    parser.add_argument("--small-disk", action="store_true", help="put the runs on a small disk (as root), to fill it")
    parser.add_argument(
        "--report", nargs="*", type=Path, metavar="FOLDER",
        help="run nothing: write docs/reliability.md, with the campaigns in these folders beside those of other dates",
    )  # fmt: skip
    options = parser.parse_args()
    if options.warm and options.backend != "local":
        parser.error("--warm is of the backend local, whose fork servers it forks")
    if options.report is not None:
        return report(options.report)
    if options.replay and len(options.schedules) > 1:
        parser.error("--replay is of one schedule; name it with --schedules")
    with ExitStack() as stack:
        folder = Path(options.folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="podium-chaos-")))
        folder = folder.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if options.small_disk:
            stack.enter_context(_small_disk(folder / "runs"))
        campaigns = [_campaign(options, folder, schedule) for schedule in options.schedules]
        if options.replay:
            wrong = campaigns[0].run(options.replay, _say)
            _print({"wrong": wrong})
            return min(len(wrong), 1)
        return _strike(campaigns, options, folder)


def _campaign(options: argparse.Namespace, folder: Path, schedule: str) -> Campaign:
    victim = partial(_victim, folder, schedule, options.backend, options.sessions, options.warm)
    faults = options.faults or _faults(options)
    return Campaign(
        folder, schedule, faults, options.kills, options.seed, victim, options.sessions, faults_a_run=options.a_run
    )


def _strike(campaigns: Sequence[Campaign], options: argparse.Namespace, folder: Path) -> int:
    """Give each schedule a run in turn until all have had their faults, and write what they led to."""
    until = time.monotonic() + 60.0 * options.minutes
    while time.monotonic() < until and any(campaign.plan() for campaign in campaigns):
        for campaign in campaigns:
            if (strikes := campaign.plan()) and time.monotonic() < until:
                for text in campaign.run(strikes, _say, until):
                    _print({"schedule": campaign.schedule, "wrong": text})
                _write_summary(campaign, options, folder)
    for campaign in campaigns:
        for row in campaign.summary():
            _print({"schedule": campaign.schedule, **row})
        _print(campaign.about())
    return int(any(campaign.about()["wrong"] for campaign in campaigns))


def _write_summary(campaign: Campaign, options: argparse.Namespace, folder: Path) -> None:
    """Write what a campaign has led to so far, with the median load of its runs."""
    about = {"backend": options.backend, "sessions": options.sessions, "warm": options.warm, **campaign.about()}
    load = statistics.median(run["load"] for run in campaign.runs)
    summary = {**about, "machine": machine(load), "rows": campaign.summary()}
    summary_path(folder, campaign.schedule).write_text(json.dumps(summary))


def report(folders: Sequence[Path]) -> int:
    """Add the figures of the campaigns in ``folders``, if there are any, and write the page from the figures."""
    if folders:
        write_campaigns(RESULTS, merge(json.loads(RESULTS.read_text()), collect(folders)))
    PAGE.write_text(put_section(PAGE.read_text(), section(json.loads(RESULTS.read_text())), MARK))
    return 0


def _faults(options: argparse.Namespace) -> list[str]:
    """All kinds of faults that these runs can have."""
    never = OF_SINGLE_TURNS if options.sessions else OF_SESSIONS
    every = [*ON_RAY, *OF_SESSIONS] if options.backend == "ray" else list(FAULTS)
    return [name for name in every if name not in never and (name != "disk_full" or options.small_disk)]


def _victim(folder: Path, schedule: str, backend: str, sessions: bool, warm: bool, name: str) -> Victim:
    options, gone_s = BACKENDS[backend]
    about: dict[str, Any] = {"backend": backend, "options": options, "gone_s": gone_s}
    return Victim(folder, name, schedule, sessions=sessions, warm=warm, **about)


def _say(result: Result) -> None:
    _print({name: value for name, value in result._asdict().items() if value})


def _print(row: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


@contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    folder.mkdir(exist_ok=True)
    kept = folder.with_name("kept")  # what the disk had, as it goes with its mount
    command = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_MB}m", "podium-chaos", str(folder)]
    subprocess.run(command, check=True)
    try:
        if kept.exists():
            shutil.copytree(kept, folder, symlinks=True, dirs_exist_ok=True)
        yield
    finally:
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(folder, kept, symlinks=True)
        subprocess.run(["umount", str(folder)], check=True)


if __name__ == "__main__":
    sys.exit(main())
