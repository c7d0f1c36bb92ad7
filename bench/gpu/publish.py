"""The weights of a policy go to a generator's process on the same device: by CUDA IPC, and through host memory."""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

import podium
from bench.gpu.clock import wall_s
from bench.gpu.numerics import random_rows
from bench.gpu.shapes import TOKENIZER, model_config
from bench.gpu.stage import Stage
from podium import Cluster
from podium.algorithms import AlgorithmConfig
from podium.data import Batch, Jagged
from podium.devices import free_memory_bytes
from podium.models import ModelConfig
from podium.rollout.sampling import SamplingParams
from podium.telemetry import Note, subscribe
from podium.trainer import PRELOAD
from podium.training import OptimConfig
from podium.workers import Generator, Policy, StreamedSync
from tests.unit.training.near import Borrower, Lender

MIB = 2**20
PROMPTS, ROW_TOKENS = 4, 32
FREE_S, MOST_LEFT_MIB = 5.0, 512  # 264 were found once: what torch keeps of the checksums in the generator
WAY = "1 of 1 generator copies the policy's weights on its device"


def ipc(stage: Stage) -> None:
    """Syncs by CUDA IPC: that this way is taken, how long it takes, what it brings, and what it leaves behind."""
    notes: list[str] = []
    stop = subscribe(lambda event: notes.append(event.text) if isinstance(event, Note) else None)
    try:
        with podium.connect("local", preload=PRELOAD, echo=False) as cluster:
            _publish(stage, cluster)
    finally:
        stop()
    said = [note for note in notes if note.startswith("weight sync")]
    for number, note in enumerate(said, 1):
        stage.fact(f"way {number}", note)
    if not said or WAY not in said[0]:
        stage.failures.append("the weights went another way than by CUDA IPC")


def _publish(stage: Stage, cluster: Cluster) -> None:
    config = ModelConfig(config=model_config(stage), tokenizer=TOKENIZER)
    training, drawing = (Policy, Generator) if stage.on_gpu else (Lender, Borrower)
    generator = cluster.start(drawing.bind(config), cluster.pool([1], gpus=stage.gpus / 2))
    generator.generate(_prompts(), SamplingParams(max_new_tokens=8))
    before, files = free_memory_bytes(stage.device), _shared_files()
    trained = training.bind(config, OptimConfig(lr=1e-3), algorithm=AlgorithmConfig(loss="cross_entropy"))
    policy = cluster.start(trained, cluster.pool([1], gpus=stage.gpus / 2))
    policy.update(random_rows((ROW_TOKENS + 1,) * PROMPTS, config.config["vocab_size"]))
    near = StreamedSync(policy, [generator])
    near.init()
    near.sync(1)
    free = free_memory_bytes(stage.device)
    took = math.inf
    for version in range(2, 4 if stage.dry else 12):
        took = min(took, wall_s(lambda version=version: near.sync(version), stage.device))
    stage.figure("ipc", took * 1e3, "ms of all weights to the generator, checked by checksums at either end")
    if stage.on_gpu:
        stage.expect("grown", (free - free_memory_bytes(stage.device)) / MIB, 64, "MiB by ten syncs")
    drawn = generator.generate(_prompts(), SamplingParams(max_new_tokens=8)).fetch()
    through_host = StreamedSync(policy, [generator], delta=True)
    through_host.init()
    stage.figure("host", wall_s(lambda: through_host.sync(100), stage.device) * 1e3, "ms through host memory, checked")
    again = generator.generate(_prompts(), SamplingParams(max_new_tokens=8)).fetch()
    _expect_equal(stage, drawn, again)
    near.sync(101)
    os.kill(policy.group.pids[0], signal.SIGKILL)
    policy.group.close()
    _expect_nothing_left(stage, before, files)


def _expect_nothing_left(stage: Stage, before: int, files: set[str]) -> None:
    """The killed policy's memory is free, since the generator holds no handle, and torch has left no file."""
    if stage.on_gpu:
        until = time.monotonic() + FREE_S
        while (left := (before - free_memory_bytes(stage.device)) / MIB) > MOST_LEFT_MIB and time.monotonic() < until:
            time.sleep(0.01)
        stage.expect("left", left, MOST_LEFT_MIB, "MiB of the device taken after the policy's process was killed")
    stage.expect("files_left", len(_shared_files() - files), 0, "files of torch in /dev/shm afterwards")


def _shared_files() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.glob("torch_*")} if folder.exists() else set()


def _expect_equal(stage: Stage, one: Batch, other: Batch) -> None:
    tokens, others = (batch.jagged("tokens").values for batch in (one, other))
    if tokens.shape != others.shape or not torch.equal(tokens, others):
        stage.failures.append("the generator draws other tokens after the same weights came through host memory")
        return
    gap: Any = (one.jagged("rollout_logprobs").values - other.jagged("rollout_logprobs").values).abs().max()
    stage.expect("difference", float(gap), 0.0, "nats between the two ways")


def _prompts() -> Batch:
    rows = [torch.arange(4, 12 + row) for row in range(PROMPTS)]
    return Batch(
        {"prompt_tokens": Jagged.from_rows(rows), "seed": torch.arange(PROMPTS), "group": torch.arange(PROMPTS)}
    )
