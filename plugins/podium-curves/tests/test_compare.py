"""`podium runs compare` shows how runs differ, by their files alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from podium.cli import main
from tests.made_runs import make_run


def test_runs_are_compared_and_seeds_are_a_band(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    for name, seed, lr in (("a0", 0, 1e-5), ("a1", 1, 1e-5), ("b0", 0, 1e-4)):
        make_run(tmp_path / name, seed=seed, lr=lr, offset=seed)
    assert main(["runs", "compare", "a0", "a1", "b0"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["run.seed", "0", "1", "0"] in lines
    assert ["optim.lr", "1e-05", "1e-05", "0.0001"] in lines
    assert not any("data.train" in line for line in lines), "it is the same in all"
    assert lines[-1] == ["reward/mean:", "comparison.png"]
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert main(["runs", "compare", "a0"]) == 2
    assert main(["runs", "compare", "a0", "b0", "--metric", "absent"]) == 2


def test_a_metric_of_evaluations_alone_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pictures: list[bytes] = []
    for offset in (0.0, 0.5):
        runs = [make_run(tmp_path / f"{offset}" / name) for name in "ab"]
        for run in runs:
            rows = [{"kind": "eval", "step": step, "accuracy": offset * step} for step in (1, 2)]
            (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        out = tmp_path / f"{offset}.png"
        assert main(["runs", "compare", *map(str, runs), "--metric", "accuracy", "--out", str(out)]) == 0
        pictures.append(out.read_bytes())
    assert pictures[0] != pictures[1], "the curve is in the picture"
