"""Monarch actors that hand tensors on, in bench.suites.dataplane. Runs in .venvs/monarch.

The reference is the producing actor itself, whom the consumer asks ("message"), or an RDMABuffer ("rdma"), for which
Monarch uses TCP where there is no RDMA hardware.
"""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # its procs find the modules beside this one

import torch
from monarch.actor import Actor, endpoint, this_host
from monarch.config import configure
from monarch.rdma import RDMABuffer
from protocol import Peer
from touching import look

MAX_MESSAGE = 8 << 30


class Holder(Actor):
    def __init__(self) -> None:
        setting()
        self._tensor = torch.zeros(1)
        self._weights: list[torch.Tensor] = []

    @endpoint
    async def prepare(self, nbytes: int) -> None:
        self._tensor = torch.rand(nbytes // 4)

    @endpoint
    async def give(self) -> torch.Tensor:
        return self._tensor

    @endpoint
    async def register(self) -> RDMABuffer:
        return RDMABuffer(self._tensor.view(torch.uint8))

    @endpoint
    async def drop(self, buffer: RDMABuffer) -> None:
        await buffer.drop()

    @endpoint
    async def look(self, source: Any, pages: bool) -> float:
        """Seconds inside the worker."""
        started = time.perf_counter()
        if isinstance(source, RDMABuffer):
            bytes_N = torch.empty(source.size(), dtype=torch.uint8)
            await source.read_into(bytes_N)
            look(bytes_N.view(torch.float32), pages)
        else:
            look(await source.give.call_one(), pages)
        return time.perf_counter() - started

    @endpoint
    async def make_weights(self, sizes: list[int]) -> None:
        self._weights = [torch.ones(size) for size in sizes]

    @endpoint
    async def give_weights(self) -> list[torch.Tensor]:
        return self._weights

    @endpoint
    async def register_weights(self) -> list[RDMABuffer]:
        return [RDMABuffer(weight.view(torch.uint8)) for weight in self._weights]

    @endpoint
    async def load(self, source: Any) -> None:
        """From buffers into the own tensors in place, or from the trainer, an actor, by a message."""
        if isinstance(source, list):
            for weight, buffer in zip(self._weights, source, strict=True):
                await buffer.read_into(weight.view(torch.uint8))
            return
        for weight, sent in zip(self._weights, await source.give_weights.call_one(), strict=True):
            weight.copy_(sent)


def setting() -> None:
    """Of each process: messages as large as a tensor, TCP in the place of RDMA."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    configure(
        codec_max_frame_length=MAX_MESSAGE,
        message_delivery_timeout="10m",
        rdma_allow_tcp_fallback=True,
    )


class MonarchPeer:
    def __init__(self) -> None:
        self._meshes: list[Any] = []
        self._actors: list[Any] = []
        self._buffers: list[RDMABuffer] = []

    def start(self, workers: int) -> None:
        setting()
        for place in range(workers):
            mesh = this_host().spawn_procs(per_host={"procs": 1}, name=f"procs_{place}")
            self._meshes.append(mesh)
            self._actors.append(mesh.spawn(f"holder_{place}", Holder))
        self.prepare_weights([])

    def stop(self) -> None:
        for mesh in self._meshes:
            mesh.stop().get()
        self._meshes, self._actors = [], []

    def hop(self, nbytes: int, variant: str) -> dict[str, float]:
        """The figures of one tensor from the first actor to the second, in seconds. A message needs no put."""
        producer, consumer = self._actors[:2]
        producer.prepare.call_one(nbytes).get()
        if variant == "rdma":
            source, put_s = timed(producer.register)
        else:
            source, put_s = producer, 0.0
        inside_s, hop_s = timed(consumer.look, source, False)
        _, touch_s = timed(consumer.look, source, True)
        if variant == "rdma":
            producer.drop.call_one(source).get()
        producer.prepare.call_one(4).get()
        return {"put": put_s, "hop": hop_s, "inside": inside_s, "touch": touch_s}

    def prepare_weights(self, sizes: list[int]) -> None:
        for pending in [actor.make_weights.call_one(sizes) for actor in self._actors]:
            pending.get()
        self._buffers = []

    def publish(self, variant: str) -> float:
        """Seconds: each generator asks the trainer for its weights, or reads its buffers, registered once before."""
        trainer, *generators = self._actors
        if variant == "rdma" and not self._buffers:
            self._buffers = trainer.register_weights.call_one().get()
        source = self._buffers if variant == "rdma" else trainer
        started = time.perf_counter()
        for pending in [generator.load.call_one(source) for generator in generators]:
            pending.get()
        return time.perf_counter() - started


def timed(call: Any, *arguments: Any) -> tuple[Any, float]:
    started = time.perf_counter()
    answer = call.call_one(*arguments).get()
    return answer, time.perf_counter() - started


if __name__ == "__main__":
    peer = MonarchPeer()
    Peer().serve({name: getattr(peer, name) for name in ("start", "stop", "hop", "prepare_weights", "publish")})
