"""Supervised fine-tuning on a file of examples, and what is done with its model afterwards."""

from __future__ import annotations

import gc
import io
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console

import podium
from podium.cli import main
from podium.errors import ConfigError, DataError
from podium.telemetry import metrics
from podium.telemetry.formatting import percent
from podium.telemetry.held_out import Metric
from podium.telemetry.sinks import ConsoleSink
from podium.trainer import GRPOConfig, PPOTrainer, SFTConfig, SFTTrainer
from tests.integration.training import losses, metrics_rows, tiny


def test_the_loss_falls_and_the_model_goes_on_to_grpo(tmp_path: Path) -> None:
    evaluation = {"every": 10, "metric": "reward"}
    config = tiny(SFTConfig, tmp_path, run={"steps": 20, "name": "sft"}, eval=evaluation)
    with podium.connect("inline") as cluster:
        warm = SFTTrainer(config, cluster=cluster, show=False).fit()
        grpo = tiny(GRPOConfig, tmp_path, model={"path": warm.model_path, "config": {}, "tokenizer": ""})
        after = PPOTrainer(grpo, cluster=cluster, show=False).fit()
    run = tmp_path / "runs" / "sft"
    assert losses(run)[-1] < 0.8 * losses(run)[0]
    assert [row["step"] for row in metrics_rows(run, "eval")] == [0, 10, 20]
    assert {metrics.GRAD_NORM, metrics.LEARNING_RATE, metrics.TOKENS_PER_S} <= metrics_rows(run)[0].keys()
    assert after.before == warm.after  # the same weights on the same held-out prompts


@pytest.mark.parametrize(("config_of", "trainer_of"), [(SFTConfig, SFTTrainer), (GRPOConfig, PPOTrainer)])
def test_a_script_has_its_memory_back_after_a_run_of_its_own_process(
    tmp_path: Path, config_of: Any, trainer_of: Any
) -> None:
    """Models are parts of cycles, for which Python may not look for hours."""
    config = tiny(config_of, tmp_path, run={"steps": 1}, eval={"items": 0})
    gc.collect()
    before = {id(model) for model in gc.get_objects() if isinstance(model, torch.nn.Embedding)}
    gc.disable()
    try:
        trainer = trainer_of(config, cluster="inline", show=False)
        trainer.fit()
        assert [m for m in gc.get_objects() if isinstance(m, torch.nn.Embedding) and id(m) not in before] == []
    finally:
        gc.enable()


def test_sft_resumes_to_the_same_losses(tmp_path: Path) -> None:
    sections = {"eval": {"items": 0}, "save": {"model": False}}
    SFTTrainer(
        tiny(SFTConfig, tmp_path, run={"steps": 6, "name": "whole"}, **sections), cluster="inline", show=False
    ).fit()
    for steps, resume in ((3, ""), (6, str(tmp_path / "runs" / "parts"))):
        config = tiny(SFTConfig, tmp_path, run={"steps": steps, "name": "parts", "resume": resume}, **sections)
        SFTTrainer(config, cluster="inline", show=False).fit()
    assert losses(tmp_path / "runs" / "parts") == losses(tmp_path / "runs" / "whole")


def test_the_learning_rate_falls_to_the_end_of_the_run(tmp_path: Path) -> None:
    optim = {"lr_schedule": "linear", "lr": 1e-2}
    config = tiny(SFTConfig, tmp_path, run={"steps": 4}, optim=optim, eval={"items": 0}, save={"model": False})
    SFTTrainer(config, cluster="inline", show=False).fit()
    rates = [row[metrics.LEARNING_RATE] for row in metrics_rows(tmp_path / "runs" / "run")]
    assert rates == pytest.approx([1e-2, 7.5e-3, 5e-3, 2.5e-3])


def test_a_run_ends_once_it_is_good_enough(tmp_path: Path) -> None:
    config = tiny(SFTConfig, tmp_path, run={"steps": 400}, eval={"every": 20, "items": 12, "stop_at": 1.5})
    summary = SFTTrainer(config, cluster="inline", show=False).fit()
    assert summary.finished
    assert summary.steps < 400
    assert summary.metric == "loss"
    assert summary.before["loss"] > 1.5 >= summary.after["loss"]
    assert summary.after.keys() == {"loss", "token_accuracy", "perplexity"}
    assert summary.model_path is not None


