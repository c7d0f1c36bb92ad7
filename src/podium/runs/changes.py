"""What changed from one evaluation to another: the held-out prompts that broke, and those that were mended."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from podium.errors import ConfigError
from podium.runs.files import SET, step_of
from podium.runs.records import RunRecord, check_run

__all__ = ["Change", "Changes", "compare_evaluations", "find_evaluations", "without_completions"]

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
        apart: Number of prompts that only one of the two evaluations has: their data differ, or a session failed.
        correct: Number of prompts that were answered correctly in the first and in the second evaluation.
        broke: Prompts that the first evaluation has correct and the second one wrong.
        mended: Prompts that the first evaluation has wrong and the second one correct.
    """

    items: int
    apart: int
    correct: tuple[int, int]
    broke: tuple[Change, ...]
    mended: tuple[Change, ...]


def find_evaluations(names: list[str]) -> dict[str, tuple[Path, Path]]:
    """Return the files of two evaluations of each set, by the name of the set. The name is "" if the run has only one
    set.

    ``[RUN]`` names the first and the last evaluation of a run, and ``[RUN@STEP, RUN@STEP]`` names two evaluations.

    Raises:
        ConfigError: There are no such evaluations, or none of the same set. The message lists those of the run.
    """
    if len(names) == 1:
        files_by_set = {name: files for name, files in _evaluations(Path(names[0])).items() if len(files) > 1}
        if not files_by_set:
            progress = RunRecord(Path(names[0])).progress
            raise ConfigError(f"{names[0]} ({progress}) has fewer than two evaluations to compare: set eval.every")
        return {name: (files[0], files[-1]) for name, files in files_by_set.items()}
    first, second = (_evaluation(name) for name in names)
    both = {name: (first[name], second[name]) for name in first if name in second}
    if not both:
        raise ConfigError(f"{names[0]} has the set(s) {', '.join(first)}, and {names[1]} {', '.join(second)}")
    return both


def without_completions(run: Path, name: str, last: Path) -> list[int]:
    """Return the steps after the file ``last``, the newest one of the set ``name``, at which the run evaluated this
    set. These evaluations have a row in metrics.jsonl but no file, for example because all sessions failed."""
    metric, last_step = f"accuracy/{name}" if name else "accuracy", step_of(last.stem) or 0
    rows = [row for row in RunRecord(run).rows if row["kind"] == "eval" and metric in row]
    return [row["step"] for row in rows if row["step"] > last_step]


def compare_evaluations(first: Path, second: Path) -> Changes:
    """Compare the files of two evaluations. Prompts that only one of them has are counted and not compared.

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
    apart = len(before.keys() ^ after.keys())
    return Changes(items=len(both), apart=apart, correct=correct, broke=changes[False], mended=changes[True])


def _evaluations(run: Path) -> dict[str, list[Path]]:
    """Return the files of the run's evaluations by the name of the set, in the order of their steps."""
    check_run(run)
    folder, files_by_set = run / "evaluations", dict[str, list[Path]]()
    files = (path for path in folder.rglob("step-*.parquet") if step_of(path.stem) is not None)
    for path in sorted(files, key=lambda path: (path.parent, step_of(path.stem))):
        name = "" if path.parent == folder else unquote(path.parent.name.removeprefix(SET))
        files_by_set.setdefault(name, []).append(path)
    return files_by_set


def _evaluation(name: str) -> dict[str, Path]:
    run, _, step = name.rpartition("@")
    files_by_set = _evaluations(Path(run or name))
    wanted = int(step) if step.isdecimal() and run else None
    evaluations = {
        set_name: path for set_name, files in files_by_set.items() for path in files if step_of(path.stem) == wanted
    }
    if not evaluations:
        steps = ", ".join(
            map(str, sorted({step_of(path.stem) or 0 for files in files_by_set.values() for path in files}))
        )
        raise ConfigError(
            f"{name} is no evaluation: expected RUN@STEP, and {run or name} evaluated {steps or 'no step'}"
        )
    return evaluations


def _rows(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the rows by their prompt and by their number among the rows with this prompt.

    A session is represented by its first row, which has the verdict. Its number is that of its task, because other
    sessions may have failed.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        of_sessions = "session" in pq.read_schema(path).names
        columns = [*_COLUMNS, "group", "session"] if of_sessions else [*_COLUMNS]
        rows = pq.read_table(path, columns=columns).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if of_sessions:
        firsts = {row["session"]: row for row in reversed(rows)}
        return {(row["prompt"], row["group"]): row for row in reversed(firsts.values())}
    seen = Counter[str]()
    row_by_key: dict[tuple[str, int], dict[str, Any]] = {}
    for row in rows:
        row_by_key[row["prompt"], seen[row["prompt"]]] = row
        seen[row["prompt"]] += 1
    return row_by_key
