"""Workers count the tensors of a model that they have read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from transformers.utils import logging as transformers_logging

from podium.models import ModelConfig
from podium.models.progress import counting_transformers
from podium.runtime.worker import WorkerContext, current_context
from podium.telemetry.progress import Counting, read_counts
from podium.training import ParallelConfig
from podium.training.sharded_loading import load_parallel
from tests.unit.training.families import make


@pytest.mark.parametrize("parallel", [ParallelConfig(), ParallelConfig(strategy="fsdp2")], ids=["whole", "shards"])
def test_each_tensor_that_is_read_is_counted(
    parallel: ParallelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("qwen3").save_pretrained(tmp_path / "model")
    with safe_open(tmp_path / "model" / "model.safetensors", framework="numpy") as file:
        stored = len(file.keys())
    counts: list[tuple[str, str, int, int, int]] = []
    over = Counting.over

    def watch(self: Counting, tensors: Iterable[object]) -> Iterator[object]:
        for tensor in over(self, tensors):
            yield tensor
            counts.extend((c.unit, c.role, c.rank, c.done, c.total) for c in read_counts())

    monkeypatch.setattr(Counting, "over", watch)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    token = current_context.set(WorkerContext(rank=1, world_size=2, role="policy"))
    try:
        load_parallel(ModelConfig(path=str(tmp_path / "model")), parallel, torch.device("cpu"))
    finally:
        current_context.reset(token)
        dist.destroy_process_group()
    assert counts == [("tensors", "policy", 1, done, stored) for done in range(stored)]
    assert read_counts() == ()


def test_other_bars_of_transformers_stay_as_they_are() -> None:
    with counting_transformers():
        for _ in transformers_logging.tqdm(["a file"], desc="Writing", disable=True):
            assert read_counts() == ()
    assert transformers_logging.set_tqdm_hook(None) is None
