"""One metric judges a run: its best checkpoint, when it ends early, its curve, its report, and all who read the run.

A reward function grades held-out prompts as it was told in advance, so that evaluations have known scores.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from podium.cli import main
from podium.errors import CheckpointError, ConfigError
from podium.runs.run_reader import RunRecord
from podium.telemetry import Note, subscribe
from podium.trainer import GRPOConfig, PPOTrainer, SFTConfig, SFTTrainer, Summary
from podium_view.run import Run
from tests.integration.test_reward_model import write_scorer
from tests.integration.training import metrics_rows, tiny

ITEMS = 8
REWARD = f"{Path(__file__).with_name('rewards.py')}:as_planned"


def write_plan(folder: Path, plan: Sequence[Sequence[float]]) -> str:
    """Write held-out prompts, of which evaluation e gives number i the score ``plan[e][i]``."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"prompt": f"{n}=", "answer": str(n), "plan": [scores[n] for scores in plan], "marks": str(folder / f"mark{n}")}
        for n in range(ITEMS)
    ]
    file = folder / "held_out.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def levels(*means: float) -> list[list[float]]:
    """Evaluations with these means, whose scores are neither 0 nor 1."""
    return [[mean + 0.01 * (n - (ITEMS - 1) / 2) if mean else 0.0 for n in range(ITEMS)] for mean in means]


def verdicts(*counts: int) -> list[list[float]]:
    """Evaluations in which so many items are correct."""
    return [[float(n < count) for n in range(ITEMS)] for count in counts]


