"""``podium runs compare`` shows how runs differ."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from podium.errors import ConfigError

__all__ = ["run_compare"]


def run_compare(arguments: Sequence[str]) -> int:
    """Compare runs. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="podium runs compare", description="Compare the settings, the results and the curves of runs."
    )
    parser.add_argument(
        "paths",
        nargs="+",
        help="runs, or directories of runs; runs that differ only in their seeds are drawn as a band",
    )
    parser.add_argument(
        "--metric", default="", help="the metric to draw (default: what judges the runs, else accuracy, reward or loss)"
    )
    parser.add_argument("--out", default="comparison.png", help="the picture (default: %(default)s)")
    options = parser.parse_args(arguments)
    from podium.telemetry import metrics
    from podium.telemetry.formatting import visible
    from podium_curves.comparison import (
        RunCurve,
        describe_omissions,
        differing,
        explain_groups,
        group_curves,
        plot_curves,
    )
    from podium_view.runs import describe_held_out, explain_unlike, find_runs, name_runs, write_table

    named_runs = [run for path in options.paths for run in find_runs(Path(path))]
    runs_by_place = {run.files.run: run for run in named_runs}  # one that is given twice is no second one
    if len(named_runs) < 2:
        raise ConfigError(f"{options.paths[0]} is one run: give at least two to compare")
    runs, names = [*runs_by_place.values()], [visible(name) for name in name_runs([*runs_by_place])]
    write_table(
        [("", *names)]
        + [(key, *(_shorten(value) for value in values)) for key, values in differing(runs).items()]
        + [("state", *(run.state for run in runs)), ("step", *(str(run.step) for run in runs))]
        + [("held-out", *(describe_held_out(run) for run in runs))]
        + [(name, *(_write_number(run.last(name)) for run in runs)) for name in (metrics.REWARD_MEAN, metrics.LOSS)]
    )
    judges = {run.judged[0].of_steps for run in runs if run.judged is not None}
    preferred = (*(judges if len(judges) == 1 else ()), metrics.ACCURACY, metrics.REWARD_MEAN, metrics.LOSS)
    metric = options.metric or next((name for name in preferred if all(run.last(name) is not None for run in runs)), "")
    if not metric or all(run.last(metric) is None for run in runs):
        raise ConfigError(f"--metric {metric or 'NAME'}: no metric of this name is in metrics.jsonl of these runs")
    curves = [RunCurve.of(run, name, metric) for run, name in zip(runs, names, strict=True)]
    groups = group_curves(curves)
    sys.stdout.flush()
    for remark in (*explain_unlike(runs), *explain_groups(curves), *describe_omissions(groups, metric)):
        sys.stderr.write(f"{remark}\n")
    sys.stdout.write(f"{metric}: {plot_curves(groups, metric, Path(options.out))}\n")
    return 0


def _write_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _shorten(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
