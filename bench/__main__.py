"""`python -m bench`: run the suites, print a table, write bench/results.json."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console

from bench.context import Context
from bench.measure import Row
from bench.report import show, write
from bench.suites import dataplane, faults, generation, grpo, ray, runtime

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results.json"
TABLE_WIDTH = 150
BUSY = 0.5  # load average over the last minute above which figures of a two-core machine are not to be trusted

SUITES: dict[str, Callable[[Context], Iterator[Row]]] = {
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
    "grpo": grpo.grpo,
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("--only", default=",".join(SUITES), help=f"suites, comma-separated: {', '.join(SUITES)}")
    parser.add_argument("--quick", action="store_true", help="a short look: few repetitions, small sizes")
    parser.add_argument("--out", type=Path, help=f"where the rows go; {RESULTS.relative_to(ROOT)} after a full run")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=TABLE_WIDTH)  # a file or a pipe has no width of its own
    chosen = options.only.split(",")
    unknown = [name for name in chosen if name not in SUITES]
    if unknown:
        console.print(f"no suite {', '.join(unknown)}; there are {', '.join(SUITES)}", style="red")
        return 2
    logs = ROOT / "runs" / "bench"
    logs.mkdir(parents=True, exist_ok=True)
    context = Context(quick=options.quick, logs=logs, say=console.print)
    load_before = os.getloadavg()[0]
    if load_before > BUSY:
        console.print(f"the machine is busy (load {load_before:.1f}): expect worse figures, above all of calls")
    rows: list[Row] = []
    failed: list[str] = []
    for name in chosen:
        try:
            with console.status(f"measuring {name}"):
                for row in SUITES[name](context):
                    rows.append(row)
                    console.print(f"{row.name}: {row.median:.4g} {row.unit}", style="dim")
        except Exception:  # noqa: BLE001 - what the other suites measure in many minutes is worth keeping
            console.print_exception()
            failed.append(name)
    show(console, rows, context.absent)
    complete = not options.quick and not failed and chosen == list(SUITES)
    out = options.out or (RESULTS if complete else None)
    if out:
        write(out, rows, load_before=load_before, absent=context.absent)
        console.print(f"written to {out}")
    if failed:
        console.print(f"failed: {', '.join(failed)}", style="red")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
