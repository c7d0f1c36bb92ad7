"""Workers tell how many tensors of a model they have read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from transformers.utils import logging as transformers_logging

from podium.models import ModelConfig
from podium.models.progress import counting_transformers
from podium.runtime.worker import WorkerContext, current_context
from podium.telemetry import Event, WorkerLoading, subscribe
from podium.training import ParallelConfig
from podium.training.shards import load_parallel
from tests.unit.training.families import make


@pytest.mark.parametrize("parallel", [ParallelConfig(), ParallelConfig(strategy="fsdp2")], ids=["whole", "shards"])
def test_each_tensor_that_is_read_is_told(parallel: ParallelConfig, tmp_path: Path) -> None:
    make("qwen3").save_pretrained(tmp_path / "model")
    with safe_open(tmp_path / "model" / "model.safetensors", framework="numpy") as file:
        stored = len(file.keys())
    told: list[Event] = []
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    token = current_context.set(WorkerContext(rank=1, world_size=2, role="policy"))
    unsubscribe = subscribe(told.append)
    try:
        load_parallel(ModelConfig(path=str(tmp_path / "model")), parallel, torch.device("cpu"))
    finally:
        unsubscribe()
        current_context.reset(token)
        dist.destroy_process_group()
    assert told == [WorkerLoading("policy", 1, done, stored) for done in range(1, stored + 1)]


def test_other_bars_of_transformers_stay_as_they_are() -> None:
    told: list[Event] = []
    unsubscribe = subscribe(told.append)
    try:
        with counting_transformers():
            assert list(transformers_logging.tqdm(["a file"], desc="Writing", disable=True)) == ["a file"]
        assert transformers_logging.set_tqdm_hook(None) is None
    finally:
        unsubscribe()
    assert told == []
