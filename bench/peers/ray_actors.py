"""Raw Ray actors doing what Podium's workers do in bench.suites. Runs in .venvs/ray, without Podium."""

from __future__ import annotations

import os
from typing import Any

from protocol import Peer
from ray_cluster import RayPeer, median_s, ray, rows_of, torch


@ray.remote(num_cpus=0)
class Actor:
    def __init__(self, rank: int) -> None:
        import torch

        self._rank = rank
        self._scratch = torch.zeros(1)

    def noop(self) -> None:
        return None

    def echo(self, rows: Any) -> Any:
        return rows

    def touch(self, tensor: Any) -> float:
        return float(tensor[0, 0])

    def pid(self) -> int:
        return os.getpid()

    def fault(self, *arguments: Any) -> None:
        from faulty import fail_or_work

        fail_or_work(self._rank, *arguments)


class ActorsPeer(RayPeer):
    def __init__(self) -> None:
        self._actors: list[Any] = []

    def make(self, workers: int) -> None:
        self._actors = [Actor.remote(rank) for rank in range(workers)]

    def stop(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []

    def call_all(self) -> None:
        ray.get(self.send("noop"))

    def send(self, method: str, *arguments: Any) -> list[Any]:
        return [getattr(actor, method).remote(*arguments) for actor in self._actors]

    def replace(self, rank: int) -> None:
        self._actors[rank] = Actor.remote(rank)
        self.call_all()

    def echo(self, nbytes: int, calls: int, numpy: bool) -> float:
        """A batch split over the actors and joined again.

        Slices are cloned first: pickled as they are, each would carry the whole batch along.
        """
        rows = rows_of(nbytes)

        def once() -> None:
            parts = [part.numpy() if numpy else part.clone() for part in rows.chunk(len(self._actors))]
            answers = ray.get([actor.echo.remote(part) for actor, part in zip(self._actors, parts, strict=True)])
            joined = torch.cat([torch.from_numpy(answer) if numpy else answer for answer in answers])
            assert joined.shape == rows.shape

        return median_s(once, calls)

    def broadcast(self, nbytes: int, calls: int) -> float:
        """One put, the reference to every actor."""
        rows = rows_of(nbytes)

        def once() -> None:
            reference = ray.put(rows)
            ray.get([actor.touch.remote(reference) for actor in self._actors])

        return median_s(once, calls)


if __name__ == "__main__":
    peer = ActorsPeer()
    names = ("init", "start", "stop", "shutdown", "noop", "echo", "broadcast", "exception", "kill")
    Peer().serve({name: getattr(peer, name) for name in names})
