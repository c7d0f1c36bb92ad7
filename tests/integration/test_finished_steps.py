"""The steps that a model has finished, as rewards are told them outside of training."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from podium.cli import main
from podium.runs.stored_models import find_model
from podium.trainer import GRPOConfig
from tests.integration.test_environments import WORLDS, config_of
from tests.integration.training import metrics_rows, tiny, train

SECTIONS: dict[str, Any] = {
    "reward": {"name": f"{__name__}:count_finished", "processes": 1},
    "eval": {"items": 2, "every": 2},
    "save": {"every": 2, "keep": 9},
    "run": {"steps": 3},
}


def count_finished(completion: str, answer: str, trainer_state: Any) -> float:
    """A reward that is the number of finished steps which it is told."""
    return float(trainer_state.global_step)


@pytest.mark.parametrize("world", ["", "graded_by_reward"])
def test_an_evaluation_of_a_stored_model_tells_its_finished_steps(
    world: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It told 0 of each model, so that a reward that changes with the steps gave another figure than in the run."""
    run = train(config_of(world, tmp_path, **SECTIONS) if world else tiny(GRPOConfig, tmp_path, **SECTIONS))
    assert [(row["step"], row["reward_mean"]) for row in metrics_rows(run, "eval")] == [(0, 0), (2, 2), (3, 3)]
    checkpoint = f"{run}/checkpoints/step-000002"
    for name, finished in ((f"{run}@2", 2), (checkpoint, 2), (f"{run}@latest", 3), (str(run), 3)):
        capsys.readouterr()
        assert main(["eval", name, "--backend", "inline"]) == 0
        assert re.search(rf"^reward +{finished}\.000 ", capsys.readouterr().out, re.MULTILINE)
    if not world:
        shutil.copytree(run / "model", tmp_path / "copy")
        assert main(["eval", str(run), "--backend", "inline", "--model.path", str(tmp_path / "copy")]) == 0
        assert re.search("^reward +0\\b", capsys.readouterr().out, re.MULTILINE), "a model of no run"


def test_the_best_completions_are_chosen_by_the_finished_steps(tmp_path: Path) -> None:
    """It told the number of the 64 prompts that are drawn together, less 1: -1 at first."""
    run = train(tiny(GRPOConfig, tmp_path, **SECTIONS))
    rows = tmp_path / "many.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n % 100:02d}=", "answer": "0"}) + "\n" for n in range(150)))
    data = ["--data.train", str(rows), "--data.holdout", "0", "--sampling.n", "2", "--sampling.temperature", "1"]
    for name, finished in ((f"{run}@2", 2.0), (str(run), 3.0)):
        best = tmp_path / f"best-{finished}.jsonl"
        assert main(["sample", name, "--best", str(best), "--backend", "inline", *data]) == 0
        assert {json.loads(line)["reward"] for line in best.read_text().splitlines()} == {finished}


def test_a_model_without_a_run_has_finished_no_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tiny(GRPOConfig, tmp_path, **{**SECTIONS, "eval": {"items": 0}}))
    model = (run / "model").rename(tmp_path / "model")
    settings = ["--data.train", str(tmp_path / "copy.jsonl"), "--reward.name", f"{__name__}:count_finished"]
    arguments = [*settings, "--reward.processes", "1", "--eval.items", "2", "--sampling.max_new_tokens", "3"]
    assert main(["eval", str(model), "--backend", "inline", *arguments]) == 0
    assert re.search("^reward +0\\b", capsys.readouterr().out, re.MULTILINE)
    assert find_model(str(model)) is None


def test_a_final_model_whose_summary_is_gone_has_the_steps_of_the_latest_checkpoint(tmp_path: Path) -> None:
    run = train(tiny(GRPOConfig, tmp_path, **SECTIONS))
    stored = find_model(str(run))
    assert stored is not None and stored.checkpoint is None and stored.step == 3
    (run / "summary.json").unlink()
    assert stored.step == 3


def test_an_evaluation_whose_sessions_all_fail_is_an_error_after_some_steps_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Within a run the items count as not correct, and the run continues."""
    run = train(config_of("graded_by_reward", tmp_path, **SECTIONS))
    world = ["--environment.name", f"{WORLDS}:hopeless"]
    assert main(["eval", f"{run}@2", "--backend", "inline", *world]) != 0
    assert "reward " not in capsys.readouterr().out
