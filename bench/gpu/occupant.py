"""A worker that takes memory and time of its device."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from bench.gpu.clock import synchronize
from podium import Worker, endpoint, first, nothing
from podium.devices import choose_device

GIB = 2**30


class Occupant(Worker):
    """Takes memory and time of its device."""

    def __init__(self) -> None:
        self.device = choose_device(self.ctx.devices)
        self._held = torch.zeros(1, device=self.device)

    @endpoint(collect=nothing())
    def occupy(self, gib: float) -> None:
        """Take so much memory and write to all of it."""
        self._held = torch.ones(int(gib * GIB) // 4, device=self.device)
        synchronize(self.device)

    @endpoint(collect=nothing())
    def compute(self, seconds: float) -> None:
        """Multiply matrices; on a GPU, hundreds of kernels wait in the stream at any moment."""
        matrix, until = torch.randn(1024, 1024, device=self.device), time.monotonic() + seconds
        while time.monotonic() < until:
            for _ in range(1000 if self.device.type == "cuda" else 1):
                matrix = matrix @ matrix
                matrix /= matrix.norm()
            synchronize(self.device)

    @endpoint(collect=nothing())
    def make(self, nbytes: int) -> None:
        self._held = torch.ones(nbytes // 4, device=self.device)

    @endpoint(collect=first(), returns="ref")
    def give(self) -> Tensor:
        return self._held

    @endpoint(collect=first())
    def take(self, tensor: Tensor) -> int:
        """Bring the tensor to this worker's device, and return its sum."""
        return int(tensor.to(self.device).sum(dtype=torch.float64))
