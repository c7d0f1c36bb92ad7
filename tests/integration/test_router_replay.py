"""Replayed experts in runs: what the generator or the policy chose reaches the updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from podium.errors import ConfigError, WorkerStartError
from podium.telemetry import metrics
from podium.trainer import GRPOConfig
from tests.integration.training import MODEL, metrics_rows, tiny, train

SHAPE: dict[str, Any] = {name: value for name, value in MODEL["config"].items() if name != "head_dim"}  # pyright: ignore[reportAttributeAccessIssue] - a value of a mixed mapping
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def settings_of(folder: Path, replayed: str, **sections: Any) -> GRPOConfig:
    folder.mkdir(exist_ok=True)
    values: dict[str, Any] = {
        "model": {**MODEL, "config": {**SHAPE, **EXPERTS}},
        "engine": {"name": "transformers"},
        "eval": {"items": 0},
        "algorithm": {"minibatches": 2, "options": {"router_replay": replayed}},
        "run": {"steps": 2},
    }
    return tiny(GRPOConfig, folder, **{**values, **sections})


@pytest.mark.parametrize("replayed", ["rollout", pytest.param("old", marks=pytest.mark.exhaustive)])
def test_a_run_replays_what_was_chosen(tmp_path: Path, replayed: str) -> None:
    """Generator and trainer agree here, so that the first update is the same with and without."""
    rows = {name: metrics_rows(train(settings_of(tmp_path / name, name))) for name in (replayed, "none")}
    for row in rows[replayed]:
        assert row[metrics.MISMATCH_MEAN] < 1e-4
    assert rows[replayed][0][metrics.GRAD_NORM] == pytest.approx(rows["none"][0][metrics.GRAD_NORM], rel=1e-2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("replayed", ["rollout", "old"])
def test_ranks_shards_and_layers_that_are_computed_again_replay_alike(tmp_path: Path, replayed: str) -> None:
    rows: list[list[float]] = []
    for ranks, strategy, again in ((1, "replicate", False), (2, "replicate", False), (2, "fsdp2", True)):
        model = {**MODEL, "config": {**SHAPE, **EXPERTS}, "gradient_checkpointing": again}
        sections: dict[str, Any] = {"placement": {"ranks": ranks}, "parallel": {"strategy": strategy}, "model": model}
        optim = {"lr": 1e-2}  # so that choices would change between the updates of a batch
        run = train(settings_of(tmp_path / f"{ranks}-{strategy}", replayed, optim=optim, **sections), "local")
        rows.append([row[name] for row in metrics_rows(run) for name in (metrics.LOSS, metrics.GRAD_NORM)])
    assert rows[1] == pytest.approx(rows[0], rel=1e-3, abs=1e-5)
    assert rows[2] == pytest.approx(rows[0], rel=1e-3, abs=1e-5)


def test_runs_that_record_no_experts_are_refused(tmp_path: Path) -> None:
    world = {"environment": {"name": "tests.integration.worlds:add_up"}, "reward": {}}
    with pytest.raises(ConfigError, match=r"router_replay = 'rollout' with environment\.name"):
        settings_of(tmp_path, "rollout", **world)
    with pytest.raises(ConfigError, match=r"engine\.name = 'auto' with algorithm\.options\.router_replay = 'rollout'"):
        train(settings_of(tmp_path, "rollout", engine={"name": "auto"}))
    with pytest.raises(WorkerStartError, match=r"router_replay: Qwen3ForCausalLM is no mixture of experts"):
        train(settings_of(tmp_path, "old", model=MODEL))
