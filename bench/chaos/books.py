"""The books of a disturbed run. Each check returns what is wrong, as sentences; an empty list means that all is well.

The checks read the run's files and share no code with what wrote them.

    every prompt was trained exactly once, and in the order of the data
    no token is older than the schedule allows
    with `sync`, metrics, completions and weights are those of an undisturbed run, to the bit; of sessions, whose calls
    share forward passes by chance, the tokens and the rewards
    the lengths that trained are those of the undisturbed run (Kolmogorov-Smirnov, where the schedule reorders time;
    these runs learn next to nothing, so that only what is skipped or repeated changes lengths)
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

__all__ = ["ODDS", "check_books", "check_ledger", "check_same", "check_so_far", "same_lengths"]

ENDLESS = 10**6
ODDS = 0.001  # the largest p-value at which lengths count as other lengths
_BEFORE = {"rolled_out": "taken", "graded": "rolled_out", "trained": "graded"}
_TIMED = ("time", "tokens_per_s")  # metrics whose name begins so tell how fast the machine was
_COLUMNS = ("step", "prompt", "completion", "tokens", "reward", "advantage", "version")


def check_books(
    disturbed: Path, undisturbed: Path, *, steps: int, prompts: int, staleness: int, sessions: bool = False
) -> list[str]:
    """Check a run of ``steps`` steps of ``prompts`` prompts against the same steps of its undisturbed twin.

    Args:
        staleness: The most updates that a token may be behind the weights which it trains; with 0 the two runs must be
            the same to the bit, and with ``sessions`` the same in their tokens and rewards.
    """
    wrong = check_ledger(disturbed / "ledger.jsonl", prompts=steps * prompts, staleness=staleness)
    return wrong + check_same(disturbed, undisturbed, steps=steps, identical=staleness == 0, sessions=sessions)


def check_ledger(path: Path, *, prompts: int, staleness: int | None = None) -> list[str]:
    """Check that exactly the first ``prompts`` prompts were trained, each once and after it was taken, and that no
    token is more than ``staleness`` updates old."""
    return _check_lines(_ledger_lines(path), prompts, staleness)


def check_so_far(path: Path, *, staleness: int) -> list[str]:
    """Check the ledger of a run that goes on: as many prompts were trained as its last step says, in the order of the
    data."""
    lines = _ledger_lines(path)
    prompts = 1 + max((prompt for line in _trained(lines) for prompt in line["prompts"]), default=-1)
    return _check_lines(lines, prompts, staleness)


def _ledger_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a ledger, without one that is being written."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _trained(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [line for line in lines if line.get("state") == "trained"]


def _check_lines(lines: Sequence[Mapping[str, Any]], prompts: int, staleness: int | None) -> list[str]:
    wrong = _order_of_states(lines)
    trained = Counter(prompt for line in _trained(lines) for prompt in line["prompts"])
    wrong += [f"prompt {prompt} was trained {times} times" for prompt, times in trained.items() if times > 1]
    if missing := sorted(set(range(prompts)) - trained.keys()):
        wrong.append(f"{len(missing)} prompts were not trained, the first of them {missing[:5]}")
    if more := sorted(trained.keys() - set(range(prompts))):
        wrong.append(f"prompts were trained that are none of the first {prompts}: {more[:5]}")
    return wrong if staleness is None else wrong + _too_old(lines, staleness)


def _order_of_states(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Check that each state of a prompt follows the one before it."""
    wrong: list[str] = []
    at: dict[int, str] = {}
    for number, line in enumerate(lines, 1):
        state: str = line.get("state", "")
        for prompt in line.get("prompts", ()):
            before = at.get(prompt)
            allowed = (None, "returned") if state == "taken" else (_BEFORE.get(state, before),)  # or any
            if before not in allowed:
                wrong.append(f"line {number}: prompt {prompt} is {state} after it was {before}")
            at[prompt] = state
    return wrong


def _too_old(lines: Sequence[Mapping[str, Any]], staleness: int) -> list[str]:
    """Check the versions of the weights that drew each prompt's tokens."""
    wrong: list[str] = []
    for line in lines:
        if line.get("state") == "rolled_out":
            step, versions = line["step"], line["versions"]
            behind = max((step - 1 - low for low, _ in versions), default=0)
            if behind > staleness:
                wrong.append(f"step {step} has a token that is {behind} versions old; allowed are {staleness}")
            if len(versions) != len(line["prompts"]):
                wrong.append(f"step {step} has {len(versions)} versions of {len(line['prompts'])} prompts")
    return wrong


def check_same(disturbed: Path, undisturbed: Path, *, steps: int, identical: bool, sessions: bool = False) -> list[str]:
    """Check that the first run trained the same prompts, in the same order, as the second run in its first ``steps``
    steps, and completions of the same lengths. With ``identical``, completions, metrics and weights must be the same to
    the bit, and with ``sessions`` the completions alone."""
    ours, theirs = _completions(disturbed), _completions(undisturbed, steps)
    wrong: list[str] = []
    if [row["prompt"] for row in ours] != [row["prompt"] for row in theirs]:
        wrong.append("the prompts that trained are others, or in another order")
    if (chance := same_lengths(*[[len(row["tokens"]) for row in rows] for rows in (ours, theirs)])) < ODDS:
        wrong.append(f"the lengths that trained are other lengths (p = {chance:.2g})")
    if not identical:
        return wrong
    if ours != theirs:
        first = next((one["step"] for one, other in zip(ours, theirs, strict=False) if one != other), "the last")
        wrong.append(f"the completions of step {first} are not those of the undisturbed run")
    if sessions:
        return wrong
    metrics, others = _metrics(disturbed), _metrics(undisturbed, steps)
    if [row["step"] for row in metrics] != [row["step"] for row in others]:
        wrong.append("metrics.jsonl does not have one row for each step")
    for one, other in zip(metrics, others, strict=False):
        if names := sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name)):
            wrong.append(f"step {one['step']}: {', '.join(names)} are not those of the undisturbed run")
            break
    if _weights(disturbed, steps) != _weights(undisturbed, steps):
        wrong.append("the weights of the last checkpoint are not those of the undisturbed run")
    return wrong


def same_lengths(first: Sequence[int], second: Sequence[int]) -> float:
    """The p-value of the two-sample Kolmogorov-Smirnov test, by its asymptotic series."""
    if not first or not second:
        return float(len(first) == len(second))
    values = sorted({*first, *second})
    counts = [Counter(lengths) for lengths in (first, second)]
    below, distance = [0, 0], 0.0
    for value in values:
        below = [before + count[value] for before, count in zip(below, counts, strict=True)]
        distance = max(distance, abs(below[0] / len(first) - below[1] / len(second)))
    scaled = distance * math.sqrt(len(first) * len(second) / (len(first) + len(second)))
    if scaled < 0.2:
        return 1.0
    return min(1.0, 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101)))


def _completions(run: Path, steps: int = ENDLESS) -> list[dict[str, Any]]:
    files = sorted((run / "completions").glob("step-*.parquet"))[:steps]
    return [row for file in files for row in pq.read_table(file, columns=list(_COLUMNS)).to_pylist()]


def _metrics(run: Path, steps: int = ENDLESS) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["kind"] == "step" and row["step"] <= steps]
    return [{name: value for name, value in row.items() if not name.startswith(_TIMED)} for row in rows]


def _weights(run: Path, step: int) -> dict[str, str]:
    """The checksum of each file of tensors in the checkpoint of a step."""
    folder = run / "checkpoints" / f"step-{step:06d}"
    files = sorted(folder.rglob("*.safetensors"))
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
