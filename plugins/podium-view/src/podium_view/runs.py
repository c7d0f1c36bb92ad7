"""``podium runs`` lists runs, shows one, and removes runs. Packages add to it: an entry point of the group
``podium.commands`` with the name ``runs NAME`` is the command ``podium runs NAME``."""

from __future__ import annotations

import argparse
import datetime
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from podium.errors import ConfigError
from podium.extras import explain_packages
from podium.functions import nearest
from podium.spelling import write_count

if TYPE_CHECKING:
    from podium.runs.run_reader import RunRecord

__all__ = ["describe_held_out", "explain_unlike", "find_runs", "name_runs", "run_runs", "write_table"]

_EPILOG: Final = """\
examples:
  podium runs                          a line for each run below runs/, the newest first
  podium runs --best                   the same, the best first
  podium runs runs/NAME                one run: its result, its prompts and its curve
  podium runs clean                    remove runs that ended without a step, after asking
"""


def run_runs(arguments: Sequence[str]) -> int:
    """List, show or remove runs, or call the command of a package. Returns the exit status."""
    first, *rest = [*arguments, ""]
    if first == "clean":
        return _clean(rest[:-1])
    if first.isidentifier() and not Path(first).exists():
        from podium.cli import find_commands

        if (entry := find_commands().get(f"runs {first}")) is not None:
            return entry.load()(rest[:-1])
        if rest[:-1]:
            names = ["clean", *(name[5:] for name in find_commands() if name.startswith("runs "))]
            raise ConfigError(
                f"there is no run and no command {first!r} of podium runs{nearest(first, names)}; its commands are "
                f"{', '.join(names)}; {explain_packages('podium.commands', f'runs {first}')}"
            )
    parser = _parser("podium runs", "List runs, or show one.", epilog=_EPILOG)
    parser.add_argument("paths", nargs="*", default=["runs"], help="runs, or directories of runs (default: runs)")
    parser.add_argument(
        "--best", action="store_true", help="the best runs first, by the held-out figure that judges them (eval.metric)"
    )
    options = parser.parse_args(arguments)
    paths = [Path(path) for path in options.paths]
    runs = [run for path in paths for run in find_runs(path)]
    if len(runs) == 1 and runs[0].path == paths[0]:
        _show(runs[0])
    else:
        runs.sort(key=lambda run: run.modified, reverse=True)
        _list(sorted(runs, key=_rank) if options.best else runs)
        sys.stdout.flush()
        sys.stderr.writelines(f"{sentence}\n" for sentence in (explain_unlike(runs) if options.best else ()))
    return 0


def find_runs(path: Path) -> Iterator[RunRecord]:
    """Yield the run at ``path``, or the runs directly below it. Raises ConfigError if there are none."""
    from podium.runs.run_reader import RunRecord, explain_start, is_run

    folders = [path, *sorted(path.iterdir())] if path.is_dir() else [path]
    runs = [folder for folder in folders if is_run(folder)]
    if not runs and (text := explain_start(path)):
        raise ConfigError(f"{path}: {text}")
    if not runs:
        below = {run.parent for folder in folders[1:] for run in folder.glob("*") if is_run(run)}
        named = f", such as {max(below, key=lambda folder: folder.stat().st_mtime)}" if below else ""
        raise ConfigError(f"{path}: no run is here; give the directory of a run, or one of runs (run.dir){named}")
    yield from map(RunRecord, runs)


def name_runs(paths: Sequence[Path]) -> list[str]:
    """Return the shortest end of each path that no other one has. The paths are absolute, and no two are equal."""
    names = [path.name for path in paths]
    for depth in range(2, 64):
        counts = Counter(names)
        if max(counts.values(), default=1) == 1:
            break
        names = [
            "/".join(path.parts[-depth:]) if counts[name] > 1 else name for path, name in zip(paths, names, strict=True)
        ]
    return names


def _rank(run: RunRecord) -> tuple[str, float]:
    """The place of a run among others: those of one metric together, the best first, and those without one last."""
    if run.judged is None:
        return chr(sys.maxunicode), 0.0
    metric, value = run.judged
    return metric.name, -metric.rank(value)


def describe_held_out(run: RunRecord) -> str:
    """What was measured last, such as "accuracy 42.3%", or "accuracy of hard 42.3%" for a set with a name."""
    if run.judged is None:
        return "-"
    metric, value = run.judged
    return f"{metric.title}{f' of {run.judging_set}' * bool(run.judging_set)} {metric.write(value)}"


def explain_unlike(runs: Sequence[RunRecord]) -> Iterator[str]:
    """Yield a sentence for each metric by which some of the runs are judged, and which they have measured on other data
    or in another way, as far as their settings and the files that these name say so."""
    from podium.runs.measures import list_differing, select_measures

    by_title: dict[str, list[dict[str, str]]] = {}
    for run in runs:
        if run.judged is not None and run.settings:
            measures = select_measures(run.settings, run.judged[0], run.contents)
            measures["the set that judges them"] = run.judging_set
            by_title.setdefault(run.judged[0].title, []).append(measures)
    for title, measures_of_runs in by_title.items():
        if differing := list_differing(measures_of_runs):
            reasons = ", ".join(differing)
            yield f"held-out {title}: these runs may not have measured the same, as they differ in {reasons}"


