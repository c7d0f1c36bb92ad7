"""``podium changes RUN`` shows which held-out prompts broke, and which were mended, from one evaluation to another."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from podium.errors import ConfigError

__all__ = ["run_changes"]


def run_changes(arguments: Sequence[str]) -> int:
    """Compare two evaluations and print what changed. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="podium changes",
        usage="podium changes RUN | RUN@STEP RUN@STEP [--show N]",
        description="Show which held-out prompts broke, and which were mended, from one evaluation to another.",
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
    from podium.runs.changes import find_evaluations, without_completions

    for number, (name, (first, second)) in enumerate(find_evaluations(options.names).items()):
        sys.stdout.write("\n" * (number > 0) + (f"set       {name}\n" if name else ""))
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
    from podium.runs.changes import compare_evaluations
    from podium.telemetry.formatting import percent

    comparison = compare_evaluations(first, second)
    for name, path, correct in (("before", first, comparison.correct[0]), ("after", second, comparison.correct[1])):
        share = percent(correct / comparison.items)
        sys.stdout.write(f"{name:<9} {share}  ({correct} of {comparison.items})  {path}\n")
    for name, changes in (("broke", comparison.broke), ("mended", comparison.mended)):
        sys.stdout.write(f"{name:<9} {len(changes)}\n")
    if comparison.apart:
        why = "only one of the two evaluations has these prompts: the data differ, or sessions failed"
        sys.stdout.write(f"left out  {comparison.apart}  ({why})\n")
    for name, changes in (("broke", comparison.broke), ("mended", comparison.mended)):
        for change in changes[:count]:
            sys.stdout.write(
                f"\n{name:<9} {change.prompt!r}\nbefore    {change.before!r}\nafter     {change.after!r}\n"
            )
            sys.stdout.write(f"expected  {change.expected!r}\n")
