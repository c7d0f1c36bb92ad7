"""`python -m bench.schedules`: how fast each schedule gets a model of 0.8 million parameters to the same accuracy.

Each run is the command `podium train grpo` on two processes of one thread, one for the policy and one for the
generator, from the same warm start. A run that has finished is not run again. After the last one, or with --report
alone, the figures go to docs/schedules.md and its picture.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.report import put_section
from bench.schedules.campaign import ARMS, STEPS, Campaign, read_results
from bench.schedules.figures import BEGIN, section
from bench.schedules.records import Run

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "schedules" / "results.json"
PAGE = ROOT / "docs" / "schedules.md"
PICTURE = "schedules.svg"


def report(results: Path, page: Path) -> None:
    """Write the figures of ``results`` into ``page``, and the picture beside it."""
    from bench.schedules.picture import draw

    found = read_results(results)
    page.write_text(put_section(page.read_text(), section(found, PICTURE), BEGIN))
    if found["runs"]:
        draw([Run.from_json(values) for values in found["runs"]], page.with_name(PICTURE))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.schedules", description=str(__doc__).partition("\n")[2])
    parser.add_argument("--seeds", type=int, default=5, help="runs of each arm (5)")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of each run ({STEPS})")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file of figures, which is continued")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page that gets them")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "bench" / "schedules", help="of the runs")
    parser.add_argument("--report", action="store_true", help="run nothing: write the page from the figures")
    options = parser.parse_args(arguments)

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    if not options.report:
        Campaign(options.folder, options.results, options.steps, say).run(options.arms, options.seeds)
    report(options.results, options.page)
    say(f"written to {options.page} and {options.page.with_name(PICTURE)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
