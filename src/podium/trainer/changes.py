"""What changed from one evaluation to another: the held-out prompts that broke, and those that were mended."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podium.errors import ConfigError
from podium.trainer.files import step_name, step_of

__all__ = ["Change", "Changes", "compare_evaluations", "find_evaluations"]

_COLUMNS = ("prompt", "completion", "expected", "correct")


@dataclass(frozen=True, kw_only=True)
class Change:
    """A held-out prompt with its answers in two evaluations."""

    prompt: str
    expected: str | None
    before: str
    after: str


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Two evaluations of the same prompts.

    Attributes:
        items: Number of prompts that both have.
        correct: Number of prompts that were answered correctly in the first and in the second evaluation.
        broke: Prompts that the first evaluation has correct and the second one wrong.
        mended: Prompts that the first evaluation has wrong and the second one correct.
    """

    items: int
    correct: tuple[int, int]
    broke: tuple[Change, ...]
    mended: tuple[Change, ...]


def find_evaluations(names: list[str]) -> tuple[Path, Path]:
    """Return the files of two evaluations: ``[RUN]`` means its first and its last, ``[RUN@STEP, RUN@STEP]`` these.

    Raises:
        ConfigError: There are no such evaluations. The message lists those of the run.
    """
    if len(names) == 1:
        there = _evaluations(Path(names[0]))
        if len(there) < 2:
            raise ConfigError(f"{names[0]} has {len(there)} evaluation(s), and two are compared: set eval.every")
        return there[0], there[-1]
    first, second = (_evaluation(name) for name in names)
    return first, second


def compare_evaluations(first: Path, second: Path) -> Changes:
    """Compare two files of evaluations. Prompts that only one of them has are left out.

    Raises:
        ConfigError: They have no prompt in common, or a file cannot be read.
    """
    before, after = _rows(first), _rows(second)
    both = [(before[key], after[key]) for key in before if key in after]
    if not both:
        raise ConfigError(f"{first} and {second} have no prompt in common: they evaluated other data")
    changes = {
        good: tuple(
            Change(prompt=a["prompt"], expected=a["expected"], before=a["completion"], after=b["completion"])
            for a, b in both
            if a["correct"] != b["correct"] and b["correct"] == good
        )
        for good in (False, True)
    }
    correct = sum(bool(a["correct"]) for a, _ in both), sum(bool(b["correct"]) for _, b in both)
    return Changes(items=len(both), correct=correct, broke=changes[False], mended=changes[True])


def _evaluations(run: Path) -> list[Path]:
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"no run at {run}: give the directory of a run, such as runs/NAME, or RUN@STEP")
    return sorted((run / "evaluations").glob("step-*.parquet"), key=lambda path: step_of(path.stem) or 0)


def _evaluation(name: str) -> Path:
    run, _, step = name.rpartition("@")
    there = _evaluations(Path(run or name))
    found = Path(run) / "evaluations" / f"{step_name(int(step))}.parquet" if step.isdecimal() and run else None
    if found not in there:
        steps = ", ".join(str(step_of(path.stem)) for path in there) or "no step"
        raise ConfigError(f"{name} is no evaluation: expected RUN@STEP, and {run or name} evaluated {steps}")
    return found


def _rows(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """The rows by their prompt, and by their place among those with the same prompt."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(path, columns=list(_COLUMNS)).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    seen = Counter[str]()
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for row in rows:
        found[row["prompt"], seen[row["prompt"]]] = row
        seen[row["prompt"]] += 1
    return found
