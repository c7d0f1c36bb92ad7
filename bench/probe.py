"""The worker that the runtime suite drives. It imports torch, through podium.data, as a training worker does."""

from __future__ import annotations

from torch import Tensor

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
