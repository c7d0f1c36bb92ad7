"""`python -m bench`: run the suites, print a table, write bench/results.json.

Each row is kept in runs/bench as soon as it is measured. A run that was stopped goes on after the suites that had
finished, if machine, versions and commit are the same, and prints the rows of both parts. A busy machine is refused:
machine.json beside the rows has the load before the run (the largest of its parts) and the seconds of each suite.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from bench.context import Context
from bench.measure import Row
from bench.record import Record
from bench.report import show
from bench.suites import dataplane, faults, generation, grading, grpo, loading, ray, runtime, scoring

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results.json"  # of the last whole run
ROWS, QUICK_ROWS = (ROOT / "runs" / "bench" / name / "results.json" for name in ("rows", "quick"))
TABLE_WIDTH = 150
BUSY = 1.0  # load average over the last minute above which figures of a two-core machine are not to be trusted

Suite = Callable[[Context], Iterator[Row]]
SUITES: dict[str, Suite] = {
    "noop": runtime.noop,
    "echo": runtime.echo,
    "broadcast": runtime.broadcast,
    "startup": runtime.startup,
    "hop": dataplane.hop,
    "transfer": dataplane.transfer,
    "publish": dataplane.publish,
    "faults": faults.faults,
    "ray": ray.ray,
    "generate": generation.generate,
    "generate_135m": generation.generate_135m,
    "scoring": scoring.scoring,
    "grading": grading.grading,
    "grpo": grpo.grpo,
    "grpo_10m": grpo.grpo_10m,
    "grpo_135m": grpo.grpo_135m,
    "load": loading.load,
    "first_step": loading.first_step,
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", help=f"suites to measure anew, comma-separated: {', '.join(SUITES)}")
    parser.add_argument("--quick", action="store_true", help="a short look: few repetitions, small sizes")
    parser.add_argument("--again", action="store_true", help="drop the rows of a run that was stopped")
    parser.add_argument("--busy", action="store_true", help=f"measure at a load average above {BUSY:g} too")
    parser.add_argument("--out", type=Path, help="where the rows go as they come, instead of runs/bench/rows")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, suites: Mapping[str, Suite] = SUITES) -> int:
    options = parse(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=TABLE_WIDTH)  # a file or a pipe has no width of its own
    named = options.only.split(",") if options.only else []
    unknown = [name for name in named if name not in suites]
    if unknown:
        console.print(f"no suite {', '.join(unknown)}; there are {', '.join(suites)}", style="red")
        return 2
    load_before = os.getloadavg()[0]
    if load_before > BUSY:
        console.print(f"the machine is busy: its load average over the last minute is {load_before:.1f}", style="red")
        if not options.busy:
            console.print(f"nothing was measured: wait until it is at most {BUSY:g}, or add --busy for worse figures")
            return 2
    path = options.out or (QUICK_ROWS if options.quick else ROWS)
    record = Record(path, quick=options.quick, load_before=load_before, again=options.again, say=console.print)
    chosen = named or [name for name in suites if name not in record.finished]
    failed: list[str] = []
    try:
        failed = measure({name: suites[name] for name in chosen}, record, console, quick=options.quick)
    except KeyboardInterrupt:
        failed = ["stopped"]
    show(console, record.rows, record.absent)
    if not failed and not options.quick and not options.out and set(record.finished) == set(suites):
        record.move(RESULTS)
        path = RESULTS
    console.print(f"the rows are in {path}")
    if failed:
        console.print(f"failed: {', '.join(failed)}; the next run goes on after the suites that finished", style="red")
    return 1 if failed else 0


def measure(suites: Mapping[str, Suite], record: Record, console: Console, *, quick: bool) -> list[str]:
    """Run the suites, and keep each row in ``record`` as it comes. Returns the names of the suites that failed."""
    logs = ROOT / "runs" / "bench"
    logs.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    for name, suite in suites.items():
        context = Context(quick=quick, logs=logs, say=console.print)
        record.begin(name)
        started = time.perf_counter()
        try:
            with console.status(f"measuring {name}"):
                for row in suite(context):
                    record.add(name, row)
                    console.print(f"{row.name}: {row.median:.4g} {row.unit}", style="dim")
            record.finish(name, context.absent, time.perf_counter() - started)
        except Exception:  # noqa: BLE001 - what the other suites measure in many minutes is worth keeping
            console.print_exception()
            failed.append(name)
    return failed


if __name__ == "__main__":
    sys.exit(main())
