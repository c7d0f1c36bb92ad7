"""Raw Ray actors doing what Podium's workers do in bench.suites.runtime. Runs in .venvs/ray, without Podium."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

# Two cores, many actors: as in Podium, each process computes with one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
import torch
from protocol import Peer

OBJECT_STORE_BYTES = 4 << 30
ROW_FLOATS = 1024


@ray.remote(num_cpus=0)
class Actor:
    def __init__(self) -> None:
        import torch

        self._scratch = torch.zeros(1)

    def noop(self) -> None:
        return None

    def echo(self, rows: Any) -> Any:
        return rows

    def touch(self, tensor: Any) -> float:
        return float(tensor[0, 0])


def median_s(call: Callable[[], object], calls: int) -> float:
    times = []
    for _ in range(calls):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


class RayPeer:
    def __init__(self) -> None:
        self._actors: list[Any] = []

    def init(self) -> float:
        """Start Ray; seconds."""
        started = time.perf_counter()
        ray.init(
            num_cpus=os.cpu_count(),
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            configure_logging=False,
        )
        return time.perf_counter() - started

    def start(self, workers: int) -> float:
        """Start `workers` actors with torch imported; seconds to the last one's first answer."""
        started = time.perf_counter()
        self._actors = [Actor.remote() for _ in range(workers)]
        ray.get([actor.noop.remote() for actor in self._actors])
        return time.perf_counter() - started

    def stop(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []

    def shutdown(self) -> None:
        ray.shutdown()

    def noop(self, calls: int) -> float:
        return median_s(lambda: ray.get([actor.noop.remote() for actor in self._actors]), calls)

    def echo(self, nbytes: int, calls: int, numpy: bool) -> float:
        """A batch split over the actors and joined again.

        Slices are cloned first: pickled as they are, each would carry the whole batch along.
        """
        rows = torch.rand(nbytes // (4 * ROW_FLOATS), ROW_FLOATS)

        def once() -> None:
            parts = [part.numpy() if numpy else part.clone() for part in rows.chunk(len(self._actors))]
            answers = ray.get([actor.echo.remote(part) for actor, part in zip(self._actors, parts, strict=True)])
            joined = torch.cat([torch.from_numpy(answer) if numpy else answer for answer in answers])
            assert joined.shape == rows.shape

        return median_s(once, calls)

    def broadcast(self, nbytes: int, calls: int) -> float:
        """One put, the reference to every actor."""
        rows = torch.rand(nbytes // (4 * ROW_FLOATS), ROW_FLOATS)

        def once() -> None:
            reference = ray.put(rows)
            ray.get([actor.touch.remote(reference) for actor in self._actors])

        return median_s(once, calls)


if __name__ == "__main__":
    peer = RayPeer()
    names = ("init", "start", "stop", "shutdown", "noop", "echo", "broadcast")
    Peer().serve({name: getattr(peer, name) for name in names})
