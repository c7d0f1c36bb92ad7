"""Workers and functions shipped to them that import neither torch nor pytest: a Ray worker starts from nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from podium.runtime import Worker, endpoint, first

__all__ = ["Busy", "add_rank", "attach_and_ask", "devices_of", "make_zeros", "place_of", "total"]


class Busy(Worker):
    """Waits until told otherwise, fails in several ways, and has children."""

    def __init__(self) -> None:
        self.free = threading.Event()

    @endpoint
    def wait(self) -> bool:
        return self.free.wait(600.0)

    @endpoint(concurrent=True)
    def let_go(self) -> None:
        self.free.set()

    @endpoint(concurrent=True)
    def ping(self, number: int) -> int:
        return number

    @endpoint
    def raise_on(self, rank: int) -> None:
        """One rank raises, the others are busy for long."""
        if self.ctx.rank == rank:
            raise LookupError("the first cause")
        time.sleep(600)

    @endpoint
    def child(self) -> int:
        """Start a process that ends by itself only after ten minutes; its id."""
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid

    @endpoint(collect=first())
    def echo(self, value: Any) -> Any:
        return value


def make_zeros(worker: Worker, mib: int) -> npt.NDArray[np.uint8]:
    """A large result."""
    return np.zeros(mib << 20, np.uint8)


def total(worker: Worker, value: npt.NDArray[Any]) -> int:
    """The sum of an argument."""
    return int(value.sum(dtype=np.int64))


def add_rank(worker: Worker, value: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Write into the argument and return it."""
    value += worker.ctx.rank
    return value


def place_of(worker: Worker) -> tuple[int, int, int, str]:
    """Rank, local rank, ranks on the same node, and the node by Ray's own account."""
    import ray

    where: Any = {node["NodeID"]: node["NodeName"] for node in ray.nodes()}[ray.get_runtime_context().get_node_id()]
    assert where == worker.ctx.node, "it runs where the runtime says"
    return worker.ctx.rank, worker.ctx.local_rank, worker.ctx.local_world_size, where


def devices_of(worker: Worker) -> tuple[tuple[int, ...], str | None]:
    """Indices of its accelerators, and what it may see."""
    return worker.ctx.devices, os.environ.get("CUDA_VISIBLE_DEVICES")


def attach_and_ask(name: str) -> list[int]:
    """What a Ray task does with a group that another script left running."""
    import podium

    with podium.connect("ray", preload=()) as cluster:
        answer: list[int] = cluster.attach(name).ping(2)
        return answer