def test_a_run_ends_that_becomes_no_better_also_after_a_resume(tmp_path: Path) -> None:
    """Nothing is learned, so that the evaluation before the first step stays the best one."""
    evaluation = {"every": 1, "items": 4, "patience": 3}
    sections = {"optim": {"lr": 0.0}, "eval": evaluation, "save": {"every": 1, "keep": 0}}
    stopped = SFTTrainer(tiny(SFTConfig, tmp_path, run={"steps": 2}, **sections), cluster="inline", show=False).fit()
    assert (stopped.steps, stopped.best_step) == (2, 0)
    run = str(tmp_path / "runs" / "run")
    config = tiny(SFTConfig, tmp_path, run={"steps": 9, "resume": run}, **sections)
    summary = SFTTrainer(config, cluster="inline", show=False).fit()
    assert (summary.steps, summary.best_step, summary.finished) == (3, 0, True)
    assert summary.best == summary.before["loss"]
    assert summary.model_path is not None


def test_an_example_without_an_answer_is_named(tmp_path: Path) -> None:
    config = tiny(SFTConfig, tmp_path, data={"answer_column": None})
    with pytest.raises(DataError, match=r"copy\.jsonl, line \d+: there is no answer to learn"):
        SFTTrainer(config, cluster="inline", show=False).fit()


@pytest.mark.parametrize("recipe", ["sft", "grpo"])
def test_an_answer_that_is_no_text_is_refused_before_the_first_step(tmp_path: Path, recipe: str) -> None:
    path = tmp_path / "lists.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n:02d}=", "answer": [n, n]}) + "\n" for n in range(60)))
    settings = {"data": {"train": str(path)}, "eval": {"items": 0}}
    with pytest.raises(DataError, match=r"the answer '\[\d+, \d+\]' \(list\) is neither text nor messages"):
        if recipe == "sft":
            SFTTrainer(tiny(SFTConfig, tmp_path, **settings), cluster="inline", show=False).fit()
        else:
            PPOTrainer(tiny(GRPOConfig, tmp_path, **settings), cluster="inline", show=False).fit()
    assert not (tmp_path / "runs" / "run" / "config.yaml").exists()


