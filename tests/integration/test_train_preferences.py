"""Learning from preferences: a policy and a reward model, and what is done with them afterwards."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from podium.cli import main
from podium.data import Batch
from podium.errors import ConfigError
from podium.models import char_tokenizer
from podium.runs.paths import resolve_resume
from podium.telemetry import metrics
from podium.telemetry.held_out import Metric
from podium.trainer import GRPOConfig, PPOTrainer, SFTConfig
from podium.workers import RewardModel
from podium_preferences import DPOConfig, PreferenceTrainer, RMConfig
from tests.integration.training import MODEL, losses, metrics_rows, tiny, train
from tests.unit.rollout.tasks.test_encode import notes_of


def write_pairs(folder: Path, rows: int = 200) -> Path:
    """``12=`` is to be answered by ``12``, and rather not by ``23``."""
    path = folder / "pairs.jsonl"
    numbers = [37 * n % 100 for n in range(rows)]
    path.write_text(
        "".join(
            json.dumps({"prompt": f"{n:02d}=", "chosen": f"{n:02d}", "rejected": f"{n % 10}{(n // 10 + 1) % 10}"})
            + "\n"
            for n in numbers
        )
    )
    return path


def write_judgements(folder: Path, rows: int = 200) -> Path:
    """Large digits are better than small ones."""
    path, numbers = folder / "judgements.jsonl", [37 * n % 100 for n in range(rows)]
    texts = [(f"{n:02d}=", n % 5, n // 7 % 5) for n in numbers]
    path.write_text(
        "".join(
            json.dumps({"prompt": prompt, "chosen": f"{5 + a}{5 + b}", "rejected": f"{b}{a}"}) + "\n"
            for prompt, a, b in texts
        )
    )
    return path


def settings(path: Path, **sections: Any) -> dict[str, Any]:
    return {"data": {"train": str(path), "holdout": 0.2}, "eval": {"items": 100}, **sections}


def test_a_policy_learns_to_prefer_and_resumes_to_the_same_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps, batch = {"steps": 30}, {"batch": {"examples": 16}}
    whole = tiny(DPOConfig, tmp_path, run={**steps, "name": "whole"}, **settings(write_pairs(tmp_path)), **batch)
    summary = PreferenceTrainer(whole, cluster="inline", show=False).fit()
    run = tmp_path / "runs" / "whole"
    assert summary.metric == "accuracy"
    assert summary.before["accuracy"] == 0.5, "the policy is the reference, so that all rewards are 0"
    assert summary.after["accuracy"] > 0.8
    assert summary.after["loss"] < 0.6 < summary.before["loss"]
    assert summary.after["reward_margin"] > 0.3
    assert summary.after.keys() == {"accuracy", "loss", "reward_margin"}
    assert losses(run)[0] == pytest.approx(0.6931, abs=1e-4)
    row = metrics_rows(run)[-1]
    assert row[metrics.REWARD_MARGIN] == pytest.approx(row[metrics.REWARD_CHOSEN] - row[metrics.REWARD_REJECTED])
    assert row[metrics.LOGPROBS_CHOSEN] > row[metrics.LOGPROBS_REJECTED]
    kept = pq.read_table(run / "evaluations" / "step-000030.parquet").to_pylist()
    assert sum(row["correct"] for row in kept) / len(kept) == pytest.approx(summary.after["accuracy"])
    assert all(row["prompt"] == f"{row['expected']}=" and row["rejected"] != row["expected"] for row in kept)
    for last, resume in ((10, ""), (30, str(tmp_path / "runs" / "parts"))):
        parts = {"steps": last, "name": "parts", "resume": resume}
        config = tiny(DPOConfig, tmp_path, run=parts, **settings(write_pairs(tmp_path)), **batch)
        PreferenceTrainer(config, cluster="inline", show=False).fit()
    assert losses(tmp_path / "runs" / "parts") == losses(run)
    capsys.readouterr()
    assert main(["runs", str(tmp_path / "runs")]) == 0
    assert "accuracy" in capsys.readouterr().out
    assert main(["train", "sft", "--resume", str(run)]) == 2
    assert f"is a run of another recipe: podium train dpo --resume {run}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "loss", ["kto", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("ipo", "orpo", "simpo"))]
)
def test_each_loss_teaches_the_preference(tmp_path: Path, loss: str) -> None:
    algorithm, batch = {"loss": loss}, {"examples": 16}
    sections = settings(write_judgements(tmp_path), algorithm=algorithm, batch=batch, save={"model": False})
    if loss == "kto":  # answers with labels
        rows = [json.loads(line) for line in (tmp_path / "judgements.jsonl").read_text().splitlines()]
        labeled = [
            {"prompt": row["prompt"], "completion": row[name], "label": name == "chosen"}
            for row in rows
            for name in ("chosen", "rejected")
        ]
        (tmp_path / "judgements.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labeled))
    summary = PreferenceTrainer(
        tiny(DPOConfig, tmp_path, run={"steps": 10}, **sections), cluster="inline", show=False
    ).fit()
    assert summary.after["accuracy"] > 0.9
    assert summary.after["loss"] < summary.before["loss"]
    assert ("reward_margin" in summary.after) == (loss != "kto")
    assert "perplexity" not in summary.after, "the loss is of preferences, not of tokens"


def test_an_evaluation_of_labels_does_not_depend_on_how_many_answers_are_scored_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of KTO subtracts the mean log-ratio of mismatched answers, which was that of a block of rows."""
    rows = [{"prompt": f"{n}=", "completion": f"{n % 7}{n % 3}", "label": n % 9 > 0} for n in range(100)]
    data = tmp_path / "labels.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections = settings(data, algorithm={"loss": "kto"}, batch={"examples": 16}, save={"model": False})
    losses: list[tuple[float, float]] = []
    for together in (512, 7):
        monkeypatch.setattr("podium_preferences.trainer._TOGETHER", together)
        config = tiny(DPOConfig, tmp_path, run={"steps": 6, "name": str(together)}, **sections)
        summary = PreferenceTrainer(config, cluster="inline", show=False).fit()
        losses.append((summary.before["loss"], summary.after["loss"]))
    assert losses[0][0] == losses[1][0] == 0.5, "the policy is the reference"
    assert losses[0][1] == pytest.approx(losses[1][1], rel=1e-6)


