"""What becomes of a device's memory: a kill inside a kernel, and a tensor that goes from worker to worker."""

from __future__ import annotations

import math
import os
import signal
import time
from typing import Any

import podium
from bench.gpu.occupant import GIB, Occupant
from bench.gpu.stage import Stage
from podium import Cluster
from podium.devices import free_memory_bytes
from podium.errors import WorkerDied

KILL_S = 10.0


def sigkill(stage: Stage) -> None:
    """SIGKILL within a kernel: how soon the script knows, and how soon the device's memory is free again."""
    gib = 1 / 16 if stage.dry else 16.0
    with _local() as cluster:
        victim = cluster.start(Occupant.bind(), cluster.pool([1], gpus=stage.gpus))
        before = free_memory_bytes(stage.device)
        victim.occupy(gib)
        taken = (before - free_memory_bytes(stage.device)) / GIB
        call = victim.compute.submit(60.0)
        time.sleep(0.5)
        began = time.perf_counter()
        os.kill(victim.group.pids[0], signal.SIGKILL)
        try:
            call.result()
        except WorkerDied as error:
            stage.figure("noticed", (time.perf_counter() - began) * 1e3, "ms from SIGKILL to WorkerDied")
            stage.fact("cause", error.cause)
        else:
            raise RuntimeError("the worker was killed, and its call returned")
        stage.part("memory", lambda: _freed(stage, before, taken, began), cuda=True)
        victim.group.restart()
        victim.occupy(gib)
        stage.fact("afterwards", "the worker that was started again takes the same memory")


def hop(stage: Stage) -> None:
    """A tensor of 512 MiB from one worker to another, both on the device, by a reference."""
    nbytes = (1 if stage.dry else 512) << 20
    repetitions = 2 if stage.dry else 5
    with _local() as cluster:
        share = stage.gpus / 2
        pools = [cluster.pool([1], gpus=share) for _ in range(2)]
        producer, consumer = (cluster.start(Occupant.bind(), pool) for pool in pools)
        producer.make(nbytes)
        put, took = math.inf, math.inf
        for _ in range(repetitions):
            began = time.perf_counter()
            ref: Any = producer.give()
            put = min(put, time.perf_counter() - began)
            began = time.perf_counter()
            total = consumer.take(ref)
            took = min(took, time.perf_counter() - began)
            if total != nbytes // 4:
                raise RuntimeError(f"{nbytes // 4} ones were sent, and their sum there is {total}")
            del ref
    stage.figure("put", put * 1e3, "ms until the script has the reference")
    stage.figure("hop", took * 1e3, "ms from the reference to the sum on the device")
    stage.figure("hop_rate", nbytes / (put + took) / 1e9, "GB/s, both together")


def _local() -> Cluster:
    return podium.connect("local", preload=("torch", Occupant.__module__), echo=False)


def _freed(stage: Stage, before: int, taken: float, began: float) -> None:
    """Wait until the device has the victim's memory again."""
    stage.figure("taken", taken, "GiB by the worker that is killed")
    while (missing := before - free_memory_bytes(stage.device)) > taken * GIB / 16:
        if time.perf_counter() - began > KILL_S:
            raise RuntimeError(f"{missing / GIB:.2f} GiB are not free {KILL_S:.0f} s after SIGKILL")
        time.sleep(0.002)
    stage.figure("freed", (time.perf_counter() - began) * 1e3, "ms from SIGKILL to free memory")
