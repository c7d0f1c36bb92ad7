"""What changed from one evaluation to another: the held-out prompts that became worse, and those that became better."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import unquote

from podium.errors import ConfigError
from podium.runs.files import SET, step_of
from podium.runs.run_files import RunFiles
from podium.runs.run_reader import METRICS, RunRecord, check_run, figure_of, is_run
from podium.telemetry.held_out import ACCURACY, LOSS, REWARD, TOKEN_ACCURACY, Metric, count_draws
from podium.telemetry.metrics import REWARD_PART_PREFIX

__all__ = ["Change", "Changes", "compare_evaluations", "find_evaluations", "find_reported", "without_completions"]

_COLUMNS = ("prompt", "completion", "expected")


@dataclass(frozen=True, kw_only=True)
class Change:
    """A held-out prompt with its answers and scores in two evaluations. Examples of which the loss is computed have no
    answers but that of the data, and prompts with several completions have their mean score and no answer."""

    prompt: str
    expected: str | None
    before: str | None
    after: str | None
    scores: tuple[float, float]
    weight: float = 1.0  # in the means: the tokens to learn of an example; 1 of a preference


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Two evaluations of the same prompts.

    Attributes:
        items: Number of prompts that are compared.
        apart: Number of prompts that only one of the two evaluations has: their data differ, or a session failed.
        unscored: Number of prompts that both have, and of which one has no score, because the reward left it out.
        metric: The figure that is compared.
        means: Its mean over these prompts in the first and in the second evaluation.
        worse: Prompts whose score is worse in the second evaluation, those that changed most first. By verdicts these
            were correct and are wrong.
        better: Prompts whose score is better in the second evaluation, those that changed most first.
        are_verdicts: Whether the figure is the accuracy, and each score 0 or 1. The score of a preference is 0.5 where
            the rewards of both answers are equal.
    """

    items: int
    apart: int
    unscored: int
    metric: Metric
    means: tuple[float, float]
    worse: tuple[Change, ...]
    better: tuple[Change, ...]
    are_verdicts: bool


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
    items, last_step = f"items/{name}" if name else "items", step_of(last.stem) or 0
    rows = [row for row in RunRecord(run).rows if row["kind"] == "eval" and items in row]
    return [row["step"] for row in rows if row["step"] > last_step]


def compare_evaluations(first: Path, second: Path) -> Changes:
    """Compare the files of two evaluations by the metric that judges the run of the second file.

    Prompts that only one of them has, or that have no score, are counted and not compared.

    Raises:
        ConfigError: They have no prompt with scores in common, a file cannot be read, or it has no such scores.
    """
    judged = RunRecord(find_run(second)).judged
    metric = Metric(ACCURACY) if judged is None or count_draws(judged[0].name) else judged[0]
    before, after = _rows(first, metric), _rows(second, metric)
    both = [(before[key], after[key]) for key in before if key in after]
    if not both:
        raise ConfigError(f"{first} and {second} have no prompt in common: they evaluated other data")
    changes = [
        Change(
            prompt=b["prompt"],
            expected=b["expected"],
            before=a["completion"],
            after=b["completion"],
            scores=(float(a["score"]), float(b["score"])),
            weight=float(len(b["tokens"] or ())) if "tokens" in b else 1.0,
        )
        for a, b in both
        if a["score"] is not None and b["score"] is not None
    ]
    if not changes:
        hint = (
            ""
            if judged is not None
            else f"; {find_run(second) / METRICS}, which says what judges the run, is not there"
        )
        raise ConfigError(f"{first} and {second} have no prompt in common that has the {metric.title} in both{hint}")
    changes.sort(key=lambda change: -abs(change.scores[1] - change.scores[0]))
    gains = [metric.rank(change.scores[1]) - metric.rank(change.scores[0]) for change in changes]
    weight = sum(change.weight for change in changes) or 1.0
    means = [sum(change.weight * change.scores[index] for change in changes) / weight for index in (0, 1)]
    return Changes(
        items=len(changes),
        apart=len(before.keys() ^ after.keys()),
        unscored=len(both) - len(changes),
        metric=metric,
        means=(means[0], means[1]),
        worse=tuple(change for change, gain in zip(changes, gains, strict=True) if gain < 0),
        better=tuple(change for change, gain in zip(changes, gains, strict=True) if gain > 0),
        are_verdicts=metric.name == ACCURACY and all({*change.scores} <= {0.0, 1.0} for change in changes),
    )