def test_a_step_of_one_prompt_has_no_divergence_which_is_noted_once(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}=", "completion": f"{n % 7}", "label": n % 2 > 0} for n in range(20)]
    (data := tmp_path / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for examples, count in ((1, 1), (2, 0)):
        sections = settings(data, algorithm={"loss": "kto"}, batch={"examples": examples}, save={"model": False})
        config = tiny(DPOConfig, tmp_path, run={"steps": 2, "name": str(examples)}, **sections)
        notes = notes_of(PreferenceTrainer(config, cluster="inline", show=False).fit)
        assert sum("0 is taken (batch.examples = 1)" in note for note in notes) == count


@pytest.mark.parametrize("metric", ["loss", "accuracy"])
def test_preferences_that_became_worse_or_better_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], metric: str
) -> None:
    sections = settings(write_judgements(tmp_path), batch={"examples": 16}, save={"model": False})
    sections["eval"] = {"items": 40, "metric": metric}
    config = tiny(DPOConfig, tmp_path, run={"steps": 3}, **sections)
    after = PreferenceTrainer(config, cluster="inline", show=False).fit().after
    capsys.readouterr()
    assert main(["changes", str(tmp_path / "runs" / "run"), "--show", "0"]) == 0
    out = capsys.readouterr().out
    judge = Metric(metric)
    assert f"after     {judge.write(after[metric])}  (40 items)" in out
    assert "broke" not in out, "before the first step both answers of each pair have the reward 0: none is wrong"
    rows = [pq.read_table(path).to_pylist() for path in sorted((tmp_path / "runs/run/evaluations").iterdir())]
    name = "correct" if metric == "accuracy" else metric
    pairs = [(judge.rank(one[name]), judge.rank(other[name])) for one, other in zip(*rows, strict=True)]
    worse, better = sum(new < old for old, new in pairs), sum(new > old for old, new in pairs)
    assert f"worse     {worse}\nbetter    {better}\n" in out


TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


