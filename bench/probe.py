"""The worker that the suites of the runtime drive. It imports torch, through podium.data, as a training worker does."""

from __future__ import annotations

import os

from torch import Tensor

from bench.peers.faulty import fail_or_work
from podium import Batch, Worker, concat, endpoint, shard


class Probe(Worker):
    """Does as little as can be done with what it is sent."""

    @endpoint()
    def noop(self) -> None:
        return None

    @endpoint(dispatch=shard(args=("batch",)), collect=concat())
    def echo(self, batch: Batch) -> Batch:
        return batch

    @endpoint()
    def touch(self, tensor: Tensor) -> float:
        return float(tensor[0, 0])

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def fault(self, failing: int, lead_s: float, busy_s: float, computing: bool) -> None:
        fail_or_work(self.ctx.rank, failing, lead_s, busy_s, computing)
