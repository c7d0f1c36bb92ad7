"""Several completions of each held-out prompt: in a run, at a step of the finished run, and by source."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from statistics import fmean

import pyarrow.parquet as pq
import pytest

from podium.cli import main
from podium.trainer import GRPOConfig
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