def _parser(prog: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=prog, description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def _list(runs: Sequence[RunRecord]) -> None:
    from podium.telemetry.formatting import duration, visible

    lines = [("run", "state", "step", "held-out", "took", "last written")]
    for run in runs:
        when = datetime.datetime.fromtimestamp(run.modified).strftime("%Y-%m-%d %H:%M")
        total = run.settings.get("run.steps")
        step = f"{run.step} of {total}" if isinstance(total, int) else str(run.step)
        name = f"{run.path} (replay)" if run.replay_of else str(run.path)
        lines.append((visible(name), run.state, step, describe_held_out(run), duration(run.seconds), when))
    write_table(lines)


def _show(run: RunRecord) -> None:
    from podium.runs.run_reader import name_data
    from podium.telemetry.formatting import duration, visible

    sys.stdout.write(f"{visible(str(run.path))}: {_describe_run(run)}, took {duration(run.seconds)}\n")
    chosen = ("model.path", "data.train", "environment.name", "reward.name", "run.seed", "run.schedule", "optim.lr")
    shown = {**run.settings, "data.train": name_data(run.settings)}
    settings = {key: shown[key] for key in chosen if shown.get(key) not in (None, "", {})} | run.of_script
    if settings:
        sys.stdout.write(f"  {', '.join(f'{key} {value}' for key, value in settings.items())}\n")
    for name in ("best_checkpoint", "model_path"):
        if path := run.result(name):
            gone = "" if path.is_dir() else ", which is gone"
            sys.stdout.write(f"  {name.replace('_', ' ')}: {visible(str(path))}{gone}\n")
    _draw(run)


def _describe_run(run: RunRecord) -> str:
    """Return a line about a run: its state, what judges it, and the states of its prompts."""
    from podium.telemetry.formatting import visible

    facts = [run.progress, *([f"replay of {run.replay_of}"] if run.replay_of else [])]
    if run.judged is not None:
        facts.append(f"held-out {describe_held_out(run)}")
    prompts = run.prompts
    if prompts is None:
        return ", ".join(facts)
    facts += [f"{write_count(count, 'prompt')} {name.replace('_', ' ')}" for name, count in prompts.counts().items()]
    facts += [f"({count} dropped: {visible(reason)})" for reason, count in prompts.reasons.items()]
    return ", ".join(facts)


def _draw(run: RunRecord) -> None:
    """Draw the learning curve with characters, if an installed package does it."""
    from podium.runs.curves import load_drawer
    from podium.telemetry.sinks.console import terminal

    if sum(row["kind"] == "step" for row in run.rows) < 2:
        return
    drawer, reason = load_drawer()
    if drawer is None:
        sys.stdout.write(f"  the curve is not drawn{reason}\n")
        return
    console = terminal()
    if (curve := drawer.draw(run.rows, min(console.width, 100))) is not None:
        sys.stdout.write(f"\n  {curve.metric}{f' ({curve.remark})' * bool(curve.remark)}\n")
        sys.stdout.flush()
        console.print((curve.in_ascii() if console.options.ascii_only else curve).drawing, highlight=False)


def _clean(arguments: Sequence[str]) -> int:
    parser = _parser("podium runs clean", "Remove runs that ended without a step, or the runs that you name.")
    parser.add_argument("paths", nargs="*", help="runs to remove; default: those below runs/ that ended before a step")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    options = parser.parse_args(arguments)
    from podium.runs.run_reader import RunRecord, check_run

    named = [RunRecord(Path(path)) for path in options.paths]
    for run in named:
        check_run(run.path)
        if not run.is_own:
            raise ConfigError(
                f"{run.path} is no run, or holds others, although it has a config.yaml: name the runs in it"
            )
    removable = named or [run for run in find_runs(Path("runs")) if run.is_own and run.is_empty]
    if running := [run for run in removable if run.files.is_locked()]:
        if named:
            raise ConfigError(f"{running[0].path} is being written to: stop the run first")
        removable = [run for run in removable if run not in running]
    if not removable:
        sys.stdout.write("nothing to remove\n")
        return 0
    _list(removable)
    if not options.yes and not _ask_for_consent(len(removable)):
        sys.stdout.write("nothing was removed\n")
        return 0
    for run in removable:
        with run.files.lock():  # somebody may have resumed the run since the question was asked
            run.files.remove_run()
    sys.stdout.write(f"removed {write_count(len(removable), 'run')}\n")
    return 0


def _ask_for_consent(count: int) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("podium runs clean asks before it removes anything: give --yes where nobody can answer")
    return input(f"Remove {write_count(count, 'run')}? [y/N] ").strip().lower() in ("y", "yes")


def write_table(lines: Sequence[Sequence[str]]) -> None:
    """Print rows of cells in columns."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        sys.stdout.write("  ".join(cells).rstrip() + "\n")
