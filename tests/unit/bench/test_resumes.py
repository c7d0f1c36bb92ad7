"""The comparison of `python -m bench.resumes` finds what is lost, doubled or changed, and leaves times alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from bench.resumes.comparison import list_differences
from bench.resumes.draws import draw_case

SETTINGS = {"save": {"keep": 1}}


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_table(path: Path, tokens: list[int]) -> None:
    pq.write_table(pa.table({"tokens": [tokens], "reward": [0.5]}), path)


def write_run(run: Path) -> Path:
    for folder in ("completions", "evaluations", "model", "checkpoints/step-000002/policy"):
        (run / folder).mkdir(parents=True)
    (run / "checkpoints" / "latest").symlink_to("step-000002")
    rows = [{"kind": "step", "step": step, "loss": 0.1 * step, "lr": 0.1, "time": float(step)} for step in (1, 2)]
    write_lines(run / "metrics.jsonl", [*rows, {"kind": "eval", "step": 2, "reward": float("nan")}])
    states = [{"state": state, "step": step, "prompts": [step]} for step in (1, 2) for state in ("taken", "trained")]
    write_lines(run / "ledger.jsonl", [{"first": 1}, *states])
    for folder in ("completions", "evaluations"):
        write_table(run / folder / "step-000002.parquet", [1, 2])
    save_file({"weight": torch.arange(3.0)}, run / "model" / "model.safetensors")
    save_file({"weight": torch.arange(3.0)}, run / "checkpoints" / "latest" / "policy" / "model.safetensors")
    for name in ("summary.json", "checkpoints/latest/trainer.json"):
        (run / name).write_text(json.dumps({"step": 2, "wall_s": 1.0, "best": {"reward": 0.5, "time": 1.0}}))
    return run


def change_row(run: Path, index: int, **values: Any) -> None:
    rows = read_lines(run / "metrics.jsonl")
    rows[index] |= values
    write_lines(run / "metrics.jsonl", rows)


def change_rows(run: Path, change: Callable[[list[dict[str, Any]]], Any]) -> None:
    rows = read_lines(run / "metrics.jsonl")
    change(rows)
    write_lines(run / "metrics.jsonl", rows)


def add_entry(run: Path, **entry: Any) -> None:
    with (run / "ledger.jsonl").open("a") as file:
        file.write(json.dumps(entry) + "\n")


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "other loss": (lambda run: change_row(run, 1, loss=0.3), "metrics step 2.loss is 0.3 and was 0.2"),
    "lost figure": (lambda run: change_row(run, 2, reward=0.0), "metrics eval 2.reward is 0.0 and was nan"),
    "new figure": (lambda run: change_row(run, 0, more=1.0), "metrics step 1.more is 1.0 and was missing"),
    "lost row": (lambda run: change_rows(run, lambda rows: rows.pop(2)), "metrics.jsonl has"),
    "double row": (lambda run: change_rows(run, lambda rows: rows.insert(1, rows[0])), "metrics.jsonl has"),
    "trained twice": (lambda run: add_entry(run, state="trained", step=3, prompts=[1]), "trained twice: [1]"),
    "open prompt": (lambda run: add_entry(run, state="returned", prompts=[3]), "prompts are left {'returned'}"),
    "no completions": (lambda run: shutil.rmtree(run / "completions"), "completions has [] more"),
    "other tokens": (
        lambda run: write_table(run / "completions" / "step-000002.parquet", [1, 3]),
        "completions/step-000002.parquet: column.tokens",
    ),
    "other model": (
        lambda run: save_file({"weight": torch.arange(3.0) + 1e-7}, run / "model" / "model.safetensors"),
        "model/model.safetensors has other bits",
    ),
    "no latest": (lambda run: (run / "checkpoints" / "latest").unlink(), "trainer.json is missing"),
    "other best": (
        lambda run: (run / "checkpoints/latest/trainer.json").write_text('{"step": 2, "best": {"reward": 0.4}}'),
        "trainer.json.best.reward is 0.4 and was 0.5",
    ),
    "a checkpoint more": (lambda run: (run / "checkpoints" / "step-000001").mkdir(), "checkpoints are ['step-000001'"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_what_is_lost_doubled_or_changed_is_found(tmp_path: Path, name: str) -> None:
    whole_run, ended_run = write_run(tmp_path / "whole"), write_run(tmp_path / "ended")
    damage, sentence = DAMAGE[name]
    damage(ended_run)
    assert any(
        sentence in found for found in list_differences(ended_run, whole_run, SETTINGS, exact=True, stopped=set())
    )


def test_times_and_the_checkpoint_of_a_stop_are_no_differences(tmp_path: Path) -> None:
    whole_run, ended_run = write_run(tmp_path / "whole"), write_run(tmp_path / "ended")
    change_row(ended_run, 1, time=9.0)
    (ended_run / "summary.json").write_text(json.dumps({"step": 2, "wall_s": 7.0, "best": {"reward": 0.5}}))
    (ended_run / "checkpoints" / "step-000001").mkdir()
    assert list_differences(ended_run, whole_run, SETTINGS, exact=True, stopped={1}) == []


def test_in_any_order_of_events_steps_and_learning_rates_count(tmp_path: Path) -> None:
    whole_run, ended_run = write_run(tmp_path / "whole"), write_run(tmp_path / "ended")
    change_row(ended_run, 1, loss=0.3)
    assert list_differences(ended_run, whole_run, SETTINGS, exact=False, stopped=set()) == []
    change_row(ended_run, 1, lr=0.2)
    assert list_differences(ended_run, whole_run, SETTINGS, exact=False, stopped=set()) == [
        "metrics step 2.lr is 0.2 and was 0.1"
    ]


def test_a_case_follows_from_its_seed(tmp_path: Path) -> None:
    cases = [draw_case(seed, tmp_path) for seed in (*range(40), *range(40))]
    assert cases[:40] == cases[40:]
    assert {case.recipe for case in cases} == {"grpo", "ppo", "sft", "dpo", "rm"}
    assert {end.kind for case in cases for end in case.ends} == {"stop", "kill"}
