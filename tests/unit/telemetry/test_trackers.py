"""The trackers, each with its real package where that is installed."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from podium.errors import ConfigError
from podium.telemetry import CompletionsSampled, EvalFinished, PhaseStarted, Sample, StepFinished, emit
from podium.telemetry.sinks import TensorBoardSink, TrackioSink, WandbSink
from podium.telemetry.sinks.trackers import TrackerSink


def one_run() -> None:
    emit(PhaseStarted("grpo", 2))
    emit(EvalFinished(0, 0.4, 500, 0.5))
    emit(StepFinished(1, {"reward/mean": 0.25, "policy/kl": float("nan")}))
    emit(CompletionsSampled(1, (Sample("2 + 2?", "4\n<b>", 1.0, "4"),)))
    emit(StepFinished(2, {"reward/mean": 0.75}))


class Recorded(TrackerSink):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.rows.append((step, dict(values)))


def test_a_second_phase_goes_on_where_the_first_ended() -> None:
    with Recorded() as sink:
        emit(PhaseStarted("sft", 2))
        emit(StepFinished(1, {"loss": 2.0}))
        emit(StepFinished(2, {"loss": 1.0}))
        emit(PhaseStarted("grpo", 1))
        emit(EvalFinished(0, 0.4, 500, 0.5))
        emit(StepFinished(1, {"reward/mean": 0.3}))
    assert [step for step, _ in sink.rows] == [1, 2, 2, 3]


def test_a_resumed_phase_keeps_its_steps() -> None:
    with Recorded() as sink:
        emit(PhaseStarted("grpo", 9, first_step=8))
        emit(StepFinished(8, {"reward/mean": 0.3}))
    assert sink.rows == [(8, {"reward/mean": 0.3})]


def test_what_is_not_finite_is_left_out() -> None:
    with Recorded() as sink:
        emit(StepFinished(1, {"a": float("nan"), "b": float("inf"), "c": 1.0}))
    assert sink.rows == [(1, {"c": 1.0})]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboard's own imports
def test_tensorboard_event_files_hold_the_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with TensorBoardSink(tmp_path):
        one_run()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(tmp_path)).Reload()
    assert [(point.step, point.value) for point in read.Scalars("reward/mean")] == [(1, 0.25), (2, 0.75)]
    assert read.Scalars("eval/accuracy")[0].step == 0
    (text,) = read.Tensors("samples/1/text_summary")
    assert b"    4\n    <b>" in text.tensor_proto.string_val[0]


def test_wandb_offline_run(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    with WandbSink("podium-test", name="a", config={"seed": 1}, folder=tmp_path, mode="offline") as sink:
        one_run()
        emit(StepFinished(3, {"other": 1.0}))  # W&B completes a step when the next one begins
        summary = dict(sink._run.summary)
    assert summary["reward/mean"] == 0.75
    assert summary["eval/accuracy"] == 0.4
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_trackio_keeps_the_run_on_this_machine(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    script = """
from podium.telemetry import EvalFinished, StepFinished, emit
from podium.telemetry.sinks import TrackioSink
with TrackioSink("podium-test", name="a", config={"seed": 1}):
    emit(EvalFinished(0, 0.4, 500, 0.5))
    emit(StepFinished(1, {"reward/mean": 0.25}))
    emit(StepFinished(2, {"reward/mean": 0.75}))
"""
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, "TRACKIO_DIR": str(tmp_path)})
    with contextlib.closing(sqlite3.connect(tmp_path / "podium-test.db")) as database:
        rows = database.execute("select step, metrics from metrics order by step").fetchall()
    assert [step for step, _ in rows] == [0, 1, 2]
    assert json.loads(rows[2][1])["reward/mean"] == 0.75


@pytest.mark.parametrize(
    ("sink", "package"),
    [
        (lambda: TensorBoardSink("x"), "tensorboard"),
        (lambda: WandbSink("x"), "wandb"),
        (lambda: TrackioSink("x"), "trackio"),
    ],
)
def test_a_missing_package_is_named_with_its_remedy(sink: Any, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # None in sys.modules is Python's own way to say that a module cannot be imported.
    monkeypatch.setitem(cast("dict[str, Any]", sys.modules), package, None)
    with pytest.raises(ConfigError, match=f"pip install {package}"):
        sink()
