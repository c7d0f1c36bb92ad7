"""The arithmetic of the report: bands over seeds, the time to an accuracy, and the page's table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from bench.schedules.campaign import MAX_STALENESS
from bench.schedules.records import Run

BAR: Final = 0.5  # the held-out accuracy to which the schedules are compared
TITLES: Final = {
    "sync_colocated": "`sync`, colocated",
    "sync": "`sync`, split",
    "one_step_off": "`one_step_off`",
    "asynchronous": f"`asynchronous`, `max_staleness: {MAX_STALENESS}`",
}
BEGIN: Final = "<!-- begin: python -m bench.schedules --report -->"
NOT_MEASURED: Final = "Not measured yet: `python -m bench.schedules` measures it and writes this section.\n"

# Quantiles of Student's t-distribution for a two-sided 95 %, by degrees of freedom from 1 on.
_T95: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_T95_MORE: Final = 2.228  # for more degrees, a little too wide


def band(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean, and the bounds of its 95 % confidence interval by Student's t-distribution; NaN bounds for one value.

    Raises:
        ValueError: There are no values.
    """
    if not values:
        raise ValueError("a band needs at least one value")
    mean, degrees = statistics.fmean(values), len(values) - 1
    if not degrees:
        return mean, math.nan, math.nan
    quantile = _T95[degrees - 1] if degrees <= len(_T95) else _T95_MORE
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def reaching(run: Run, bar: float, axis: Callable[[Any], float]) -> float:
    """Where ``run`` first reaches the accuracy ``bar``, between two evaluations by a straight line; inf if it does not.

    ``axis`` gives a point's place: its seconds or its step.
    """
    for before, after in zip(run.points, run.points[1:], strict=False):
        if before.accuracy >= bar:
            return axis(before)
        if after.accuracy >= bar:
            share = (bar - before.accuracy) / (after.accuracy - before.accuracy)
            return axis(before) + share * (axis(after) - axis(before))
    return math.inf


def accuracy_at(run: Run, place: float, axis: Callable[[Any], float]) -> float:
    """The accuracy at ``place`` on ``axis``, between two evaluations by a straight line."""
    for before, after in zip(run.points, run.points[1:], strict=False):
        if axis(before) <= place <= axis(after):
            share = (place - axis(before)) / (axis(after) - axis(before))
            return before.accuracy + share * (after.accuracy - before.accuracy)
    raise ValueError(f"{place:g} is outside the run, which ends at {axis(run.points[-1]):g}")


def curve(runs: Sequence[Run], axis: Callable[[Any], float], places: int = 81) -> list[tuple[float, ...]]:
    """Place, mean and bounds of the accuracy over seeds, from the start to where the shortest of ``runs`` ends."""
    end = min(axis(run.points[-1]) for run in runs)
    grid = [end * number / (places - 1) for number in range(places)]
    rows: list[tuple[float, ...]] = []
    for place in grid:
        mean, low, high = band([accuracy_at(run, min(place, end), axis) for run in runs])
        rows.append((place, mean, max(low, 0.0), min(high, 1.0)))  # in this order, NaN stays NaN
    return rows


def by_arm(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each arm in the order of their seeds; the arms in the order of :data:`TITLES`."""
    found = {arm: sorted((run for run in runs if run.arm == arm), key=lambda run: run.seed) for arm in TITLES}
    return {arm: some for arm, some in found.items() if some}


def spread(values: Sequence[float], form: Callable[[float], str]) -> str:
    """The median, and the least and the largest where they differ: "40 (38 to 45)"; "never" for infinity."""

    def text(value: float) -> str:
        return form(value) if math.isfinite(value) else "never"

    middle, low, high = text(statistics.median(values)), text(min(values)), text(max(values))
    return middle if low == high else f"{middle} ({low} to {high})"


def table(runs: Sequence[Run]) -> str:
    """The figures of each schedule as a table in Markdown."""
    groups = by_arm(runs)

    def seconds(run: Run) -> float:
        return reaching(run, BAR, lambda point: point.seconds)

    def times_faster(than: str) -> Callable[[Sequence[Run]], str]:
        base = {run.seed: seconds(run) for run in groups.get(than, ())}

        def cell(some: Sequence[Run]) -> str:
            ratios = [base[run.seed] / seconds(run) for run in some if run.seed in base]
            known = [ratio for ratio in ratios if not math.isnan(ratio)]  # neither of two reached the bar
            return spread(known, "{:.2f}".format) if known else ""

        return cell

    def each(of: Callable[[Run], float], form: str) -> Callable[[Sequence[Run]], str]:
        return lambda some: spread([of(run) for run in some], form.format)

    def final(some: Sequence[Run]) -> str:
        mean, low, high = band([run.points[-1].accuracy for run in some])
        return f"{mean:.0%}" if math.isnan(low) else f"{mean:.0%} ({low:.0%} to {high:.0%})"

    rows: dict[str, Callable[[Sequence[Run]], str]] = {
        f"seconds to {BAR:.0%}": each(seconds, "{:.1f}"),
        **{
            f"times faster than {TITLES[base]}, with the same seed": times_faster(base)
            for base in ("sync_colocated", "sync")
            if base in groups
        },
        f"steps to {BAR:.0%}": each(lambda run: reaching(run, BAR, lambda point: point.step), "{:.0f}"),
        "accuracy after the last step (95 % band)": final,
        "seconds a step": each(lambda run: run.step_s, "{:.2f}"),
        "seconds of a step's generation, from its begin to its end": each(lambda run: run.generate_s, "{:.2f}"),
        "seconds of a step's update": each(lambda run: run.update_s, "{:.2f}"),
        "sampled tokens/s": each(lambda run: run.sampled_tokens_per_s, "{:,.0f}"),
        "generator at work": each(lambda run: run.generator_busy, "{:.0%}"),
        "policy at work": each(lambda run: run.policy_busy, "{:.0%}"),
        "staleness of a prompt's oldest token, mean": each(lambda run: run.staleness_mean, "{:.2f}"),
        "the same, largest": each(lambda run: run.staleness_max, "{:.0f}"),
        "importance weights at the cap": each(lambda run: run.weights_capped, "{:.2%}"),
    }
    lines = [["", *(TITLES[arm] for arm in groups)], ["---", *("---" for _ in groups)]]
    lines += [[title, *(cell(some) for some in groups.values())] for title, cell in rows.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def section(results: Mapping[str, Any], picture: str) -> str:
    """What stands on the page between the markers: who measured what where, the picture and the table."""
    runs = [Run.from_json(values) for values in results["runs"]]
    if not runs:
        return NOT_MEASURED
    settings, machine = results["settings"], results["machine"]
    seeds, grpo = sorted({run.seed for run in runs}), settings["grpo"]
    others = max(run.others_cpu for run in runs)
    counted = "one seed" if len(seeds) == 1 else f"{len(seeds)} seeds"
    words = (
        f"{settings['steps']} steps of GRPO, each of {grpo['batch']['prompts']} prompts with {grpo['sampling']['n']} "
        f"completions; {counted}; on {machine['cores']} cores ({machine['processor']}), {machine['when'][:10]}, torch "
        f"{machine['libraries']['torch']}. Other processes took at most {others:.0%} of the cores during a run. The "
        "table has medians over the seeds, with the least and the largest in brackets."
    )
    shown = f"![Held-out accuracy over time and over steps]({picture})"
    return f"{words}\n\n{shown}\n\n{table(runs)}"
