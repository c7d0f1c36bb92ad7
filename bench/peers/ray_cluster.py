"""What the peers on Ray share: a cluster of their own, and how calls and faults of a group on it are timed."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable
from typing import Any

# Two cores, many actors: as in Podium, each process computes with one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
import torch
from faulty import NOBODY
from ray.exceptions import RayActorError, RayTaskError

OBJECT_STORE_BYTES = 4 << 30
ROW_FLOATS = 1024


def median_s(call: Callable[[], object], calls: int) -> float:
    times = []
    for _ in range(calls):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def rows_of(nbytes: int) -> torch.Tensor:
    return torch.rand(nbytes // (4 * ROW_FLOATS), ROW_FLOATS)


class RayPeer:
    """A Ray cluster of its own and one group of workers, which a subclass makes."""

    cpus = os.cpu_count()

    def init(self, object_store_bytes: int = OBJECT_STORE_BYTES) -> float:
        """Start Ray; seconds. The address says: a new cluster, whatever else runs on this machine."""
        started = time.perf_counter()
        ray.init(
            address="local",
            num_cpus=self.cpus,
            include_dashboard=False,
            object_store_memory=object_store_bytes,
            log_to_driver=False,
            configure_logging=False,
        )
        return time.perf_counter() - started

    def shutdown(self) -> None:
        ray.shutdown()

    def start(self, workers: int) -> float:
        """Start `workers` workers with torch imported; seconds to the last one's first answer."""
        started = time.perf_counter()
        self.make(workers)
        self.call_all()
        return time.perf_counter() - started

    def noop(self, calls: int) -> float:
        """Seconds of a call that does nothing on all workers."""
        return median_s(self.call_all, calls)

    def exception(self, rank: int, lead_s: float, busy_s: float, computing: bool) -> float:
        """Seconds from a worker's raise to the exception here, while the others are busy."""
        answers = self.send("fault", rank, lead_s, busy_s, computing)
        try:
            ray.get(answers)
        except RayTaskError as error:
            seconds = (time.monotonic_ns() - error.cause.args[0]) / 1e9
        else:
            raise AssertionError("a worker raised, and its answer came")
        ray.wait(answers, num_returns=len(answers))
        return seconds

    def kill(self, rank: int, lead_s: float, busy_s: float, computing: bool) -> float:
        """Seconds from a worker's SIGKILL to the exception here, while all are busy."""
        pids = ray.get(self.send("pid"))
        answers = self.send("fault", NOBODY, lead_s, busy_s, computing)
        time.sleep(lead_s)
        started = time.perf_counter()
        os.kill(pids[rank], signal.SIGKILL)
        try:
            ray.get(answers)
        except RayActorError:
            seconds = time.perf_counter() - started
        else:
            raise AssertionError("a worker was killed, and its answer came")
        ray.wait(answers, num_returns=len(answers))
        self.replace(rank)
        return seconds

    # What a subclass implements.

    def make(self, workers: int) -> None:
        """Ask for the workers; their first answers are waited for elsewhere."""
        raise NotImplementedError

    def stop(self) -> None:
        """End the workers."""
        raise NotImplementedError

    def call_all(self) -> None:
        """Call what does nothing on all workers, and wait."""
        raise NotImplementedError

    def send(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of all workers; references to the answers."""
        raise NotImplementedError

    def replace(self, rank: int) -> None:
        """Have a whole group again after the death of one worker."""
        raise NotImplementedError