def test_train_eval_and_sample_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands that a user types, on a file of their own."""
    config = tiny(SFTConfig, tmp_path)
    yaml = tmp_path / "run.yaml"
    yaml.write_text(json.dumps({"model": {"config": dict(config.model.config), "tokenizer": config.model.tokenizer}}))
    data = ["--data.train", config.data.train, "--data.holdout", "0.2", "--eval.items", "4"]
    where = ["--run.dir", str(tmp_path), "--run.name", "cli", "--sampling.max_new_tokens", "3"]
    train = ["train", "sft", "--config", str(yaml), *data, *where, "--batch.examples", "4", "--backend", "inline"]
    assert main([*train, "--run.steps", "2", "--optim.lr", "1e-2"]) == 0
    out = capsys.readouterr().out
    assert "held-out loss  with the 95% interval, lower is better" in out
    assert "also  token accuracy " in out
    run = str(tmp_path / "cli")
    assert main(["train", "sft", "--resume", run, "--run.steps", "3", "--backend", "inline"]) == 0
    assert [row["step"] for row in metrics_rows(tmp_path / "cli")] == [1, 2, 3]
    capsys.readouterr()
    assert main(["eval", run, "--backend", "inline"]) == 0
    out = capsys.readouterr().out
    loss = Metric("loss").write(metrics_rows(tmp_path / "cli", "eval")[-1]["loss"])
    assert out.startswith(f"loss           {loss}  (4 items; 95% interval ")
    assert [line.split()[0] for line in out.splitlines()] == ["loss", "token", "perplexity"]
    assert main(["eval", run, "--backend", "inline", "--eval.metric", "accuracy", "--reward.correct_at", "1"]) == 0
    out = capsys.readouterr().out
    assert "of 4; 95% interval" in out
    assert out.count("expected") == 3
    assert main(["sample", run, "--prompt", "12=", "--sampling.n", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[::2] == ["--- prompt 1, completion 1", "--- prompt 1, completion 2"]
    assert len(lines) == 4
    assert main(["eval", run, "--data.train", "absent.jsonl"]) == 2
    assert "no file absent.jsonl" in capsys.readouterr().err


def test_examples_beyond_the_models_positions_are_refused_before_anything_starts(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n:02d}=", "answer": "7" * (28 if n % 20 else 29)} for n in range(60)]
    config = tiny(SFTConfig, tmp_path, data={"holdout": 0.0}, eval={"items": 0})
    (tmp_path / "copy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    message = r"3 of the 60 training examples are longer than the model's 32 positions; .*copy.jsonl, line 1,"
    with pytest.raises(ConfigError, match=message):
        SFTTrainer(config, cluster="inline", show=False).fit()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboard's own imports
def test_several_evaluation_sets_are_scored_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("podium_trackers")
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"prompt": f"{n:02d}=", "answer": "00"}) + "\n" for n in range(9)))
    places = {"copies": str(tmp_path / "copy.jsonl"), "all 0/0": str(other)}
    run: dict[str, Any] = {"steps": 2, "trackers": ["tensorboard"]}
    evaluation = {"items": 6, "metric": "accuracy"}
    sections = {"data": {"eval": places, "holdout": 0.0}, "reward": {"correct_at": 1.0}}
    config = tiny(SFTConfig, tmp_path, run=run, eval=evaluation, **sections)
    with ConsoleSink(console=Console(file=(out := io.StringIO()), width=100)):
        summary = SFTTrainer(config, cluster="inline", show=False).fit()
    rows = metrics_rows(tmp_path / "runs" / "run", "eval")
    assert [row["step"] for row in rows] == [0, 2]
    assert all(row["accuracy"] == row["accuracy/copies"] and row["items/all 0/0"] == 6 for row in rows)
    assert list(summary.sets) == ["copies", "all 0/0"]
    for name, scores in summary.sets.items():
        assert scores["before"]["accuracy"] == rows[0][f"accuracy/{name}"]
        assert scores["after"]["accuracy"] == rows[1][f"accuracy/{name}"]
    assert summary.after == summary.sets["copies"]["after"]
    assert [line.split()[:2] for line in out.getvalue().splitlines() if " accuracy " in line] == [
        ["0", "copies"], ["0", "all"], ["2", "copies"], ["2", "all"],
    ]  # fmt: skip

    kept: list[dict[str, Any]] = pq.read_table(tmp_path / "runs" / "run" / "evaluations").to_pylist()
    right = {(name, row["step"]): round(6 * row[f"accuracy/{name}"]) for name in places for row in rows}
    assert {key: sum(row["correct"] for row in kept if (row["set"], row["step"]) == key) for key in right} == right
    tracked = events.EventAccumulator(str(tmp_path / "runs" / "run" / "tensorboard")).Reload()
    assert [point.value for point in tracked.Scalars("eval/copies/accuracy")] == pytest.approx(
        [row["accuracy/copies"] for row in rows]
    )
    tags = tracked.Tags()
    assert "eval/copies/samples/1/text_summary" in tags["tensors"]
    assert ("curve" in tags["images"]) == (find_spec("plotext") is not None)
    assert tracked.Scalars("summary/steps")[0].value == 2
    capsys.readouterr()
    assert main(["eval", summary.model_path or "", "--backend", "inline"]) == 2, "a model's directory has no data"
    assert main(["eval", str(tmp_path / "runs" / "run"), "--backend", "inline", "--eval.items", "6"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if line.startswith("set ")][:2] == ["set       copies", "set       all 0/0"]
    scores = [line.split()[1:3] for line in said if line.startswith("accuracy ")]
    assert scores == [[percent(row), f"({round(6 * row)}"] for row in (rows[1][f"accuracy/{name}"] for name in places)]
    assert said.count("set       all 0/0") == 1 + 3, "three samples of each set"
    assert main(["changes", str(tmp_path / "runs" / "run")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if line.startswith("set ")] == ["set       all 0/0", "set       copies"]
    assert sum(line.startswith("before    ") and line.endswith("step-000000.parquet") for line in said) == 2
    assert sum(line.startswith("after     ") and line.endswith("step-000002.parquet") for line in said) == 2
    assert main(["changes", f"{tmp_path}/runs/run@0", f"{tmp_path}/runs/run@1"]) == 2
    assert "run evaluated 0, 2" in capsys.readouterr().err
