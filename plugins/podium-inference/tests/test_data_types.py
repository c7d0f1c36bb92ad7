"""The model of a run computes in the data types in which the run has drawn and evaluated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import podium
from podium.cli import main
from podium.config import build_config
from podium.runs.config import GRPOConfig
from podium.trainer import SFTConfig
from podium_inference import evaluation
from podium_inference.command import inference_config, open_config
from podium_inference.evaluation import evaluate_model
from podium_inference.unread_settings import list_unread_by_eval
from tests.integration.training import tiny, train

BASE = "{path: base, dtype: bfloat16, attention: eager, gradient_checkpointing: true, lora: {rank: 4}}"


def open_run(folder: Path, text: str, *words: str) -> Any:
    (folder / "model").mkdir()
    (folder / "config.yaml").write_text(text)
    return inference_config(str(folder), None, words)


def test_the_model_of_a_run_has_the_data_type_of_the_run(tmp_path: Path) -> None:
    model = open_run(tmp_path, f"model: {BASE}").model
    assert (model.path, model.dtype, model.attention) == (str(tmp_path / "model"), "bfloat16", "eager")
    assert (model.lora, model.gradient_checkpointing) == (None, False)
    assert inference_config(str(tmp_path), None, ["--model.dtype", "float32"]).model.dtype == "float32"


@pytest.mark.parametrize("precision", ["auto", "float32", "float16", "bfloat16", "{compute: float32}"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("engine", ["null", "bfloat16"])
def test_the_engine_computes_as_that_of_the_run(tmp_path: Path, precision: str, dtype: str, engine: str) -> None:
    text = f"model: {{path: base, dtype: {dtype}}}\nparallel: {{precision: {precision}}}\nengine: {{dtype: {engine}}}\n"
    opened = open_run(tmp_path, text)
    parallel = {"precision": {"compute": "float32"} if precision.startswith("{") else precision}
    settings = {"model": {"path": "base", "dtype": dtype}, "parallel": parallel}
    settings["engine"] = {"dtype": None if engine == "null" else engine}
    assert opened.resolved_engine.dtype == build_config(GRPOConfig, settings).resolved_engine.dtype


def test_typed_data_types_count(tmp_path: Path) -> None:
    text = "model: {path: base}\nparallel: {precision: float32}\n"
    assert open_run(tmp_path, text).engine.dtype == "float32"
    assert inference_config(str(tmp_path), None, ["--engine.dtype", "bfloat16"]).engine.dtype == "bfloat16"
    assert inference_config(str(tmp_path), None, ["--model.dtype", "bfloat16"]).engine.dtype is None


@pytest.mark.parametrize(
    "precision", ["bfloat16", {"compute": "bfloat16", "output": "float32"}], ids=["all", "but one"]
)
def test_held_out_answers_are_scored_in_the_data_type_of_the_run(
    precision: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, where the usual one is float32. Each answer has the loss to the bit that it has in the run's file."""
    run = train(tiny(SFTConfig, tmp_path, parallel={"precision": precision}, run={"steps": 1}, eval={"items": 8}))
    measured: list[Any] = []

    def evaluate(config: Any, *arguments: Any, **options: Any) -> None:
        measured.append(evaluate_model(config, *arguments, **options))

    monkeypatch.setattr(evaluation, "evaluate_model", evaluate)
    assert main(["eval", str(run), "--backend", "inline"]) == 0
    expected = pq.read_table(run / "evaluations" / "step-000001.parquet").column("loss").to_pylist()
    assert measured[0][""].scores["loss"] == expected
    with podium.connect("inline") as cluster, open_config(str(run), None, [], list_unread_by_eval) as config:
        assert evaluate_model(config, cluster)[""].scores["loss"] != expected
