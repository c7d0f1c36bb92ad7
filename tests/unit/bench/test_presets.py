"""The figures of the presets are those of the runs, and every preset and recipe learned in five seeds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.presets import __main__ as command, page
from bench.presets.training import SEEDS, TRL, Course, Run, list_arms, merge, write_data
from bench.report import put_section
from bench.schedules.campaign import read_results
from podium.cli.presets import list_presets
from podium.runs.recipes import list_recipes

RESULTS = read_results(command.RESULTS)
RUNS = [Run.from_json(values) for values in RESULTS["runs"]]


def test_the_page_has_the_figures_of_the_runs() -> None:
    text = command.PAGE.read_text()
    assert put_section(text, page.make_section(RESULTS, command.PICTURE), page.MARK) == text, (
        "python -m bench.presets --report writes it anew"
    )


def test_every_preset_and_recipe_that_there_is_learned_in_five_seeds() -> None:
    arms = list_arms()
    assert arms.keys() == {*list_presets(), *list_recipes()}
    assert not page.find_missed(RUNS, arms)
    assert {(run.arm, run.seed) for run in RUNS} == {(name, seed) for name in (*arms, TRL) for seed in SEEDS}


def test_a_seed_that_did_not_learn_or_is_missing_is_named() -> None:
    runs = [
        Run("grpo", 0, [(0, 0.3), (40, 0.9)], 1.0, 1.0),
        Run("grpo", 1, [(0, 0.25), (40, 0.5)], 1.0, 1.0),
        Run("grpo", 2, [(0, 0.3), (40, float("nan"))], 1.0, 1.0),
    ]
    low, undefined, missing = page.find_missed(runs, ["grpo"], seeds=range(4))
    assert low.startswith("grpo, seed 1, goes from 25.0% to 50.0% on held-out rows: a gain of 25.0 points")
    assert undefined.startswith("grpo, seed 2, goes from 30.0% to nan%")
    assert missing == "grpo, seed 3, was not run: python -m bench.presets --arms grpo"


def test_no_held_out_row_is_trained_on(tmp_path: Path) -> None:
    write_data(tmp_path)
    prompts = {
        path.stem: {json.loads(line)["prompt"] for line in path.read_text().splitlines()} for path in tmp_path.iterdir()
    }
    for name in ("train", "examples-train", "pairs-train", "habits"):
        assert prompts[name] == prompts["train"] and not prompts[name] & prompts["held_out"]
    assert len(prompts["held_out"]) == 200 and prompts["held_out"] == prompts["pairs-held_out"]


def test_results_are_continued_and_a_failed_run_names_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is trained: the runs are made up, and the last one fails in the warm-up."""
    made: list[tuple[str, int]] = []

    def train(self: Course, arm: object, seed: int) -> Run:
        made.append((getattr(arm, "name", ""), seed))
        return Run("grpo", seed, [(0, 0.3), (40, 0.9)], 1.0, 1.0)

    results = tmp_path / "presets.json"
    with monkeypatch.context() as patch:
        patch.setattr(Course, "train", train)
        command.measure(results, tmp_path / "runs", ["grpo"], again=False)
        assert made == [("grpo", seed) for seed in SEEDS]
        command.measure(results, tmp_path / "runs", ["grpo"], again=False)
        assert len(made) == len(SEEDS)
        patch.setattr(command, "DRAWN", {})
        with pytest.raises(SystemExit, match=r"presets\.json is of other settings: remove it"):
            command.measure(results, tmp_path / "runs", ["grpo"], again=False)
    monkeypatch.setattr("bench.presets.training.WARM_UP", merge({"optim": {"lr": -1}}))
    with pytest.raises(SystemExit, match=r"habit ended with status 2; .*habit\.log ends with:[\s\S]*optim\.lr"):
        Course(tmp_path / "failed").warm_up()
