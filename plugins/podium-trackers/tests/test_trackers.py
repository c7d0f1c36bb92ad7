"""The trackers, each with its real package where that is installed."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, cast

import pytest
from PIL import Image

from podium.errors import ConfigError
from podium.runs.run_writer import RunDirectory
from podium.telemetry import (
    CompletionsSampled,
    EvalFinished,
    Event,
    PhaseStarted,
    Recovered,
    RunSummarized,
    Sample,
    StepFinished,
    emit,
    flush,
)
from podium.telemetry.sinks import Sink, TrackedRun
from podium.trainer import GRPOConfig
from tests.integration.training import tiny

trackers: Any = pytest.importorskip("podium_trackers")
TensorBoardSink, TrackioSink, WandbSink = trackers.TensorBoardSink, trackers.TrackioSink, trackers.WandbSink

SAMPLES = (Sample("2 + 2?", "4\n<b>", 1.0, "4"),)


def one_run(curve: Path | None = None) -> None:
    """Emit the events of a run, and draw its curve in a file of 20 x 10 pixels at ``curve``."""
    emit(PhaseStarted("grpo", 2))
    emit(EvalFinished(0, 500, {"accuracy": 0.4, "reward_mean": 0.5}, samples=SAMPLES))
    emit(StepFinished(1, {"reward/mean": 0.25, "policy/kl": float("nan")}))
    emit(CompletionsSampled(1, SAMPLES))
    emit(StepFinished(2, {"reward/mean": 0.75}))
    hard = EvalFinished(2, 9, {"accuracy": 0.5, "reward_mean": 0.5}, name="hard", samples=SAMPLES)
    emit(EvalFinished(2, 500, {"accuracy": 0.6, "loss": math.nan}, name="easy", others=(hard,), samples=SAMPLES))
    if curve is not None:
        Image.new("RGB", (20, 10), "red").save(curve)
    figures = {"after/accuracy": 0.6, "task": "sums.jsonl", "finished": True, "best_step": None, "wall_s": math.nan}
    emit(RunSummarized(2, figures, str(curve or "")))


SUMMARY = {"after/accuracy": 0.6, "finished": 1.0}
CONFIG = {"run": {"seed": 1}, "model": {"lora": None}, "data": {"eval": ["a", "b"]}}


class Recorded(trackers.TrackerSink):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.summaries: list[tuple[int, dict[str, float | str], str]] = []

    @classmethod
    def of_run(cls, run: TrackedRun) -> Self:
        return cls()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.rows.append((step, dict(values)))

    def log_samples(self, name: str, step: int, samples: tuple[Sample, ...]) -> None:
        self.rows.append((step, {name: len(samples)}))

    def log_summary(self, step: int, figures: Mapping[str, float | str], curve: str) -> None:
        self.summaries.append((step, dict(figures), curve))


def test_a_second_phase_goes_on_where_the_first_ended() -> None:
    with Recorded() as sink:
        emit(PhaseStarted("sft", 2))
        emit(StepFinished(1, {"loss": 2.0}))
        emit(StepFinished(2, {"loss": 1.0}))
        emit(PhaseStarted("grpo", 1))
        emit(EvalFinished(0, 500, {"accuracy": 0.4, "reward_mean": 0.5}))
        emit(StepFinished(1, {"reward/mean": 0.3}))
    assert [step for step, _ in sink.rows] == [1, 2, 2, 3]


def test_a_phase_that_loses_a_worker_before_its_first_checkpoint_keeps_its_steps() -> None:
    with Recorded() as sink:
        for phase in ("sft", "grpo"):
            emit(PhaseStarted(phase, 2))
            emit(StepFinished(1, {"loss": 1.0}))
            emit(Recovered("the run resumes: rank 0 of policy was lost"))
            emit(PhaseStarted(phase, 2))
            for step in (1, 2):
                emit(StepFinished(step, {"loss": 0.5}))
    assert [step for step, _ in sink.rows] == [1, 1, 2, 3, 3, 4]


def test_a_resumed_phase_keeps_its_steps() -> None:
    with Recorded() as sink:
        emit(PhaseStarted("grpo", 9, first_step=8))
        emit(StepFinished(8, {"reward/mean": 0.3}))
    assert sink.rows == [(8, {"reward/mean": 0.3})]


def test_steps_are_in_order_where_completions_are_drawn_ahead() -> None:
    """W&B leaves out what belongs to an earlier step than what it has."""
    with Recorded() as sink:
        emit(PhaseStarted("grpo", 3))
        for sampled, trained in ((1, 0), (2, 1), (3, 2)):
            emit(CompletionsSampled(sampled, SAMPLES))
            emit(StepFinished(trained, {"loss": 1.0}))
        emit(RunSummarized(2, {"steps": 2}))  # step 3 was not trained
    names = [(step, name) for step, values in sink.rows for name in values]
    assert names == [(0, "loss"), (1, "loss"), (1, "samples"), (2, "loss"), (2, "samples")]


def test_what_is_not_finite_is_left_out() -> None:
    with Recorded() as sink:
        emit(StepFinished(1, {"a": float("nan"), "b": float("inf"), "c": 1.0}))
    assert sink.rows == [(1, {"c": 1.0})]


def test_what_is_of_the_end_comes_at_the_end() -> None:
    with Recorded() as sink:
        emit(PhaseStarted("sft", 2))
        emit(StepFinished(2, {"loss": 2.0}))
        emit(PhaseStarted("grpo", 2))
        emit(RunSummarized(1, {"wall_s": math.inf, "best_step": None, "task": "sums"}, "curve.png"))
    assert sink.summaries == [(3, {"task": "sums"}, "curve.png")]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboard's own imports
def test_tensorboard_event_files_hold_the_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with TensorBoardSink(tmp_path / "tb", CONFIG):
        one_run(tmp_path / "curve.png")
    read = read_tensorboard(tmp_path / "tb")
    assert [(point.step, point.value) for point in read.Scalars("reward/mean")] == [(1, 0.25), (2, 0.75)]
    assert [(point.step, point.value) for point in read.Scalars("eval/accuracy")] == [
        (0, pytest.approx(0.4)),
        (2, pytest.approx(0.6)),
    ]
    assert [point.step for point in read.Scalars("eval/hard/accuracy")] == [2]
    for name, step in (("samples", 1), ("eval/samples", 0), ("eval/easy/samples", 2), ("eval/hard/samples", 2)):
        (text,) = read.Tensors(f"{name}/1/text_summary")
        assert text.step == step
        assert text.tensor_proto.string_val[0].endswith(b"    completion\n    4\n    <b>")
    (text,) = read.Tensors("summary/text_summary")
    assert text.tensor_proto.string_val[0].endswith(
        b"| after/accuracy | 0.6 |\n| task | sums.jsonl |\n| finished | True |"
    )
    assert {name: read.Scalars(f"summary/{name}")[0].value for name in SUMMARY} == pytest.approx(SUMMARY)
    (picture,) = read.Images("curve")
    assert (picture.step, picture.width, picture.height) == (2, 20, 10)
    messages: Any = importlib.import_module("tensorboard.plugins.hparams.plugin_data_pb2")
    stored = read.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    parameters = messages.HParamsPluginData.FromString(stored).session_start_info.hparams
    assert parameters["run.seed"].number_value == 1
    assert {name: parameters[name].string_value for name in ("model.lora", "data.eval")} == {
        "model.lora": "None", "data.eval": "['a', 'b']",
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_does_not_show_the_steps_twice_that_a_killed_run_repeats(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    for first, steps in ((1, (1, 2, 3)), (3, (3, 4))):
        with TensorBoardSink(tmp_path):
            emit(PhaseStarted("grpo", 4, first))
            for step in steps:
                emit(StepFinished(step, {"loss": 10.0 * first + step}))
    points = read_tensorboard(tmp_path).Scalars("loss")
    assert [(point.step, point.value) for point in points] == [(1, 11.0), (2, 12.0), (3, 33.0), (4, 34.0)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_shows_a_run_once_that_was_killed_before_its_first_checkpoint(tmp_path: Path) -> None:
    """It begins again, with the evaluation before its first step."""
    pytest.importorskip("tensorboard")
    for is_resumed, steps in ((False, (1, 2, 3)), (True, (1, 2))):
        with TensorBoardSink(tmp_path, is_resumed=is_resumed):
            emit(PhaseStarted("grpo", 4, 1))
            emit(EvalFinished(0, 8, {"accuracy": 0.5 + is_resumed / 4}, "accuracy", None, ""))
            for step in steps:
                emit(StepFinished(step, {"loss": 10.0 * is_resumed + step}))
    read = read_tensorboard(tmp_path)
    assert [(point.step, point.value) for point in read.Scalars("loss")] == [(1, 11.0), (2, 12.0)]
    assert [(point.step, point.value) for point in read.Scalars("eval/accuracy")] == [(0, 0.75)]


def read_tensorboard(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def test_wandb_offline_run(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    with WandbSink("podium-test", name="a", config=CONFIG, folder=tmp_path, mode="offline") as sink:
        one_run(tmp_path / "curve.png")
        flush()
        summary = dict(sink._run.summary)
    assert summary["reward/mean"] == 0.75
    assert summary["eval/accuracy"] == 0.6
    assert {name: summary[f"summary/{name}"] for name in SUMMARY} == SUMMARY
    assert summary["summary/task"] == "sums.jsonl"
    for name in ("samples", "eval/samples", "eval/easy/samples", "eval/hard/samples"):
        assert (summary[name]["_type"], summary[name]["nrows"]) == ("table-file", 1)
    assert (summary["curve"]["_type"], summary["curve"]["width"]) == ("image-file", 20)
    (stored,) = tmp_path.glob("wandb/offline-run-*/files/media/table/samples_*.table.json")
    row = ["2 + 2?", "4\n<b>", 1.0, "4"]
    assert json.loads(stored.read_text()) == {"columns": ["prompt", "completion", "reward", "expected"], "data": [row]}
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_wandb_keeps_the_steps_that_a_resumed_run_trains_again(tmp_path: Path) -> None:
    """W&B drops what is recorded at an earlier step than its last one, so that steps are an axis of their own."""
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportMissingImports, reportUnknownVariableType]
    from wandb.sdk.internal.datastore import (  # pyright: ignore[reportMissingImports]
        DataStore,  # pyright: ignore[reportUnknownVariableType]
    )

    with WandbSink("podium-test", name="a", folder=tmp_path, mode="offline"):
        for first, steps in ((1, (1, 2, 3)), (3, (3, 4))):
            emit(PhaseStarted("grpo", 4, first_step=first))
            for step in steps:
                emit(StepFinished(step, {"loss": 10.0 * first + step}))
        flush()
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    store: Any = DataStore()
    store.open_for_scan(str(file))
    points: list[tuple[int, float]] = []
    while (data := store.scan_data()) is not None:
        record: Any = Record.FromString(data)
        row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        points += [(row["step"], row["loss"])] if "loss" in row else []
    store._fp.close()  # DataStore has no method that does
    assert points == [(1, 11.0), (2, 12.0), (3, 13.0), (3, 33.0), (4, 34.0)]


def test_trackio_keeps_the_run_on_this_machine(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    script = """
import sys
from pathlib import Path
import importlib.util
from podium_trackers import TrackioSink
spec = importlib.util.spec_from_file_location("test_trackers", sys.argv[2])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
CONFIG, one_run = module.CONFIG, module.one_run
with TrackioSink("podium-test", name="a", config=CONFIG):
    one_run(Path(sys.argv[1]))
