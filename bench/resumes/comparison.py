"""What must be the same in a run that was ended and resumed, and in a whole one. Each difference is a sentence."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq

from bench.resumes.draws import Settings

__all__ = ["list_differences"]

_OF_TIME: Final = ("time", "per_s", "memory", "wall_s", "utilization")
_OF_PROCESS: Final = ("configs", "ledger", "stage_s", "model_path", "best_checkpoint", "dir", "name")
_BY_STEP: Final = ("lr", "epoch", "kl_coef")
Row = Mapping[str, Any]


def list_differences(ended: Path, whole: Path, settings: Settings, *, exact: bool, stopped: set[int]) -> list[str]:
    """Return what differs. ``exact``: everything is compared, otherwise what holds in any order of events."""
    differences = [*_check_ledger(ended, whole, exact), *_compare_rows(ended, whole, exact)]
    if exact:
        differences += _compare_tables(ended, whole)
        differences += _compare_weights(ended, whole)
        differences += _compare_files(ended / "summary.json", whole / "summary.json")
        differences += _compare_kept(ended, whole, settings["save"], stopped)
    return differences


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _compare_values(name: str, one: Any, other: Any) -> Iterator[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted(one.keys() | other.keys()):
            if not any(part in key for part in _OF_TIME) and key not in _OF_PROCESS:
                yield from _compare_values(f"{name}.{key}", one.get(key), other.get(key))
    elif str(one) != str(other):  # as text, in which NaN is equal to NaN
        yield f"{name} is {one!s:.90} and was {other!s:.90}"


def _compare_files(one: Path, other: Path) -> Iterator[str]:
    if one.exists() != other.exists():
        yield f"{one.name} is {'there' if one.exists() else 'missing'}"
    elif one.exists():
        yield from _compare_values(one.name, json.loads(one.read_text()), json.loads(other.read_text()))


def _compare_rows(ended: Path, whole: Path, exact: bool) -> Iterator[str]:
    rows, others = (_read_lines(run / "metrics.jsonl") for run in (ended, whole))
    keys, expected = ([(row["kind"], row.get("step")) for row in lines] for lines in (rows, others))
    if keys != expected:
        yield f"metrics.jsonl has {keys} and had {expected}"
        return
    for one, other in zip(rows, others, strict=True):
        names = one.keys() | other.keys() if exact else {name for name in one if name in _BY_STEP and name != "kl_coef"}
        yield from _compare_values(
            f"metrics {one['kind']} {one.get('step')}",
            {name: one.get(name, "missing") for name in names},
            {name: other.get(name, "missing") for name in names},
        )


def _compare_tables(ended: Path, whole: Path) -> Iterator[str]:
    for folder in ("completions", "evaluations"):
        names, others = (
            {str(file.relative_to(run)) for file in (run / folder).rglob("*.parquet")} for run in (ended, whole)
        )
        if names != others:
            yield f"{folder} has {sorted(names - others)} more and {sorted(others - names)} less"
        for name in sorted(names & others):
            columns, expected = (pq.read_table(run / name).to_pydict() for run in (ended, whole))
            yield from (f"{name}: {text}" for text in _compare_values("column", columns, expected))


def _compare_weights(ended: Path, whole: Path) -> Iterator[str]:
    for folder in ("model", "checkpoints/latest"):
        for file in sorted((whole / folder).rglob("*.safetensors")):
            name = file.relative_to(whole)
            if not (ended / name).exists():
                yield f"{name} is missing"
            elif hashlib.sha256((ended / name).read_bytes()).digest() != hashlib.sha256(file.read_bytes()).digest():
                yield f"{name} has other bits"
    yield from _compare_files(ended / "checkpoints/latest/trainer.json", whole / "checkpoints/latest/trainer.json")


def _compare_kept(ended: Path, whole: Path, save: Settings, stopped: set[int]) -> Iterator[str]:
    """A stop writes one more checkpoint, which may take the place of another one."""
    steps, others = ({file.name for file in (run / "checkpoints").glob("step-*")} for run in (ended, whole))
    more = {f"step-{step:06d}" for step in stopped}
    allowed = 0 if save["keep"] == 0 else len(more & steps)
    if steps - others - more or len(others - steps) > allowed:
        yield f"checkpoints are {sorted(steps)} and were {sorted(others)}"


def _read_ledger(run: Path) -> tuple[dict[int, tuple[str, int, str]], Counter[int]]:
    """The last state of each prompt with its step, and how often each was trained."""
    states, trained = dict[int, tuple[str, int, str]](), Counter[int]()
    for line in _read_lines(run / "ledger.jsonl"):
        for number in line.get("prompts", ()):
            states[number] = (line["state"], line.get("step", 0), str(line.get("reason")))
            trained[number] += line["state"] == "trained"
    return states, trained


def _check_ledger(ended: Path, whole: Path, exact: bool) -> Iterator[str]:
    (states, trained), (others, _) = _read_ledger(ended), _read_ledger(whole)
    if twice := [number for number, times in trained.items() if times > 1]:
        yield f"prompts were trained twice: {twice}"
    if exact and states != others:
        changed = {n: (states.get(n), others.get(n)) for n in sorted(states.keys() | others.keys())}
        yield f"ledger: {dict([(n, pair) for n, pair in changed.items() if pair[0] != pair[1]][:4])}"
    if left := {state for state, *_ in states.values()} - {"trained", "dropped"}:
        yield f"prompts are left {left}"
