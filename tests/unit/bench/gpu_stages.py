"""Stages for the tests of bench.gpu.runner: one that passes, and one for each way to go wrong."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from bench.gpu.stage import Stage


def passes(stage: Stage) -> None:
    stage.figure("rate", 3.0, "GB/s")


def tries_cuda(stage: Stage) -> None:
    stage.part("ipc", lambda: stage.fact("ipc", "works"), cuda=True)


def reads_the_book(stage: Stage) -> None:
    """Look at the results as they are while this stage runs."""
    book = json.loads(Path(os.environ["BOOK"]).read_text())
    stage.fact("statuses", ",".join(one["status"] for one in book["stages"]))
    stage.fact("predicted", sum(len(one["predictions"]) for one in book["stages"]))


def fails(stage: Stage) -> None:
    stage.figure("rate", 1.0, "GB/s")
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def fails_in_parts(stage: Stage) -> None:
    stage.part("first", lambda: 1 / 0)  # type: ignore[arg-type,return-value] - it raises
    stage.expect("difference", float("nan"), 0.1, "nats")
    stage.figure("rate", 2.0, "GB/s")


def crashes(stage: Stage) -> None:
    stage.figure("rate", 1.0, "GB/s")
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(stage: Stage) -> None:
    stage.figure("rate", 1.0, "GB/s")
    if path := os.environ.get("PIDFILE"):
        Path(path).write_text(str(os.getpid()))
    time.sleep(600)


def cannot(stage: Stage) -> None:
    stage.skip("this machine has no such thing")
