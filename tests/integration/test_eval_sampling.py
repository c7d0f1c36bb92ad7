"""Several completions of each held-out prompt: in a run, at a step of the finished run, and by source."""

from __future__ import annotations

import itertools
import json
from operator import itemgetter
from pathlib import Path
from statistics import fmean

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from podium.cli import main
from podium.errors import ConfigError
from podium.trainer import GRPOConfig
from podium_changes.evaluations import compare_evaluations
from tests.integration.training import metrics_rows, tiny, train, write_copy_task


def test_a_run_is_judged_by_pass_at_k_and_evaluated_again_at_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"prompt": f"{n}=", "answer": f"{n}"}) + "\n" for n in range(40)))
    draws = {"temperature": 1.0, "n": 4, "top_k": 5, "max_new_tokens": 2}
    config = tiny(
        GRPOConfig,
        tmp_path,
        data={"train": [str(write_copy_task(tmp_path)), str(other)], "holdout": 0.2},
        reward={"name": "exact"},
        eval={"items": 8, "every": 1, "metric": "pass@4", "temperature": draws},
        save={"every": 1, "keep": 0, "keep_best": 1},
    )
    run = train(config)
    rows = metrics_rows(run, "eval")
    assert {row["metric"] for row in rows} == {"pass@4"}
    for row in rows:
        table = pq.read_table(run / "evaluations" / f"step-{row['step']:06d}.parquet").to_pydict()
        items = [
            [correct for group, correct in zip(table["group"], table["correct"], strict=True) if group == number]
            for number in sorted({*table["group"]})
        ]
        assert [len(item) for item in items] == [4] * row["items"]
        assert max(map(len, table["tokens"])) <= 2
        for k in (1, 2, 4):
            expected = fmean(fmean(any(some) for some in itertools.combinations(item, k)) for item in items)
            assert row[f"pass@{k}"] == pytest.approx(expected)
        assert row["completion_tokens"] == pytest.approx(fmean(map(len, table["tokens"])))
        assert {"maj@4", "sources/copy/pass@4", "sources/other/accuracy", "cut_off"} <= row.keys()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["metric"] == "pass@4"
    assert summary["best_step"] == max(rows, key=lambda row: (row["pass@4"], -row["step"]))["step"]
    capsys.readouterr()
    assert main(["eval", f"{run}@1", "--backend", "inline"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = next(row for row in rows if row["step"] == 1)
    assert lines[0].startswith("pass@4 ") and f"{100 * first['pass@4']:.1f}%" in lines[0], lines[:4]
    assert any(line.startswith("maj@4 ") for line in lines)
    assert any("of other" in line for line in lines)
    assert main(["changes", str(run), "--show", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first, *_, last = (list_shares(run, row["step"]) for row in rows)
    assert [line.split()[:3] for line in lines if line.startswith(("before", "after"))] == [
        [name, f"{100 * row['accuracy']:.1f}%", f"({row['items']}"]
        for name, row in (("before", rows[0]), ("after", rows[-1]))
    ]
    assert f"worse     {sum(new < old for old, new in zip(first, last, strict=True))}" in lines
    assert f"better    {sum(new > old for old, new in zip(first, last, strict=True))}" in lines


def list_shares(run: Path, step: int) -> list[float]:
    """The share of correct completions of each prompt."""
    rows = pq.read_table(run / "evaluations" / f"step-{step:06d}.parquet").to_pylist()
    return [fmean(row["correct"] for row in of_prompt) for _, of_prompt in itertools.groupby(rows, itemgetter("group"))]


@pytest.mark.parametrize("sessions", [True, False])
def test_a_prompt_with_several_completions_or_sessions_counts_once_by_their_mean(
    tmp_path: Path, sessions: bool
) -> None:
    """Prompts 0 and 2 have the same text. The last row of the second file was left out by the reward."""
    (tmp_path / "config.yaml").write_text("{}")
    (tmp_path / "evaluations").mkdir()
    verdicts = {
        0: [(0, 1), (0, 0), (1, 1), (1, 0), (2, 0), (2, 0)],
        1: [(1, 0), (1, 0), (2, 1), (2, 1), (0, 0), (0, None)],
    }
    for step, rows in verdicts.items():
        table = {
            "group": pa.array([group for group, _ in rows]),
            "prompt": pa.array([("twice", "once", "twice")[group] for group, _ in rows]),
            "completion": pa.array(["-"] * len(rows)),
            "expected": pa.array(["+"] * len(rows)),
            "correct": pa.array([None if correct is None else bool(correct) for _, correct in rows]),
            **({"session": pa.array(range(len(rows)))} if sessions else {}),
        }
        pq.write_table(pa.table(table), tmp_path / "evaluations" / f"step-{step:06d}.parquet")
    changes = compare_evaluations(*sorted((tmp_path / "evaluations").iterdir()))
    assert (changes.items, changes.apart, changes.are_verdicts) == (3, 0, False)
    assert changes.means == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    assert sorted((change.prompt, change.scores) for change in changes.worse) == [
        ("once", (0.5, 0.0)),
        ("twice", (0.5, 0.0)),
    ]
    assert [(change.prompt, change.scores) for change in changes.better] == [("twice", (0.0, 1.0))]


@pytest.mark.parametrize("name", ["group", "session", "prompt"])
def test_rows_of_evaluations_without_a_number_are_refused_by_their_column(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.yaml").write_text("{}")
    (tmp_path / "evaluations").mkdir()
    columns = {
        "group": [0, 1],
        "session": [0, 1],
        "prompt": ["a", "b"],
        "completion": ["-", "-"],
        "expected": ["+", "+"],
    }
    for step in (0, 1):
        table = {**columns, "correct": [True, False]}
        if step:
            table[name] = [columns[name][0], None]
        pq.write_table(pa.table(table), tmp_path / "evaluations" / f"step-{step:06d}.parquet")
    with pytest.raises(ConfigError, match=rf"step-000001\.parquet, row 2: the column '{name}' is empty: the file was"):
        compare_evaluations(*sorted((tmp_path / "evaluations").iterdir()))