"""
    command = [sys.executable, "-c", script, str(tmp_path / "curve.png"), __file__]
    subprocess.run(command, check=True, env={**os.environ, "TRACKIO_DIR": str(tmp_path)})
    with contextlib.closing(sqlite3.connect(tmp_path / "podium-test.db")) as database:
        rows = database.execute("select step, metrics from metrics order by step").fetchall()
    series: dict[str, list[Any]] = {}
    for step, values in rows:
        for name, value in json.loads(values).items():
            series.setdefault(name, []).append((step, value))
    assert series["reward/mean"] == [(1, 0.25), (2, 0.75)]
    assert series["eval/accuracy"] == [(0, 0.4), (2, 0.6)]
    assert series["summary/after/accuracy"] == [(2, 0.6)]
    row = {"prompt": "2 + 2?", "completion": "4\n<b>", "reward": 1.0, "expected": "4"}
    for name, step in (("samples", 1), ("eval/samples", 0), ("eval/easy/samples", 2), ("eval/hard/samples", 2)):
        assert series[name] == [(step, {"_type": "trackio.table", "_value": [row]})]
    ((_, summary),) = series["summary"]
    assert {"figure": "task", "value": "sums.jsonl"} in summary["_value"]
    ((_, picture),) = series["curve"]
    assert picture["_type"] == "trackio.image"
    assert len(list(tmp_path.glob("media/**/*.png"))) == 1


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
    with pytest.raises(ConfigError, match=f"pip install '{package}>="):
        sink()


def test_a_resumed_run_goes_on_in_the_same_run_of_its_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    class Recorded(trackers.WandbSink):
        def __init__(self, **options: Any) -> None:
            Sink.__init__(self)
            calls.append(options)

        def handle(self, event: Event) -> None:
            pass

        def finish(self) -> None:
            pass

        @classmethod
        def check(cls) -> None:
            pass

    monkeypatch.setattr(trackers, "WandbSink", Recorded)
    settings = {"trackers": {"wandb": {"project": "sums", "group": "a", "tags": ["x"]}}}
    config = tiny(GRPOConfig, tmp_path, run=settings)
    for resume in (False, True):
        run = RunDirectory(tmp_path / "run", resume=resume)
        for sink in list(run.sinks(config, None)):
            sink.close()
        run.write_config("")
        run.close()
    first, second = calls
    assert (first["project"], first["group"], first["tags"]) == ("sums", "a", ["x"])
    assert "entity" not in first
    assert first["id"] == second["id"]
    assert second["resume"] == "allow"
