"""metrics.jsonl is valid JSON, line by line, whatever the metrics are and whenever the run died."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from podium.telemetry import EvalFinished, Note, PhaseStarted, StepFinished, emit, flush
from podium.telemetry.sinks import JsonlSink


def rows(path: Path) -> list[dict[str, Any]]:
    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_a_row_a_step_and_a_row_an_evaluation(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    with JsonlSink(path):
        hard = EvalFinished(0, 9, {"accuracy": 0.5}, name="hard")
        figures = {"accuracy": 0.25, "reward_mean": 0.4}
        emit(EvalFinished(0, 500, figures, "reward_mean", (0.3, 0.5), "easy", (hard,)))
        emit(PhaseStarted("grpo", 10))
        emit(Note("no row"))
        emit(StepFinished(1, {"reward/mean": 0.5, "tokens": 128}))
        flush()
        assert len(rows(path)) == 2
    emit(StepFinished(2, {"reward/mean": 0.5}))
    first, second = rows(path)
    assert first.pop("time") > 1.6e9
    assert first == {
        **{"kind": "eval", "phase": None, "step": 0, "metric": "reward_mean", "low": 0.3, "high": 0.5},
        **{"accuracy": 0.25, "items": 500, "reward_mean": 0.4},
        **{"accuracy/easy": 0.25, "items/easy": 500, "reward_mean/easy": 0.4, "accuracy/hard": 0.5, "items/hard": 9},
    }
    del second["time"]
    assert second == {"kind": "step", "phase": "grpo", "step": 1, "reward/mean": 0.5, "tokens": 128}


def test_what_is_not_finite_is_null_and_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonlSink(path):
        emit(StepFinished(1, {"loss": math.nan, "ratio": math.inf, "kl": -math.inf, "lr": 0.1}))
    (row,) = rows(path)
    assert (row["loss"], row["ratio"], row["kl"], row["lr"]) == (None, None, None, 0.1)
    assert row["nonfinite"] == {"loss": "nan", "ratio": "inf", "kl": "-inf"}


def test_numbers_of_other_libraries_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    foreign: dict[str, Any] = {"a": torch.tensor(0.5), "b": torch.tensor(2), "step": 99.0}
    with JsonlSink(path):
        emit(StepFinished(1, foreign))
    (row,) = rows(path)
    assert (row["a"], row["b"], row["step"]) == (0.5, 2.0, 1)


def test_a_metric_that_is_no_number_is_named(tmp_path: Path) -> None:
    wrong: dict[str, Any] = {"stop_reason": "length"}
    with JsonlSink(tmp_path / "m.jsonl") as sink, pytest.raises(TypeError, match=r"'stop_reason'.*str.*'length'"):
        sink.handle(StepFinished(1, wrong))


def test_a_resumed_run_appends_and_is_not_glued_to_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "step", "step": 1}\n{"kind": "st')
    with JsonlSink(path):
        emit(StepFinished(2, {"loss": 1.0}))
    lines = path.read_text().splitlines()
    assert len(lines) == 3
    assert json.loads(lines[2])["step"] == 2


def test_closing_twice_and_events_after_it_do_no_harm(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl").attach()
    late: Callable[[StepFinished], None] = sink
    sink.close()
    sink.close()
    late(StepFinished(1, {"loss": 1.0}))
    assert sink.attach()._unsubscribe is None
    assert sink.path.read_text() == ""