@pytest.mark.parametrize("template", [pytest.param(None, marks=pytest.mark.exhaustive), TEMPLATE])
def test_a_reward_model_learns_and_rewards_at_once(
    tmp_path: Path, template: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it scores in training is what the reward of a later run scores, with a chat template and without."""
    tokenizer = char_tokenizer("0123456789= ", chat_template=template)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    model = {**MODEL, "tokenizer": str(tmp_path / "tokenizer")}
    shared = {"model": model, "batch": {"examples": 16}, "optim": {"lr": 5e-3}, "save": {"every": 20}}
    config = tiny(RMConfig, tmp_path, run={"steps": 20, "name": "rm"}, **settings(write_judgements(tmp_path)), **shared)
    summary = PreferenceTrainer(config, cluster="inline", show=False).fit()
    run = tmp_path / "runs" / "rm"
    assert summary.before["accuracy"] == 0.5
    assert summary.after["accuracy"] > 0.9
    assert not (run / "model" / "resume").exists()
    kept = pq.read_table(run / "evaluations" / "step-000020.parquet").to_pylist()
    for folder in (run / "model", run / "checkpoints" / "step-000020" / "policy"):
        scorer = RewardModel(str(folder))
        rows = [(row["prompt"], row[name]) for row in kept for name in ("expected", "rejected")]
        columns = {
            "messages": [[{"role": "user", "content": prompt}] for prompt, _ in rows],
            "prompt": [prompt for prompt, _ in rows],
            "completion": [answer for _, answer in rows],
        }
        scores = scorer.score(Batch(columns)).dense("rewards")
        margins = (scores[::2] - scores[1::2]).tolist()
        assert margins == pytest.approx([row["reward_margin"] for row in kept], abs=1e-5)
    grpo = tiny(
        GRPOConfig,
        tmp_path,
        model=model,
        run={"steps": 1, "name": "grpo"},
        reward={"name": "model", "path": str(run)},
    )
    assert resolve_resume(grpo).reward.path == str(run / "model")
    best = replace(grpo, reward=replace(grpo.reward, path=f"{run}@20"))
    assert resolve_resume(best).reward.path == str(run / "checkpoints" / "step-000020" / "policy")
    PPOTrainer(grpo, cluster="inline", show=False).fit()
    for command in (["eval"], ["sample", "--prompt", "12="]):
        assert main([command[0], str(run), *command[1:]]) == 2
        assert "is a reward model, which writes no completions" in capsys.readouterr().err
    assert metrics_rows(tmp_path / "runs" / "grpo")[-1]["reward/std"] > 0
    again = {"steps": 21, "name": "rm", "resume": str(run)}
    config = tiny(RMConfig, tmp_path, run=again, **settings(write_judgements(tmp_path)), **shared)
    assert PreferenceTrainer(config, cluster="inline", show=False).fit().steps == 21


def test_what_preferences_cannot_have_is_refused_by_its_key(tmp_path: Path) -> None:
    for sections, message in (
        ({"data": {"split_turns": True}}, r"data\.split_turns = true makes a row of each turn"),
        ({"data": {"prompt_column": None}}, r"data\.prompt_column = null"),
        ({"model": {**MODEL, "dropout": True}}, r"model\.dropout and model\.lora\.dropout have to be off"),
        ({"eval": {"metric": "token_accuracy"}}, r"eval\.metric = 'token_accuracy' is no figure of preferences"),
        ({"algorithm": {"loss": "ppo_clip"}}, r"algorithm\.loss"),
    ):
        with pytest.raises(ConfigError, match=message):
            tiny(DPOConfig, tmp_path, **sections)


@pytest.mark.exhaustive
def test_the_best_completions_are_rows_to_learn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = train(tiny(SFTConfig, tmp_path, run={"steps": 20, "name": "warm"}, eval={"items": 0})) / "model"
    path, data = tmp_path / "best.jsonl", str(tmp_path / "copy.jsonl")
    words = ["sample", str(model), "--best", str(path), "--backend", "inline", "--data.train", data]
    words += ["--sampling.max_new_tokens", "3", "--reward.name", "fraction", "--reward.correct_at", "0.5"]
    assert main(words) == 2
    assert "sampling.n = 1: one completion of a prompt leaves no choice" in capsys.readouterr().err
    assert not path.exists()
    assert main([*words, "--sampling.n", "8"]) == 0
    said = capsys.readouterr().out
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert f"best.jsonl: the best of 8 completions of {len(rows)} prompts" in said
    assert len(rows) > 5
    assert all(row["reward"] >= 0.5 for row in rows)
    assert any(row["answer"] == row["prompt"][:2] for row in rows)
    assert main([*words, "--sampling.n", "8"]) == 2
    assert "this file exists" in capsys.readouterr().err
    sections = {"model": {"path": str(model), "config": {}, "tokenizer": ""}, "eval": {"items": 0}}
    train(tiny(SFTConfig, tmp_path, data={"train": str(path), "holdout": 0.0}, **sections))
