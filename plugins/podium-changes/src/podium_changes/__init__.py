"""``podium changes RUN`` shows which held-out prompts became worse, and which better, between two evaluations."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from podium.errors import ConfigError
from podium.spelling import write_count

if TYPE_CHECKING:
    from podium_changes.evaluations import Changes

__all__ = ["run_changes"]


def run_changes(arguments: Sequence[str]) -> int:
    """Compare two evaluations and print what changed. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="podium changes",
        usage="podium changes RUN | RUN@STEP RUN@STEP [--show N]",
        description="Show which held-out prompts became worse, and which better, from one evaluation to another.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "names", metavar="RUN", nargs="+", help="a run, for its first and last evaluation; or two of RUN@STEP"
    )
    parser.add_argument(
        "--show", type=int, default=3, metavar="N", help="show this many prompts of each kind and set (default 3)"
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    options = parser.parse_args(arguments)
    if len(options.names) > 2:
        raise ConfigError("expected two evaluations: give RUN, or RUN@STEP twice")
    from podium.runs.run_reader import RunRecord
    from podium.telemetry.formatting import visible
    from podium_changes.evaluations import find_evaluations, find_run, without_completions

    sets = find_evaluations(options.names)
    for run in dict.fromkeys(find_run(path) for paths in sets.values() for path in paths):
        sys.stdout.writelines(
            f"{visible(str(run))}: {key} is {text}\n" for key, text in RunRecord(run).of_script.items()
        )
    for number, (name, (first, second)) in enumerate(sets.items()):
        sys.stdout.write("\n" * (number > 0) + (f"set       {visible(name)}\n" if name else ""))
        gone = without_completions(Path(options.names[0]), name, second) if len(options.names) == 1 else ()
        if gone:
            steps = ", ".join(map(str, gone))
            sys.stdout.write(
                f"left out  step {steps}  (evaluated, without completions: all sessions failed, or the file is gone)\n"
            )
        _show(first, second, max(0, options.show))
    return 0


def _show(first: Path, second: Path, count: int) -> None:
    """Print what changed between the evaluations in two files, and ``count`` prompts of each kind."""
    from podium.telemetry.formatting import visible
    from podium_changes.evaluations import compare_evaluations

    changes = compare_evaluations(first, second)
    metric, are_verdicts = changes.metric, changes.are_verdicts
    if not are_verdicts:
        sys.stdout.write(f"metric    {metric.title}\n")
    for name, path, mean in (("before", first, changes.means[0]), ("after", second, changes.means[1])):
        items = (
            f"{round(mean * changes.items)} of {changes.items}" if are_verdicts else write_count(changes.items, "item")
        )
        sys.stdout.write(f"{name:<9} {metric.write(mean)}  ({items})  {visible(str(path))}\n")
    _write_reported(first, second, changes)
    kinds = {
        ("broke" if are_verdicts else "worse"): changes.worse,
        ("mended" if are_verdicts else "better"): changes.better,
    }
    for name, prompts in kinds.items():
        sys.stdout.write(f"{name:<9} {len(prompts)}\n")
    if changes.apart:
        why = "only one of the two evaluations has these prompts: the data differ, or sessions failed"
        sys.stdout.write(f"left out  {changes.apart}  ({why})\n")
    if changes.unscored:
        sys.stdout.write(f"left out  {changes.unscored}  (the reward left them out in one of the two evaluations)\n")
    for name, prompts in kinds.items():
        for change in prompts[:count]:
            sys.stdout.write(f"\n{name:<9} {change.prompt!r}\n")
            if not are_verdicts:
                sys.stdout.write(f"{metric.title:<9} {' to '.join(map(metric.write, change.scores))}\n")
            if change.before is not None and change.after is not None:
                sys.stdout.write(f"before    {change.before!r}\nafter     {change.after!r}\n")
            sys.stdout.write(f"expected  {change.expected!r}\n")


def _write_reported(first: Path, second: Path, changes: Changes) -> None:
    """Print the figures that the run has reported, where they are not those of the prompts that are compared."""
    from podium_changes.evaluations import find_reported

    reported = [find_reported(path, changes.metric) for path in (first, second)]
    pairs = zip(reported, changes.means, strict=True)
    if all(value is None or math.isclose(value, mean, rel_tol=1e-5, abs_tol=1e-9) for value, mean in pairs):
        return
    values = " to ".join("-" if value is None else changes.metric.write(value) for value in reported)
    sys.stdout.write(f"reported  {values}  (by the run, over all of its prompts, and with sessions that failed)\n")
