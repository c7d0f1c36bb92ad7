"""Policies in worker processes that own the GPU, or share it: a checkpoint, shards over one rank, two ranks."""

from __future__ import annotations

import tempfile
import time

import podium
from bench.gpu.shapes import TINY, TOKENIZER
from bench.gpu.stage import Stage
from podium import Cluster, Handle
from podium.data import Batch
from podium.models import ModelConfig
from podium.telemetry import metrics
from podium.trainer import PRELOAD
from podium.training import OptimConfig, ParallelConfig
from podium.workers import Policy
from tests.unit.workers.tiny import recorded

MODEL = ModelConfig(config=TINY, tokenizer=TOKENIZER, seed=3)
OPTIM = OptimConfig(lr=1e-3)
ROUNDING = {"cpu": 1e-4, "cuda": 5e-2}  # relative, of losses and norms after a few steps; bfloat16 on the device
SMALL = 0.1  # losses and norms below it are compared as if they were this large, since they are sums of larger numbers


def checkpoint(stage: Stage) -> None:
    """A checkpoint, read by a fresh process, goes on as the process that wrote it."""
    with _local() as cluster, tempfile.TemporaryDirectory() as folder:
        path, batch = f"{folder}/checkpoint", recorded()
        pool = cluster.pool([1], gpus=stage.gpus)
        policy = cluster.start(Policy.bind(MODEL, OPTIM), pool)
        for _ in range(2):
            policy.update(batch)
        began = time.perf_counter()
        policy.save(path)
        stage.figure("save", (time.perf_counter() - began) * 1e3, "ms")
        went_on = [policy.update(batch) for _ in range(2)]
        policy.group.close()
        other = ModelConfig(config=TINY, tokenizer=TOKENIZER, seed=4)
        resumed = cluster.start(Policy.bind(other, OPTIM), pool)
        began = time.perf_counter()
        resumed.load(path)
        stage.figure("load", (time.perf_counter() - began) * 1e3, "ms")
        found = [resumed.update(batch) for _ in range(2)]
    _alike(stage, "resumed", found, went_on)


def fsdp2(stage: Stage) -> None:
    """Shards over one rank, and its collectives, against a plain replica."""
    with _local() as cluster:
        expected = _updates(cluster, 1, stage.gpus)
        found = _updates(cluster, 1, stage.gpus, ParallelConfig(strategy="fsdp2"))
    _alike(stage, "sharded", found, expected)


def two_ranks(stage: Stage) -> None:
    """Two ranks that share the device against one that has it alone."""
    with _local() as cluster:
        expected = _updates(cluster, 1, stage.gpus)
        for name, parallel in (("replicas", ParallelConfig()), ("shards", ParallelConfig(strategy="fsdp2"))):
            stage.part(
                name,
                lambda name=name, parallel=parallel: _alike(
                    stage, name, _updates(cluster, 2, stage.gpus / 2, parallel), expected
                ),
            )


def _local() -> Cluster:
    return podium.connect("local", preload=PRELOAD, echo=False)


def _updates(
    cluster: Cluster, ranks: int, gpus: float, parallel: ParallelConfig | None = None
) -> list[dict[str, float]]:
    """The metrics of three updates by so many ranks, each with that share of the GPU."""
    pool = cluster.pool([ranks], gpus=gpus)
    policy: Handle[Policy] = cluster.start(Policy.bind(MODEL, OPTIM, parallel), pool)
    batch: Batch = recorded()
    found = [policy.update(batch) for _ in range(3)]
    policy.group.close()
    cluster.release(pool)
    return found


def _alike(stage: Stage, name: str, found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    """Expect equal losses and norms of gradients, up to rounding."""
    for figure in (metrics.LOSS, metrics.GRAD_NORM):
        worst = max(
            abs(one[figure] - other[figure]) / max(abs(other[figure]), SMALL)
            for one, other in zip(found, expected, strict=True)
        )
        unit = "relative difference, at most"
        stage.expect(f"{name}_{figure.rpartition('/')[2]}", worst, ROUNDING[stage.device.type], unit)
