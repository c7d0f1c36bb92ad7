"""Raw Ray actors that hand tensors on, in bench.suites.dataplane. Runs in .venvs/ray, without Podium.

As "numpy" the tensors travel as numpy arrays, which Ray maps without a copy and hands out read-only.
"""

from __future__ import annotations

import time
from typing import Any

from protocol import Peer
from ray_cluster import RayPeer, ray, torch
from touching import look, timed_look


@ray.remote(num_cpus=0)
class Holder:
    def __init__(self) -> None:
        self._data: Any = None
        self._weights: list[torch.Tensor] = []

    def prepare(self, nbytes: int, variant: str) -> None:
        tensor = torch.rand(nbytes // 4)
        self._data = tensor.numpy() if variant == "numpy" else tensor

    def put(self) -> list[Any]:
        """Within a list, a reference stays one."""
        return [ray.put(self._data)]

    def look(self, data: Any, pages: bool) -> None:
        look(data, pages)

    def fetch(self, references: list[Any]) -> float:
        return timed_look(lambda: ray.get(references[0]), pages=False)

    def make_weights(self, sizes: list[int]) -> None:
        self._weights = [torch.ones(size) for size in sizes]

    def put_weights(self, variant: str) -> list[Any]:
        return [ray.put([weight.numpy() for weight in self._weights] if variant == "numpy" else self._weights)]

    def load(self, references: list[Any]) -> None:
        for weight, source in zip(self._weights, ray.get(references[0]), strict=True):
            weight.copy_(source if isinstance(source, torch.Tensor) else torch.from_numpy(source))


class TensorsPeer(RayPeer):
    def __init__(self) -> None:
        self._actors: list[Any] = []

    def make(self, workers: int) -> None:
        self._actors = [Holder.remote() for _ in range(workers)]

    def call_all(self) -> None:
        ray.get([actor.make_weights.remote([]) for actor in self._actors])

    def stop(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []

    def hop(self, nbytes: int, variant: str) -> dict[str, float]:
        """The figures of one tensor from the first actor to the second, in seconds."""
        producer, consumer = self._actors[:2]
        ray.get(producer.prepare.remote(nbytes, variant))
        (reference,), put_s = timed(producer.put.remote)
        _, hop_s = timed(consumer.look.remote, reference, False)
        inside_s = ray.get(consumer.fetch.remote([reference]))
        _, touch_s = timed(consumer.look.remote, reference, True)
        del reference
        ray.get(producer.prepare.remote(0, variant))
        return {"put": put_s, "hop": hop_s, "inside": inside_s, "touch": touch_s}

    def prepare_weights(self, sizes: list[int]) -> None:
        """A trainer and all others, which are generators, have tensors of these sizes."""
        ray.get([actor.make_weights.remote(sizes) for actor in self._actors])

    def publish(self, variant: str) -> float:
        """Seconds: one put, and each generator copies into its own tensors."""
        started = time.perf_counter()
        references = ray.get(self._actors[0].put_weights.remote(variant))
        ray.get([actor.load.remote(references) for actor in self._actors[1:]])
        return time.perf_counter() - started


def timed(call: Any, *arguments: Any) -> tuple[Any, float]:
    started = time.perf_counter()
    answer = ray.get(call(*arguments))
    return answer, time.perf_counter() - started


if __name__ == "__main__":
    peer = TensorsPeer()
    names = ("init", "start", "stop", "shutdown", "hop", "prepare_weights", "publish")
    Peer().serve({name: getattr(peer, name) for name in names})