def train(folder: Path, plan: Sequence[Sequence[float]], *, show: bool = True, **sections: Any) -> Summary:
    """A run of GRPO that evaluates and saves after each step."""
    values: dict[str, Any] = {
        "reward": {"name": REWARD},
        "run": {"steps": len(plan) - 1},
        "eval": {"items": ITEMS, "every": 1},
        "save": {"every": 1, "keep": 1, "keep_best": 1},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    data = {"eval": write_plan(folder, plan)}
    config = tiny(GRPOConfig, folder, **{**values, "data": {**data, **values.get("data", {})}})
    return PPOTrainer(config, cluster="inline", show=show).fit()


def read_report(text: str) -> list[str]:
    """The lines of the report with the figures, without spaces at their ends."""
    lines = [line.strip() for line in text.splitlines()]
    first = next(number for number, line in enumerate(lines) if "with the 95% interval" in line)
    return lines[first : lines.index("", first)]


def test_a_reward_with_partial_credit_is_judged_by_its_mean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run begins with a reward of 0 everywhere, as a verdict may, learns, and is ended by patience."""
    summary = train(tmp_path, levels(0.0, 0.2, 0.4, 0.3, 0.35, 0.9), eval={"patience": 2}, run={"steps": 9})
    out, run = capsys.readouterr().out, tmp_path / "runs" / "run"
    assert (summary.steps, summary.finished, summary.metric) == (4, True, "reward_mean")
    assert (summary.best_step, summary.best) == (2, pytest.approx(0.4))
    assert summary.best_checkpoint == str(run / "checkpoints" / "step-000002")
    assert (summary.before["reward_mean"], summary.after["reward_mean"]) == (0.0, pytest.approx(0.35))
    assert "accuracy" not in summary.after
    assert "no evaluation was better than that of step 2, reward 0.400 (eval.patience)" in out
    heading, before, after, gain, *_ = read_report(out)
    assert heading == "held-out reward  with the 95% interval"
    assert before.split()[:2] == ["before", "0"] and before.endswith("n = 8")
    assert after.split()[:2] == ["after", "0.350"] and after.endswith("0.330 to 0.370, n = 8")
    assert gain == "gain  +0.350  (+0.33 to +0.37)"
    assert "reward on the training prompts    ● held-out" in out
    rows = metrics_rows(run, "eval")
    assert [row["metric"] for row in rows] == ["accuracy", *["reward_mean"] * 4], "all scores are 0 at first"
    assert not any("reward/accuracy" in row for row in metrics_rows(run))
    assert main(["runs", str(run)]) == 0
    assert "held-out reward 0.350" in capsys.readouterr().out
    assert main(["changes", f"{run}@2", f"{run}@3"]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        "metric    reward",
        f"before    0.400  (8 items)  {run}/evaluations/step-000002.parquet",
    ]
    assert main(["export", str(run), "--to", str(tmp_path / "exported")]) == 0
    card = (tmp_path / "exported" / "README.md").read_text()
    assert "| held-out | reward | 95 % interval |" in card
    assert "The reward changed by +0.350." in card
    about = Run(run, "").answer("about")
    assert (about["metric"], about["before"], about["after"]) == ("reward", "0", "0.350")
    held_out = Run(run, "").answer("curves")["held_out"]
    assert held_out["reward/mean"] == "reward_mean" and "reward/accuracy" not in held_out


def test_verdicts_are_judged_by_accuracy_and_chance_is_called_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = train(tmp_path, verdicts(1, 3, 6, 4), eval={"stop_at": 0.75}, run={"steps": 9})
    assert (summary.steps, summary.metric, summary.best_step, summary.best) == (2, "accuracy", 2, 0.75)
    heading, before, after, gain, *_ = read_report(capsys.readouterr().out)
    assert heading == "held-out accuracy  with the 95% interval"
    assert before.split()[:2] == ["before", "12.5%"] and after.split()[:2] == ["after", "75.0%"]
    assert gain.startswith("gain  +62.5 points  (") and gain.endswith("may be chance: 5 items changed")


def test_a_threshold_gives_accuracy_to_any_reward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = train(tmp_path, levels(0.1, 0.345), reward={"correct_at": 0.345})
    assert (summary.metric, summary.before["accuracy"], summary.after["accuracy"]) == ("accuracy", 0.0, 0.5)
    lines = read_report(capsys.readouterr().out)
    assert lines[0] == "held-out accuracy  with the 95% interval"
    assert any(line.startswith("also  reward 0.100 → 0.345") for line in lines)
    assert all("reward/accuracy" in row for row in metrics_rows(tmp_path / "runs" / "run"))


def test_what_was_decided_at_first_stays_and_scores_that_do_not_fit_are_told(tmp_path: Path) -> None:
    notes: list[str] = []
    unsubscribe = subscribe(lambda event: notes.append(event.text) if isinstance(event, Note) else None)
    try:
        summary = train(tmp_path, [*verdicts(2), *levels(0.5), [2.0] * ITEMS], show=False)
    finally:
        unsubscribe()
    assert (summary.metric, summary.after["accuracy"]) == ("accuracy", 1.0)
    told = [note for note in notes if "neither 0 nor 1" in note]
    assert [note.split(" are ")[0] for note in told] == ["8 of 8 held-out scores"] * 2
    assert "eval.metric = reward judges a run by the scores themselves" in told[0]
    assert [row["accuracy"] for row in metrics_rows(tmp_path / "runs" / "run", "eval")] == [0.25, 0.0, 1.0]


def test_a_reward_model_ends_a_run_by_its_scores(tmp_path: Path) -> None:
    scorer = write_scorer(tmp_path / "scorer")
    evaluation = {"items": 4, "every": 1, "patience": 2}
    sections = {"reward": {"name": "model", "path": str(scorer)}, "optim": {"lr": 0.0}, "eval": evaluation}
    config = tiny(GRPOConfig, tmp_path, run={"steps": 5}, **sections)
    summary = PPOTrainer(config, cluster="inline", show=False).fit()
    assert (summary.steps, summary.metric, summary.best_step) == (2, "reward_mean", 0)
    assert summary.best == summary.before["reward_mean"] == summary.after["reward_mean"]


def test_a_part_of_the_reward_or_another_set_may_judge(tmp_path: Path) -> None:
    plans = {
        name: write_plan(tmp_path / name, plan)
        for name, plan in (("easy", levels(0.5, 0.6)), ("hard", levels(0.1, 0.2)))
    }
    summary = train(tmp_path, levels(0, 0), data={"eval": plans}, eval={"metric": "reward_parts/size/hard"}, show=False)
    assert summary.metric == "reward_parts/size"
    assert list(summary.sets) == ["hard", "easy"]
    row = metrics_rows(tmp_path / "runs" / "run", "eval")[-1]
    assert row["metric"] == "reward_parts/size"
    assert row["reward_mean"] == row["reward_mean/hard"] == pytest.approx(0.2)
    assert row["reward_mean/easy"] == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ("accuracy", r"and 8 of 8 held-out scores are neither 0 nor 1, such as 0\.065: set reward\.correct_at"),
        ("reward_parts/format", r"has no such part: the reward returned reward_parts/size"),
    ],
)
def test_a_metric_without_a_meaning_ends_the_run_before_its_first_step(tmp_path: Path, metric: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        train(tmp_path, levels(0.1, 0.2), eval={"metric": metric}, show=False)


def test_a_share_is_never_above_one(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"eval\.stop_at = 90, and accuracy is a share from 0 to 1: write 0\.9 for 90 %"
    ):
        train(tmp_path, verdicts(1, 2), eval={"stop_at": 90}, show=False)


def test_a_run_goes_on_by_another_metric_after_a_resume(tmp_path: Path) -> None:
    first = train(tmp_path, [*verdicts(4), *verdicts(3)], show=False)
    assert (first.metric, first.best_step) == ("accuracy", 0)
    resume = {"resume": str(tmp_path / "runs" / "run"), "steps": 2}
    for mark in tmp_path.glob("mark*"):
        mark.unlink()
    summary = train(tmp_path, levels(0.45), run=resume, eval={"metric": "reward", "patience": 3}, show=False)
    assert (summary.steps, summary.metric) == (2, "reward_mean")
    assert (summary.best_step, summary.best) == (0, 0.5)
    assert RunRecord(tmp_path / "runs" / "run").judged is not None


def test_a_run_that_is_resumed_with_another_set_measures_by_it_where_it_goes_on(tmp_path: Path) -> None:
    """Its first evaluation by the set that judges it came steps later, and the one that was there is kept."""
    sets = {
        name: write_plan(tmp_path / name, levels(*means))
        for name, means in (("easy", (0.9,) * 4), ("hard", (0.1,) * 4))
    }
    run, directory = {"resume": str(tmp_path / "runs" / "run"), "steps": 4}, tmp_path / "runs" / "run"
    train(tmp_path, levels(0), run={"steps": 2}, data={"eval": {"easy": sets["easy"]}}, eval={"every": 2}, show=False)
    summary = train(tmp_path, levels(0), run=run, data={"eval": {"hard": sets["hard"]}}, eval={"every": 2}, show=False)
    rows = metrics_rows(directory, "eval")
    assert [(row["step"], *(name for name in row if name.startswith("items/"))) for row in rows] == [
        (0, "items/easy"), (2, "items/easy"), (2, "items/hard"), (4, "items/hard"),
    ]  # fmt: skip
    assert summary.best_step == 2
    assert (summary.sets["hard"]["before"], summary.sets["hard"]["after"]["reward_mean"]) == ({}, pytest.approx(0.1))
    both = {"data": {"eval": sets}, "eval": {"every": 2, "metric": "reward/easy"}}
    summary = train(tmp_path, levels(0), run=run, **both, show=False)
    row = metrics_rows(directory, "eval")[-1]
    assert (row["step"], row["reward_mean"], row["reward_mean/hard"]) == (4, pytest.approx(0.9), pytest.approx(0.1))
    assert len(metrics_rows(directory, "eval")) == len(rows), "the row that had a part of this is replaced"
    assert summary.before == {"reward_mean": pytest.approx(0.9)}, "by the rows of the first set"


@pytest.mark.parametrize(
    ("key", "setting", "off", "means"),
    [
        ("stop_at", 0.75, "null", (1, 3, 6, 6, 8)),
        pytest.param("patience", 2, "0", (4, 3, 3, 8, 8), marks=pytest.mark.exhaustive),
    ],
)
def test_a_run_that_an_evaluation_ended_trains_no_further_when_it_is_resumed(
    tmp_path: Path, key: str, setting: float, off: str, means: Sequence[int]
) -> None:
    """As a job does that is started again, or that was killed after the last checkpoint and before the model."""
    first = train(tmp_path, verdicts(*means), run={"steps": 4}, eval={key: setting}, show=False)
    said: list[str] = []
    unsubscribe = subscribe(lambda event: said.append(event.text) if isinstance(event, Note) else None)
    resume = {"resume": str(tmp_path / "runs" / "run"), "steps": 4}
    try:
        second = train(tmp_path, verdicts(*means), run=resume, eval={key: setting}, show=False)
    finally:
        unsubscribe()
    assert (first.steps, second.steps, second.after) == (2, 2, first.after)
    told = f"eval.{key} has ended the run after step 2: to train longer, resume it with --eval.{key} {off}"
    assert told in said
    third = train(tmp_path, verdicts(*means), run=resume, show=False)
    assert (third.steps, third.finished) == (4, True)


def test_a_run_of_an_earlier_podium_is_refused_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, verdicts(4, 3), show=False)
    run = tmp_path / "runs" / "run"
    old = {"step": 1, "correct": 4, "items": 8, "reward_mean": 0.5, "samples": []}
    for file in (run / "checkpoints").glob("step-*/trainer.json"):
        state = json.loads(file.read_text())
        file.write_text(json.dumps({**state, "first": old, "last": old, "best": old}))
        (file.parent / "manifest.json").unlink()
    assert main(["export", f"{run}@best", "--to", str(tmp_path / "exported")]) == 2
    assert "another version of Podium wrote it" in capsys.readouterr().err
    with pytest.raises(CheckpointError):
        train(tmp_path, verdicts(4, 3), run={"resume": str(run), "steps": 3}, show=False)


def test_fine_tuning_is_judged_by_the_loss_of_held_out_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And needs no generator and no reward for that."""
    save = {"every": 10, "keep": 1, "keep_best": 1}
    config = tiny(SFTConfig, tmp_path, run={"steps": 40}, eval={"every": 10, "items": 8, "stop_at": 0.01}, save=save)
    summary = SFTTrainer(config, cluster="inline").fit()
    out, run = capsys.readouterr().out, tmp_path / "runs" / "run"
    rows = metrics_rows(run, "eval")
    losses = {row["step"]: row["loss"] for row in rows}
    assert "placement  policy: 1 process" in out
    assert not (run / "logs" / "reward.log").exists()
    assert (summary.metric, summary.best) == ("loss", min(losses.values()))
    assert losses[summary.best_step or 0] == summary.best
    assert summary.best_checkpoint == str(run / "checkpoints" / f"step-{summary.best_step:06d}")
    heading, before, after, change, also = read_report(out)
    assert heading == "held-out loss  with the 95% interval, lower is better"
    assert (before.split()[0], after.split()[0], change.split()[0]) == ("before", "after", "change")
    assert "may be chance" not in change
    assert also.startswith("also  token accuracy ") and "perplexity" in also
    assert "loss on the training data    ● held-out" in out
    assert main(["changes", str(run)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "metric    loss"
    assert said[1].startswith(f"before    {rows[0]['loss']:.3f}  (8 items)")
    assert said[2].startswith(f"after     {rows[-1]['loss']:.3f}  (8 items)")
    (held_out,) = Run(run, "").answer("evaluations")
    assert Run(run, "").answer(f"evaluation/0/{held_out['steps'][0]}")["rows"][0]["loss"] > 0


def test_the_best_runs_come_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = {"a": ("loss", 0.9), "b": ("loss", 0.2), "c": ("accuracy", 0.5), "d": ("accuracy", 0.7), "e": ("", 0.0)}
    for name, (metric, value) in figures.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("run: {steps: 1}\n")
        row = {"kind": "eval", "step": 1, "time": 1.0, "metric": metric, metric: value, "items": 3} if metric else {}
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert main(["runs", str(tmp_path), "--best"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [Path(line[0]).name for line in lines] == ["d", "c", "b", "a", "e"]
    assert lines[2][5:7] == ["loss", "0.200"]