def find_reported(file: Path, metric: Metric) -> float | None:
    """The figure that a run has reported of the evaluation in ``file``; None where metrics.jsonl has none. Sessions
    that failed count in it, and are not in the file."""
    set_name = unquote(file.parent.name.removeprefix(SET)) if file.parent.name.startswith(SET) else ""
    rows = [
        row for row in RunRecord(find_run(file)).rows if row["kind"] == "eval" and row["step"] == step_of(file.stem)
    ]
    return figure_of(rows[-1], metric.name, set_name) if rows else None


def find_run(file: Path) -> Path:
    """The directory of the run to which a file of an evaluation belongs."""
    return next((folder for folder in file.parents if is_run(folder)), file.parent)


def _column_of(metric: Metric) -> str:
    """The column of an evaluation's file with the scores of a metric."""
    if metric.name.startswith(REWARD_PART_PREFIX):
        return f"reward_{metric.name.removeprefix(REWARD_PART_PREFIX)}"
    return {ACCURACY: "correct", REWARD: "reward"}.get(metric.name, metric.name)


def _evaluations(run: Path) -> dict[str, list[Path]]:
    """Return the files of the run's evaluations by the name of the set, in the order of their steps."""
    check_run(run)
    folder, files_by_set = run / "evaluations", dict[str, list[Path]]()
    files = (folder / name for name in RunFiles(run).walk("evaluations") if name.endswith(".parquet"))
    files = (path for path in files if step_of(path.stem) is not None)
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


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    return types.is_string(kind) or types.is_large_string(kind) or types.is_null(kind)


def _is_number(kind: Any) -> bool:
    from pyarrow import types

    return types.is_floating(kind) or types.is_integer(kind) or types.is_boolean(kind) or types.is_null(kind)


def _rows(path: Path, metric: Metric) -> dict[tuple[str, int], dict[str, Any]]:
    """Return a row of each prompt by the prompt's text and by its number among those with this text.

    The key ``score`` of a row is its score by ``metric``. Of several completions or sessions of a prompt, it is the
    mean over those that have a score, and there is no ``completion``.

    A session is represented by the first row of its client, which has the verdict. The number of its prompt is that of
    the task, because all sessions of another task may have failed.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    column = _column_of(metric)
    try:
        run = find_run(path)
        with RunFiles(run).open(str(path.relative_to(run))) as opened:
            file = pq.ParquetFile(opened)
            present = file.schema_arrow.names
            weighing = ("tokens",) if metric.name in (LOSS, TOKEN_ACCURACY) else ()
            names = [name for name in (*_COLUMNS, column, *weighing, "group", "session", "agent") if name in present]
            kinds = {field.name: field.type for field in file.schema_arrow}
            checks = {name: _is_text for name in _COLUMNS if name != "completion" or name in present}
            checks |= {name: _is_number for name in ("group", column) if name == "group" or name in present}
            for name, is_right in checks.items():
                if name not in kinds or not is_right(kinds[name]):
                    kind = "texts" if is_right is _is_text else "numbers"
                    raise ConfigError(f"{path}: the column {name!r} holds no {kind}: the file was damaged or changed")
            rows = file.read(columns=names, use_threads=False).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if column not in present:
        raise ConfigError(f"{path} has no column {column!r}, which holds the {metric.title} of its items")
    for name in ("prompt", "group", "session"):
        if name in names and (number := next((i for i, row in enumerate(rows, 1) if row[name] is None), 0)):
            raise ConfigError(f"{path}, row {number}: the column {name!r} is empty: the file was damaged or changed")
    if is_sessions := "session" in present:
        rows.sort(key=lambda row: bool(row.get("agent")))  # an agent that the reward left out stands last in the file
        rows = [*{row["session"]: row for row in reversed(rows)}.values()][::-1]
    rows_by_group: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        rows_by_group.setdefault(row["group"], []).append(row)
    seen = Counter[str]()
    row_by_key: dict[tuple[str, int], dict[str, Any]] = {}
    for group, of_prompt in sorted(rows_by_group.items()):  # those that the reward left out stand last in the file
        prompt, scores = of_prompt[0]["prompt"], [row[column] for row in of_prompt if row[column] is not None]
        completion = of_prompt[0].get("completion") if len(of_prompt) == 1 else None
        score = fmean(scores) if scores else None
        key = (prompt, group if is_sessions else seen[prompt])
        row_by_key[key] = {**of_prompt[0], "completion": completion, "score": score}
        seen[prompt] += 1
    return row_by_key
