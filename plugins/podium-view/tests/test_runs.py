"""`podium runs` lists, shows, compares and removes runs, by their files alone."""

from __future__ import annotations

import json
import os
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from podium.cli import main
from podium.runs.run_files import RunFiles
from podium.runs.stored_models import find_model
from tests.made_runs import make_run


def test_runs_are_listed_the_newest_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for age, (name, ending) in enumerate({"new": {"finished": True}, "old": {"finished": False}, "killed": {}}.items()):
        run = make_run(tmp_path / name, **ending)
        os.utime(run / "metrics.jsonl", (1e9 - age, 1e9 - age))
    assert main(["runs", str(tmp_path)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "state", "step", "held-out", "took", "last", "written"]
    assert [line.split()[:7] for line in lines] == [
        [str(tmp_path / "new"), "finished", "3", "of", "3", "accuracy", "25.0%"],
        [str(tmp_path / "old"), "stopped", "3", "of", "3", "accuracy", "25.0%"],
        [str(tmp_path / "killed"), "unfinished", "3", "of", "3", "accuracy", "25.0%"],
    ]
    with RunFiles(tmp_path / "killed").lock():
        main(["runs", str(tmp_path)])
    assert "running" in capsys.readouterr().out


def test_a_directory_of_several_trainings_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `make quickstart` leaves: runs/quickstart-DATE/grpo."""
    for age, day in enumerate(("tuesday", "monday")):
        make_run(tmp_path / "runs" / day / "grpo")
        os.utime(tmp_path / "runs" / day, (1e9 - age, 1e9 - age))
    (tmp_path / "runs" / "notes.txt").touch()
    assert main(["runs", str(tmp_path / "runs")]) == 2
    assert f"or one of runs (run.dir), such as {tmp_path}/runs/tuesday\n" in capsys.readouterr().err
    assert main(["runs", str(tmp_path / "runs" / "tuesday")]) == 0


def test_one_run_is_shown_with_its_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("plotext")
    run = make_run(tmp_path / "a", finished=True, model_path="runs/a/model")
    assert main(["runs", str(run)]) == 0
    out = capsys.readouterr().out
    assert f"{run}: finished at step 3, held-out accuracy 25.0%, took 1m12s" in out
    assert f"model path: {run}/model, which is gone" in out
    assert "reward/mean" in out
    assert "┤" in out


def test_what_ended_before_a_step_is_removed_and_nothing_that_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, steps in (("good", 3), ("failed", 0), ("starting", 0)):
        make_run(tmp_path / "runs" / name, steps=steps)
    with RunFiles(tmp_path / "runs/starting").lock():
        assert main(["runs", "clean"]) == 2, "nobody can answer"
        assert (tmp_path / "runs/failed").exists()
        assert main(["runs", "clean", "--yes"]) == 0
        assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["good", "starting"]
        capsys.readouterr()
        assert main(["runs", "clean", "runs/starting", "--yes"]) == 2
        assert "is being written to" in capsys.readouterr().err
    assert main(["runs", "clean", "runs/good", "--yes"]) == 0
    assert not (tmp_path / "runs/good").exists()
    (tmp_path / "other").mkdir()
    assert main(["runs", "clean", "other", "--yes"]) == 2


def test_a_directory_that_holds_runs_or_a_project_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs/good")
    (make_run(tmp_path / "runs/saved", steps=0) / "checkpoints/step-000001").mkdir(parents=True)
    for place in ("runs", "."):
        (tmp_path / place / "config.yaml").write_text("run: {steps: 3}\n")
    assert main(["runs", "clean", "--yes"]) == 0
    assert capsys.readouterr().out == "nothing to remove\n"
    (tmp_path / "runs/metrics.jsonl").touch()
    for place in ("runs", "."):
        assert main(["runs", "clean", place, "--yes"]) == 2, place
        assert "name the runs in it" in capsys.readouterr().err
    assert (tmp_path / "runs/good/metrics.jsonl").exists()


def test_a_run_that_was_resumed_and_killed_is_unfinished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", finished=True)
    (run / "summary.json").write_text(json.dumps({"steps": 2, "finished": True}))
    assert main(["runs", str(run)]) == 0
    assert "unfinished at step 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    "summary",
    [{"steps": 2, "finished": True, "model_path": "model"}, {"steps": 3, "finished": False, "model_path": None}],
)
def test_the_model_of_an_earlier_end_is_not_the_runs(tmp_path: Path, summary: dict[str, Any]) -> None:
    """A run that ended after step 2 was resumed, and was killed or stopped after the checkpoint of step 3."""
    run = make_run(tmp_path / "run", finished=True)
    (run / "model").mkdir()
    (run / "checkpoints/step-000003").mkdir(parents=True)
    (run / "summary.json").write_text(json.dumps(summary))
    found = find_model(str(run))
    assert found is not None
    assert found.checkpoint == run / "checkpoints/step-000003"
    (run / "summary.json").write_text(json.dumps({"steps": 3, "finished": True, "model_path": "model"}))
    found = find_model(str(run))
    assert found is not None
    assert found.checkpoint is None


def test_a_command_of_no_package_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    own = EntryPoint("runs", "podium_view.runs:run_runs", "podium.commands")
    monkeypatch.setattr("podium.cli.list_entry_points", lambda group: [own])
    assert main(["runs", "compare", "a", "b"]) == 2
    assert "pip install ./plugins/podium-NAME" in capsys.readouterr().err
    entry = EntryPoint("runs count", "builtins:len", "podium.commands")
    monkeypatch.setattr("podium.cli.list_entry_points", lambda group: [own, entry])
    assert main(["runs", "count", "a", "b", "c"]) == 3, "what the function returns for its words"
    assert main(["runs", "cuont", "a"]) == 2
    assert "did you mean count?; its commands are clean, count" in capsys.readouterr().err
    make_run(tmp_path / "count")
    assert main(["runs", "count"]) == 0, "a run of this name is shown"


def test_a_model_or_a_checkpoint_that_is_gone_is_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A copy of a run without its model named that of the run elsewhere."""
    place = tmp_path / "elsewhere" / "run"
    (place / "model").mkdir(parents=True)
    kept: dict[str, Any] = {
        "model_path": str(place / "model"),
        "best_checkpoint": str(place / "checkpoints/step-000002"),
    }
    run = make_run(tmp_path / "run", finished=True, **kept)
    (run / "checkpoints/step-000002").mkdir(parents=True)
    assert main(["runs", str(run)]) == 0
    out = capsys.readouterr().out
    assert f"model path: {run}/model, which is gone\n" in out
    assert f"best checkpoint: {run}/checkpoints/step-000002\n" in out
