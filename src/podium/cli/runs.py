"""``podium runs`` lists runs: how far each is, how it scored, and the states of its prompts."""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from podium.errors import ConfigError

__all__ = ["run_runs"]


def run_runs(arguments: Sequence[str]) -> int:
    """Print a line for each run. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="podium runs",
        description="List runs: the steps that are done, the held-out accuracy, and the states of the prompts.",
    )
    parser.add_argument("paths", nargs="*", default=["runs"], help="runs, or directories of runs (default: runs)")
    found = [run for path in parser.parse_args(arguments).paths for run in _runs(Path(path))]
    width = max(len(str(run)) for run in found)
    for run in found:
        sys.stdout.write(f"{run!s:<{width}}  {_describe(run)}\n")
    return 0


def _runs(path: Path) -> Iterator[Path]:
    """The runs at ``path`` or directly below. Raises ConfigError if there are none."""
    folders = [path, *sorted(path.iterdir())] if path.is_dir() else [path]
    runs = [folder for folder in folders if (folder / "config.yaml").exists()]
    if not runs:
        raise ConfigError(f"{path}: no run is here; give the directory of a run, or one of runs (run.dir)")
    yield from runs


def _describe(run: Path) -> str:
    from podium.trainer.ledger import read_ledger
    from podium.trainer.run_dir import read_rows

    summary = _summary(run / "summary.json")
    state = "finished" if summary.get("finished") else "stopped" if summary else "unfinished"
    step, accuracy = 0, None
    for row in read_rows(run / "metrics.jsonl"):
        step = max(step, row["step"])
        accuracy = row["accuracy"] if row["kind"] == "eval" else accuracy
    told = [f"{state} at step {step}"]
    if accuracy is not None:
        told.append(f"accuracy {accuracy:.1%}")
    if (run / "ledger.jsonl").exists():
        states = read_ledger(run / "ledger.jsonl")
        told += [f"{count} prompts {name.replace('_', ' ')}" for name, count in states.counts().items()]
        told += [f"({count} dropped: {reason})" for reason, count in states.reasons.items()]
    return ", ".join(told)


def _summary(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_bytes()) if path.exists() else {}
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
